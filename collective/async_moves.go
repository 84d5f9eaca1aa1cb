package collective

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// BroadcastAsync is [Broadcast] in the background, and what [AllReduceAsync] says holds for it: for
// the names, which all asynchronous operations of a group share, the order, the failures and the
// data. It is not fused with others. A rank that has joined cannot take part: the operation ends
// the group then.
func BroadcastAsync[T Element](ctx context.Context, g *Group, name string, data []T, root int) *Handle {
	h := newMove[T](name, operation.BroadcastAsync, data, nil, 0)
	h.request.root = clampRoot(root)
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
	h.check(cmp.Or(checkReduced[T](), h.request.op.CheckParts(h.request.dtype), checkScatter(g, data, part)))
	return g.submit(ctx, h)[0]
}

func newMove[T Element](name string, do operation.Action, data, result []T, op Op) *Handle {
	return &Handle{name: name, err: checkName(name), data: kernel.Bytes(data), result: kernel.Bytes(result),
		request: request{do: do, dtype: typeOf[T](), op: operation.Op(op), count: uint64(len(data)), prescale: 1, postscale: 1}}
}

// check refuses the operation where its arguments are invalid.
func (h *Handle) check(invalid error) {
	if invalid != nil {
		h.refuse(invalid)
	}
}

// moves reports whether the operation is another one than AllReduce.
func (r *request) moves() bool {
	return r.do == operation.BroadcastAsync || r.do == operation.AllGatherIntoAsync || r.do == operation.ReduceScatterIntoAsync
}

// action is the operation of the API.
func (r *request) action() operation.Action { return cmp.Or(r.do, operation.AllReduceAsync) }

// movable reports whether a request that another rank has sent, and that is no AllReduce, is valid.
func (r *request) movable() bool {
	if r.elsewhere || r.compression != operation.NotCompressed || r.prescale != 1 || r.postscale != 1 {
		return false
	}
	switch r.do {
	case operation.BroadcastAsync:
		return r.op == 0 && r.root >= 0
	case operation.AllGatherIntoAsync:
		return r.op == 0 && r.root == 0
	case operation.ReduceScatterIntoAsync:
		return r.op.CheckParts(r.dtype) == nil && r.root == 0
	}
	return false
}

var errJoinedMove = errors.New("collective: a rank has joined, and cannot take part in what is not reduced on all ranks")

// move does the operation of a bucket that is no AllReduce.
func (e *engine) move(b *bucket) error {
	t := &e.table[b.ids[0]]
	if e.contribute < e.g.size {
		return e.fail(frame.Gone(fmt.Errorf("%w (%q)", errJoinedMove, t.name), e.g.rank))
	}
	e.mark(0)
	e.mark(1)
	ctx, r, h := context.Background(), &t.request, t.mine
	var err error
	switch r.do {
	case operation.BroadcastAsync:
		err = e.lane.broadcastBytes(ctx, r.dtype, h.data, int(r.root))
	case operation.AllGatherIntoAsync:
		err = e.lane.allGatherBytes(ctx, r.dtype, h.data, h.result, nil)
	case operation.ReduceScatterIntoAsync:
		err = e.lane.reduceScatterBytes(ctx, r.dtype, r.op, h.data, h.result, nil)
	}
	if err != nil {
		return err
	}
	e.mark(2)
	e.conclude(b.ids[0])
	return nil
}

// conclude ends the operation of a name, which all ranks have done.
func (e *engine) conclude(id int) {
	t := &e.table[id]
	h := t.mine
	e.watchTensor(id, h)
	e.record(h)
	t.mine = nil
	e.pending--
	e.complete(h, nil)
}
