package collective

import (
	"cmp"
	"context"
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// ReduceTree combines the values of the leaves of a binary tree, element by element, in an order
// that the tree alone determines: the result has the same bits for any number of ranks and any
// distribution of the leaves. It is for sums of gradients of numbered microbatches, in worlds of
// any size.
//
// Each rank has the values of some nodes: parts[i] is the value of the rank's node i in p, the
// combination of the leaves under it by the same rule. p is the same on all ranks. All parts and
// results have the same length. The parts are unchanged, and result, which must not overlap with
// them, is set to the root's value on every rank. op is any Op but Adasum; Average is the sum
// divided by the number of leaves. For an Average of [Float16] or [BFloat16], the value of a node
// is the sum of its leaves divided by the smallest power of two that is not less than their number,
// since the sum itself may overflow the type; [CombineNodes] computes it. Each part is sent once,
// so fewer nodes cost less. If all ranks are on one host and the parts are from [Alloc], ranks read
// each other's parts in place. It blocks and fails as [AllReduce] does.
func ReduceTree[T Element](ctx context.Context, g *Group, p *Partials, parts [][]T, result []T, op Op) error {
	own := make([][]byte, len(parts))
	for i := range parts {
		own[i] = kernel.Bytes(parts[i])
	}
	return g.reduceTree(ctx, typeOf[T](), p, own, kernel.Bytes(result), operation.Op(op), checkReduced[T]())
}

func (g *Group) reduceTree(ctx context.Context, t kernel.Type, p *Partials, parts [][]byte, result []byte, op operation.Op, invalid error) error {
	d := operation.Descriptor{Action: operation.ReduceTree, Type: t, Op: op, Count: uint64(len(result) / t.Size())}
	invalid = cmp.Or(invalid, op.Check(t))
	if op == operation.Adasum {
		invalid = fmt.Errorf("ReduceTree does not support %v", op)
	}
	switch {
	case g == nil || invalid != nil:
	case p == nil || p.tree.Ranks() != g.size:
		invalid = fmt.Errorf("the partials are not for %d ranks", g.size)
	default:
		d.Root = p.tree.Root(d.Count)
		invalid = checkTreeParts(p.tree.Nodes(g.rank), parts, result, t)
	}
	if h := g.inMemory(); h != nil {
		return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			return h.ReduceTree(ctx, m, call, d, p.tree, parts, result)
		})
	}
	return g.run(ctx, d, invalid, func(c *levels.Call) error { return c.ReduceTree(p.tree, parts, result) })
}

func checkTreeParts(nodes int, parts [][]byte, result []byte, t kernel.Type) error {
	if len(parts) != nodes {
		return fmt.Errorf("%d parts are given for the %d nodes of this rank", len(parts), nodes)
	}
	for i, p := range parts {
		if len(p) != len(result) {
			return fmt.Errorf("part %d has %d elements, and the result %d", i, len(p)/t.Size(), len(result)/t.Size())
		}
		if err := checkApart(result, p); err != nil {
			return err
		}
	}
	return nil
}
