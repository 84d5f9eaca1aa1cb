package collective

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// ReduceTree combines the values of the leaves of a binary tree, element by element, in an order
// that the tree alone determines: the result has the same bits whatever ranks there are, and
// whichever has which leaves. It is for sums of gradients of numbered microbatches, in worlds of
// any size.
//
// Each rank has the values of some nodes (parts[i] that of node i of those it has in p), each the
// combination of the leaves under it by the same rule; p is the same on all ranks. All parts and
// results have the same length; parts stay as they are, and result, which overlaps with none, is
// set to the root's value on every rank. Op is any but Adasum; Average is the sum divided by the
// number of leaves. For an Average of [Float16] or [BFloat16] the value of a node is not the sum of
// its leaves, which need not fit the type, but that divided by the least power of two that is not
// less than their number; [CombineNodes] computes it. Each rank's parts travel once, so the fewer
// nodes there are, the less it costs; where all is on one host and of [Alloc], ranks read each
// other's parts where they lie. It blocks and fails as [AllReduce] does.
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
		invalid = fmt.Errorf("%v is not for the leaves of a tree", op)
	}
	switch {
	case g == nil || invalid != nil:
	case p == nil || len(p.counts) != g.size:
		invalid = fmt.Errorf("no partials of %d ranks", g.size)
	default:
		d.Root = int32(crc32.Update(p.digest, crc32.IEEETable, binary.AppendUvarint(nil, d.Count)))
		invalid = checkTreeParts(p.counts[g.rank], parts, result, t)
	}
	if h := g.inMemory(); h != nil {
		return h.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
			f, most := g.folder(p, d), slices.Max(p.counts)
			if !m.Folds(most) {
				return g.call.foldPairs(peers{here: h.ranks, meet: inMember{h, m, ctx, call}.meet}, p, parts, result, t.Size())
			}
			return m.Fold(ctx, call, parts, result, &shm.Folding{
				Size: t.Size(), Operands: p.members, Most: most,
				Block: func(target []byte, operands [][]byte) { f.Block(p.order, target, operands) },
			})
		})
	}
	return g.run(ctx, d, invalid, func(c *levelCall) error {
		f := g.folder(p, d)
		var err error
		if l := c.levelsOf(p); p.few(result) {
			err = c.foldGathered(p, parts, result)
		} else if l != nil {
			f.Finish = nil
			err = c.foldHierarchical(p, l, parts, result, t.Size())
		} else {
			err = c.foldPairs(c.peers(), p, parts, result, t.Size())
		}
		if bad := (*shareError)(nil); errors.As(err, &bad) {
			g.fail(frame.Gone(err, bad.rank))
			return c.Lost()
		}
		return err
	})
}

func checkTreeParts(nodes int, parts [][]byte, result []byte, t kernel.Type) error {
	if len(parts) != nodes {
		return fmt.Errorf("%d parts of a rank that has %d nodes", len(parts), nodes)
	}
	for i, p := range parts {
		if len(p) != len(result) {
			return fmt.Errorf("part %d has %d elements, the result %d", i, len(p)/t.Size(), len(result)/t.Size())
		}
		if err := checkApart(result, p); err != nil {
			return err
		}
	}
	return nil
}

// inMember is how the ranks of one host exchange bytes during an operation. What it returns is by
// rank; what stands there for this rank is undefined.
type inMember struct {
	h    *host
	m    *shm.Member
	ctx  context.Context
	call shm.Desc
}

func (i inMember) meet(body func(inMember) error) error { return body(i) }

// withMember calls body with the ranks of this host, if there are others.
func (c *levelCall) withMember(body func(inMember) error) error {
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return body(inMember{c.host.Load(), m, c.Ctx, call})
	})
}

// few reports whether all values are so short that each rank gets all of them.
func (p *Partials) few(result []byte) bool {
	return len(p.order.Operands)*len(result) <= operation.Thresholds.FoldFew
}

// foldGathered computes the result by giving all values to all ranks.
func (c *levelCall) foldGathered(p *Partials, parts [][]byte, result []byte) error {
	f := &c.folding
	own := joined(f.packed[:0], parts, 0, len(result))
	all, err := c.allGatherSockets(own)
	if err != nil {
		return err
	}
	all[c.Rank] = own
	if err := p.checkSent(all, len(result)); err != nil {
		return err
	}
	f.All(p.order, result, p.order.Pick(all, len(result)))
	return nil
}

// cutParts returns the shares of parts that so many ranks of a host get, one part behind the other.
// It ends the use of all that was taken of the room.
func (f *folder) cutParts(parts [][]byte, ranks int, share func(place int) (from, to int)) [][]byte {
	f.room.Reset()
	all := make([][]byte, ranks)
	for place := range all {
		from, to := share(place)
		all[place] = joined(f.room.Take(len(parts) * (to - from))[:0], parts, from, to)
	}
	return all
}

// allToAll gives each rank what is its, and returns the values of all, each of n bytes. Both are by
// place on the host.
func (i inMember) allToAll(given [][]byte, p *Partials, n int) ([][]byte, error) {
	g, ranks := i.h.g, i.h.ranks
	var all [][]byte
	err := i.m.AllToAll(i.ctx, i.call, given, func(lengths []int) (_ [][]byte, err error) {
		all, err = placeFor(ranks, g.rank, lengths, func(r int) []byte { return g.call.folding.room.Take(p.counts[r] * n) })
		return all, err
	})
	if err != nil {
		return nil, err
	}
	all[i.m.Index()] = given[i.m.Index()]
	return all, nil
}

// shares returns the bounds in bytes of each rank's share of one of so many pieces of a value.
func shares(count, size, pieces, piece, ranks int) func(rank int) (from, to int) {
	lo, hi := kernel.Split(count, pieces, piece)
	return func(rank int) (from, to int) {
		a, b := kernel.Split(hi-lo, ranks, rank)
		return (lo + a) * size, (lo + b) * size
	}
}

// shareError says that a rank has sent another number of bytes than the partials say.
type shareError struct{ rank, got, want int }

func (e *shareError) Error() string {
	return fmt.Sprintf("rank %d has sent %d bytes instead of %d", e.rank, e.got, e.want)
}

// checkSent compares the lengths of what the ranks have sent, values of n bytes.
func (p *Partials) checkSent(all [][]byte, n int) error {
	for r := range all {
		if want := p.counts[r] * n; len(all[r]) != want {
			return &shareError{r, len(all[r]), want}
		}
	}
	return nil
}

// joined appends the same bytes of each of the parts.
func joined(to []byte, parts [][]byte, from, end int) []byte {
	for _, p := range parts {
		to = append(to, p[from:end]...)
	}
	return to
}
