package identity

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Pending holds the unproven connections of one listener and bounds their cost. When there are too
// many, or they have sent too much, it closes one: the oldest of the source with the most. So
// strangers who hold connections open neither keep out nor delay clients with other addresses. Its
// methods may be called by many goroutines.
type Pending struct {
	mu       sync.Mutex
	most     int
	each     int64 // bytes read from one connection
	total    int64 // bytes read from all; 0: most times each
	deadline time.Duration
	closed   bool
	arrived  uint64 // connections so far
	count    int
	bytes    int64
	sources  map[netip.Prefix]*source
}

// source holds the connections of one IPv4 address or one network of IPv6 addresses.
type source struct {
	conns []*Conn // oldest first
	bytes int64
}

// NewPending returns an empty Pending. It starts nothing.
func NewPending(b Bounds) *Pending {
	return &Pending{most: permitted(b.Unproven), each: b.Bytes, total: b.Total, deadline: b.Deadline, sources: make(map[netip.Prefix]*source)}
}

// Resize changes the number of connections, and how long later ones may be unproven.
func (p *Pending) Resize(unproven int, deadline time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.most, p.deadline = permitted(unproven), deadline
}

// permitted returns most, or less: a quarter of this process's descriptors must suffice.
func permitted(most int) int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return most
	}
	return max(1, int(min(uint64(most), limit.Cur/4)))
}

// Unproven returns the number of unproven connections.
func (p *Pending) Unproven() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// Held returns the number of bytes read from the unproven connections.
func (p *Pending) Held() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes
}

// Admit counts a connection until it is proven or closed, and makes room for it if there are too
// many. It closes the connection if p is closed.
func (p *Pending) Admit(conn net.Conn) *Conn {
	c := &Conn{Conn: conn, pending: p, from: sourceOf(conn), gone: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		c.state.Store(gaveWay)
		close(c.gone)
		conn.Close()
		return c
	}
	for p.count >= p.most {
		p.giveWay(p.mostOf(func(s *source) int64 { return int64(len(s.conns)) }).conns[0])
	}
	p.arrived++
	c.number = p.arrived
	s := p.sources[c.from]
	if s == nil {
		s = &source{}
		p.sources[c.from] = s
	}
	s.conns = append(s.conns, c)
	p.count++
	c.expiry = time.AfterFunc(p.deadline, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.giveWay(c)
	})
	return c
}

// Close closes the unproven connections, and all later ones.
func (p *Pending) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, s := range p.sources {
		for len(s.conns) > 0 {
			p.giveWay(s.conns[0])
		}
	}
}

// mostOf returns the source with the largest value; among equals, the one with the oldest
// connection.
func (p *Pending) mostOf(value func(*source) int64) *source {
	var best *source
	for _, s := range p.sources {
		if best == nil || value(s) > value(best) || value(s) == value(best) && s.conns[0].number < best.conns[0].number {
			best = s
		}
	}
	return best
}

// giveWay closes an unproven connection to make room; the lock is held.
func (p *Pending) giveWay(c *Conn) {
	if p.remove(c, gaveWay) {
		c.Conn.Close()
	}
}

// remove stops counting an unproven connection, and returns whether it was counted; the lock is
// held.
func (p *Pending) remove(c *Conn, state int32) bool {
	if !c.state.CompareAndSwap(unproven, state) {
		return false
	}
	if state == gaveWay {
		close(c.gone)
	}
	c.expiry.Stop()
	s := p.sources[c.from]
	i, _ := slices.BinarySearchFunc(s.conns, c.number, func(o *Conn, n uint64) int { return int(int64(o.number) - int64(n)) })
	s.conns = slices.Delete(s.conns, i, i+1)
	s.bytes -= c.read
	p.bytes -= c.read
	p.count--
	if len(s.conns) == 0 {
		delete(p.sources, c.from)
	}
	return true
}

// room returns how many bytes may still be read from an unproven connection.
func (p *Pending) room(c *Conn) (int64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case c.state.Load() == proven:
		return 1 << 30, nil
	case c.read >= p.each:
		p.giveWay(c)
		return 0, errTooMuch
	}
	return p.each - c.read, nil
}

// took counts n bytes that were read.
func (p *Pending) took(c *Conn, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.state.Load() != unproven {
		return
	}
	c.read += int64(n)
	p.bytes += int64(n)
	p.sources[c.from].bytes += int64(n)
	for p.total > 0 && p.bytes > p.total {
		s := p.mostOf(func(s *source) int64 { return s.bytes })
		p.giveWay(s.conns[slices.IndexFunc(s.conns, func(c *Conn) bool { return c.read > 0 })])
	}
}

// errTooMuch ends a connection whose peer sends too much before its proof.
var errTooMuch = errors.New("identity: the peer has sent too much without proving who it is")

// The states of a Conn.
const (
	unproven int32 = iota
	proven
	gaveWay
)

// Conn is a connection that counts in its listener's bounds until it is proven or closed.
type Conn struct {
	net.Conn
	pending *Pending
	from    netip.Prefix
	state   atomic.Int32
	gone    chan struct{} // closed when the connection is closed without a proof
	// The lock of Pending guards the following fields.
	number uint64
	read   int64
	expiry *time.Timer
}

// Proven stops bounding the connection, whose peer has proven its identity. It returns false if the
// connection was closed to make room for another.
func (c *Conn) Proven() bool {
	c.pending.mu.Lock()
	defer c.pending.mu.Unlock()
	return c.pending.remove(c, proven) || c.state.Load() == proven
}

// Gone returns a channel that is closed when the connection is closed without a proof.
func (c *Conn) Gone() <-chan struct{} { return c.gone }

// NetConn returns the underlying connection.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Read reads no more than the bounds permit before the proof.
func (c *Conn) Read(b []byte) (int, error) {
	if c.state.Load() == proven {
		return c.Conn.Read(b)
	}
	room, err := c.pending.room(c)
	if err != nil {
		return 0, err
	}
	n, err := c.Conn.Read(b[:min(int64(len(b)), room)])
	c.pending.took(c, n)
	return n, err
}

// Close closes the connection. It may be called again.
func (c *Conn) Close() error {
	c.pending.mu.Lock()
	c.pending.remove(c, gaveWay)
	c.pending.mu.Unlock()
	return c.Conn.Close()
}

// sourceOf returns the source for which a connection counts: an IPv4 address, or an IPv6 network of
// 64 bits, since one machine may have a whole one. All other peers are one source.
func sourceOf(conn net.Conn) netip.Prefix {
	tcp, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	addr := tcp.AddrPort().Addr().Unmap().WithZone("")
	bits := 64
	if addr.Is4() {
		bits = 32
	}
	prefix, _ := addr.Prefix(bits) // its only error is a wrong number of bits
	return prefix
}
