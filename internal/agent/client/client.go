// Package client is a driver's side of the agents of hosts: it finds or starts an agent on each
// host, and runs workers through it.
//
// Agents is a launch.Launcher. It keeps one session with each agent. If the cluster has no agent on
// a host, a Starter starts one only for the job: Exec on this machine, SSH on others. The package
// also has an agent's side of the same protocol: Hello and Ready.
package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/launch"
)

// defaultLease is how long an agent may be silent before its workers count as lost, unless
// Config.Lease is set.
const defaultLease = 10 * time.Second

// Agents refuse a lease outside MinLease and MaxLease, and an Orphan of more than MaxOrphan.
const (
	MinLease  = 50 * time.Millisecond
	MaxLease  = 10 * time.Minute
	MaxOrphan = 7 * 24 * time.Hour
)

// Agents starts workers through the agents of their hosts: there is one session with each agent,
// shared by all workers on it. If a cluster has no agent on a host, Agents starts one only for this
// job. Its methods may be called by many goroutines.
type Agents struct {
	cfg       Config
	wide      widening
	routes    sync.Map      // the session of each worker, by incarnation
	beginning sync.Mutex    // one call of Begun at a time
	starting  chan struct{} // holds one token for each job agent that is being started
	wg        sync.WaitGroup
	hosts
	ends    sync.Map     // by incarnation: the keptEnd of each worker whose end is not in the journal yet
	noted   atomic.Int64 // the time of the last record that is on disk; 0: none
	streams retry.Gate   // limits the log of failing streams
}

// New returns the Agents of a driver. It starts nothing before the first Run. The caller must call
// Close.
func New(cfg Config) *Agents {
	cfg = cfg.withDefaults()
	a := &Agents{cfg: cfg, starting: make(chan struct{}, cfg.Parallel)}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.open, a.shut = context.WithCancel(a.ctx)
	a.sessions, a.jobs, a.machines = make(map[string]*session), make(map[string]*jobAgent), make(map[string]string)
	return a
}

// hosts holds the agents that a driver knows and its sessions with them.
type hosts struct {
	mu       sync.Mutex
	begun    sync.Once       // what begin does once
	ctx      context.Context // of the sessions
	cancel   context.CancelFunc
	open     context.Context // of what Close ends first: starts of agents, and fences of lost sessions after their first attempt
	shut     context.CancelFunc
	closed   bool
	own      *identity.Credentials // the driver's credentials for job agents; nil: not issued yet
	sessions map[string]*session   // by host
	jobs     map[string]*jobAgent  // by host
	machines map[string]string     // by Ready.Machine: the first host on that machine
	local    []*jobAgent           // all on this machine, also those that earlier drivers started
	// foundFirst is when Find first returned an agent; zero: it has not.
	foundFirst time.Time
	adopted    *adopted // nil: there was no driver before this one
}

var (
	_ launch.Widener = (*Agents)(nil)
	_ launch.Teller  = (*Agents)(nil)
)

// Prepare starts an agent on each of the hosts that has none, and blocks until all have answered or
// failed. It returns the errors by host, most of them *HostError. Run does the same for the host of
// its worker.
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

// begin returns an error after Close. Its first call adds the agents that earlier drivers have
// started, and issues the driver's credentials; a.mu is held.
func (a *Agents) begin() (err error) {
	if a.closed {
		return errors.New("the launcher is closed")
	}
	a.begun.Do(func() {
		for _, k := range a.cfg.Known {
			a.jobs[k.Host] = knownAgent(k)
			if k.Local {
				a.local = append(a.local, a.jobs[k.Host])
			}
		}
	})
	if a.own == nil && a.cfg.Starter != nil {
		a.own, err = a.cfg.Authority.Issue(identity.Subject{Role: identity.Driver})
	}
	return err
}

