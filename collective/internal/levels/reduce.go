package levels

import (
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// fewHosts is the largest number of hosts among which the owners of a part send pieces of it
// directly to each other. Among more hosts a ring needs fewer connections, at the price of bits
// that depend on an element's position.
const fewHosts = 8

// Hierarchical reports whether an AllReduce has two levels.
func (c *Call) Hierarchical() bool {
	return c.levels != nil && c.Forced.Algorithm == operation.Auto
}

// AllReduceSockets performs AllReduce with one level or two.
func (c *Call) AllReduceSockets(data []byte) error {
	if c.Hierarchical() {
		return c.allReduceHierarchical(data)
	}
	return c.AllReduceFlat(c.WholeTeam(), data)
}

// allReduceHierarchical combines in the order of the ranks of each host, then in the order of the
// hosts: no bit depends on an element's position, or on what else is reduced with it. The exception
// is data of more than fewHosts hosts in a group that is not strict, unless the operation is a
// mean.
func (c *Call) allReduceHierarchical(data []byte) error {
	switch {
	case c.Desc.Op == operation.Adasum:
		c.By(operation.ByAdasum)
		return c.allReduceAdasum(data)
	case len(data) <= operation.Thresholds.ThroughOne:
		c.By(operation.ByLeaders)
		return c.allReduceLeaders(data)
	case len(c.levels.hosts) > fewHosts && !c.Strict && !c.Desc.Means():
		c.By(operation.ByRings)
		return c.allReduceRings(data)
	}
	c.By(operation.ByWaves)
	return c.allReduceWaves(data)
}

// allReduceLeaders makes the first rank of each host exchange all data with the first ranks of the
// other hosts.
func (c *Call) allReduceLeaders(data []byte) error {
	h := c.host.Load()
	err := c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllReduce(c.Ctx, call, data, h.Reduction(c.Desc.Type, c.Desc.Op))
	})
	if err != nil {
		return err
	}
	if t := c.Dividing(c.levels.leaders); c.levels.leads() {
		if c.Strict && !operation.Exact(c.Desc.Type) {
			err = c.AllReduceDirect(t, data)
		} else {
			err = c.AllReduceFlat(t, data)
		}
		if err != nil {
			return err
		}
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.Broadcast(c.Ctx, call, data, 0)
	})
}

// reduceHere combines data of this host's ranks. Each rank gets its own part of the result.
func (c *Call) reduceHere(data []byte) error {
	h := c.host.Load()
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.Reduce(c.Ctx, call, data, m.Members(), h.Reduction(c.Desc.Type, c.Desc.Op))
	})
}

// allReduceRings combines within the hosts, then between them by a ring for each part, and spreads
// the result.
func (c *Call) allReduceRings(data []byte) error {
	size := c.Desc.Type.Size()
	if err := c.reduceHere(data); err != nil {
		return err
	}
	for _, x := range c.cross(nil, data, size) {
		if err := c.AllReduceFlat(c.Dividing(x.Team), x.data); err != nil {
			return err
		}
	}
	return c.spread(data, size)
}

// allReduceWaves cuts data into waves. While one wave is in flight between the hosts, the next one
// is combined within them, and the result of the previous one is spread. So the links always have
// at least one wave to send, however long the ranks of a host take among themselves.
func (c *Call) allReduceWaves(data []byte) error {
	if err := c.agreeOnShares(len(data)); err != nil {
		return err
	}
	size, waves := c.Desc.Type.Size(), c.waves(len(data))
	c.Suit(len(data) / waves / c.Size)
	cuts := c.shares.cuts
	room := c.crossingRoom(wave(data, size, waves, 0), size, cuts)
	memory := c.Scratch(2 * room)
	var first, end [2]int // numbers of the receives of the results of the two latest waves
	for w := range waves + 2 {
		if w < waves {
			part := wave(data, size, waves, w)
			if err := c.reduceHere(part); err != nil {
				return err
			}
			c.crossings[w%2] = c.crossIn(c.crossings[w%2][:0], part, size, cuts)
			c.scatter(c.crossings[w%2], memory[w%2*room:][:room], uint32(2*w))
		}
		if last := w - 1; last >= 0 && last < waves {
			first[last%2] = c.Receives()
			if err := c.exchangeResults(c.crossings[last%2]); err != nil {
				return err
			}
			end[last%2] = c.Receives()
		}
		if done := w - 2; done >= 0 {
			if err := c.WaitFor(first[done%2], end[done%2]); err != nil {
				return err
			}
			if err := c.spread(wave(data, size, waves, done), size); err != nil {
				return err
			}
		}
	}
	return nil
}

// crossIn is like cross, with the cuts of hostShares.
func (c *Call) crossIn(to []crossing, data []byte, size int, cuts []int) []crossing {
	to = c.cross(to, data, size)
	for i := range to {
		to[i].cuts = cuts
	}
	return to
}

// crossingRoom returns an upper bound of the bytes that the other hosts send to this rank to
// combine, for data or for any shorter data. With cuts, a piece of shorter data may have one more
// unit.
func (c *Call) crossingRoom(data []byte, size int, cuts []int) (room int) {
	c.crossings[0] = c.crossIn(c.crossings[0][:0], data, size, cuts)
	for i := range c.crossings[0] {
		x := &c.crossings[0][i]
		room += (x.Size - 1) * (len(x.piece(x.Me)) + size)
	}
	return room
}

