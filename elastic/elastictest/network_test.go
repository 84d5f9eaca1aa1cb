package elastictest

import (
	"context"
	"fmt"
	"hash/crc64"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
)

// Network is an in-memory network for a job in virtual time. Its seed determines the latencies. A
// send never blocks, because virtual time stops while a goroutine waits for room and holds a lock.
type Network struct {
	seed uint64

	mu        sync.Mutex
	counts    map[string]int // number of processes, listeners and connections by name
	listeners map[int]*memoryListener
	conns     []*memoryConn // the accepting ends
}

// NewNetwork returns a network.
func NewNetwork(seed uint64) *Network {
	return &Network{seed: seed, counts: make(map[string]int), listeners: make(map[int]*memoryListener)}
}

// On returns the config of a job whose processes use n. A worker also waits for a latency at each
// moment, so that virtual time passes in a world of one worker too.
func (cfg Config) On(n *Network) Config {
	cfg.network = func(slot plan.SlotID) identity.Network {
		name := n.named(slot.String())
		return identity.Network{
			Listen: func(addr string) (net.Listener, error) { return n.listen(name, slot, addr) },
			Dial:   func(ctx context.Context, addr string) (net.Conn, error) { return n.dial(ctx, name, slot, addr) },
		}
	}
	at := cfg.At
	cfg.At = func(now Moment) bool {
		<-time.After(n.latency(now.Slot.String()))
		return at != nil && at(now)
	}
	return cfg
}

// InMemory is like On, with a new network.
func (cfg Config) InMemory(seed uint64) Config { return cfg.On(NewNetwork(seed)) }

// Cut drops all data, except the end of a stream, that the worker in slot from sends over the
// current connections opened by the worker in slot to. That includes data in flight. It reports
// whether such a connection is open.
func (n *Network) Cut(from, to plan.SlotID) (some bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		if c.slot == from && c.peer == to {
			some = c.out.cut() || some
		}
	}
	return some
}

const (
	leastLatency = 50 * time.Microsecond
	mostLatency  = 250 * time.Microsecond
	firstPort    = 10_000
)

// named returns a unique name that begins with name. Callers pass names that do not depend on which
// of two simultaneous events is handled first.
func (n *Network) named(name string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counts[name]++
	return fmt.Sprint(name, "#", n.counts[name])
}

// port returns an unused port.
func (n *Network) port() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counts[""]++
	return firstPort + n.counts[""]
}

// latency returns a random duration. It depends only on the seed, who and the current time, so data
// sent at one moment in one piece or in several arrives at the same time.
func (n *Network) latency(who string) time.Duration {
	dice := rand.New(rand.NewPCG(n.seed^crc64.Checksum([]byte(who), crc64.MakeTable(crc64.ECMA)), uint64(time.Now().UnixNano())))
	return leastLatency + time.Duration(dice.Int64N(int64(mostLatency-leastLatency)))
}

func (n *Network) listen(process string, slot plan.SlotID, addr string) (net.Listener, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	l := &memoryListener{network: n, slot: slot, name: n.named(process + " listens"), addr: net.TCPAddr{IP: at.Addr().AsSlice(), Port: n.port()},
		conns: make(chan net.Conn, 1024), done: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listeners[l.addr.Port] = l
	return l, nil
}

func (n *Network) dial(ctx context.Context, process string, slot plan.SlotID, addr string) (net.Conn, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	find := func() *memoryListener {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.listeners[int(at.Port())]
	}
	name := process + " to none"
	if l := find(); l != nil {
		name = n.named(process + " to " + l.name)
	}
	trip := time.NewTimer(n.latency(name))
	defer trip.Stop()
	select {
	case <-trip.C:
	case <-ctx.Done():
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: ctx.Err()}
	}
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	l := find()
	if l == nil {
		return nil, refused
	}
	local := net.TCPAddr{IP: l.addr.IP, Port: n.port()}
	there, back := newStream(n, name+" there"), newStream(n, name+" back")
	near := &memoryConn{in: back, out: there, local: &local, remote: &l.addr}
	far := &memoryConn{in: there, out: back, local: &l.addr, remote: &local, slot: l.slot, peer: slot}
	n.mu.Lock()
	n.conns = append(n.conns, far)
	n.mu.Unlock()
	select {
	case <-l.done:
		return nil, refused
	case l.conns <- far:
		return near, nil
	}
}

type memoryListener struct {
	network *Network
	slot    plan.SlotID
	name    string
	addr    net.TCPAddr
	conns   chan net.Conn
	done    chan struct{}
	once    sync.Once
}

