package collective

import (
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// fewHosts is up to how many hosts the owners of a part send pieces of it directly to each other.
// Among more, a ring spares them so many connections, at the price of bits that depend on an
// element's place.
const fewHosts = 8

// hierarchical reports whether an AllReduce has two levels.
func (g *Group) hierarchical() bool {
	return g.levels != nil && g.family.algorithm == operation.Auto
}

// allReduceHierarchical combines in the order of the ranks of each host, then in the order of the
// hosts: no bit depends on an element's place, or on what else is reduced with it. The exception is
// data of more than fewHosts hosts in a group that is not strict, but for means.
func (c *call) allReduceHierarchical(data []byte) error {
	switch {
	case c.desc.Op == operation.Adasum:
		c.by(operation.ByAdasum)
		return c.allReduceAdasum(data)
	case len(data) <= operation.Thresholds.ThroughOne:
		c.by(operation.ByLeaders)
		return c.allReduceLeaders(data)
	case len(c.g.levels.hosts) > fewHosts && !c.g.strict && !c.desc.Means():
		c.by(operation.ByRings)
		return c.allReduceRings(data)
	}
	c.by(operation.ByWaves)
	return c.allReduceWaves(data)
}

// allReduceLeaders has the first rank of each host exchange all data with those of the others.
func (c *call) allReduceLeaders(data []byte) error {
	h := c.g.host.Load()
	err := c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.AllReduce(c.ctx, call, data, h.reduction(c.desc.Type, c.desc.Op))
	})
	if err != nil {
		return err
	}
	if t := c.dividing(c.g.levels.leaders); c.g.levels.leads() {
		if c.g.strict && !operation.Exact(c.desc.Type) {
			err = c.allReduceDirect(t, data)
		} else {
			err = c.allReduceFlat(t, data)
		}
		if err != nil {
			return err
		}
	}
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.Broadcast(c.ctx, call, data, 0)
	})
}

// dividing has a team divide its results where they are averages of all ranks.
func (c *call) dividing(t team) team {
	if c.desc.Op == operation.Average {
		t.divide = c.g.contributing()
	}
	return t
}

// reduceHere combines data of this host's ranks: each has its own part of the result.
func (c *call) reduceHere(data []byte) error {
	h := c.g.host.Load()
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.Reduce(c.ctx, call, data, m.Members(), h.reduction(c.desc.Type, c.desc.Op))
	})
}

// allReduceRings combines within the hosts, then between them by a ring for each part, and spreads
// the result.
func (c *call) allReduceRings(data []byte) error {
	size := c.desc.Type.Size()
	if err := c.reduceHere(data); err != nil {
		return err
	}
	for _, x := range c.cross(nil, data, size) {
		if err := c.allReduceFlat(c.dividing(x.team), x.data); err != nil {
			return err
		}
	}
	return c.spread(data, size)
}

// allReduceWaves cuts data into waves. While one is on its way between the hosts, the next one is
// combined within them, and the result of the one before is spread: what the links have to send is
// never less than a wave, whatever time the ranks of a host take among themselves.
func (c *call) allReduceWaves(data []byte) error {
	size, waves := c.desc.Type.Size(), c.waves(len(data))
	if c.g.family.segment == 0 {
		c.segment = operation.SegmentFor(len(data) / waves / c.g.size)
	}
	room := c.crossingRoom(wave(data, size, waves, 0), size)
	memory := c.scratch(2 * room)
	var first, end [2]int // receives of the results of the two latest waves
	for w := range waves + 2 {
		if w < waves {
			part := wave(data, size, waves, w)
			if err := c.reduceHere(part); err != nil {
				return err
			}
			c.crossings[w%2] = c.cross(c.crossings[w%2][:0], part, size)
			c.scatter(c.crossings[w%2], memory[w%2*room:][:room], uint32(2*w))
		}
		if last := w - 1; last >= 0 && last < waves {
			first[last%2] = c.inUsed
			if err := c.exchangeResults(c.crossings[last%2]); err != nil {
				return err
			}
			end[last%2] = c.inUsed
		}
		if done := w - 2; done >= 0 {
			if err := c.waitFor(first[done%2], end[done%2]); err != nil {
				return err
			}
			if err := c.spread(wave(data, size, waves, done), size); err != nil {
				return err
			}
		}
	}
	return nil
}

// crossingRoom is how many bytes the other hosts send for this rank to combine, of data.
func (c *call) crossingRoom(data []byte, size int) (room int) {
	c.crossings[0] = c.cross(c.crossings[0][:0], data, size)
	for i := range c.crossings[0] {
		x := &c.crossings[0][i]
		room += (x.size - 1) * len(x.piece(x.me))
	}
	return room
}

