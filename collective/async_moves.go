package collective

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// BroadcastAsync is [Broadcast] in the background. The rules of [AllReduceAsync] for names, order,
// failures and data apply to it; all asynchronous operations of a group share the same names. It is
// not fused with others. If a rank has joined, the operation ends the group, since that rank cannot
// take part.
func BroadcastAsync[T Element](ctx context.Context, g *Group, name string, data []T, root int) *Handle {
	h := newMove[T](name, operation.BroadcastAsync, data, nil, 0)
	h.request.Root = clampRoot(root)
	h.check(checkRoot(g, root))
	return g.submit(ctx, h)[0]
}

// AllGatherIntoAsync is [AllGatherInto] in the background, as [BroadcastAsync] is [Broadcast]. Data
// and all belong to the operation until it is done.
func AllGatherIntoAsync[T Element](ctx context.Context, g *Group, name string, data, all []T) *Handle {
	h := newMove(name, operation.AllGatherIntoAsync, data, all, 0)
	h.check(checkGather(g, data, all))
	return g.submit(ctx, h)[0]
}

// ReduceScatterIntoAsync is [ReduceScatterInto] in the background, as [BroadcastAsync] is
// [Broadcast]. Data and part belong to the operation until it is done.
func ReduceScatterIntoAsync[T Element](ctx context.Context, g *Group, name string, data, part []T, op Op) *Handle {
	h := newMove(name, operation.ReduceScatterIntoAsync, data, part, op)
	h.check(cmp.Or(checkReduced[T](), h.request.Op.CheckParts(h.request.Type), checkScatter(g, data, part)))
	return g.submit(ctx, h)[0]
}

func newMove[T Element](name string, do operation.Action, data, result []T, op Op) *Handle {
	return &Handle{name: name, err: checkName(name), data: kernel.Bytes(data), result: kernel.Bytes(result),
		request: agreement.Request{Do: do, Type: typeOf[T](), Op: operation.Op(op), Count: uint64(len(data)), Prescale: 1, Postscale: 1}}
}

// check refuses the operation if invalid is not nil.
func (h *Handle) check(invalid error) {
	if invalid != nil {
		h.refuse(invalid)
	}
}

var errJoinedMove = errors.New("collective: a rank has called Join, and takes part only in reductions over all ranks")

// move performs the operation of a bucket that is not an AllReduce.
func (e *engine) move(b *agreement.Bucket) error {
	t := e.agreed.At(b.IDs[0])
	if !e.agreed.Whole() {
		return e.fail(frame.Gone(fmt.Errorf("%w (%q)", errJoinedMove, t.Name), e.g.rank))
	}
	e.mark(0)
	e.mark(1)
	ctx, r, h := context.Background(), &t.Request, t.Mine
	var err error
	switch r.Do {
	case operation.BroadcastAsync:
		err = e.lane.broadcastBytes(ctx, r.Type, h.data, int(r.Root))
	case operation.AllGatherIntoAsync:
		err = e.lane.allGatherBytes(ctx, r.Type, h.data, h.result, nil)
	case operation.ReduceScatterIntoAsync:
		err = e.lane.reduceScatterBytes(ctx, r.Type, r.Op, h.data, h.result, nil)
	}
	if err != nil {
		return err
	}
	e.mark(2)
	e.conclude(b.IDs[0])
	return nil
}

// conclude ends the operation of a name that all ranks have performed.
func (e *engine) conclude(id int) {
	h := e.agreed.Take(id)
	e.watchTensor(id, h)
	e.record(h)
	e.complete(h, nil)
}
