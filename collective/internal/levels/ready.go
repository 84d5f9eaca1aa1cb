package levels

import (
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// ReducesIfReady reports whether AllReduceIfReady can reduce n bytes. The result is the same on all
// ranks.
func (c *Call) ReducesIfReady(n int) bool {
	if h := c.host.Load(); h != nil && h.Whole() {
		return c.Algorithm().Shares()
	}
	if n <= operation.Thresholds.ThroughOne || n > operation.Thresholds.LargestIfReady || c.Forced.Algorithm != operation.Auto {
		return false
	}
	h := c.levels
	if h == nil {
		return c.Strict && c.Size > 1
	}
	return len(h.hosts) <= fewHosts || c.Strict
}

// AllReduceIfReady reduces data if all ranks are ready, and otherwise leaves it unchanged. The
// ranks of a host exchange in memory whether they are ready. The hosts, or all ranks if none share
// memory, exchange it in the first frames that they send to each other; every rank receives one
// from all, since each owns at least one element. The sums of a host are kept apart from data until
// the rank has heard from all.
func (c *Call) AllReduceIfReady(data []byte, ready bool) (right bool, err error) {
	size := c.Desc.Type.Size()
	c.Suit(len(data) / c.Size)
	sums, room := data, c.crossingRoom(data, size, nil)
	h, on := c.levels, c.host.Load()
	if h == nil {
		on = nil // not all hosts share memory
	} else {
		sums = kernel.Part(data, size, len(h.ranks()), h.place)
	}
	memory := c.Scratch(room + len(sums))
	c.Ready = ready
	if on != nil {
		sums, memory = memory[:len(sums)], memory[len(sums):]
		err = c.inMemory(func(m *shm.Member, call shm.Desc) (err error) {
			c.Ready, err = m.ReduceSaying(c.Ctx, call, data, sums, ready, on.Reduction(c.Desc.Type, c.Desc.Op))
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
	if h == nil {
		return true, nil
	}
	return true, c.spread(data, size)
}

// hear waits for the first frame from each other host, and reports whether all hosts are ready.
func (c *Call) hear(all []crossing) (ready bool, err error) {
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
