package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// DefaultLease is how long agents keep the workers of a driver that is silent, unless Agents.Lease says otherwise.
const DefaultLease = 10 * time.Second

// Agents refuse leases outside these bounds.
const (
	MinLease = 50 * time.Millisecond
	MaxLease = 10 * time.Minute
)

// Router is a Launcher whose workers may run on other machines.
type Router interface {
	Launcher
	// DriverAddr returns the address of this machine at which the workers of the host reach the driver.
	DriverAddr(host string) (netip.Addr, error)
	// HostAddr returns an address, or a name, at which the job's other hosts reach the host.
	HostAddr(host string) (string, error)
}

// Agents starts workers through the agents of their hosts: there is one session with each agent, shared by all workers
// on it. Its methods may be called by many goroutines. Nothing is started before the first Run; Close must be called.
type Agents struct {
	// Credentials are the driver's in the cluster of the agents.
	Credentials *identity.Credentials
	// Find returns where the agent of a host listens, host:port, and whether there is one now. It is called often, also
	// to see whether an agent that is silent is known to be gone, and must not block.
	Find func(host string) (addr string, ok bool)
	// Lease is how long the driver and an agent may be out of each other's reach: after that the agent ends the workers,
	// and they count as killed here. Zero: DefaultLease. They exchange beats ten times as often, but no rarer than each
	// second.
	Lease time.Duration
	// Local runs the workers of hosts that have no agent but are this machine. Nil: Local.
	Local Launcher
	// Log takes what becomes of the sessions. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger

	mu       sync.Mutex
	ctx      context.Context // of the sessions
	cancel   context.CancelFunc
	closed   bool
	sessions map[string]*agentSession // by host
	wg       sync.WaitGroup
}

var _ Router = (*Agents)(nil)

// LostError is the end of a worker whose agent cannot be reached any more: nobody knows how it has ended, or will, and it
// counts as killed. It is also an *ExitError of SIGKILL. Its text has no package prefix: it completes a sentence.
type LostError struct {
	// Host is the worker's, Addr where its agent listened.
	Host, Addr string
	// Err is what led to it.
	Err error
}

// Error returns "was lost: its agent at ADDR is lost: …".
func (e *LostError) Error() string {
	return fmt.Sprintf("was lost: its agent at %s is lost: %v", e.Addr, e.Err)
}

// Unwrap returns an *ExitError and the cause.
func (e *LostError) Unwrap() []error {
	return []error{exitOfSignal(9), e.Err}
}

// Run implements Launcher. Besides, it returns *LostError. Where the agent cannot be reached it tries for the time of a
// lease. An empty Dir is the driver's working directory, which must exist on the host as well.
func (a *Agents) Run(ctx context.Context, s Spec, started func(pid int)) error {
	if err := context.Cause(ctx); err != nil {
		return startError(s, err)
	}
	for {
		addr, ok := a.Find(s.Slot.Host)
		switch {
		case !ok && IsLocal(s.Slot.Host):
			return a.local().Run(ctx, s, started)
		case !ok:
			return startError(s, fmt.Errorf("host %s has no agent", s.Slot.Host))
		}
		session, err := a.session(s.Slot.Host, addr)
		if err != nil {
			return startError(s, err)
		}
		err = session.run(ctx, s, started)
		if !errors.Is(err, errStale) {
			return err
		}
	}
}

func (a *Agents) local() Launcher {
	if a.Local == nil {
		return Local{}
	}
	return a.Local
}

// session returns that with the agent of the host, which it begins where there is none.
func (a *Agents) session(host, addr string) (*agentSession, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, errors.New("the launcher is closed")
	}
	if s := a.sessions[host]; s != nil {
		return s, nil
	}
	if a.ctx == nil {
		a.ctx, a.cancel = context.WithCancel(context.Background())
		a.sessions = make(map[string]*agentSession)
		if a.Log == nil {
			a.Log = logrus.StandardLogger()
		}
		if a.Lease <= 0 {
			a.Lease = DefaultLease
		}
	}
	s := newAgentSession(a, host, addr)
	a.sessions[host] = s
	a.wg.Go(func() { s.serve(a.ctx) })
	return s, nil
}

// forget makes the next worker of the host begin another session.
func (a *Agents) forget(s *agentSession) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sessions[s.host] == s {
		delete(a.sessions, s.host)
	}
}

// Kill kills all workers that run on agents now, without the grace that they may have been given. It does not block.
func (a *Agents) Kill() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		s.killAll()
	}
}

// Close ends the sessions and waits until agents have heard of it, for 2 seconds at most; agents that have not end what is
// left when the lease runs out. All calls of Run must have returned.
func (a *Agents) Close() error {
	a.mu.Lock()
	a.closed = true
	cancel := a.cancel
	for _, s := range a.sessions {
		s.finish()
	}
	a.mu.Unlock()
	if cancel == nil {
		return nil
	}
	late := time.AfterFunc(farewell, cancel)
	defer late.Stop()
	a.wg.Wait()
	cancel()
	return nil
}

// DriverAddr implements Router: the address from which packets go to the host's agent, or, for a host without one, which
// is this machine, an address that the others may reach.
func (a *Agents) DriverAddr(host string) (netip.Addr, error) {
	addr, ok := a.Find(host)
	if !ok {
		return outwardAddr(), nil
	}
	conn, err := net.Dial("udp", addr) // sends nothing: the kernel only picks the route
	if err != nil {
		return netip.Addr{}, fmt.Errorf("launch: the way to the agent of %s: %w", host, err)
	}
	defer conn.Close()
	own, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return own.Addr().Unmap(), err
}

// HostAddr implements Router.
func (a *Agents) HostAddr(host string) (string, error) {
	addr, ok := a.Find(host)
	if !ok {
		return outwardAddr().String(), nil
	}
	name, _, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("launch: the agent of %s: %w", host, err)
	}
	return name, nil
}

// outwardAddr returns an address of this machine that others may reach, where it has one: IPv4 before IPv6.
func outwardAddr() netip.Addr {
	best := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	addrs, _ := net.InterfaceAddrs() // none known: loopback
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		addr, ok := netip.AddrFromSlice(n.IP)
		if addr = addr.Unmap(); !ok || !addr.IsGlobalUnicast() {
			continue
		}
		if addr.Is4() {
			return addr
		}
		if best.IsLoopback() {
			best = addr
		}
	}
	return best
}