// session returns the session with the host's agent, and begins one if there is no session. If
// there is no agent, it starts one, unless the argument there says that the agent should run
// already: then it returns an error. It blocks until an agent runs.
func (a *Agents) session(ctx context.Context, host string, there bool) (*session, error) {
	if a.cfg.Find != nil {
		if !there {
			a.awaitFound(ctx, host)
		}
		if addr, ok := a.cfg.Find(host); ok {
			a.mu.Lock()
			if a.foundFirst.IsZero() {
				a.foundFirst = time.Now()
			}
			a.mu.Unlock()
			return a.sessionAt(place{host: host, addr: addr, away: true, credentials: a.cfg.Credentials, there: func() error {
				switch now, ok := a.cfg.Find(host); {
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
	away := j.process == nil && !a.cfg.LocalOnly
	return a.sessionAt(place{host: host, addr: j.addr, away: away, credentials: a.own, there: j.there, process: j.process, kill: j.ready.kill, logs: true})
}

// awaitFound waits up to findNew for the cluster to find the host, which another source may find
// first.
func (a *Agents) awaitFound(ctx context.Context, host string) {
	a.mu.Lock()
	started := a.jobs[host] != nil
	a.mu.Unlock()
	for begun := time.Now(); !started && time.Since(begun) < findNew && ctx.Err() == nil; _ = retry.Pause(ctx, findEvery) {
		if _, ok := a.cfg.Find(host); ok {
			return
		}
	}
}

// place describes an agent and how to reach it.
type place struct {
	host, addr  string
	away        bool // it may be on another machine
	credentials *identity.Credentials
	there       func() error // returns an error if waiting for a silent agent is useless
	process     *proc.Ref    // the agent's process on this machine; nil: it is elsewhere or unknown
	kill        func()       // kills the agent itself; nil: this process cannot
	logs        bool         // the agent sends its log to this process
}

func (a *Agents) sessionAt(p place) (*session, error) {
	if p.away {
		if err := a.widen(); err != nil {
			return nil, &HostError{Host: p.host, Stage: stageReach, Err: err}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.begin(); err != nil {
		return nil, err
	}
	if s := a.sessions[p.host]; s != nil {
		return s, nil
	}
	s := newSession(a, p)
	a.inherit(s)
	a.sessions[p.host] = s
	a.wg.Go(func() { s.serve(a.ctx) })
	return s, nil
}

// forget removes the session, and its job agent if it has one: the next worker of the host begins
// new ones.
func (a *Agents) forget(s *session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sessions[s.host] == s {
		delete(a.sessions, s.host)
	}
	if j := a.jobs[s.host]; j != nil && j.addr == s.addr {
		delete(a.jobs, s.host)
	}
}

// Kill kills all workers that run on agents now, without a grace period. An agent that has not
// reported the end of its workers after killPatience is given up, and its workers count as killed.
// It does not block.
func (a *Agents) Kill() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		s.request(func() {
			for _, w := range s.workers {
				w.stop = 2
			}
		})
	}
	time.AfterFunc(killPatience, a.cancel)
}

// Signal passes SIGUSR1 or SIGUSR2 on to those processes of all running workers that handle it. It
// does not block.
func (a *Agents) Signal(sig syscall.Signal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		s.request(func() {
			for _, w := range s.workers {
				if w.known {
					w.signals = append(w.signals, sig)
				}
			}
		})
	}
}

// Close ends the sessions and waits at most 2 seconds until agents have acknowledged that; other
// agents end their workers when the lease expires. Job agents of this machine have ended when Close
// returns. All calls of Run must have returned before.
func (a *Agents) Close() error {
	a.mu.Lock()
	a.closed = true
	for _, s := range a.sessions {
		s.request(func() { s.end = max(s.end, finished) })
	}
	for _, j := range a.jobs {
		if j.started() && a.sessions[j.host] == nil && j.ready.kill != nil {
			j.ready.kill() // it runs nothing
		}
	}
	a.mu.Unlock()
	a.shut()
	late := time.AfterFunc(endPatience, a.cancel)
	defer late.Stop()
	ended := make(chan struct{})
	go func() { // abandoned if a program hangs in the kernel
		a.wg.Wait()
		close(ended)
	}()
	var stuck error
	select {
	case <-ended:
	case <-time.After(2 * endPatience):
		stuck = errors.New("agent: a program that connects to a host still exists after SIGKILL")
	}
	a.cancel()
	for _, j := range a.local { // complete by now
		j.awaitEnd()
	}
	return stuck
}

// HostAddr implements Router: it returns the address at which the host's agent was reached, or the
// name itself if everything is on this machine or the agent could not be started.
func (a *Agents) HostAddr(ctx context.Context, host string) (string, error) {
	if a.cfg.LocalOnly {
		return host, nil
	}
	s, err := a.session(ctx, host, false)
	switch {
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case err != nil:
		return host, nil // the workers of the host report why
	}
	name, _, err := net.SplitHostPort(s.addr)
	if err != nil {
		return "", fmt.Errorf("agent: the agent of %s: %w", host, err)
	}
	if addr, err := netip.ParseAddr(name); err == nil && addr.IsLoopback() && !s.away && !a.cfg.Listen.IsValid() {
		return outwardAddr().String(), nil // others may have to reach it
	}
	return name, nil
}
