package elastictest

import (
	"context"
	"hash/crc64"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// InMemory returns the config of a job whose processes are on a network in memory, so that the job
// can be in virtual time: it then passes while data is on its way, and while a worker is at a
// moment. The seed determines how long each of that takes.
func (cfg Config) InMemory(seed uint64) Config {
	m := &memory{seed: seed, listeners: make(map[int]*memoryListener)}
	cfg.network = identity.Network{Listen: m.listen, Dial: m.dial}
	at := cfg.At
	cfg.At = func(now Moment) bool {
		<-time.After(m.latency(crc64.Checksum([]byte(now.Slot.String()), crc64.MakeTable(crc64.ECMA))))
		return at != nil && at(now)
	}
	return cfg
}

// memory is a network in memory. It never holds a sender back, since a goroutine that waits for
// room with a lock held stops virtual time.
type memory struct {
	seed uint64

	mu        sync.Mutex
	ports     int
	listeners map[int]*memoryListener
}

const (
	leastLatency = 50 * time.Microsecond
	mostLatency  = 250 * time.Microsecond
	firstPort    = 10_000
)

// latency returns a random time. It depends on who asks and when, so that it is the same whether
// data is sent in one piece or in several at once.
func (m *memory) latency(who uint64) time.Duration {
	dice := rand.New(rand.NewPCG(m.seed^who<<16, uint64(time.Now().UnixNano())))
	return leastLatency + time.Duration(dice.Int64N(int64(mostLatency-leastLatency)))
}

func (m *memory) listen(addr string) (net.Listener, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ports++
	l := &memoryListener{network: m, addr: net.TCPAddr{IP: at.Addr().AsSlice(), Port: firstPort + m.ports},
		conns: make(chan net.Conn, 1024), done: make(chan struct{})}
	m.listeners[l.addr.Port] = l
	return l, nil
}

func (m *memory) dial(ctx context.Context, addr string) (net.Conn, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.ports++
	own := firstPort + m.ports
	m.mu.Unlock()
	trip := time.NewTimer(m.latency(uint64(own)))
	defer trip.Stop()
	select {
	case <-trip.C:
	case <-ctx.Done():
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: ctx.Err()}
	}
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	m.mu.Lock()
	l := m.listeners[int(at.Port())]
	m.mu.Unlock()
	if l == nil {
		return nil, refused
	}
	local := net.TCPAddr{IP: l.addr.IP, Port: own}
	there, back := newStream(m, uint64(own)<<1), newStream(m, uint64(own)<<1|1)
	near := &memoryConn{in: back, out: there, local: &local, remote: &l.addr}
	far := &memoryConn{in: there, out: back, local: &l.addr, remote: &local}
	select {
	case <-l.done:
		return nil, refused
	case l.conns <- far:
		return near, nil
	}
}

type memoryListener struct {
	network *memory
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
		case c := <-l.conns: // nobody has accepted it
			c.Close()
		default:
			return nil
		}
	}
}

// stream is one direction of a connection.
type stream struct {
	network *memory
	number  uint64

	mu       sync.Mutex
	changed  sync.Cond
	pieces   []piece
	deadline time.Time // of reading
	bound    *time.Timer
	ended    bool // by its reader
}

// piece is data, or the end, that a stream delivers at a time.
type piece struct {
	data []byte
	end  bool
	at   time.Time
}

func newStream(m *memory, number uint64) *stream {
	s := &stream{network: m, number: number}
	s.changed.L = &s.mu
	return s
}

// send puts a piece on its way.
func (s *stream) send(p piece) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || len(s.pieces) > 0 && s.pieces[len(s.pieces)-1].end {
		return
	}
	p.at = time.Now().Add(s.network.latency(s.number))
	if n := len(s.pieces); n > 0 && p.at.Before(s.pieces[n-1].at) {
		p.at = s.pieces[n-1].at
	}
	s.pieces = append(s.pieces, p)
	time.AfterFunc(time.Until(p.at), s.wake)
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

// end ends it on its reader's side.
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
