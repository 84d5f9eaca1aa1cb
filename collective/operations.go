package collective

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// AllReduce combines data of all ranks, element by element, and puts the result into data on every
// rank. Lengths must be equal. Between hosts it runs recursive doubling for little data, and
// Rabenseifner's algorithm or a pipelined ring for more ([Algorithm]). [Adasum] runs recursive
// doubling if ranks of a host share no memory.
//
// It blocks until the result is complete on this rank, which requires that every rank has called
// it; it keeps no reference to data. Empty data on all ranks is a barrier. Its errors:
//   - an [*AbortedError] if another rank is lost, has left, or gives up; elastic.Run continues from
//     the last commit;
//   - ctx's error if ctx ends first; the others then get an *AbortedError;
//   - a [*MismatchError] on every rank if lengths, element types, ops or operations differ;
//   - an error that names the op on every rank if all ranks use an unknown op, or Adasum of
//     integers: data is unchanged and the group can still be used;
//   - [ErrBusy] while another operation of this rank runs, [ErrClosed] after Close, and an error
//     for a nil group, all without an effect on the group.
//
// After the first three, data is undefined and the group is unusable.
func AllReduce[T Element](ctx context.Context, g *Group, data []T, op Op) error {
	return g.allReduceBytes(ctx, typeOf[T](), operation.Op(op), kernel.Bytes(data), checkReduced[T]())
}

// allReduceBytes performs AllReduce with bytes that hold elements of type t; invalid, if not nil,
// is the reason why they are refused.
func (g *Group) allReduceBytes(ctx context.Context, t kernel.Type, op operation.Op, data []byte, invalid error) error {
	if invalid == nil {
		invalid = op.Check(t)
	}
	d := operation.Descriptor{Action: operation.AllReduce, Type: t, Op: op, Count: uint64(len(data) / t.Size())}
	if g != nil {
		d.Algorithm = g.call.Algorithm()
	}
	if h := g.inMemory(); h != nil && d.Algorithm.Shares() {
		return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			if op == operation.Adasum {
				return h.AdasumHere(ctx, m, call, t, data)
			}
			return m.AllReduce(ctx, call, data, h.Reduction(t, op))
		})
	}
	return g.run(ctx, d, invalid, func(c *levels.Call) error { return c.AllReduceSockets(data) })
}

// Broadcast sets data on every rank to the data of rank root. Lengths must be equal.
func Broadcast[T Element](ctx context.Context, g *Group, data []T, root int) error {
	return g.broadcastBytes(ctx, typeOf[T](), kernel.Bytes(data), root)
}

// broadcastBytes performs Broadcast with bytes that hold elements of type t.
func (g *Group) broadcastBytes(ctx context.Context, t kernel.Type, data []byte, root int) error {
	d := operation.Descriptor{Action: operation.Broadcast, Type: t, Root: clampRoot(root), Count: uint64(len(data) / t.Size())}
	if h := g.inMemory(); h != nil {
		return g.do(ctx, d, checkRoot(g, root), func(m *shm.Member, call shm.Desc) error {
			return m.Broadcast(ctx, call, data, root)
		})
	}
	return g.run(ctx, d, checkRoot(g, root), func(c *levels.Call) error { return c.BroadcastSockets(data) })
}

// AllGather returns the data of every rank, by rank, as copies. Lengths may differ.
func AllGather[T Element](ctx context.Context, g *Group, data []T) ([][]T, error) {
	d := operation.Descriptor{Action: operation.AllGather, Type: typeOf[T](), Count: uint64(len(data))}
	if h := g.inMemory(); h != nil {
		all := gathering(g.rank, g.size, data)
		return result(all, g.allGatherShared(ctx, h, d, nil, kernel.Bytes(data), receiving(all)))
	}
	var all [][]T
	err := g.run(ctx, d, nil, func(c *levels.Call) error {
		b := kernel.Bytes(data)
		parts, err := c.AllGatherSockets(b)
		all = gathered(parts, g.rank, data)
		return err
	})
	return result(all, err)
}

// ReduceScatter combines data of all ranks, element by element, and returns this rank's part of the
// result; data is unchanged. Lengths must be equal. The parts are consecutive and as equal as
// possible: with n ranks and count elements, each rank gets count/n elements, and the first count%n
// ranks get one more.
func ReduceScatter[T Element](ctx context.Context, g *Group, data []T, op Op) ([]T, error) {
	var part []T
	if g != nil {
		lo, hi := kernel.Split(len(data), g.size, g.rank)
		part = make([]T, hi-lo)
	}
	return result(part, ReduceScatterInto(ctx, g, data, part, op))
}