// scatter sends each host's piece of every crossing to its owner there, and asks for this rank's
// own piece of all hosts, into memory.
func (c *call) scatter(all []crossing, memory []byte, step uint32) {
	for i := range all {
		x := &all[i]
		x.step, x.team, x.sent = step, c.dividing(x.team), c.outUsed
		longest := c.frames(len(x.piece(0))) // the first piece is a longest one
		for s := range longest {
			for d := 1; d < x.size; d++ { // each to another one first
				to := (x.me + d) % x.size
				if p := x.piece(to); s < c.frames(len(p)) {
					c.send(x.rank(to), step, c.cut(p, s))
				}
			}
		}
		x.sentEnd, x.received = c.outUsed, c.inUsed
		own := len(x.piece(x.me))
		for s := range c.frames(own) {
			for d := 1; d < x.size; d++ {
				from := (x.me + d) % x.size
				c.post(x.rank(from), step, c.cut(memory[(d-1)*own:d*own], s))
			}
		}
		memory = memory[(x.size-1)*own:]
	}
}

// gather exchanges results and waits for them.
func (c *call) gather(all []crossing) error {
	first := c.inUsed
	if err := c.exchangeResults(all); err != nil {
		return err
	}
	return c.waitFor(first, c.inUsed)
}

// exchangeResults combines this rank's pieces, in the order of the hosts, sends them to the other
// owners, and asks for theirs.
func (c *call) exchangeResults(all []crossing) error {
	for i := range all {
		if err := c.combineCrossing(&all[i]); err != nil {
			return err
		}
	}
	for i := range all { // the results come into memory that has been sent
		for _, o := range c.outs[all[i].sent:all[i].sentEnd] {
			if err := c.wait(&o.Done); err != nil {
				return err
			}
		}
	}
	c.postResults(all)
	return nil
}

// postResults asks for what the other owners combine.
func (c *call) postResults(all []crossing) {
	for i := range all {
		x := &all[i]
		for s := range c.frames(len(x.piece(0))) {
			for d := 1; d < x.size; d++ {
				from := (x.me + d) % x.size
				if p := x.resultOf(from); s < c.frames(len(p)) {
					c.post(x.rank(from), x.step+1, c.cut(p, s))
				}
			}
		}
	}
}

func (c *call) combineCrossing(x *crossing) error {
	own, result := x.piece(x.me), x.resultOf(x.me)
	posted := c.ins[x.received:]
	for s := range c.frames(len(own)) {
		c.posted = slices.Grow(c.posted[:0], x.size)[:x.size]
		for d := 1; d < x.size; d++ {
			c.posted[(x.me+d)%x.size] = posted[s*(x.size-1)+d-1]
		}
		part := c.cut(result, s)
		if err := c.combineAll(x.team, part, c.cut(own, s), c.posted); err != nil {
			return err
		}
		c.sendResult(x, part)
	}
	return nil
}

// sendResult sends some of this rank's piece of the result to the other owners.
func (c *call) sendResult(x *crossing, part []byte) {
	for d := 1; d < x.size; d++ {
		c.send(x.rank((x.me+d)%x.size), x.step+1, part)
	}
}

// reduceScatterHierarchical combines, in turns, what this host's ranks have for the ranks of each
// other host and sends it there, and then what they have for themselves; each rank combines what
// all hosts have for it, in their order.
func (c *call) reduceScatterHierarchical(part func(rank int) []byte, result []byte) error {
	h := c.g.levels
	sent := 0
	for _, host := range h.others() {
		for _, to := range h.shares(host, h.place) {
			sent += len(part(to))
		}
	}
	memory := c.scratch(sent + (len(h.hosts)-1)*len(result)) // what is sent; what is received
	first := c.inUsed
	for i, host := range h.others() {
		room := memory[sent+i*len(result):][:len(result)]
		for s := range c.frames(len(result)) {
			c.post(h.counterpart(host, h.place), 0, c.cut(room, s))
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
			for s := 0; rank >= 0 && s < c.frames(len(sum)); s++ {
				c.send(rank, 0, c.cut(sum, s))
			}
		}
	}
	if _, own, err := c.reduceFor(h.here, 0, part, result); err != nil {
		return err
	} else if c.g.host.Load() == nil {
		kernel.Copy(result, own)
	}
	t := h.leaders // whose places are those of the hosts
	for s := range c.frames(len(result)) {
		c.posted = slices.Grow(c.posted[:0], t.size)[:t.size]
		for i, host := range h.others() {
			c.posted[host] = c.ins[first+i*c.frames(len(result))+s]
		}
		if err := c.combineAll(c.dividing(t), c.cut(result, s), c.cut(result, s), c.posted); err != nil {
			return err
		}
	}
	return nil
}

// reduceFor combines what the ranks of this host have for some of the ranks of a host: sum, in
// memory, is for the rank that this one is to send it to; −1: for none.
func (c *call) reduceFor(host, turn int, part func(rank int) []byte, memory []byte) (rank int, sum []byte, err error) {
	h := c.g.levels
	parts := make([][]byte, len(h.ranks()))
	for i := range parts {
		if to := h.share(host, i, turn); to >= 0 {
			parts[i] = part(to)
		}
	}
	rank = h.share(host, h.place, turn)
	on := c.g.host.Load()
	if on == nil {
		return rank, parts[0], nil
	}
	sum = memory[:len(parts[h.place])]
	err = on.within(c.ctx, c.desc, func(m *shm.Member, call shm.Desc) error {
		return m.ReduceScatter(c.ctx, call, parts, sum, on.reduction(c.desc.Type, c.desc.Op))
	})
	return rank, sum, err
}