func (l *memoryListener) Addr() net.Addr { return &l.addr }

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.network.mu.Lock()
	delete(l.network.listeners, l.addr.Port)
	l.network.mu.Unlock()
	l.once.Do(func() { close(l.done) })
	for {
		select {
		case c := <-l.conns: // nobody has accepted the connection
			c.Close()
		default:
			return nil
		}
	}
}

// stream is one direction of a connection.
type stream struct {
	network *Network
	name    string

	mu       sync.Mutex
	changed  sync.Cond
	pieces   []piece
	deadline time.Time // of reading
	bound    *time.Timer
	ended    bool // by its reader
	dropping bool
}

// piece is what a stream delivers at one time: data or the end.
type piece struct {
	data []byte
	end  bool
	at   time.Time
}

func newStream(n *Network, name string) *stream {
	s := &stream{network: n, name: name}
	s.changed.L = &s.mu
	return s
}

// send schedules the delivery of a piece.
func (s *stream) send(p piece) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.dropping && !p.end || len(s.pieces) > 0 && s.pieces[len(s.pieces)-1].end {
		return
	}
	p.at = time.Now().Add(s.network.latency(s.name))
	if n := len(s.pieces); n > 0 && p.at.Before(s.pieces[n-1].at) {
		p.at = s.pieces[n-1].at
	}
	s.pieces = append(s.pieces, p)
	time.AfterFunc(time.Until(p.at), s.wake)
}

// cut drops all data that the stream has or gets, except its end, and reports whether it is open.
func (s *stream) cut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropping = true
	s.pieces = slices.DeleteFunc(s.pieces, func(p piece) bool { return !p.end })
	return !s.ended && len(s.pieces) == 0
}

func (s *stream) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed.Broadcast()
}

func (s *stream) read(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		now := time.Now()
		switch {
		case s.ended:
			return 0, net.ErrClosed
		case !s.deadline.IsZero() && !now.Before(s.deadline):
			return 0, os.ErrDeadlineExceeded
		case len(b) == 0:
			return 0, nil
		case len(s.pieces) > 0 && !now.Before(s.pieces[0].at):
			first := &s.pieces[0]
			if first.end {
				return 0, io.EOF
			}
			n := copy(b, first.data)
			if first.data = first.data[n:]; len(first.data) == 0 {
				s.pieces = s.pieces[1:]
			}
			return n, nil
		}
		s.changed.Wait()
	}
}

// end ends the stream on its reader's side.
func (s *stream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended, s.pieces = true, nil
	if s.bound != nil {
		s.bound.Stop()
	}
	s.changed.Broadcast()
}

// memoryConn is one end of a connection.
type memoryConn struct {
	in, out       *stream
	local, remote *net.TCPAddr
	slot, peer    plan.SlotID // the slots of this end and of the other

	mu       sync.Mutex
	closed   bool
	deadline time.Time // of writing
}

func (c *memoryConn) LocalAddr() net.Addr  { return c.local }
func (c *memoryConn) RemoteAddr() net.Addr { return c.remote }

func (c *memoryConn) Read(b []byte) (int, error) { return c.in.read(b) }

func (c *memoryConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	closed, late := c.closed, !c.deadline.IsZero() && !time.Now().Before(c.deadline)
	c.mu.Unlock()
	c.out.mu.Lock()
	broken := c.out.ended
	c.out.mu.Unlock()
	switch {
	case closed:
		return 0, net.ErrClosed
	case late:
		return 0, os.ErrDeadlineExceeded
	case broken:
		return 0, &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", syscall.EPIPE)}
	}
	c.out.send(piece{data: append([]byte(nil), b...)})
	return len(b), nil
}

func (c *memoryConn) Close() error {
	c.mu.Lock()
	was := c.closed
	c.closed = true
	c.mu.Unlock()
	if was {
		return net.ErrClosed
	}
	c.out.send(piece{end: true})
	c.in.end()
	return nil
}

func (c *memoryConn) SetDeadline(at time.Time) error {
	_ = c.SetWriteDeadline(at) // always nil
	return c.SetReadDeadline(at)
}

func (c *memoryConn) SetReadDeadline(at time.Time) error {
	s := c.in
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deadline = at; s.bound != nil {
		s.bound.Stop()
	}
	if !at.IsZero() && !s.ended {
		s.bound = time.AfterFunc(time.Until(at), s.wake)
	}
	s.changed.Broadcast()
	return nil
}

func (c *memoryConn) SetWriteDeadline(at time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = at
	return nil
}
