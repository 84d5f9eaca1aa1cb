package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
)

// KnownAgent is a job agent that has been started, as another driver must know it to take it over.
type KnownAgent struct {
	Host string
	// Addr is the address at which the driver reaches it, PID its process on its host.
	Addr string
	PID  int
	// Local: its host is this machine.
	Local bool
}

var _ launch.Keeper = (*Agents)(nil)

// adopted is what Agents know of the driver before this one.
type adopted struct {
	workers map[string]bool // by incarnation, of which the end is not known
	hosts   map[string]bool // where the session has been taken over
	term    uint64          // this driver's
	last    int64           // the time of the journal's last record
}

// predecessor is what a session knows of the driver before this one.
type predecessor struct {
	attached bool                // a stream has taken over from it
	kept     map[string]uint64   // the agent's workers by incarnation, and the acknowledged bytes of their output
	queues   map[string][]*event // of workers that have not been claimed
	awaited  map[string]bool     // workers for which Run will be called, and has not been
	ahead    bool                // the agent knows of records that the journal lacks
}

// Adopt implements Keeper. It attaches to the sessions of all Known agents, so that they learn the
// driver's address, and end with the job.
func (a *Agents) Adopt(incarnations []string, term uint64, last time.Time) {
	a.mu.Lock()
	a.adopted = &adopted{workers: make(map[string]bool, len(incarnations)), hosts: make(map[string]bool), term: term, last: last.UnixNano()}
	for _, inc := range incarnations {
		a.adopted.workers[inc] = true
	}
	a.mu.Unlock()
	for _, k := range a.cfg.Known {
		// It begins a session: that fails only where the launcher is closed.
		_, _ = a.session(context.Background(), k.Host, true)
	}
}

// Noted implements Keeper.
func (a *Agents) Noted(at time.Time) {
	a.noted.Store(at.UnixNano())
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		poke(s.wake)
	}
}

// AheadError says that an agent knows later records of the job than the journal has that the driver
// was given.
type AheadError struct {
	Host string
	// Ends is the time of the journal's last record, Knows the time up to which the agent knows
	// that there were records.
	Ends, Knows time.Time
}

// Error says what can be done.
func (e *AheadError) Error() string {
	return fmt.Sprintf("the journal ends at %s, but the agent of host %s knows that it had records up to %s: "+
		"it is an older copy, or has lost its end", e.Ends.Format(time.StampMilli), e.Host, e.Knows.Format(time.StampMilli))
}

// Settle implements Keeper.
func (a *Agents) Settle(incarnation string) {
	a.mu.Lock()
	if a.adopted != nil {
		delete(a.adopted.workers, incarnation)
	}
	a.mu.Unlock()
	a.ends.mu.Lock()
	k, ok := a.ends.of[incarnation]
	delete(a.ends.of, incarnation)
	a.ends.mu.Unlock()
	if ok {
		k.session.settle(k.event)
	}
}

// keptEnds are the ends of workers that the journal does not have yet. Its lock is taken last.
type keptEnds struct {
	mu sync.Mutex
	of map[string]keptEnd // by incarnation
}

// keptEnd is one of them.
type keptEnd struct {
	session *session
	event   *event
}

// keep records the end of a worker for which Settle will be called; the session's lock is
// held.
func (a *Agents) keep(s *session, incarnation string, e *event) {
	if !a.cfg.Keep {
		return
	}
	a.ends.mu.Lock()
	defer a.ends.mu.Unlock()
	if a.ends.of == nil {
		a.ends.of = make(map[string]keptEnd)
	}
	a.ends.of[incarnation] = keptEnd{s, e}
}

// inherit makes the first session with the host one that takes over from the driver before; the
// lock is held.
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

// takenOver begins the session anew as the driver before left it; the lock is held.
func (s *session) takenOver(answer *agentpb.Attached) {
	s.before.attached = true
	if first := answer.GetFirst(); first > 0 {
		s.id, s.heard, s.told = answer.GetSession(), first-1, first-1
	}
	s.before.kept = make(map[string]uint64)
	if last := s.a.adopted.last; answer.GetNoted() > last {
		s.before.ahead = true
		s.a.cfg.Ahead(&AheadError{s.host, time.Unix(0, last), time.Unix(0, answer.GetNoted())})
	}
	for _, k := range answer.GetKept() {
		s.before.kept[k.GetIncarnation()] = k.GetBytes()
	}
	for _, w := range s.workers {
		s.claim(w)
	}
}

// stopUnknown makes the agent kill the workers of the driver before that this driver does not know:
// they count as lost, and hold their slots. It leaves them alone where the agent knows records that
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

// takesOver returns whether the next stream takes over from the driver before this one; the lock is
// held.
func (s *session) takesOver() bool { return s.before != nil && !s.before.attached }

// claim gives a worker what there is of it from before; the lock is held. One that should be there
// and is not is lost.
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
			poke(w.wake)
			return
		}
	}
	if w.resumed {
		w.lost = errors.New("it does not know the worker")
		poke(w.wake)
	}
}
