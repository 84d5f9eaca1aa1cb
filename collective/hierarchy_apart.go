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
		(len(h.hosts) <= fewHosts || g.strict) && g.call.waves(n) == 1
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

// allReduceApart keeps the sums of a host in memory of its own until the last rank of the host
// knows, by an element more in its share, whether all ranks are ready, and tells the others.
func (c *call) allReduceApart(data []byte, ready bool) (right bool, err error) {
	h, on, size := c.g.levels, c.g.host.Load(), c.desc.dtype.Size()
	if c.g.family.segment == 0 {
		c.segment = segmentFor(len(data) / c.g.size)
	}
	share := len(kernel.Part(data, size, len(h.ranks()), h.place))
	x := crossing{team: h.column, unit: size}
	own := share
	last := h.place == len(h.ranks())-1
	if last {
		own += size
	}
	_, piece := kernel.Split(own/size, x.size, 0) // the first is a longest one
	memory := c.scratch(own + (x.size-1)*piece*size)
	x.data = memory[:own]
	all, sums, element := false, x.data[:share], x.data[share:]
	err = on.within(c.ctx, c.desc, func(m *shm.Member, call shm.Desc) (err error) {
		all, err = m.ReduceApart(c.ctx, call, data, sums, ready, on.reduction(c.desc.dtype, c.desc.reduce))
		return err
	})
	if err != nil {
		return false, err
	}
	if last {
		setCount(element, c.desc.dtype, c.desc.reduce, len(h.ranks()), all)
	}
	c.crossings[0] = append(c.crossings[0][:0], x)
	c.scatter(c.crossings[0], memory[own:], 0)
	if err := c.gather(c.crossings[0]); err != nil {
		return false, err
	}
	if last {
		right = counted(element, c.desc.dtype, c.desc.reduce, c.g.size)
	}
	err = on.within(c.ctx, c.desc, func(m *shm.Member, call shm.Desc) (err error) {
		right, err = m.GatherApart(c.ctx, call, data, sums, size, right)
		return err
	})
	return right, err
}
