package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// DefaultLease is how long an agent may be silent before its workers count as lost, unless
// Agents.Lease says otherwise.
const DefaultLease = 10 * time.Second

// Leases outside these bounds, and drivers that want their workers kept for longer, are refused.
const (
	MinLease  = 50 * time.Millisecond
	MaxLease  = 10 * time.Minute
	MaxOrphan = 7 * 24 * time.Hour
)

// Router is a Launcher whose workers reach the driver by way of their agents, and may run on other
// machines.
type Router interface {
	Launcher
	// ListenAddr returns where the driver has to listen for its workers, as net.Listen takes it.
	ListenAddr() string
	// Listening tells the port at which the driver does. It is called before the first Run.
	Listening(port int)
	// HostAddr returns an address, or a name, at which the job's other hosts reach the host. It may
	// block.
	HostAddr(host string) (string, error)
}

// Agents starts workers through the agents of their hosts: there is one session with each agent,
// shared by all workers on it. Where a cluster has no agent on a host, one is started for this job
// alone. Its methods may be called by many goroutines. Nothing is started before the first Run;
// Close must be called.
type Agents struct {
	// Find returns where the cluster's agent of a host listens, host:port, and whether there is one
	// now. It is called often, also to see whether an agent that is silent is known to be gone, and
	// must not block. Nil: there is no cluster.
	Find func(host string) (addr string, ok bool)
	// Credentials are the driver's in the cluster of the agents that Find finds.
	Credentials *identity.Credentials

	// Starter starts job agents. Nil: hosts without an agent of the cluster are refused.
	Starter Starter
	// Authority is the job's: the driver and job agents have their credentials from it.
	Authority *identity.Authority
	// Hello is what job agents are told; host, run and credentials are filled in.
	Hello AgentHello
	// Parallel is how many job agents are started at a time. Zero: 16.
	Parallel int
	// LocalOnly says that all hosts are this machine, and always will be: nobody else needs to
	// reach anything.
	LocalOnly bool

	// Lease is how long the driver and an agent may be out of each other's reach: after that the
	// workers count as killed here. Zero: DefaultLease. They exchange beats ten times as often, but
	// no rarer than each second.
	Lease time.Duration
	// Orphan is how long an agent keeps the workers of a driver that is silent; it bounds Lease.
	// Zero: Lease.
	Orphan time.Duration
	// Keep says that Settle will be called for every worker that has ended: until then its agent
	// keeps it for another driver.
	Keep bool
	// Begun, if not nil, is called with each job agent, one at a time, before anything is started
	// on it. An error makes the agent one that could not be started.
	Begun func(KnownAgent) error
	// Known are the job agents that drivers before this one have begun; of two on one host the
	// later counts.
	Known []KnownAgent
	// Log takes what becomes of the sessions. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger

	driverPort atomic.Int64
	telling    sync.Mutex // one call of Begun at a time

	mu       sync.Mutex
	ctx      context.Context // of the sessions
	cancel   context.CancelFunc
	fences   context.Context // of sessions that are lost
	unfence  context.CancelFunc
	closed   bool
	sessions map[string]*agentSession // by host
	jobs     map[string]*jobAgent     // by host
	children []*jobAgent              // all that have been processes of this one
	orphans  []*jobAgent              // of this machine, of drivers before
	own      *identity.Credentials    // the driver's, towards job agents
	starting chan struct{}            // of as many as may start at a time
	wg       sync.WaitGroup

	ending sync.Mutex         // guards ends; it is taken last
	ends   map[string]keptEnd // by incarnation

	adopted   map[string]bool // workers of the driver before, of which the end is not known; nil: there was none
	inherited map[string]bool // the hosts where the session has been taken over from it
}

var _ Router = (*Agents)(nil)

// LostError is the end of a worker whose agent cannot be reached any more: nobody knows how it has
// ended, or will, and it counts as killed. It is also an *ExitError of SIGKILL. Its text has no
// package prefix: it completes a sentence.
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

// Run implements Launcher. Besides, it returns *LostError, and start errors that are a *HostError.
// Where an agent of the cluster cannot be reached it tries for the time of a lease. An empty Dir is
// the driver's working directory, which must exist on the host as well.
func (a *Agents) Run(ctx context.Context, s Spec, started func(pid int)) error {
	if err := context.Cause(ctx); err != nil && !s.Resumed {
		return startError(s, err)
	}
	finding := ctx
	if s.Resumed {
		finding = context.WithoutCancel(ctx) // whom to stop must be found first
	}
	for {
		session, err := a.session(finding, s.Slot.Host, s.Resumed)
		switch {
		case err != nil && s.Resumed:
			return &LostError{Host: s.Slot.Host, Err: err}
		case err != nil:
			return startError(s, err)
		}
		err = session.run(ctx, s, started)
		if !errors.Is(err, errStale) {
			return err
		}
	}
}

// Prepare starts an agent on each of the hosts that has none, and blocks until all have answered or
// failed. It returns the errors, most of them *HostError, by host. Run does the same for its host,
// but its worker is waited for meanwhile.
func (a *Agents) Prepare(ctx context.Context, hosts []string) map[string]error {
	var mu sync.Mutex
	failed := make(map[string]error)
	var starting sync.WaitGroup
	for _, host := range hosts {
		starting.Go(func() {
			if _, err := a.session(ctx, host, false); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed[host] = err
			}
		})
	}
	starting.Wait()
	return failed
}

