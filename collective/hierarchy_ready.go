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
		return g.call.Algorithm().Shares()
	}
	h := g.call.levels
	return h != nil && g.call.hierarchical() && n > operation.Thresholds.ThroughOne && n <= operation.Thresholds.LargestIfReady &&
		(len(h.hosts) <= fewHosts || g.call.Strict) && g.call.waves(n) == 1
}

// allReduceIfReady is AllReduce of so many bytes on every rank if all ranks are ready for it, with
// the same bits. Otherwise data stays as it is; that of a rank that is not ready is not looked at.
// All ranks find the same.
func (g *Group) allReduceIfReady(ctx context.Context, t kernel.Type, op operation.Op, length int, data []byte, ready bool) (right bool, err error) {
	d := operation.Descriptor{Action: operation.AllReduce, Type: t, Op: op, Count: uint64(length / t.Size()), Algorithm: g.call.Algorithm()}
	if h := g.inMemory(); h != nil {
		err = h.do(ctx, d, nil, func(m *shm.Member, call shm.Desc) (err error) {
			right, err = m.AllReduceSaying(ctx, call, length, data, ready, h.reduction(t, op))
			return err
		})
		return right && err == nil, err
	}
	err = g.run(ctx, d, nil, func(c *levelCall) (err error) {
		right, err = c.allReduceIfReady(data, ready)
		return err
	})
	return right && err == nil, err
}

// allReduceIfReady has the ranks of a host tell each other in memory whether they are ready, and
// the hosts by the first frames that they send each other, which every rank receives from all: each
// owns an element at least. The sums of a host lie beside the data until the rank has heard of all.
func (c *levelCall) allReduceIfReady(data []byte, ready bool) (right bool, err error) {
	h, size := c.levels, c.Desc.Type.Size()
	c.Suit(len(data) / c.Size)
	sums, room := kernel.Part(data, size, len(h.ranks()), h.place), c.crossingRoom(data, size)
	memory := c.Scratch(room + len(sums))
	c.Ready = ready
	if on := c.host.Load(); on != nil {
		sums, memory = memory[:len(sums)], memory[len(sums):]
		err = c.inMemory(func(m *shm.Member, call shm.Desc) (err error) {
			c.Ready, err = m.ReduceSaying(c.Ctx, call, data, sums, ready, on.reduction(c.Desc.Type, c.Desc.Op))
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
		return false, c.WaitFor(0, c.Receives())
	}
	if err := c.gather(all); err != nil {
		return false, err
	}
	return true, c.spread(data, size)
}

// hear waits for the first frame of each other host, and reports whether all hosts are ready.
func (c *levelCall) hear(all []crossing) (ready bool, err error) {
	ready = c.Ready
	for i := range all {
		said, err := c.AllReady(all[i].received, all[i].received+all[i].Size-1)
		if err != nil {
			return false, err
		}
		ready = ready && said
	}
	return ready, nil
}
