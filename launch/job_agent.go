package launch

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
)

const (
	// firstContact is how long a job agent waits for its driver.
	firstContact = time.Minute
	// reachTimeout bounds the search for an address at which a job agent is reached.
	reachTimeout = 10 * time.Second
)

// jobAgent is the agent of one job on one host.
type jobAgent struct {
	host string
	done chan struct{} // closed when it has been started, or could not be
	// What follows is there when done is closed.
	err   error
	ready AgentReady
	addr  string // where the driver reaches it
	vital *vital // its process, where that is on this machine; nil elsewhere
}

func (j *jobAgent) started() bool {
	select {
	case <-j.done:
		return true
	default:
		return false
	}
}

// there tells of a process of this machine that has ended.
func (j *jobAgent) there() error {
	if j.vital == nil {
		return nil
	}
	return j.vital.there()
}

// awaitEnd waits for the end of a child of this process, and sees to it.
func (j *jobAgent) awaitEnd() {
	late := time.AfterFunc(farewell, j.ready.kill)
	defer late.Stop()
	<-j.ready.gone
}

// awaitOrphan waits for the end of a process that was another's child, and sees to it.
func (j *jobAgent) awaitOrphan() {
	for late := time.Now().Add(farewell); j.there() == nil; pauseFor(context.Background(), 2*time.Millisecond) {
		if time.Now().After(late) {
			j.ready.kill()
			return
		}
	}
}

// knownAgent is one that a driver before this one has started.
func knownAgent(k KnownAgent) *jobAgent {
	j := &jobAgent{host: k.Host, addr: k.Addr, done: make(chan struct{}), ready: AgentReady{PID: k.PID}}
	if k.Local {
		j.vital = vitalOf(k.PID)
		j.ready.kill = func() { j.vital.signal(syscall.SIGKILL) }
	}
	close(j.done)
	return j
}

// jobAgent returns the host's, which it starts where there is none, unless it should be there, and
// blocks until it is.
func (a *Agents) jobAgent(ctx context.Context, host string, there bool) (*jobAgent, error) {
	a.mu.Lock()
	if err := a.prepare(); err != nil {
		a.mu.Unlock()
		return nil, err
	}
	if a.Starter == nil {
		a.mu.Unlock()
		return nil, fmt.Errorf("host %s has no agent", host)
	}
	j := a.jobs[host]
	if j == nil && there {
		a.mu.Unlock()
		return nil, fmt.Errorf("host %s had no agent", host)
	}
	if j == nil || j.started() && j.there() != nil {
		j = &jobAgent{host: host, done: make(chan struct{})}
		a.jobs[host] = j
		a.wg.Go(func() { a.begin(j) })
	}
	a.mu.Unlock()
	select {
	case <-j.done:
		return j, j.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// begin starts the agent and finds the way to it.
func (a *Agents) begin(j *jobAgent) {
	select {
	case a.starting <- struct{}{}:
		j.err = a.beginNow(j)
		<-a.starting
	case <-a.ctx.Done():
		j.err = errors.New("the launcher was closed")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if j.err != nil && a.jobs[j.host] == j {
		delete(a.jobs, j.host) // another try may do better
	}
	close(j.done)
}

func (a *Agents) beginNow(j *jobAgent) error {
	creds, err := a.Authority.Issue(identity.Subject{Role: identity.Agent, Host: j.host})
	if err != nil {
		return err
	}
	hello := a.Hello
	hello.RunID, hello.Host, hello.Credentials = creds.Subject().RunID, j.host, creds.Encode()
	hello.Loopback = a.LocalOnly
	if hello.Patience <= 0 {
		hello.Patience = firstContact
	}
	if j.ready, err = a.Starter.Start(a.ctx, j.host, hello); err != nil {
		return err
	}
	if j.ready.gone != nil {
		j.vital = &vital{pid: j.ready.PID, gone: j.ready.gone}
		a.mu.Lock()
		a.children = append(a.children, j)
		a.mu.Unlock()
	}
	if j.addr, err = a.reach(j); err != nil {
		if j.ready.kill != nil {
			j.ready.kill()
		}
		return &HostError{Host: j.host, Stage: StageReach, Err: err}
	}
	if a.Begun != nil {
		a.telling.Lock()
		err := a.Begun(KnownAgent{j.host, j.addr, j.ready.PID, j.ready.gone != nil})
		a.telling.Unlock()
		if err != nil {
			if j.ready.kill != nil {
				j.ready.kill()
			}
			return &HostError{Host: j.host, Stage: StageReach, Err: err}
		}
	}
	a.Log.WithField("host", j.host).Debugf("launch: an agent was started: process %d, at %s", j.ready.PID, j.addr)
	return nil
}

// reach returns the first address that leads to the agent.
func (a *Agents) reach(j *jobAgent) (string, error) {
	ctx, cancel := context.WithTimeout(a.ctx, reachTimeout)
	defer cancel()
	return Reach(ctx, a.own, j.host, j.candidates(a.LocalOnly))
}

// candidates are the addresses at which the agent may be reached, best first.
func (j *jobAgent) candidates(localOnly bool) []string {
	at := j.ready
	switch {
	case at.gone != nil && localOnly:
		at.Addresses = []string{identity.Loopback().String()}
	case at.gone != nil:
		at.Addresses = []string{outwardAddr().String()} // the one that others have to reach
	}
	return at.Endpoints()
}

// Reach connects to all the addresses (host:port) at the same time, and returns the first behind
// which there is the agent of the host. It says nothing to it. The error names each address and
// what came of it.
func Reach(ctx context.Context, creds *identity.Credentials, host string, addrs []string) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	type result struct {
		addr string
		err  error
	}
	results := make(chan result, len(addrs))
	for _, addr := range addrs {
		go func() {
			dialer := tls.Dialer{Config: creds.ClientTLS(identity.Subject{Role: identity.Agent, Host: host})}
			conn, err := dialer.DialContext(ctx, "tcp", addr)
			if err == nil {
				addr = conn.RemoteAddr().String()
				conn.Close()
			}
			results <- result{addr, err}
		}()
	}
	found, all := "", []error{}
	for range addrs {
		switch r := <-results; {
		case r.err == nil && found == "":
			found = r.addr
			cancel() // the others end at once
		case r.err != nil:
			all = append(all, fmt.Errorf("%s: %w", r.addr, plainDial(r.err)))
		}
	}
	cancel()
	switch {
	case found != "":
		return found, nil
	case len(addrs) == 0:
		return "", errors.New("the host names no address")
	}
	return "", oneLine(all)
}

// plainDial leaves out what the line says already.
func plainDial(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		if op.Timeout() {
			return errors.New("no answer")
		}
		return op.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return errors.New("no answer")
	}
	return err
}

// oneLine joins errors with "; ".
func oneLine(all []error) error {
	text := ""
	for i, err := range all {
		if i > 0 {
			text += "; "
		}
		text += err.Error()
	}
	return errors.New(text)
}
