package collective

import (
	"context"

	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// reducesApart reports whether allReduceApart can reduce n bytes. All ranks find the same.
func (g *Group) reducesApart(n int) bool {
	h := g.levels
	return h != nil && g.hierarchical() && h.column.size > 0 && len(h.ranks()) > 1 && n > throughOne &&
		(len(h.hosts) <= fewHosts || g.strict) && g.call.waves(n) == 1 &&
		n/len(h.ranks())+2*widest <= len(g.host.Load().member.Aside())
}

// allReduceApart is AllReduce of data on every rank if all ranks are ready for it, with the same
// bits. Otherwise data stays as it is. All ranks find the same.
func (g *Group) allReduceApart(ctx context.Context, t kernel.Type, op Op, data []byte, ready bool) (right bool, err error) {
	d := descriptor{action: allReduceAction, dtype: t, reduce: op, count: uint64(len(data) / t.Size()), algorithm: g.algorithm()}
	err = g.run(ctx, d, nil, func(c *call) (err error) {
		right, err = c.allReduceApart(data, ready)
		return err
	})
	return right && err == nil, err
}

// allReduceApart keeps the sums of a host in its memory, beside the data, until the last rank of
// the host knows, by an element more in its share, whether all ranks are ready, and tells the
// others.
func (c *call) allReduceApart(data []byte, ready bool) (right bool, err error) {
	if c.g.family.segment == 0 {
		c.segment = segmentFor(len(data)/c.g.size) + widest // one share has an element more
	}
	var between error // of what goes between the hosts
	err = c.inMemory(func(m *shm.Member, call shm.Desc) error {
		on := c.g.host.Load()
		all, err := m.ReduceApart(c.ctx, call, data, ready, on.reduction(c.desc.dtype, c.desc.reduce))
		if err != nil {
			return err
		}
		if right, between = c.crossApart(m.Aside(), len(data), all); between != nil {
			return nil
		}
		right, err = m.GatherApart(c.ctx, call, data, c.desc.dtype.Size(), right)
		return err
	})
	if between != nil {
		return false, between
	}
	return right, err
}

// crossApart combines the sums of this rank's share of so many bytes, which lie at the beginning of
// memory, with those of the other hosts. On the last rank of a host it reports whether all ranks
// are ready, of which all says that those of this host are.
func (c *call) crossApart(memory []byte, bytes int, all bool) (right bool, err error) {
	h, size := c.g.levels, c.desc.dtype.Size()
	lo, hi := kernel.Split(bytes/size, len(h.ranks()), h.place)
	own := (hi - lo) * size
	element := memory[own:own]
	if h.place == len(h.ranks())-1 {
		element = memory[own : own+size]
		setCount(element, c.desc.dtype, c.desc.reduce, len(h.ranks()), all)
	}
	x := crossing{team: h.column, unit: size, data: memory[:own+len(element)]}
	c.crossings[0] = append(c.crossings[0][:0], x)
	c.scatter(c.crossings[0], c.scratch((x.size-1)*len(x.piece(0))), 0) // the first piece is a longest one
	if err := c.gather(c.crossings[0]); err != nil {
		return false, err
	}
	return len(element) > 0 && counted(element, c.desc.dtype, c.desc.reduce, c.g.size), nil
}
