package levels

import (
	"fmt"
	"math"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// agreeLeaders blocks, on the first rank of each host, until every rank has called the same
// operation. The ranks of a host have compared their calls before. The other ranks return at once
// and learn the result in their next operation in memory, to which the first rank comes later.
func (c *Call) agreeLeaders() error {
	if !c.levels.leads() {
		return nil
	}
	return c.AgreeAmong(c.levels.leaders)
}

// barrierHierarchical blocks until every rank has called the operation.
func (c *Call) barrierHierarchical() error {
	if err := c.agreeLeaders(); err != nil {
		return err
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error { return m.Barrier(c.Ctx, call) })
}

// broadcastHierarchical spreads data within the root's host, wave by wave. Each rank of that host
// sends its part of the wave to the next host, which passes it on and spreads it. The hosts form a
// chain if there are enough segments to keep it busy, otherwise a binomial tree.
func (c *Call) broadcastHierarchical(data []byte) error {
	if err := c.agreeLeaders(); err != nil {
		return err
	}
	return c.broadcastWaves(data)
}

func (c *Call) broadcastWaves(data []byte) error {
	waves := c.waves(len(data))
	rootHost, _ := c.levels.find(int(c.Desc.Root))
	parent, children := c.route(rootHost, len(data))
	for w := range waves + 1 {
		if w < waves {
			part := wave(data, 1, waves, w)
			if err := c.beginWave(&c.crossings[w%2], part, parent, children, exchange.TreeStep+uint32(w)); err != nil {
				return err
			}
		}
		if w > 0 && parent >= 0 {
			part := wave(data, 1, waves, w-1)
			if err := c.passOn(c.crossings[(w-1)%2], children); err != nil {
				return err
			}
			if err := c.spreadWave(part); err != nil {
				return err
			}
		}
	}
	return nil
}

// route returns the host from which this one receives the data, or −1 on the root's host, and the
// hosts to which it passes the data on.
func (c *Call) route(root, bytes int) (parent int, children []int) {
	h := c.levels
	n := len(h.hosts)
	if c.Segments(bytes/c.Size*n) < n {
		return exchange.Tree(h.here, n, root)
	}
	parent = (h.here - 1 + n) % n
	if h.here == root {
		parent = -1
	}
	if next := (h.here + 1) % n; next != root {
		children = append(children, next)
	}
	return parent, children
}

// waveParts returns the parts of a wave of a broadcast that this rank sends to other hosts.
func (c *Call) waveParts(to []crossing, part []byte) []crossing {
	if len(part) > operation.Thresholds.ThroughOne {
		return c.cross(to, part, 1)
	}
	if c.levels.leads() {
		return append(to, crossing{Team: c.levels.leaders, data: part})
	}
	return to
}

// beginWave begins a wave: the ranks of the root's host share the data and start to send it, and
// the ranks of other hosts post the receives.
func (c *Call) beginWave(all *[]crossing, part []byte, parent int, children []int, step uint32) error {
	*all = c.waveParts((*all)[:0], part)
	if parent < 0 {
		_, place := c.levels.find(int(c.Desc.Root))
		err := c.inMemory(func(m *shm.Member, call shm.Desc) error { return m.Broadcast(c.Ctx, call, part, place) })
		if err != nil {
			return err
		}
	}
	for i := range *all {
		x := &(*all)[i]
		x.step, x.received = step, c.Receives()
		for s := range c.Segments(len(x.data)) {
			if parent >= 0 {
				c.Post(x.Rank(parent), step, c.Cut(x.data, s))
				continue
			}
			for _, child := range children {
				c.Send(x.Rank(child), step, c.Cut(x.data, s))
			}
		}
	}
	return nil
}

// passOn receives the parts of a wave, and sends each segment on as soon as it has arrived.
func (c *Call) passOn(all []crossing, children []int) error {
	for i := range all {
		x := &all[i]
		for s := range c.Segments(len(x.data)) {
			if err := c.WaitFor(x.received+s, x.received+s+1); err != nil {
				return err
			}
			for _, child := range children {
				c.Send(x.Rank(child), x.step, c.Cut(x.data, s))
			}
		}
	}
	return nil
}

// spreadWave gives a wave to all ranks of this host.
func (c *Call) spreadWave(part []byte) error {
	if len(part) > operation.Thresholds.ThroughOne {
		return c.spread(part, 1)
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error { return m.Broadcast(c.Ctx, call, part, 0) })
}

// broadcastBytesHierarchical is like broadcastHierarchical, for ranks that do not know the length.
// Memory is allocated as the bytes arrive.
func (c *Call) broadcastBytesHierarchical(data []byte) ([]byte, error) {
	if err := c.agreeLeaders(); err != nil {
		return nil, err
	}
	root := int(c.Desc.Root) == c.Rank
	total, err := c.broadcastLength(len(data))
	if err != nil {
		return nil, err
	}
	if !root {
		data = make([]byte, min(total, exchange.FirstMemory))
	}
	for done := 0; done < total; {
		n := min(total-done, max(exchange.FirstMemory, done))
		if !root && done+n > len(data) {
			bigger := make([]byte, done+n)
			copy(bigger, data)
			data = bigger
		}
		if err := c.broadcastWaves(data[done : done+n]); err != nil {
			return nil, err
		}
		if done += n; done < total {
			err = c.Flush() // received data that is being passed on is about to be moved
		}
		if err != nil {
			return nil, err
		}
	}
	return data, nil
}

func (c *Call) broadcastLength(n int) (int, error) {
	length := make([]uint64, 1)
	length[0] = uint64(n)
	if err := c.broadcastWaves(kernel.Bytes(length)); err != nil {
		return 0, err
	}
	if length[0] > math.MaxInt {
		c.Group.Fail(frame.Gone(exchange.ErrTooLarge, int(c.Desc.Root)))
		return 0, c.Lost()
	}
	return int(length[0]), nil
}

// allGatherHierarchical returns the data of every other rank, by rank; the element of this rank is
// nil. Each rank sends its data to its counterparts on the other hosts, which give it to the other
// ranks there.
func (c *Call) allGatherHierarchical(own []byte) ([][]byte, error) {
	h, size := c.levels, c.Desc.Type.Size()
	for s := range c.Frames(len(own)) {
		for _, host := range h.others() {
			c.SendOf(h.counterpart(host, h.place), uint32(s), uint64(len(own)/size), c.Cut(own, s))
		}
	}
	all := make([][]byte, c.Size)
	if err := c.gatherHere(all, h.here, 0, own); err != nil {
		return nil, err
	}
	all[c.Rank] = nil
	blocks := make([]exchange.Block, c.Size)
	for _, host := range h.others() {
		for _, from := range h.shares(host, h.place) {
			var err error
			if blocks[from], err = c.OpenBlock(from, size); err != nil {
				return nil, err
			}
		}
	}
	for _, host := range h.others() {
		for turn := range h.turns(host) {
			var data []byte
			if from := h.share(host, h.place, turn); from >= 0 {
				if err := blocks[from].Finish(); err != nil {
					return nil, err
				}
				data = blocks[from].Data
				all[from] = data
			}
			if err := c.gatherHere(all, host, turn, data); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// gatherHere gives own to all ranks of this host, and stores in all what the others give. own is
// this rank's data, or data that it has received from one rank of another host.
func (c *Call) gatherHere(all [][]byte, host, turn int, own []byte) error {
	h := c.levels
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllGather(c.Ctx, call, own, func(lengths []int) ([][]byte, error) {
			buffers := make([][]byte, len(lengths))
			for i, n := range lengths {
				from := h.share(host, i, turn)
				switch {
				case i == h.place:
				case n > mostGathered() || n%c.Desc.Type.Size() != 0 || n > 0 && from < 0:
					return nil, fmt.Errorf("rank %d: %w", h.ranks()[i], exchange.ErrTooLarge)
				case from >= 0:
					buffers[i] = make([]byte, n)
					all[from] = buffers[i]
				}
			}
			return buffers, nil
		})
	})
}

// elsewhere returns the ranks of other hosts, beginning with those that follow this rank, so that
// not all ranks send to the same one first.
func (c *Call) elsewhere() (ranks []int) {
	for d := 1; d < c.Size; d++ {
		if r := (c.Rank + d) % c.Size; !slices.Contains(c.levels.ranks(), r) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// allToAllHierarchical is like AllToAllSockets. Within this host it moves parts through shared
// memory.
func (c *Call) allToAllHierarchical(part func(to int) []byte) ([][]byte, error) {
	h := c.levels
	others := c.elsewhere()
	c.SendParts(others, part)
	all := make([][]byte, c.Size)
	parts := make([][]byte, len(h.ranks()))
	for i, r := range h.ranks() {
		parts[i] = part(r)
	}
	err := c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllToAll(c.Ctx, call, parts, func(lengths []int) ([][]byte, error) {
			buffers := make([][]byte, len(lengths))
			for i, n := range lengths {
				if n > mostGathered() || n%c.Desc.Type.Size() != 0 {
					return nil, fmt.Errorf("rank %d: %w", h.ranks()[i], exchange.ErrTooLarge)
				}
				if i != h.place {
					buffers[i] = make([]byte, n)
					all[h.ranks()[i]] = buffers[i]
				}
			}
			return buffers, nil
		})
	})
	if err != nil {
		return nil, err
	}
	return all, c.ReceiveParts(others, all)
}

// BarrierSockets performs Barrier with one level or two, like the other operations whose names end
// in Sockets.
func (c *Call) BarrierSockets() error {
	if c.levels != nil {
		return c.barrierHierarchical()
	}
	return c.Agree()
}

// BroadcastSockets performs Broadcast.
func (c *Call) BroadcastSockets(data []byte) error {
	if c.levels != nil {
		return c.broadcastHierarchical(data)
	}
	return c.BroadcastTree(data)
}

// BroadcastBytesSockets performs BroadcastBytes; data is the root's.
func (c *Call) BroadcastBytesSockets(data []byte) ([]byte, error) {
	if c.levels != nil {
		return c.broadcastBytesHierarchical(data)
	}
	return c.BroadcastBytesTree(data)
}

// AllGatherSockets returns the data of every rank, by rank; the element of this rank is undefined.
func (c *Call) AllGatherSockets(own []byte) ([][]byte, error) {
	if c.levels != nil {
		return c.allGatherHierarchical(own)
	}
	return c.ExchangePairs(func(int) []byte { return own })
}

// ReduceScatterSockets writes this rank's part of the combined data to result; part(r) is this
// rank's data for rank r.
func (c *Call) ReduceScatterSockets(part func(rank int) []byte, result []byte) error {
	if c.levels != nil {
		return c.reduceScatterHierarchical(part, result)
	}
	return c.ReduceScatterDirect(part, result)
}

// AllToAllSockets sends part(j) to every other rank j and returns the received parts, by rank; the
// element of this rank is nil.
func (c *Call) AllToAllSockets(part func(to int) []byte) ([][]byte, error) {
	if c.levels != nil {
		return c.allToAllHierarchical(part)
	}
	return c.ExchangePairs(part)
}
