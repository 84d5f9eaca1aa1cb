package launch

import (
	"context"
	"errors"

	"github.com/hvdrun/hvdrun/internal/wire"
)

// KnownAgent is a job agent that has been started, as another driver must know it to take it over.
type KnownAgent struct {
	Host string
	// Addr is where the driver reaches it, PID its process on its host.
	Addr string
	PID  int
	// Local: that is this machine.
	Local bool
}

var _ Keeper = (*Agents)(nil)

// legacy is what a session has to remember of the driver before this one.
type legacy struct {
	kept   map[string]uint64        // the agent's workers by incarnation, and the bytes of their output that are told of
	queues map[string][]*agentEvent // of workers that have not been claimed
	awaits map[string]bool          // those that will be, and have not
}

// expects tells whether somebody will ask for the worker.
func (l *legacy) expects(incarnation string) bool { return l.awaits[incarnation] }

// Adopt implements Keeper. It attaches to the sessions of all agents that are Known, so that they
// learn where the driver is now, and end with the job.
func (a *Agents) Adopt(incarnations []string) {
	a.mu.Lock()
	a.adopted = make(map[string]bool, len(incarnations))
	for _, inc := range incarnations {
		a.adopted[inc] = true
	}
	a.inherited = make(map[string]bool)
	a.mu.Unlock()
	for _, k := range a.Known {
		// It begins a session: that fails only where the launcher is closed.
		_, _ = a.session(context.Background(), k.Host, true)
	}
}

// Settle implements Keeper.
func (a *Agents) Settle(incarnation string) {
	a.mu.Lock()
	delete(a.adopted, incarnation)
	a.mu.Unlock()
	a.ending.Lock()
	k, ok := a.ends[incarnation]
	delete(a.ends, incarnation)
	a.ending.Unlock()
	if ok {
		k.session.settle(k.event)
	}
}

// keptEnd is the end of a worker that has not been written down.
type keptEnd struct {
	session *agentSession
	event   *agentEvent
}

// keep takes note of the end of a worker for which Settle will be called; the session's lock is
// held.
func (a *Agents) keep(s *agentSession, incarnation string, e *agentEvent) {
	if !a.Keep {
		return
	}
	a.ending.Lock()
	defer a.ending.Unlock()
	if a.ends == nil {
		a.ends = make(map[string]keptEnd)
	}
	a.ends[incarnation] = keptEnd{s, e}
}

// inherit makes the first session with the host one that takes over from the driver before; the
// lock is held.
func (a *Agents) inherit(s *agentSession) {
	if a.adopted == nil || a.inherited[s.host] {
		return
	}
	a.inherited[s.host] = true
	s.takeOver = true
	s.legacy = &legacy{queues: make(map[string][]*agentEvent), awaits: make(map[string]bool)}
	for inc := range a.adopted {
		s.legacy.awaits[inc] = true
	}
}

// takenOver begins the session anew as the driver before left it; the lock is held.
func (s *agentSession) takenOver(answer *wire.Attached) {
	s.takeOver = false
	if first := answer.GetFirst(); first > 0 {
		s.id, s.heard, s.told = answer.GetSession(), first-1, first-1
	}
	s.legacy.kept = make(map[string]uint64)
	for _, k := range answer.GetKept() {
		s.legacy.kept[k.GetIncarnation()] = k.GetBytes()
	}
	for _, w := range s.workers {
		s.claim(w)
	}
}

// claim gives a worker what there is of it from before; the lock is held. One that should be there
// and is not is lost.
func (s *agentSession) claim(w *agentWorker) {
	inc := w.start.GetIncarnation()
	if s.legacy != nil {
		delete(s.legacy.awaits, inc)
		if bytes, ok := s.legacy.kept[inc]; ok {
			w.known, w.everSaid = true, true
			w.taken, w.saidTaken = bytes, bytes
			w.queue = append(s.legacy.queues[inc], w.queue...)
			delete(s.legacy.queues, inc)
			for _, e := range w.queue {
				w.tellEnd(s, e)
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