// scatter starts to send each host's piece of every crossing to the owner on that host, and posts
// the receives for this rank's own piece from all hosts into memory.
func (c *Call) scatter(all []crossing, memory []byte, step uint32) {
	for i := range all {
		x := &all[i]
		x.step, x.Team, x.sent = step, c.Dividing(x.Team), c.Sends()
		longest := c.Frames(x.longest())
		for s := range longest {
			for d := 1; d < x.Size; d++ { // every rank begins with a different peer
				to := (x.Me + d) % x.Size
				if p := x.piece(to); s < c.Frames(len(p)) {
					c.Send(x.Rank(to), step, c.Cut(p, s))
				}
			}
		}
		x.sentEnd, x.received = c.Sends(), c.Receives()
		own := len(x.piece(x.Me))
		for s := range c.Frames(own) {
			for d := 1; d < x.Size; d++ {
				from := (x.Me + d) % x.Size
				c.Post(x.Rank(from), step, c.Cut(memory[(d-1)*own:d*own], s))
			}
		}
		memory = memory[(x.Size-1)*own:]
	}
}

// gather exchanges results and waits for them.
func (c *Call) gather(all []crossing) error {
	first := c.Receives()
	if err := c.exchangeResults(all); err != nil {
		return err
	}
	return c.WaitFor(first, c.Receives())
}

// exchangeResults combines this rank's pieces, in the order of the hosts, starts to send them to
// the other owners, and posts the receives for theirs.
func (c *Call) exchangeResults(all []crossing) error {
	for i := range all {
		if err := c.combineCrossing(&all[i]); err != nil {
			return err
		}
	}
	for i := range all { // the results are received into memory that is being sent
		if err := c.WaitSent(all[i].sent, all[i].sentEnd); err != nil {
			return err
		}
	}
	c.postResults(all)
	return nil
}

// postResults posts the receives for the results of the other owners.
func (c *Call) postResults(all []crossing) {
	for i := range all {
		x := &all[i]
		for s := range c.Frames(x.longest()) {
			for d := 1; d < x.Size; d++ {
				from := (x.Me + d) % x.Size
				if p := x.resultOf(from); s < c.Frames(len(p)) {
					c.Post(x.Rank(from), x.step+1, c.Cut(p, s))
				}
			}
		}
	}
}

func (c *Call) combineCrossing(x *crossing) error {
	own, result := x.piece(x.Me), x.resultOf(x.Me)
	for s := range c.Frames(len(own)) {
		part := c.Cut(result, s)
		err := c.CombineReceived(x.Team, part, c.Cut(own, s), func(place int) int {
			return x.received + s*(x.Size-1) + (place-x.Me+x.Size)%x.Size - 1
		})
		if err != nil {
			return err
		}
		c.sendResult(x, part)
	}
	return nil
}

// sendResult starts to send a part of this rank's piece of the result to the other owners.
func (c *Call) sendResult(x *crossing, part []byte) {
	for d := 1; d < x.Size; d++ {
		c.Send(x.Rank((x.Me+d)%x.Size), x.step+1, part)
	}
}

// reduceScatterHierarchical combines, in turns, the data of this host's ranks for the ranks of each
// other host and sends it there, and then their data for themselves. Each rank combines the data of
// all hosts for it, in the order of the hosts.
func (c *Call) reduceScatterHierarchical(part func(rank int) []byte, result []byte) error {
	h := c.levels
	sent := 0
	for _, host := range h.others() {
		for _, to := range h.shares(host, h.place) {
			sent += len(part(to))
		}
	}
	memory := c.Scratch(sent + (len(h.hosts)-1)*len(result)) // for the data sent, then for the data received
	first := c.Receives()
	for i, host := range h.others() {
		room := memory[sent+i*len(result):][:len(result)]
		for s := range c.Frames(len(result)) {
			c.Post(h.counterpart(host, h.place), 0, c.Cut(room, s))
		}
	}
	for _, host := range h.others() {
		for turn := range h.turns(host) {
			rank, sum, err := c.reduceFor(host, turn, part, memory)
			if err != nil {
				return err
			}
			if rank >= 0 {
				memory = memory[len(sum):]
			}
			for s := 0; rank >= 0 && s < c.Frames(len(sum)); s++ {
				c.Send(rank, 0, c.Cut(sum, s))
			}
		}
	}
	if _, own, err := c.reduceFor(h.here, 0, part, result); err != nil {
		return err
	} else if c.host.Load() == nil {
		kernel.Copy(result, own)
	}
	t := c.Dividing(h.leaders) // place i is the leader of host i
	for s := range c.Frames(len(result)) {
		err := c.CombineReceived(t, c.Cut(result, s), c.Cut(result, s), func(host int) int {
			return first + ((host-h.here+t.Size)%t.Size-1)*c.Frames(len(result)) + s
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// reduceFor combines the data of this host's ranks for some ranks of a host: in each turn, for at
// most one for each rank of this host. rank is the one for which this rank gets the sum, in memory,
// or −1.
func (c *Call) reduceFor(host, turn int, part func(rank int) []byte, memory []byte) (rank int, sum []byte, err error) {
	h := c.levels
	parts := make([][]byte, len(h.ranks()))
	for i := range parts {
		if to := h.share(host, i, turn); to >= 0 {
			parts[i] = part(to)
		}
	}
	rank = h.share(host, h.place, turn)
	on := c.host.Load()
	if on == nil {
		return rank, parts[0], nil
	}
	sum = memory[:len(parts[h.place])]
	err = on.Within(c.Ctx, c.Desc, func(m *shm.Member, call shm.Desc) error {
		return m.ReduceScatter(c.Ctx, call, parts, sum, on.Reduction(c.Desc.Type, c.Desc.Op))
	})
	return rank, sum, err
}
