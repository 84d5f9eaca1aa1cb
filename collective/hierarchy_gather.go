package collective

import (
	"fmt"
	"math"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// agreeLeaders returns once every rank has called the operation that this one has. The ranks of
// this host have compared their calls before; they learn what comes of it in their next operation
// in memory, for which the first of them comes later.
func (c *call) agreeLeaders() error {
	if !c.g.levels.leads() {
		return nil
	}
	return c.agreeAmong(c.g.levels.leaders)
}

// barrierHierarchical is agree of all ranks.
func (c *call) barrierHierarchical() error {
	if err := c.agreeLeaders(); err != nil {
		return err
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error { return m.Barrier(c.ctx, call) })
}

// broadcastHierarchical spreads data within the root's host, wave by wave. Each rank of it sends
// its part of the wave to the next host, which passes it on and spreads it: from host to host in a
// chain where there are segments enough to keep it busy, otherwise in a binomial tree.
func (c *call) broadcastHierarchical(data []byte) error {
	if err := c.agreeLeaders(); err != nil {
		return err
	}
	return c.broadcastWaves(data)
}

func (c *call) broadcastWaves(data []byte) error {
	waves := c.waves(len(data))
	rootHost, _ := c.g.levels.find(int(c.desc.Root))
	parent, children := c.route(rootHost, len(data))
	for w := range waves + 1 {
		if w < waves {
			part := wave(data, 1, waves, w)
			if err := c.beginWave(&c.crossings[w%2], part, parent, children, treeStep+uint32(w)); err != nil {
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

// route is from which host data comes, −1 on that of the root, and to which it goes on.
func (c *call) route(root, bytes int) (parent int, children []int) {
	h := c.g.levels
	n := len(h.hosts)
	if c.segments(bytes/c.g.size*n) < n {
		return tree(h.here, n, root)
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

// waveParts are the parts of a wave of a broadcast that this rank brings to other hosts.
func (c *call) waveParts(to []crossing, part []byte) []crossing {
	if len(part) > operation.Thresholds.ThroughOne {
		return c.cross(to, part, 1)
	}
	if c.g.levels.leads() {
		return append(to, crossing{team: c.g.levels.leaders, data: part})
	}
	return to
}

// beginWave has the root's host take part in a wave, and send it on; elsewhere it asks for it.
func (c *call) beginWave(all *[]crossing, part []byte, parent int, children []int, step uint32) error {
	*all = c.waveParts((*all)[:0], part)
	if parent < 0 {
		_, place := c.g.levels.find(int(c.desc.Root))
		err := c.inMemory(func(m *shm.Member, call shm.Desc) error { return m.Broadcast(c.ctx, call, part, place) })
		if err != nil {
			return err
		}
	}
	for i := range *all {
		x := &(*all)[i]
		x.step, x.received = step, c.inUsed
		for s := range c.segments(len(x.data)) {
			if parent >= 0 {
				c.post(x.rank(parent), step, c.cut(x.data, s))
				continue
			}
			for _, child := range children {
				c.send(x.rank(child), step, c.cut(x.data, s))
			}
		}
	}
	return nil
}

// passOn receives the parts of a wave, and sends each segment on as soon as it is there.
func (c *call) passOn(all []crossing, children []int) error {
	for i := range all {
		x := &all[i]
		for s := range c.segments(len(x.data)) {
			if err := c.wait(&c.ins[x.received+s].Done); err != nil {
				return err
			}
			for _, child := range children {
				c.send(x.rank(child), x.step, c.cut(x.data, s))
			}
		}
	}
	return nil
}

// spreadWave gives a wave to all ranks of this host.
func (c *call) spreadWave(part []byte) error {
	if len(part) > operation.Thresholds.ThroughOne {
		return c.spread(part, 1)
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error { return m.Broadcast(c.ctx, call, part, 0) })
}

// broadcastBytesHierarchical is broadcastHierarchical for ranks that do not know the length. Memory
// is taken as the bytes arrive.
func (c *call) broadcastBytesHierarchical(data []byte) ([]byte, error) {
	if err := c.agreeLeaders(); err != nil {
		return nil, err
	}
	root := int(c.desc.Root) == c.g.rank
	total, err := c.broadcastLength(len(data))
	if err != nil {
		return nil, err
	}
	if !root {
		data = make([]byte, min(total, firstMemory))
	}
	for done := 0; done < total; {
		n := min(total-done, max(firstMemory, done))
		if !root && done+n > len(data) {
			bigger := make([]byte, done+n)
			copy(bigger, data)
			data = bigger
		}
		if err := c.broadcastWaves(data[done : done+n]); err != nil {
			return nil, err
		}
		if done += n; done < total {
			err = c.flush() // what has been received, and is passed on, is about to be moved
		}
		if err != nil {
			return nil, err
		}
	}
	return data, nil
}

func (c *call) broadcastLength(n int) (int, error) {
	length := make([]uint64, 1)
	length[0] = uint64(n)
	if err := c.broadcastWaves(kernel.Bytes(length)); err != nil {
		return 0, err
	}
	if length[0] > math.MaxInt {
		c.g.fail(frame.Gone(errTooLarge, int(c.desc.Root)))
		return 0, c.lost()
	}
	return int(length[0]), nil
}

// allGatherHierarchical returns what every rank has, by rank; nil for this one. Each rank sends
// what it has to its counterparts on the other hosts, which give it to the other ranks there.
func (c *call) allGatherHierarchical(own []byte) ([][]byte, error) {
	h, size := c.g.levels, c.desc.Type.Size()
	for s := range c.frames(len(own)) {
		for _, host := range h.others() {
			c.sendOf(h.counterpart(host, h.place), uint32(s), uint64(len(own)/size), c.cut(own, s))
		}
	}
	all := make([][]byte, c.g.size)
	if err := c.gatherHere(all, h.here, 0, own); err != nil {
		return nil, err
	}
	all[c.g.rank] = nil
	blocks := make([]block, c.g.size)
	for _, host := range h.others() {
		for _, from := range h.shares(host, h.place) {
			blocks[from] = block{call: c, from: from, size: size}
			if err := blocks[from].open(); err != nil {
				return nil, err
			}
		}
	}
	for _, host := range h.others() {
		for turn := range h.turns(host) {
			var data []byte
			if from := h.share(host, h.place, turn); from >= 0 {
				if err := blocks[from].finish(); err != nil {
					return nil, err
				}
				data = blocks[from].data
				all[from] = data
			}
			if err := c.gatherHere(all, host, turn, data); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// gatherHere gives to all ranks of this host what each has from one rank of a host, which stands in
// all where the rank's own is not asked for.
func (c *call) gatherHere(all [][]byte, host, turn int, own []byte) error {
	h := c.g.levels
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllGather(c.ctx, call, own, func(lengths []int) ([][]byte, error) {
			buffers := make([][]byte, len(lengths))
			for i, n := range lengths {
				from := h.share(host, i, turn)
				switch {
				case i == h.place:
				case n > mostGathered() || n%c.desc.Type.Size() != 0 || n > 0 && from < 0:
					return nil, fmt.Errorf("rank %d: %w", h.ranks()[i], errTooLarge)
				case from >= 0:
					buffers[i] = make([]byte, n)
					all[from] = buffers[i]
				}
			}
			return buffers, nil
		})
	})
}

// elsewhere are the ranks of other hosts, each rank's list beginning with another one.
func (c *call) elsewhere() (ranks []int) {
	for d := 1; d < c.g.size; d++ {
		if r := (c.g.rank + d) % c.g.size; !slices.Contains(c.g.levels.ranks(), r) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// allToAllHierarchical sends part(j) to every rank j and returns what they have sent, by rank; nil
// for this one. Within this host they go through memory.
func (c *call) allToAllHierarchical(part func(to int) []byte) ([][]byte, error) {
	h := c.g.levels
	others := c.elsewhere()
	c.sendParts(others, part)
	all := make([][]byte, c.g.size)
	parts := make([][]byte, len(h.ranks()))
	for i, r := range h.ranks() {
		parts[i] = part(r)
	}
	err := c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllToAll(c.ctx, call, parts, func(lengths []int) ([][]byte, error) {
			buffers := make([][]byte, len(lengths))
			for i, n := range lengths {
				if n > mostGathered() || n%c.desc.Type.Size() != 0 {
					return nil, fmt.Errorf("rank %d: %w", h.ranks()[i], errTooLarge)
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
	return all, c.receiveParts(others, all)
}

// The operations over sockets, with one level or two.

func (c *call) barrierSockets() error {
	if c.g.levels != nil {
		return c.barrierHierarchical()
	}
	return c.agree()
}

func (c *call) broadcastSockets(data []byte) error {
	if c.g.levels != nil {
		return c.broadcastHierarchical(data)
	}
	return c.broadcastTree(data)
}

func (c *call) broadcastBytesSockets(data []byte) ([]byte, error) {
	if c.g.levels != nil {
		return c.broadcastBytesHierarchical(data)
	}
	return c.broadcastBytesTree(data)
}

func (c *call) allGatherSockets(own []byte) ([][]byte, error) {
	if c.g.levels != nil {
		return c.allGatherHierarchical(own)
	}
	return c.exchangePairs(func(int) []byte { return own })
}

func (c *call) reduceScatterSockets(part func(rank int) []byte, result []byte) error {
	if c.g.levels != nil {
		return c.reduceScatterHierarchical(part, result)
	}
	return c.reduceScatterDirect(part, result)
}

func (c *call) allToAllSockets(part func(to int) []byte) ([][]byte, error) {
	if c.g.levels != nil {
		return c.allToAllHierarchical(part)
	}
	return c.exchangePairs(part)
}
