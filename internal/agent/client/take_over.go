package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
)

// KnownAgent is what a later driver must know about a job agent to take it over.
type KnownAgent struct {
	Host string
	// Addr is the address at which the driver reaches the agent, PID its process id on its host.
	Addr string
	PID  int
	// Local: the agent is on this machine.
	Local bool
}

var _ launch.Keeper = (*Agents)(nil)

// adopted is what Agents know about the earlier driver.
type adopted struct {
	workers map[string]bool // by incarnation: the workers whose end is unknown
	hosts   map[string]bool // the hosts whose session has been taken over
	term    uint64          // this driver's
	last    int64           // the time of the journal's last record
}

// predecessor is what a session knows about the earlier driver.
type predecessor struct {
	// kept are the agent's workers by incarnation, with the bytes of output acknowledged; nil: no
	// stream of this driver has taken the session over.
	kept    map[string]uint64
	queues  map[string][]*event // events of workers that no Run has claimed
	awaited map[string]bool     // workers for which Run will be called, but has not been called yet
	ahead   bool                // the agent knows of records that the journal lacks
}

// Adopt implements Keeper. It attaches to the sessions of all Known agents: they learn the driver's
// address, and end with the job.
func (a *Agents) Adopt(incarnations []string, term uint64, last time.Time) {
	a.mu.Lock()
	a.adopted = &adopted{workers: make(map[string]bool, len(incarnations)), hosts: make(map[string]bool), term: term, last: last.UnixNano()}
	for _, inc := range incarnations {
		a.adopted.workers[inc] = true
	}
	a.mu.Unlock()
	for _, k := range a.cfg.Known {
		// It begins a session, which fails only if the launcher is closed.
		_, _ = a.session(context.Background(), k.Host, true)
	}
}

// Noted implements Keeper.
func (a *Agents) Noted(at time.Time) {
	a.noted.Store(at.UnixNano())
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		s.wake.Set()
	}
}

// Settle implements Keeper.
func (a *Agents) Settle(incarnation string) {
	a.mu.Lock()
	if a.adopted != nil {
		delete(a.adopted.workers, incarnation)
	}
	a.mu.Unlock()
	if k, ok := a.ends.LoadAndDelete(incarnation); ok {
		k := k.(keptEnd)
		k.session.settle(k.event)
	}
}

// keptEnd is the end of one worker.
type keptEnd struct {
	session *session
	event   *event
}

// inherit makes the first session with a host take over from the earlier driver; the lock is held.
func (a *Agents) inherit(s *session) {
	if a.adopted == nil {
		return
	}
	s.term = a.adopted.term
	if a.adopted.hosts[s.host] {
		return
	}
	a.adopted.hosts[s.host] = true
	s.before = &predecessor{queues: make(map[string][]*event), awaited: make(map[string]bool)}
	for inc := range a.adopted.workers {
		s.before.awaited[inc] = true
	}
}

// takenOver continues the session from the state in which the earlier driver left it; the lock is
// held.
func (s *session) takenOver(answer *agentpb.Attached) {
	if first := answer.GetFirst(); first > 0 {
		s.id, s.heard, s.told = answer.GetSession(), first-1, first-1
	}
	s.before.kept = make(map[string]uint64)
	if last := s.a.adopted.last; answer.GetNoted() > last {
		s.before.ahead = true
		s.a.cfg.Ahead(fmt.Errorf("the journal ends at %s, but the agent of host %s knows that it had records up to %s: "+
			"it is an older copy, or has lost its end",
			time.Unix(0, last).Format(time.StampMilli), s.host, time.Unix(0, answer.GetNoted()).Format(time.StampMilli)))
	}
	for _, k := range answer.GetKept() {
		s.before.kept[k.GetIncarnation()] = k.GetBytes()
	}
	for _, w := range s.workers {
		s.claim(w)
	}
}

// stopUnknown makes the agent kill the workers of the earlier driver that this driver does not
// know: they count as lost, yet hold their slots. It spares them if the agent knows of records that
// the journal lacks. The lock is held.
func (s *session) stopUnknown() {
	if s.before == nil || s.before.ahead {
		return
	}
	for inc := range s.before.kept {
		if s.workers[inc] == nil && !s.before.awaited[inc] {
			s.tells = append(s.tells, &agentpb.ToAgent{What: &agentpb.ToAgent_Stop{Stop: &agentpb.Stop{Incarnation: inc, Now: true}}})
		}
	}
}

// takesOver returns whether the next stream takes over from the earlier driver; the lock is held.
func (s *session) takesOver() bool { return s.before != nil && s.before.kept == nil }

// claim gives a worker its state and events from the earlier driver's session. A resumed worker
// that the agent does not have is lost. The lock is held.
func (s *session) claim(w *worker) {
	inc := w.start.GetIncarnation()
	if s.before != nil {
		delete(s.before.awaited, inc)
		if bytes, ok := s.before.kept[inc]; ok {
			w.known, w.everSent = true, true
			w.taken, w.sentTaken = bytes, bytes
			before := slices.Clone(s.before.queues[inc])
			isLine := func(e *event) bool { return e.GetLine() != nil }
			w.queue = append(slices.DeleteFunc(slices.Clone(before), isLine), w.queue...)
			w.lines = append(slices.DeleteFunc(before, func(e *event) bool { return !isLine(e) }), w.lines...)
			delete(s.before.queues, inc)
			for _, e := range w.queue {
				w.reportEnd(s, e)
			}
			w.wake.Set()
			return
		}
	}
	if w.resumed {
		w.lost = errors.New("it does not know the worker")
		w.wake.Set()
	}
}
