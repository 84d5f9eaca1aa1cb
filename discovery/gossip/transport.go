package gossip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// transport wraps the network, or its substitute in a test, and adds what memberlist's own
// transport lacks: closing it ends its dials and connections and waits for their users. It bounds
// incoming streams, and passes a stream to memberlist only once the stream has proven a key of the
// cluster, because memberlist reads up to 20 MiB of each before it checks the key.
type transport struct {
	memberlist.Transport
	members *members
	dial    func(ctx context.Context, addr string, timeout time.Duration) (net.Conn, error)
	streams chan net.Conn
	pending *identity.Pending
	ctx     context.Context
	cancel  context.CancelFunc
	all     sync.WaitGroup
	admits  sync.WaitGroup // goroutines of streams that have not proven a key yet

	shutdown sync.Once
	mu       sync.Mutex
	conns    map[*conn]bool
	closed   bool
	idle     chan struct{} // closed when closed and no connection is open
}

var _ memberlist.NodeAwareTransport = (*transport)(nil)

// listen binds the address and returns the network as a transport.
func listen(bind string, who *members, logger *log.Logger) (*transport, error) {
	host, port, err := hostPort(bind, DefaultPort)
	if err != nil {
		return nil, err
	}
	if net.ParseIP(host) == nil {
		return nil, fmt.Errorf("gossip: listening on %q: %q is not an IP address", bind, host)
	}
	var network *memberlist.NetTransport
	for range 10 { // a port that is free for TCP may be in use for UDP
		network, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{
			BindAddrs: []string{host}, BindPort: port, Logger: logger})
		if err == nil || port != 0 {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", cmp.Or(listenFault(host, port), err))
	}
	return newTransport(network, who, func(ctx context.Context, addr string, timeout time.Duration) (net.Conn, error) {
		return (&net.Dialer{Timeout: timeout}).DialContext(ctx, "tcp", addr)
	}), nil
}

// listenFault returns the system's error for listening at the address, which memberlist's error
// does not wrap; nil if the address has become free.
func listenFault(host string, port int) error {
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	tcp, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	return udp.Close()
}

// newTransport wraps inner. If dial is nil, inner dials.
func newTransport(inner memberlist.Transport, who *members,
	dial func(context.Context, string, time.Duration) (net.Conn, error)) *transport {
	t := &transport{Transport: inner, members: who, dial: dial, streams: make(chan net.Conn),
		pending: identity.NewPending(identity.Gossip), conns: map[*conn]bool{},
		idle: make(chan struct{})}
	if dial == nil {
		t.dial = func(_ context.Context, addr string, timeout time.Duration) (net.Conn, error) {
			return inner.DialTimeout(addr, timeout)
		}
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.all.Go(t.forward)
	return t
}

// forward accepts incoming connections.
func (t *transport) forward() {
	for {
		select {
		case <-t.ctx.Done():
			return
		case c := <-t.Transport.StreamCh():
			counted := t.pending.Admit(c)
			tracked := t.track(counted)
			t.admits.Go(func() { t.admit(tracked, counted) })
		}
	}
}

// admit passes a connection on once it has proven that it is a member's.
func (t *transport) admit(c net.Conn, counted *identity.Conn) {
	s := t.members.admit(c, counted)
	if s == nil {
		c.Close()
		return
	}
	select {
	case t.streams <- s:
	case <-t.ctx.Done():
		c.Close()
	}
}

func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	c, err := t.dial(t.ctx, addr, timeout)
	if err != nil {
		return nil, err
	}
	return t.track(c), nil
}

func (t *transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return t.DialTimeout(a.Addr, timeout)
}

func (t *transport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	return t.WriteTo(b, a.Addr)
}

// drained calls end, and discards incoming packets until it returns, because end waits until they
// are taken. There may be no memberlist that takes them.
func (t *transport) drained(end func() error) error {
	done := make(chan struct{})
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			select {
			case <-t.Transport.PacketCh():
			case <-done:
				return
			}
		}
	})
	err := end()
	close(done)
	taking.Wait()
	return err
}

// Shutdown closes the transport, and returns when the users of all connections have closed them.
func (t *transport) Shutdown() error {
	var err error
	t.shutdown.Do(func() {
		err = t.drained(t.Transport.Shutdown)
		t.cancel()
		t.all.Wait()
		t.mu.Lock()
		t.closed = true
		for c := range t.conns {
			c.Conn.Close()
		}
		t.checkIdle()
		t.mu.Unlock()
		t.admits.Wait()
		select {
		case <-t.idle:
		case <-time.After(time.Second): // memberlist leaves open those to which it could not write
		}
	})
	return err
}

func (t *transport) checkIdle() {
	if t.closed && len(t.conns) == 0 {
		select {
		case <-t.idle:
		default:
			close(t.idle)
		}
	}
}

// conn is a connection that the transport counts as open.
type conn struct {
	net.Conn
	t *transport
}

func (t *transport) track(c net.Conn) net.Conn {
	tracked := &conn{c, t}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		c.Close()
		return tracked
	}
	t.conns[tracked] = true
	return tracked
}

func (c *conn) Close() error {
	c.t.mu.Lock()
	delete(c.t.conns, c)
	c.t.checkIdle()
	c.t.mu.Unlock()
	return c.Conn.Close()
}

// resolve returns the addresses of a seed.
func resolve(ctx context.Context, seed string) ([]string, error) {
	host, port, err := hostPort(seed, DefaultPort)
	if err != nil {
		return nil, err
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	addrs := make([]string, len(ips))
	for i, ip := range ips {
		addrs[i] = net.JoinHostPort(ip.Unmap().String(), strconv.Itoa(port))
	}
	return addrs, nil
}

// advertised returns the address at which others reach a member that listens on every address: the
// local address of the route to a seed, or else that of an interface.
func advertised(ctx context.Context, seeds []string) (string, error) {
	for _, seed := range seeds {
		addrs, err := resolve(ctx, seed)
		if err != nil {
			continue
		}
		for _, addr := range addrs {
			c, err := net.Dial("udp", addr) // sends nothing
			if err != nil {
				continue
			}
			ip := c.LocalAddr().(*net.UDPAddr).IP
			c.Close()
			return ip.String(), nil
		}
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("gossip: finding an address of this machine: %w", err)
	}
	var v6, loopback string
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		switch {
		case !ok:
		case n.IP.IsLoopback():
			loopback = identity.Loopback().String()
		case n.IP.IsGlobalUnicast() && n.IP.To4() != nil:
			return n.IP.String(), nil
		case n.IP.IsGlobalUnicast() && v6 == "":
			v6 = n.IP.String()
		}
	}
	if found := cmp.Or(v6, loopback); found != "" {
		return found, nil
	}
	return "", errors.New("gossip: this machine has no address that others can reach; name one to advertise")
}
