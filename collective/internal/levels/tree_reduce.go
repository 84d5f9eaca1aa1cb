package levels

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/fold"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// ReduceTree performs ReduceTree over sockets, with one level or two.
func (c *Call) ReduceTree(p *Tree, parts [][]byte, result []byte) (err error) {
	f, size := c.folder(p, c.Desc), c.Desc.Type.Size()
	if l := c.levelsOf(p); p.few(result) {
		err = c.foldGathered(p, parts, result)
	} else if l != nil {
		f.Finish = nil
		err = c.foldHierarchical(p, l, parts, result, size)
	} else {
		err = c.foldPairs(c.peers(), p, parts, result, size)
	}
	if bad := (*shareError)(nil); errors.As(err, &bad) {
		c.Group.Fail(frame.Gone(err, bad.rank))
		return c.Lost()
	}
	return err
}

// ReduceTree performs ReduceTree if all ranks of the group are on one host.
func (h *Host) ReduceTree(ctx context.Context, m *shm.Member, call shm.Desc, d operation.Descriptor, p *Tree, parts [][]byte, result []byte) error {
	f, most := h.c.folder(p, d), slices.Max(p.counts)
	if !m.Folds(most) {
		return h.c.foldPairs(peers{here: h.Ranks, meet: inMember{h, m, ctx, call}.meet}, p, parts, result, d.Type.Size())
	}
	return m.Fold(ctx, call, parts, result, &shm.Folding{
		Size: d.Type.Size(), Operands: p.members, Most: most,
		Block: func(target []byte, operands [][]byte) { f.Block(p.order, target, operands) },
	})
}

// inMember exchanges bytes among the ranks of one host during an operation. Its results are by
// rank; the element of this rank is undefined.
type inMember struct {
	h    *Host
	m    *shm.Member
	ctx  context.Context
	call shm.Desc
}

func (i inMember) meet(body func(inMember) error) error { return body(i) }

// withMember calls body with the ranks of this host, if there are others.
func (c *Call) withMember(body func(inMember) error) error {
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return body(inMember{c.host.Load(), m, c.Ctx, call})
	})
}

// few reports whether all values together are so short that each rank gets all of them.
func (p *Tree) few(result []byte) bool {
	return len(p.order.Operands)*len(result) <= operation.Thresholds.FoldFew
}

// foldGathered computes the result by giving all values to all ranks.
func (c *Call) foldGathered(p *Tree, parts [][]byte, result []byte) error {
	f := &c.folding
	f.packed = joined(f.packed[:0], parts, 0, len(result))
	own := f.packed
	all, err := c.AllGatherSockets(own)
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

// folder is the memory that a group keeps for its ReduceTrees.
type folder struct {
	fold.Folder
	packed []byte    // data to give or received data, see foldGathered and foldPairs
	given  []byte    // data for ranks of this host, see exchangeHere
	room   fold.Room // memory for a piece, see foldHierarchical

	atRoot func([]byte) // applied to the root's value; nil if that is the result
	levels *twoLevels   // of the last tree, or nil
}

// cutParts returns the shares of parts for the ranks of a host, by place, each with the shares of
// the parts one after another. It resets the room.
func (f *folder) cutParts(parts [][]byte, ranks int, share func(place int) (from, to int)) [][]byte {
	f.room.Reset()
	all := make([][]byte, ranks)
	for place := range all {
		from, to := share(place)
		all[place] = joined(f.room.Take(len(parts) * (to - from))[:0], parts, from, to)
	}
	return all
}

// allToAll gives given[i] to the rank at place i, and returns the values received from all, each of
// n bytes, by place on the host.
func (i inMember) allToAll(given [][]byte, p *Tree, n int) ([][]byte, error) {
	c, ranks := i.h.c, i.h.Ranks
	var all [][]byte
	err := i.m.AllToAll(i.ctx, i.call, given, func(lengths []int) (_ [][]byte, err error) {
		all, err = placeFor(ranks, c.Rank, lengths, func(r int) []byte { return c.folding.room.Take(p.counts[r] * n) })
		return all, err
	})
	if err != nil {
		return nil, err
	}
	all[i.m.Index()] = given[i.m.Index()]
	return all, nil
}

// sharesOf returns the function that returns the bounds, in bytes, of each rank's share of the
// elements [lo, hi), which have size bytes each.
func sharesOf(lo, hi, size, ranks int) func(rank int) (from, to int) {
	return func(rank int) (from, to int) {
		a, b := kernel.Split(hi-lo, ranks, rank)
		return (lo + a) * size, (lo + b) * size
	}
}

// shareError reports that a rank has sent a number of bytes that does not match the tree.
type shareError struct{ rank, got, want int }

func (e *shareError) Error() string {
	return fmt.Sprintf("rank %d has sent %d bytes instead of %d", e.rank, e.got, e.want)
}

// checkSent checks the lengths of the data that the ranks have sent, whose values have n bytes.
func (p *Tree) checkSent(all [][]byte, n int) error {
	for r := range all {
		if want := p.counts[r] * n; len(all[r]) != want {
			return &shareError{r, len(all[r]), want}
		}
	}
	return nil
}

// joined appends the bytes [from, end) of each part.
func joined(to []byte, parts [][]byte, from, end int) []byte {
	for _, p := range parts {
		to = append(to, p[from:end]...)
	}
	return to
}

// folder returns the group's folder, which keeps its memory.
func (c *Call) folder(p *Tree, d operation.Descriptor) *folder {
	f := &c.folding
	f.Combine, f.Mean, f.atRoot = d.Combiner(), 0, nil
	switch whole := kernel.Fold(p.leaves); {
	case d.Means():
		f.Mean = d.Type
		if whole > p.leaves {
			f.atRoot = func(b []byte) { kernel.Mean(d.Type, b, [][]byte{b}, []int{whole}, p.leaves) }
		}
	case d.Op == operation.Average:
		f.atRoot = func(b []byte) { d.Divide(b, p.leaves) }
	}
	f.Finish = f.atRoot
	return f
}
