package agent

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/wire"
)

// dialTimeout bounds the connection to a driver. An agent with many workers may be starved by them.
const dialTimeout = 20 * time.Second

// forwarder carries the connections of a session's workers to the driver, wherever that is now.
// It cannot read them: TLS goes from end to end.
type forwarder struct {
	ln     net.Listener
	log    logrus.FieldLogger
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	to    netip.AddrPort
	said  bool // it was logged that it cannot be reached
	conns map[net.Conn]bool
}

// newForwarder listens at an address of this host.
func newForwarder(at netip.Addr, log logrus.FieldLogger) (*forwarder, error) {
	ln, err := net.Listen("tcp", netip.AddrPortFrom(at, 0).String())
	if err != nil {
		return nil, fmt.Errorf("agent: listening for workers: %w", err)
	}
	f := &forwarder{ln: ln, log: log, conns: make(map[net.Conn]bool)}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.wg.Go(f.accept)
	return f, nil
}

func (f *forwarder) addr() string { return f.ln.Addr().String() }

// aim sets where the driver is. Connections to another place are broken.
func (f *forwarder) aim(to netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.to == to {
		return
	}
	f.to, f.said = to, false
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

func (f *forwarder) accept() {
	for {
		conn, err := f.ln.Accept()
		switch {
		case f.ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return
		case err != nil: // of one connection, or of too many open files
			pause := time.NewTimer(10 * time.Millisecond)
			select {
			case <-pause.C:
			case <-f.ctx.Done():
				pause.Stop()
			}
			continue
		case !fromHere(conn):
			conn.Close()
			continue
		}
		f.wg.Go(func() { f.carry(conn) })
	}
}

// fromHere returns whether both ends of a connection are on this host.
func fromHere(conn net.Conn) bool {
	near, ok1 := conn.LocalAddr().(*net.TCPAddr)
	far, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && (far.IP.IsLoopback() || far.IP.Equal(near.IP))
}

// carry blocks until one of the ends closes the connection.
func (f *forwarder) carry(worker net.Conn) {
	defer worker.Close()
	f.mu.Lock()
	to := f.to
	f.mu.Unlock()
	dialer := net.Dialer{Timeout: dialTimeout}
	driver, err := dialer.DialContext(f.ctx, "tcp", to.String())
	if err != nil {
		f.complain(to, err)
		return // the worker tries again
	}
	defer driver.Close()
	wire.Watch(driver) // the worker's kernel sees this host alone
	if !f.keep(to, worker, driver) {
		return
	}
	defer f.forget(worker, driver)
	var wg sync.WaitGroup
	for _, pair := range [][2]net.Conn{{driver, worker}, {worker, driver}} {
		wg.Go(func() {
			_, _ = io.Copy(pair[0], pair[1])
			worker.Close()
			driver.Close()
		})
	}
	wg.Wait()
}

// complain logs, once, that the driver cannot be reached from here, though it has reached this
// host.
func (f *forwarder) complain(to netip.AddrPort, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.said || f.to != to || f.ctx.Err() != nil {
		return
	}
	f.said = true
	f.log.Warnf("agent: workers do not reach the driver: %v", err)
}

// keep records connections to the driver, unless that is elsewhere by now.
func (f *forwarder) keep(to netip.AddrPort, conns ...net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.to != to || f.ctx.Err() != nil {
		return false
	}
	f.said = false
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

// towards sends workers' connections to the driver whose stream joins those addresses; the lock is
// held.
func (s *session) towards(near, far netip.Addr, port uint32) error {
	if port == 0 || port > 65535 || !near.IsValid() || !far.IsValid() {
		return nil
	}
	if s.forward == nil {
		var err error
		if s.forward, err = newForwarder(near, s.log); err != nil {
			return err
		}
	}
	s.forward.aim(netip.AddrPortFrom(far, uint16(port)))
	return nil
}
