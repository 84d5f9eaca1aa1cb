package collective

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// Wait is the duration of one operation of the group of all ranks on this rank. Ranks leave such an
// operation at about the same time, so the rank with the shortest duration came last.
type Wait struct {
	// Operation identifies the operation: the number is the same on all ranks, and most probably
	// unique in the generation.
	Operation uint64
	// For is the duration, measured by a monotonic clock.
	For time.Duration
}

// MostWaits is the largest number of waits that [Group.Waits] returns.
const MostWaits = 64

// fewWaits and manyWaits bound the number of waits that are kept between two calls of Waits. The
// share of operations that are kept is adapted to the rate of operations.
const fewWaits, manyWaits = MostWaits / 8, MostWaits / 2

// waits keeps the times of some operations. Only the number of an operation decides whether its
// time is kept, so that ranks with about the same rate keep the same ones. An operation that is not
// kept costs one multiplication.
type waits struct {
	mask atomic.Uint64 // the operations whose number has none of these bits are kept

	mu   sync.Mutex
	kept []Wait
}

// mix spreads consecutive numbers over all 64-bit numbers. It is the finalizer of splitmix64, a
// bijection.
func mix(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// wants reports whether the time of an operation is kept.
func (w *waits) wants(operation uint64) bool { return operation&w.mask.Load() == 0 }

// keep keeps the time of an operation, unless there are too many already.
func (w *waits) keep(operation uint64, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.kept) < MostWaits {
		w.kept = append(w.kept, Wait{operation, d})
	}
}

// take returns the kept times, forgets them, and adapts the share of operations whose times are
// kept.
func (w *waits) take() []Wait {
	w.mu.Lock()
	defer w.mu.Unlock()
	kept := w.kept
	w.kept = nil
	switch mask := w.mask.Load(); {
	case len(kept) > manyWaits:
		w.mask.Store(mask<<1 | 1)
	case len(kept) < fewWaits:
		w.mask.Store(mask >> 1)
	}
	return kept
}

// Waits returns the times of operations of the group of all ranks that have succeeded since the
// last call of Waits in this process. It has only some of the operations, the same ones on all
// ranks, and only those that no rank can leave before the last rank has entered. For an
// asynchronous operation the time is from the submission of its tensor to its result. Waits may be
// called at any time by any goroutine, but only one caller gets each time.
func (g *Group) Waits() []Wait {
	if g == nil {
		return nil
	}
	return g.family.waits.take()
}

// meets are the actions that no rank can leave before the last rank has entered.
const meets = 1<<operation.AllReduce | 1<<operation.AllGather | 1<<operation.ReduceScatter | 1<<operation.AllToAll | 1<<operation.Barrier |
	1<<operation.AllGatherInto | 1<<operation.AllToAllInto | 1<<operation.ReduceTree

// watched returns the number and the time of the operation that is about to begin. A zero Time
// means that its time is not kept.
func (g *Group) watched(a operation.Action) (operation uint64, begun time.Time) {
	if g == nil || g.lane != 0 || g.size < 2 || meets>>a&1 == 0 {
		return 0, time.Time{}
	}
	operation = mix(g.state.Load()/entered + 1)
	if g.family.waits.wants(operation) {
		begun = time.Now()
	}
	return operation, begun
}

// watchTensor counts an asynchronous operation that ends now, and keeps its time if it is wanted. h
// is nil on a rank that has joined.
func (e *engine) watchTensor(id int, h *Handle) {
	t := e.agreed.At(id)
	t.Ended++
	operation := mix(mix(uint64(id)+1) ^ t.Ended)
	if h != nil && e.g.lane == 0 && e.g.family.waits.wants(operation) {
		e.g.family.waits.keep(operation, time.Since(h.since))
	}
}