// AllToAll sends parts[j] to rank j and returns copies of the parts that the ranks have sent to
// this rank, by rank. There must be one part per rank; their lengths may differ, in both
// directions.
func AllToAll[T Element](ctx context.Context, g *Group, parts [][]T) ([][]T, error) {
	d := operation.Descriptor{Action: operation.AllToAll, Type: typeOf[T](), Root: clampRoot(len(parts))}
	var invalid error
	if g != nil && len(parts) != g.size {
		invalid = fmt.Errorf("%d parts are given for %d ranks", len(parts), g.size)
	}
	if h := g.inMemory(); h != nil {
		var all [][]T
		sent := make([][]byte, len(parts))
		for i, p := range parts {
			sent[i] = kernel.Bytes(p)
		}
		if invalid == nil {
			all = gathering(g.rank, g.size, parts[g.rank])
		}
		err := g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			return m.AllToAll(ctx, call, sent, h.Place(d, receiving(all)))
		})
		return result(all, err)
	}
	var all [][]T
	err := g.run(ctx, d, invalid, func(c *levels.Call) error {
		got, err := c.AllToAllSockets(func(to int) []byte { return kernel.Bytes(parts[to]) })
		all = gathered(got, g.rank, parts[g.rank])
		return err
	})
	return result(all, err)
}

// Barrier returns when every rank has called it.
func Barrier(ctx context.Context, g *Group) error {
	if h := g.inMemory(); h != nil {
		return g.do(ctx, operation.Descriptor{Action: operation.Barrier}, nil, func(m *shm.Member, call shm.Desc) error { return m.Barrier(ctx, call) })
	}
	return g.run(ctx, operation.Descriptor{Action: operation.Barrier}, nil, (*levels.Call).BarrierSockets)
}

// BroadcastBytes returns the data of rank root: data itself on the root, and a copy on the other
// ranks. The data of other ranks is ignored. Memory is allocated as the bytes arrive, whatever the
// announced length is; if all ranks are on one host, it is allocated at once, up to the memory of
// that machine.
func BroadcastBytes(ctx context.Context, g *Group, data []byte, root int) ([]byte, error) {
	d := operation.Descriptor{Action: operation.BroadcastBytes, Type: kernel.Uint8, Root: clampRoot(root)}
	var all []byte
	if h := g.inMemory(); h != nil {
		var own []byte
		if root == g.rank {
			own, all = data, data
		}
		err := g.allGatherShared(ctx, h, d, checkRoot(g, root), own, func(rank, n int) []byte {
			b := make([]byte, n)
			if rank == root {
				all = b
			}
			return b
		})
		return result(all, err)
	}
	err := g.run(ctx, d, checkRoot(g, root), func(c *levels.Call) (err error) {
		all, err = c.BroadcastBytesSockets(data)
		return err
	})
	return result(all, err)
}

// checkRoot returns an error for a root that is no rank of the group.
func checkRoot(g *Group, root int) error {
	if g != nil && (root < 0 || root >= g.size) {
		return fmt.Errorf("rank %d is out of range: there are %d ranks", root, g.size)
	}
	return nil
}

// clampRoot converts a number to 32 bits so that a number that is out of range remains out of
// range.
func clampRoot(n int) int32 { return int32(max(math.MinInt32, min(n, math.MaxInt32))) }

// gathering returns the result before anything is received: it has only a copy of this rank's part.
func gathering[T Element](rank, size int, own []T) [][]T {
	all := make([][]T, size)
	all[rank] = cloned(own)
	return all
}

// cloned returns a copy of data, which is never nil.
func cloned[T Element](data []T) []T {
	c := make([]T, len(data))
	kernel.Copy(kernel.Bytes(c), kernel.Bytes(data))
	return c
}

// receiving returns the function that makes the buffers for the other parts.
func receiving[T Element](all [][]T) func(rank, elements int) []byte {
	return func(rank, elements int) []byte {
		all[rank] = make([]T, elements)
		return kernel.Bytes(all[rank])
	}
}

// gathered returns the parts that the other ranks have sent, with a copy of this rank's part.
func gathered[T Element](parts [][]byte, rank int, own []T) [][]T {
	all := make([][]T, len(parts))
	for i, p := range parts {
		if i == rank {
			all[i] = cloned(own)
			continue
		}
		all[i] = slices.Clip(kernel.Elements[T](p))
	}
	return all
}

// result returns v, or nil after an error.
func result[T any](v []T, err error) ([]T, error) {
	if err != nil {
		return nil, err
	}
	return v, nil
}
