package client

import (
	"context"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/retry"
)

const (
	// firstContact bounds how long a job agent waits for the first connection of its driver, unless
	// Config.Hello sets Patience.
	firstContact = time.Minute
	// reachTimeout bounds the search for an address at which a job agent is reached.
	reachTimeout = 10 * time.Second
)

// startBackoff is the pause before another try to start a job agent.
var startBackoff = retry.Backoff{First: 250 * time.Millisecond, Most: 4 * time.Second}

// jobAgent is the agent of one job on one host.
type jobAgent struct {
	host string
	done chan struct{} // closed when the start has succeeded or failed
	// The following fields are set when done is closed.
	err     error
	ready   Ready
	addr    string    // address at which the driver reaches it
	process *proc.Ref // its process, if on this machine; else nil
}

func (j *jobAgent) started() bool {
	select {
	case <-j.done:
		return true
	default:
		return false
	}
}

// there returns an error if the agent is a process of this machine that has ended.
func (j *jobAgent) there() error {
	if j.process == nil {
		return nil
	}
	return j.process.Ended()
}

// awaitEnd waits for the end of an agent of this machine, and kills it after endPatience. It does
// not wait for one that hangs in the kernel.
func (j *jobAgent) awaitEnd() {
	bounded := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), endPatience)
		defer cancel()
		return j.process.Await(ctx)
	}
	if bounded() != nil {
		j.ready.kill()
		_ = bounded()
	}
}

// knownAgent returns the jobAgent of an agent that an earlier driver started.
func knownAgent(k KnownAgent) *jobAgent {
	j := &jobAgent{host: k.Host, addr: k.Addr, done: make(chan struct{}), ready: Ready{PID: k.PID}}
	if k.Local {
		j.process = proc.Find(k.PID, agentArgs...)
		j.ready.kill = func() { j.process.Signal(syscall.SIGKILL) }
	}
	close(j.done)
	return j
}

// jobAgent returns the agent of the job on the host, and blocks until it runs. If it does not run,
// jobAgent starts it, unless the argument there says that it should run already: then it returns an
// error.
func (a *Agents) jobAgent(ctx context.Context, host string, there bool) (*jobAgent, error) {
	a.mu.Lock()
	if err := a.begin(); err != nil {
		a.mu.Unlock()
		return nil, err
	}
	if a.cfg.Starter == nil {
		a.mu.Unlock()
		return nil, fmt.Errorf("host %s %w", host, errNoAgent)
	}
	j := a.jobs[host]
	if j == nil && there {
		a.mu.Unlock()
		return nil, fmt.Errorf("host %s %w", host, errNoAgent)
	}
	if j == nil || j.started() && j.there() != nil {
		j = &jobAgent{host: host, done: make(chan struct{})}
		a.jobs[host] = j
		a.wg.Go(func() { a.startAgent(j) })
	}
	a.mu.Unlock()
	select {
	case <-j.done:
		return j, j.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// startAgent starts the agent and finds an address at which the driver reaches it. It retries while
// passes permits, until Config.Patience is over.
func (a *Agents) startAgent(j *jobAgent) {
	begun := time.Now()
	for tries := 1; ; tries++ {
		a.tryAgent(j)
		left := a.cfg.Patience - time.Since(begun)
		if j.err == nil || !passes(j.err, a.cfg.Await) || left <= 0 {
			break
		}
		if tries == 1 {
			a.cfg.Log.Warnf("%v; it is tried again for %v", j.err, a.cfg.Patience)
		}
		if retry.Pause(a.open, min(startBackoff.After(tries), left)) != nil {
			break
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if j.err != nil && a.jobs[j.host] == j {
		delete(a.jobs, j.host) // a later start may succeed
	}
	close(j.done)
}

// tryAgent calls startNow once fewer than Config.Parallel starts run, and sets j.err.
func (a *Agents) tryAgent(j *jobAgent) {
	select {
	case a.starting <- struct{}{}:
		j.err = a.startNow(j)
		a.cfg.Audit(audit.Record{
			Who:  audit.Self(string(identity.Driver), a.own.Subject().RunID),
			What: "start agent", Host: j.host, PID: j.ready.PID, Outcome: audit.Of(j.err),
		})
		<-a.starting
	case <-a.open.Done():
		j.err = errClosed
	}
}

func (a *Agents) startNow(j *jobAgent) error {
	creds, err := a.cfg.Authority.Issue(identity.Subject{Role: identity.Agent, Host: j.host})
	if err != nil {
		return err
	}
	hello := a.cfg.Hello
	hello.RunID, hello.Host, hello.Credentials = creds.Subject().RunID, j.host, creds.Encode()
	hello.Loopback = a.cfg.LocalOnly && !a.cfg.Listen.IsValid()
	if a.cfg.Listen.IsValid() {
		hello.Listen = a.cfg.Listen.String()
	}
	if hello.Patience <= 0 {
		hello.Patience = min(firstContact, a.cfg.Orphan) // this driver may die before other drivers know of the agent
	}
	if j.ready, err = a.cfg.Starter.Start(a.open, j.host, hello); err != nil {
		return err
	}
	if j.ready.gone != nil {
		j.process = proc.RefOf(j.ready.PID, j.ready.gone)
		a.mu.Lock()
		a.local = append(a.local, j)
		a.mu.Unlock()
	}
	if j.addr, err = a.reach(j); err != nil {
		if j.ready.kill != nil {
			j.ready.kill()
		}
		return &HostError{Host: j.host, Stage: stageReach, Err: err}
	}
	a.noteMachine(j)
	if a.cfg.Begun != nil {
		a.beginning.Lock()
		err := a.cfg.Begun(KnownAgent{j.host, j.addr, j.ready.PID, j.ready.gone != nil})
		a.beginning.Unlock()
		if err != nil {
			if j.ready.kill != nil {
				j.ready.kill()
			}
			return &HostError{Host: j.host, Stage: stageReach, Err: err}
		}
	}
	a.cfg.Log.WithField("host", j.host).Debugf("agent: an agent was started: process %d, at %s", j.ready.PID, j.addr)
	return nil
}

// reach returns the first address at which the agent answers. An agent of this machine has one
// address, which its session tries.
func (a *Agents) reach(j *jobAgent) (string, error) {
	if j.ready.gone != nil {
		return j.candidates(a.cfg.Listen)[0], context.Cause(a.open)
	}
	ctx, cancel := context.WithTimeout(a.open, reachTimeout)
	defer cancel()
	return Reach(ctx, a.own, j.host, j.candidates(a.cfg.Listen))
}

// candidates returns the addresses at which the agent may be reachable, best first.
func (j *jobAgent) candidates(listen netip.Addr) []string {
	at := j.ready
	switch {
	case at.gone == nil:
	case !listen.IsValid():
		at.Addresses = []string{identity.Loopback().String()}
	case listen.IsUnspecified():
		at.Addresses = []string{outwardAddr().String()} // the one that others have to reach
	default:
		at.Addresses = []string{listen.String()}
	}
	return at.Endpoints()
}
