package levels

import (
	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
)

// AllGatherIntoSockets performs AllGatherInto. This rank's part is in its place already.
func (c *Call) AllGatherIntoSockets(all exchange.Into) error {
	if c.levels != nil {
		return c.allGatherIntoHierarchical(all)
	}
	return c.ExchangeInto(c.AllOthers(), func(int) []byte { return all.Of(c.Rank) }, all)
}

// AllToAllIntoSockets performs AllToAllInto. This rank's part of result is in its place already.
func (c *Call) AllToAllIntoSockets(data, result exchange.Into) error {
	if c.levels != nil {
		return c.allToAllIntoHierarchical(data, result)
	}
	return c.ExchangeInto(c.AllOthers(), data.Of, result)
}

// allGatherIntoHierarchical is like allGatherHierarchical, with parts of equal lengths in all.
func (c *Call) allGatherIntoHierarchical(all exchange.Into) error {
	h := c.levels
	own := all.Of(c.Rank)
	for s := range c.Frames(all.Each) {
		for _, host := range h.others() {
			c.Send(h.counterpart(host, h.place), 0, c.Cut(own, s))
		}
	}
	first, frames := c.Receives(), c.Frames(all.Each)
	for _, host := range h.others() {
		c.PostInto(h.shares(host, h.place), all)
	}
	if err := c.gatherInto(all, h.here, 0); err != nil {
		return err
	}
	for _, host := range h.others() {
		for turn := range h.turns(host) {
			if h.share(host, h.place, turn) >= 0 {
				if err := c.WaitFor(first, first+frames); err != nil {
					return err
				}
				first += frames
			}
			if err := c.gatherInto(all, host, turn); err != nil {
				return err
			}
		}
	}
	return nil
}

// gatherInto gives all ranks of this host the data that each of them has received from one rank of
// another host.
func (c *Call) gatherInto(all exchange.Into, host, turn int) error {
	h := c.levels
	parts := make([][]byte, len(h.ranks()))
	for i := range parts {
		if from := h.share(host, i, turn); from >= 0 {
			parts[i] = all.Of(from)
		}
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllGather(c.Ctx, call, parts[h.place], func([]int) ([][]byte, error) { return parts, nil })
	})
}

// allToAllIntoHierarchical is like allToAllHierarchical, with parts of equal lengths.
func (c *Call) allToAllIntoHierarchical(data, result exchange.Into) error {
	h := c.levels
	others := c.elsewhere()
	for s := range c.Frames(result.Each) {
		for _, to := range others {
			c.Send(to, 0, c.Cut(data.Of(to), s))
		}
	}
	first := c.Receives()
	c.PostInto(others, result)
	err := c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllToAll(c.Ctx, call, data.By(h.ranks()), result.Place(h.ranks()))
	})
	if err != nil {
		return err
	}
	return c.WaitFor(first, c.Receives())
}
