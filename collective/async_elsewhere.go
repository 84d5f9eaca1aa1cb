package collective

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Elsewhere is a vector outside the memory of this process, for example on a device.
type Elsewhere struct {
	Name  string // as in [AllReduceAsync]
	Type  kernel.Type
	Count int // elements
	Work  Work
}

// Work performs an operation on a vector outside the memory of this process. Its methods are called
// one at a time, by the group's engine or by a goroutine that waits for an operation.
type Work interface {
	// Reduce combines the vectors of bucket in place with those of the other ranks. The first
	// element of bucket is the receiver. All vectors have the same type and operation, are in the
	// same order on every rank, and fit the fusion threshold together unless there is only one. All
	// ranks call Reduce at the same time, so it may use lane, a group of the same ranks, for its
	// own operations; it must not close or abort lane. An error becomes the error of the handles
	// and ends the group. ctx ends when the group does.
	Reduce(ctx context.Context, lane *Group, bucket []Work) error
	// Ended is called once, when the operation has ended, before Wait returns.
	Ended(err error)
}

// AllReduceElsewhere is like [AllReduceAsync], for vectors outside the memory of this process,
// which it submits all at once, as [GroupedAllReduce] does. The rules for names, order, fusion and
// failures are those of AllReduceAsync, with these exceptions: [Adasum] is refused; if a rank has
// joined, the group ends; and if a rank's own Work fails, its handles return that error.
func AllReduceElsewhere(ctx context.Context, g *Group, op Op, vectors ...Elsewhere) []*Handle {
	handles := make([]*Handle, len(vectors))
	for i, v := range vectors {
		h := &Handle{name: v.Name, work: v.Work, request: agreement.Request{Type: v.Type, Op: operation.Op(op), Count: uint64(v.Count), Prescale: 1, Postscale: 1, Elsewhere: true}}
		h.err = checkName(v.Name)
		switch {
		case v.Type == 0 || v.Type >= kernel.Types || v.Count < 0 || v.Count > math.MaxInt/v.Type.Size():
			h.request.Type, h.request.Count = kernel.Uint8, 0
			h.refuse(fmt.Errorf("%d elements of %v are not possible", v.Count, v.Type))
		case op == Adasum:
			h.refuse(fmt.Errorf("%v is for vectors in memory", op))
		case operation.Op(op).Check(v.Type) != nil:
			h.refuse(operation.Op(op).Check(v.Type))
		}
		handles[i] = h
	}
	g.submit(ctx, handles...)
	if len(handles) > 1 && handles[0].engine != nil {
		handles[0].engine.flushNow() // all vectors have been submitted
	}
	return handles
}

// lifetime is the context of a Work on a lane: it ends when the lane fails.
type lifetime struct{ lane *Group }

func (lifetime) Deadline() (time.Time, bool) { return time.Time{}, false }
func (l lifetime) Done() <-chan struct{}     { return l.lane.call.Failed }
func (lifetime) Value(any) any               { return nil }

func (l lifetime) Err() error {
	select {
	case <-l.lane.call.Failed:
		return l.lane.err()
	default:
		return nil
	}
}

var errJoinedElsewhere = errors.New("collective: a rank has called Join, and takes part only in reductions in host memory")

// reduceElsewhere performs the operations of a bucket of vectors outside the memory of this
// process.
func (e *engine) reduceElsewhere(b *agreement.Bucket) error {
	if !e.agreed.Whole() {
		return e.fail(frame.Gone(errJoinedElsewhere, e.g.rank))
	}
	e.mark(0)
	e.mark(1)
	works := make([]Work, len(b.IDs))
	for i, id := range b.IDs {
		works[i] = e.agreed.At(id).Mine.work
	}
	if err := works[0].Reduce(lifetime{e.lane}, e.lane, works); err != nil {
		if e.lane.err() == nil || !errors.Is(err, ErrAborted) {
			e.broken = err
		}
		return e.fail(frame.Gone(err, e.g.rank))
	}
	e.mark(2)
	for _, id := range b.IDs {
		e.conclude(id)
	}
	return nil
}
