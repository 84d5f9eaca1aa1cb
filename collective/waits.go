package collective

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// Wait is how long one operation of the group of all ranks took on this rank, from its beginning
// here to its end. Ranks leave such an operation at about the same time, so the one that was in it
// for the shortest time came last.
type Wait struct {
	// Operation identifies the operation: it has the same number on all ranks, and hardly another
	// operation of the generation has it.
	Operation uint64
	// For is the time, from a monotonic clock.
	For time.Duration
}

// MostWaits is the largest number of waits that [Group.Waits] returns.
const MostWaits = 64

// fewWaits and manyWaits bound how many waits are kept between two calls of Waits: it is adapted to
// the rate of operations.
const fewWaits, manyWaits = MostWaits / 8, MostWaits / 2

// waits keeps the times of some operations. The number of an operation alone decides whether it is
// one of them, so that ranks at about the same rate keep the same ones; an operation that is not
// costs one multiplication.
type waits struct {
	mask atomic.Uint64 // operations are kept whose number has none of these bits

	mu   sync.Mutex
	kept []Wait
}

// mix spreads consecutive numbers over all numbers. It is the finalizer of splitmix64, which maps
// no two numbers to one.
func mix(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// wants reports whether the times of an operation are kept.
func (w *waits) wants(operation uint64) bool { return operation&w.mask.Load() == 0 }

func (w *waits) keep(operation uint64, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.kept) < MostWaits {
		w.kept = append(w.kept, Wait{operation, d})
	}
}

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

// Waits returns the times of operations of the group of all ranks that have succeeded since its
// last call in this process. It has only some operations, the same ones on all ranks, which no rank
// can leave before the last one has come. Asynchronous operations are among them, from the
// submission of their tensor to its result. It may be called at any time by any goroutine, and by
// one caller usefully.
func (g *Group) Waits() []Wait {
	if g == nil {
		return nil
	}
	return g.family.waits.take()
}

// meets are the actions that no rank can leave before the last one has come.
const meets = 1<<operation.AllReduce | 1<<operation.AllGather | 1<<operation.ReduceScatter | 1<<operation.AllToAll | 1<<operation.Barrier |
	1<<operation.AllGatherInto | 1<<operation.AllToAllInto | 1<<operation.ReduceTree

// watched returns the number of the operation that is about to begin, and when it does; the zero
// Time: it is not kept.
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

// watchTensor counts an asynchronous operation that ends now, and keeps its time. A nil h is that
// of a rank that has joined.
func (e *engine) watchTensor(id int, h *Handle) {
	t := e.agreed.At(id)
	t.Ended++
	operation := mix(mix(uint64(id)+1) ^ t.Ended)
	if h != nil && e.g.lane == 0 && e.g.family.waits.wants(operation) {
		e.g.family.waits.keep(operation, time.Since(h.since))
	}
}