// prepare fills in what the zero value leaves out; the lock is held.
func (a *Agents) prepare() error {
	switch {
	case a.closed:
		return errors.New("the launcher is closed")
	case a.ctx != nil:
		return nil
	}
	if a.Starter != nil {
		var err error
		if a.own, err = a.Authority.Issue(identity.Subject{Role: identity.Driver}); err != nil {
			return err
		}
	}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.fences, a.unfence = context.WithCancel(a.ctx)
	a.sessions, a.jobs = make(map[string]*agentSession), make(map[string]*jobAgent)
	for _, k := range a.Known {
		a.jobs[k.Host] = knownAgent(k)
		if k.Local {
			a.orphans = append(a.orphans, a.jobs[k.Host])
		}
	}
	if a.Log == nil {
		a.Log = logrus.StandardLogger()
	}
	if a.Lease <= 0 {
		a.Lease = DefaultLease
	}
	if a.Orphan <= 0 {
		a.Orphan = a.Lease
	}
	a.Lease = min(a.Lease, a.Orphan)
	if a.Parallel <= 0 {
		a.Parallel = 16
	}
	a.starting = make(chan struct{}, a.Parallel)
	return nil
}

// session returns that with the agent of the host, which it begins, and the agent before it, where
// there is none, unless it should be there. It blocks until there is an agent.
func (a *Agents) session(ctx context.Context, host string, there bool) (*agentSession, error) {
	if a.Find != nil {
		if addr, ok := a.Find(host); ok {
			return a.sessionAt(place{host: host, addr: addr, credentials: a.Credentials, there: func() error {
				switch now, ok := a.Find(host); {
				case !ok:
					return errors.New("the host is gone")
				case now != addr:
					return fmt.Errorf("the host has another agent at %s", now)
				}
				return nil
			}})
		}
	}
	j, err := a.jobAgent(ctx, host, there)
	if err != nil {
		return nil, err
	}
	return a.sessionAt(place{host: host, addr: j.addr, credentials: a.own, there: j.there, vital: j.vital, kill: j.ready.kill, logs: true})
}

// place is where an agent is, and who.
type place struct {
	host, addr  string
	credentials *identity.Credentials
	there       func() error // why there is no use in waiting for an agent that is silent; nil where there is
	vital       *vital       // its process, on this machine; nil: it is elsewhere, or of nobody knows which
	kill        func()       // ends the agent itself; nil: it cannot be
	logs        bool         // it has no log but ours
}

func (a *Agents) sessionAt(p place) (*agentSession, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.prepare(); err != nil {
		return nil, err
	}
	if s := a.sessions[p.host]; s != nil {
		return s, nil
	}
	s := newAgentSession(a, p)
	a.inherit(s)
	a.sessions[p.host] = s
	a.wg.Go(func() { s.serve(a.ctx) })
	return s, nil
}

// forget makes the next worker of the host begin another session, with another job agent if it was
// one's.
func (a *Agents) forget(s *agentSession) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sessions[s.host] == s {
		delete(a.sessions, s.host)
	}
	if j := a.jobs[s.host]; j != nil && j.addr == s.addr {
		delete(a.jobs, s.host)
	}
}

// Kill kills all workers that run on agents now, without the grace that they may have been given.
// It does not block.
func (a *Agents) Kill() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		s.killAll()
	}
}

// Close ends the sessions and waits until agents have heard of it, for 2 seconds at most; agents
// that have not end what is left when they have waited for the driver long enough. Job agents of
// this machine have ended when it returns. All calls of Run must have returned.
func (a *Agents) Close() error {
	a.mu.Lock()
	a.closed = true
	cancel := a.cancel
	for _, s := range a.sessions {
		s.finish()
	}
	starting := false
	for _, j := range a.jobs {
		starting = starting || !j.started()
		if j.started() && a.sessions[j.host] == nil && j.ready.kill != nil {
			j.ready.kill() // it runs nothing
		}
	}
	a.mu.Unlock()
	if cancel == nil {
		return nil
	}
	a.unfence()
	late := time.AfterFunc(farewell, cancel)
	defer late.Stop()
	if starting {
		cancel()
	}
	a.wg.Wait()
	cancel()
	for _, j := range a.children { // nobody adds to them any more
		j.awaitEnd()
	}
	for _, j := range a.orphans {
		j.awaitOrphan()
	}
	return nil
}

// ListenAddr implements Router.
func (a *Agents) ListenAddr() string {
	if a.LocalOnly {
		return identity.ListenLoopback()
	}
	return ":0"
}

// Listening implements Router. Sessions that are there already tell their agents.
func (a *Agents) Listening(port int) {
	a.driverPort.Store(int64(port))
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		poke(s.wake)
	}
}

// HostAddr implements Router: where the host's agent was reached, and the name itself where all is
// on this machine.
func (a *Agents) HostAddr(host string) (string, error) {
	if a.LocalOnly {
		return host, nil
	}
	s, err := a.session(context.Background(), host, false)
	if err != nil {
		return host, nil // its own workers say why
	}
	name, _, err := net.SplitHostPort(s.addr)
	if err != nil {
		return "", fmt.Errorf("launch: the agent of %s: %w", host, err)
	}
	return name, nil
}

// outwardAddr returns an address of this machine that others may reach, where it has one: IPv4
// before IPv6.
func outwardAddr() netip.Addr {
	best := identity.Loopback()
	for _, addr := range OwnAddrs() {
		if addr.Is4() {
			return addr
		}
		if best.IsLoopback() {
			best = addr
		}
	}
	return best
}

// OwnAddrs returns the addresses of this machine that others may reach.
func OwnAddrs() (own []netip.Addr) {
	addrs, _ := net.InterfaceAddrs() // none known: none
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		if addr, ok := netip.AddrFromSlice(n.IP); ok && addr.Unmap().IsGlobalUnicast() {
			own = append(own, addr.Unmap())
		}
	}
	return own
}
