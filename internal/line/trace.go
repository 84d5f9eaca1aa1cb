package line

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Trace records the phases that a worker enters from its join of a world to its first save in it,
// for the driver's trace of the reset. The zero value is ready to use. Its methods are safe for
// concurrent use.
type Trace struct {
	recording atomic.Bool // lets a change of phase skip the lock

	mu       sync.Mutex
	entered  []phaseAt
	complete bool
}

type phaseAt struct {
	phase Phase
	at    time.Time
}

// Recording reports whether Enter records a phase. It always records Joins and Fetches, which begin
// a trace.
func (t *Trace) Recording() bool { return t.recording.Load() }

// Enter records a phase that begins at the time now.
func (t *Trace) Enter(p Phase, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	begins := p == Joins || p == Fetches
	switch {
	case begins && !t.recording.Load():
		t.entered, t.complete = nil, false
		t.recording.Store(true)
	case !t.recording.Load():
		return
	case len(t.entered) == maxEntered: // too many changes of world
		t.entered = nil
	}
	t.entered = append(t.entered, phaseAt{p, now})
	if p == Saving {
		t.complete = true
		t.recording.Store(false)
	}
}

// Told returns the phases, with how long ago each began, if the trace is complete and not sent.
func (t *Trace) Told(now time.Time) (all []Entered) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.complete {
		return nil
	}
	for _, e := range t.entered {
		all = append(all, Entered{Phase: e.phase, Ago: now.Sub(e.at)})
	}
	return slices.Clip(all)
}

// Sent records that the driver has received the trace.
func (t *Trace) Sent() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.complete {
		t.entered, t.complete = nil, false
	}
}
