package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/carry"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
)

// dialTimeout bounds the connection to a driver. An agent with many workers may be starved by them.
const dialTimeout = 20 * time.Second

// forwarder carries the calls and connections of a session's workers to the driver, wherever that
// is now. It cannot read the connections: TLS goes from end to end.
type forwarder struct {
	ln     *identity.Listener
	calls  *carry.Carrier
	log    logrus.FieldLogger
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	to    netip.AddrPort
	while context.Context    // until the driver is elsewhere
	leave context.CancelFunc // ends while
	conns map[net.Conn]bool
	unreached
}

// unreached is whether connections to the driver fail.
type unreached struct {
	why   error           // the first failure since one was made; nil: no failure
	since time.Time       // of why
	said  bool            // one was logged since a connection was made
	told  map[string]bool // incarnations that heard has returned since then
}

// lives is how long after a failed connection a message of the driver shows that it was running
// then: those of one that has ended arrive before that.
const lives = time.Second

// newForwarder listens at an address of this host.
func newForwarder(at netip.Addr, log logrus.FieldLogger) (*forwarder, error) {
	ln, err := identity.Forward.Listen(netip.AddrPortFrom(at, 0).String())
	if err != nil {
		return nil, fmt.Errorf("agent: listening for workers: %w", err)
	}
	f := &forwarder{ln: ln, calls: carry.NewCarrier(), log: log, conns: make(map[net.Conn]bool)}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.while, f.leave = context.WithCancel(f.ctx)
	f.wg.Go(func() { ln.Serve(log, "agent: workers", f.carry) })
	f.wg.Go(func() { f.calls.Run(f.ctx) })
	return f, nil
}

func (f *forwarder) addr() string { return f.ln.Addr().String() }

// direct returns the driver's own address where it is on this machine, and "" elsewhere.
func (f *forwarder) direct() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if own := f.ln.Addr().(*net.TCPAddr).AddrPort().Addr().Unmap(); !f.to.Addr().IsLoopback() && f.to.Addr().Unmap() != own {
		return ""
	}
	return f.to.String()
}

// aim sets where the driver is. Connections to another place are broken, and those that are being
// made.
func (f *forwarder) aim(to netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.why = nil // of the time in which no driver was attached
	if f.to == to {
		return
	}
	f.to, f.said, f.told = to, false, nil
	f.leave()
	f.while, f.leave = context.WithCancel(f.ctx)
	for c := range f.conns {
		c.Close()
	}
}

func (f *forwarder) close() {
	f.cancel()
	f.ln.Close()
	f.mu.Lock()
	for c := range f.conns {
		c.Close()
	}
	f.mu.Unlock()
	f.wg.Wait()
}

// fromHere returns whether both ends of a connection are on this host.
func fromHere(conn net.Conn) bool {
	near, ok1 := conn.LocalAddr().(*net.TCPAddr)
	far, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && (far.IP.IsLoopback() || far.IP.Equal(near.IP))
}

// carry blocks until one of the ends closes the connection.
func (f *forwarder) carry(worker *identity.Conn) {
	defer worker.Close()
	if !fromHere(worker) {
		return
	}
	f.mu.Lock()
	to, ctx := f.to, f.while
	f.mu.Unlock()
	dialer := net.Dialer{Timeout: dialTimeout}
	driver, err := dialer.DialContext(ctx, "tcp", to.String())
	if err != nil {
		f.failed(to, time.Now(), err)
		return // the worker tries again
	}
	defer driver.Close()
	wire.Watch(driver) // the worker's kernel sees this host alone
	if !f.keep(to, worker, driver) {
		return
	}
	defer f.forget(worker, driver)
	var wg sync.WaitGroup
	var turns turns
	wg.Go(func() { pass(driver, worker, turns.worker) })
	wg.Go(func() {
		pass(worker, driver, func() {
			if turns.driver() {
				worker.Proven()
			}
		})
	})
	wg.Wait()
}

// passBuffer is the size of a buffer through which much goes.
const passBuffer = 8 << 10

// pass copies until one of the connections ends, and closes both. passing is called before each
// part. Its buffer is small, and for a connection that has said little, as those of strangers, very
// small. It takes no more descriptors, as a copy by the kernel would.
func pass(to, from net.Conn, passing func()) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 512)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			passing()
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
			if n == len(buf) && n < passBuffer {
				buf = make([]byte, passBuffer)
			}
		}
		if err != nil {
			return
		}
	}
}

// turns tells when the driver has accepted a worker's proof. In a handshake of TLS 1.3 the driver
// answers the hello, and speaks again once it has the worker's certificate and signature. To a
// stranger that is an alert, after which it closes the connection. A hello that the driver asks to
// repeat is taken for a proof as well: then the driver's own bounds hold.
type turns struct{ n atomic.Int32 }

// worker notes that the worker has spoken.
func (t *turns) worker() { t.n.CompareAndSwap(1, 2) }

// driver notes that the driver has spoken, and returns whether the worker is proven.
func (t *turns) driver() bool {
	t.n.CompareAndSwap(0, 1)
	return t.n.CompareAndSwap(2, 3)
}

var errElsewhere = errors.New("the driver is elsewhere")

// dialForCalls connects to the driver at addr.
func (f *forwarder) dialForCalls(ctx context.Context, addr string) (net.Conn, error) {
	to := netip.MustParseAddrPort(addr) // it is one
	conn, err := wire.Dial(ctx, addr)
	if err != nil {
		f.failed(to, time.Now(), err)
		return nil, err
	}
	if !f.keep(to) {
		conn.Close()
		return nil, errElsewhere
	}
	return conn, nil
}

// failed notes that a connection to the driver could not be made.
func (f *forwarder) failed(to netip.AddrPort, now time.Time, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.why == nil && f.to == to && f.ctx.Err() == nil {
		f.why, f.since = err, now
	}
}

// heard takes that the driver has sent this host a message. If the driver cannot be reached from
// here it returns why, which it logs once, and the workers whose calls wait for that, which it
// returns once, with the time since which they wait.
func (f *forwarder) heard(now time.Time) (why error, waiting map[string]time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.why == nil || now.Sub(f.since) < lives {
		return nil, nil
	}
	if !f.said {
		f.log.Warnf("agent: workers do not reach the driver: %v", f.why)
		f.said, f.told = true, make(map[string]bool)
	}
	waiting = f.calls.Unsent()
	maps.DeleteFunc(waiting, func(incarnation string, _ time.Time) bool { return f.told[incarnation] })
	for incarnation := range waiting {
		f.told[incarnation] = true
	}
	return f.why, waiting
}

// keep records connections to the driver, unless that is elsewhere by now.
func (f *forwarder) keep(to netip.AddrPort, conns ...net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.to != to || f.ctx.Err() != nil {
		return false
	}
	f.unreached = unreached{}
	for _, c := range conns {
		f.conns[c] = true
	}
	return true
}

func (f *forwarder) forget(conns ...net.Conn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range conns {
		delete(f.conns, c)
	}
}

// towards sends workers' connections to the driver whose stream joins those addresses, and their
// calls, where it has sent credentials for them; the lock is held.
func (s *session) towards(near, far netip.Addr, port uint32, credentials string) error {
	if port == 0 || port > 65535 || !near.IsValid() || !far.IsValid() {
		return nil
	}
	if s.forward == nil {
		var err error
		if s.forward, err = newForwarder(near, s.log); err != nil {
			return err
		}
	}
	to := netip.AddrPortFrom(far, uint16(port))
	s.forward.aim(to)
	return s.forward.calls.Aim(to.String(), credentials, s.forward.dialForCalls)
}
