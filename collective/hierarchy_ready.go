package collective

import (
	"context"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// reducesIfReady reports whether allReduceIfReady can reduce n bytes. All ranks find the same.
func (g *Group) reducesIfReady(n int) bool {
	if g.inMemory() != nil {
		return g.algorithm().Shares()
	}
	h := g.levels
	return h != nil && g.hierarchical() && n > operation.Thresholds.ThroughOne && n <= operation.Thresholds.LargestIfReady &&
		(len(h.hosts) <= fewHosts || g.strict) && g.call.waves(n) == 1
}

// allReduceIfReady is AllReduce of so many bytes on every rank if all ranks are ready for it, with
// the same bits. Otherwise data stays as it is; that of a rank that is not ready is not looked at.
// All ranks find the same.
func (g *Group) allReduceIfReady(ctx context.Context, t kernel.Type, op operation.Op, length int, data []byte, ready bool) (right bool, err error) {
	d := operation.Descriptor{Action: operation.AllReduce, Type: t, Op: op, Count: uint64(length / t.Size()), Algorithm: g.algorithm()}
	if h := g.inMemory(); h != nil {
		err = h.do(ctx, d, nil, func(m *shm.Member, call shm.Desc) (err error) {
			right, err = m.AllReduceSaying(ctx, call, length, data, ready, h.reduction(t, op))
			return err
		})
		return right && err == nil, err
	}
	err = g.run(ctx, d, nil, func(c *call) (err error) {
		right, err = c.allReduceIfReady(data, ready)
		return err
	})
	return right && err == nil, err
}

// allReduceIfReady has the ranks of a host tell each other in memory whether they are ready, and
// the hosts by the first frames that they send each other, which every rank receives from all: each
// owns an element at least. The sums of a host lie beside the data until the rank has heard of all.
func (c *call) allReduceIfReady(data []byte, ready bool) (right bool, err error) {
	h, size := c.g.levels, c.desc.Type.Size()
	if c.g.family.segment == 0 {
		c.segment = operation.SegmentFor(len(data) / c.g.size)
	}
	sums, room := kernel.Part(data, size, len(h.ranks()), h.place), c.crossingRoom(data, size)
	memory := c.scratch(room + len(sums))
	c.ready = ready
	if on := c.g.host.Load(); on != nil {
		sums, memory = memory[:len(sums)], memory[len(sums):]
		err = c.inMemory(func(m *shm.Member, call shm.Desc) (err error) {
			c.ready, err = m.ReduceSaying(c.ctx, call, data, sums, ready, on.reduction(c.desc.Type, c.desc.Op))
			return err
		})
	}
	if err != nil {
		return false, err
	}
	all := c.cross(c.crossings[0][:0], data, size)
	c.crossings[0] = all
	for i := range all {
		x := &all[i]
		x.data, sums = sums[:len(x.result)], sums[len(x.result):]
	}
	c.scatter(all, memory, 0)
	if right, err = c.hear(all); err != nil {
		return false, err
	}
	if !right {
		return false, c.waitFor(0, c.inUsed)
	}
	if err := c.gather(all); err != nil {
		return false, err
	}
	return true, c.spread(data, size)
}

// hear waits for the first frame of each other host, and reports whether all hosts are ready.
func (c *call) hear(all []crossing) (ready bool, err error) {
	ready = c.ready
	for i := range all {
		for _, r := range c.ins[all[i].received:][:all[i].size-1] {
			if err := c.wait(&r.Done); err != nil {
				return false, err
			}
			ready = ready && r.Ready
		}
	}
	return ready, nil
}
