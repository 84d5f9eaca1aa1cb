package elastic

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/internal/rendezvous"
)

// way is the phases that a worker enters from its join of a world to its first save in it, for the
// driver's trace of the reset.
type way struct {
	recording atomic.Bool // otherwise a change of phase costs nothing more

	mu       sync.Mutex
	entered  []phaseAt
	complete bool
}

type phaseAt struct {
	phase rendezvous.Phase
	at    time.Time
}

// enter records a phase that begins at that time.
func (w *way) enter(p rendezvous.Phase, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	begins := p == rendezvous.Joins || p == rendezvous.Fetches
	switch {
	case begins && !w.recording.Load():
		w.entered, w.complete = nil, false
		w.recording.Store(true)
	case !w.recording.Load():
		return
	case len(w.entered) == rendezvous.MaxEntered: // it has gone to and fro between worlds
		w.entered = nil
	}
	w.entered = append(w.entered, phaseAt{p, now})
	if p == rendezvous.Saving {
		w.complete = true
		w.recording.Store(false)
	}
}

// told returns the way if it is complete and was not sent, with how long ago each phase began.
func (w *way) told(now time.Time) (all []rendezvous.Entered) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.complete {
		return nil
	}
	for _, e := range w.entered {
		all = append(all, rendezvous.Entered{Phase: e.phase, Ago: now.Sub(e.at)})
	}
	return slices.Clip(all)
}

// sent notes that the driver has the way.
func (w *way) sent() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.complete {
		w.entered, w.complete = nil, false
	}
}
