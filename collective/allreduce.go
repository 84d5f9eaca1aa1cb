package collective

import (
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

const window = 4 // receives posted ahead, so that the next segments arrive while one is reduced

// team is ranks of a group that run an algorithm among themselves.
type team struct {
	ranks  []int // by place; nil: all
	me     int   // the place of this rank
	size   int
	divide int // what the result is divided by; 0: nothing

	weights []int // by place: by what a mean has been divided there; nil: by nothing
}

// wholeTeam is the team of all ranks, with the division of an average.
func (c *call) wholeTeam() team {
	t := team{me: c.g.rank, size: c.g.size}
	return c.dividing(t)
}

func (t *team) rank(place int) int {
	if t.ranks == nil {
		return place
	}
	return t.ranks[place]
}

// part returns part i of data, of which there are as many as ranks.
func (t *team) part(c *call, data []byte, i int) []byte {
	return kernel.Part(data, c.desc.Type.Size(), t.size, i)
}

func (t *team) finish(c *call, part []byte) {
	if t.divide > 1 {
		c.desc.Divide(part, t.divide)
	}
}

// segments is the number of frames that n bytes take; none for nothing.
func (c *call) segments(n int) int { return (n + c.segment - 1) / c.segment }

// frames is segments with one empty frame for nothing, where the peer must learn of the call.
func (c *call) frames(n int) int { return max(1, c.segments(n)) }

// cut returns segment i of b.
func (c *call) cut(b []byte, i int) []byte { return b[i*c.segment : min((i+1)*c.segment, len(b))] }

func (c *call) allReduceSockets(data []byte) error {
	if c.g.hierarchical() {
		return c.allReduceHierarchical(data)
	}
	return c.allReduceFlat(c.wholeTeam(), data)
}

// allReduceFlat reduces data among a team; all its ranks call it at the same place of the
// operation.
func (c *call) allReduceFlat(t team, data []byte) error {
	if c.desc.Op == operation.Adasum {
		c.by(operation.ByDoubling)
		return c.allReduceDoubling(t, data)
	}
	if c.g.family.segment == 0 {
		c.segment = operation.SegmentFor(len(data) / t.size)
	}
	a := c.g.algorithm().Over(t.size, len(data))
	if c.desc.Means() { // no other has all operands at hand
		a = operation.Direct
	}
	switch a {
	case operation.Doubling:
		c.by(operation.ByDoubling)
		return c.allReduceDoubling(t, data)
	case operation.Rabenseifner:
		c.by(operation.ByRabenseifner)
		return c.allReduceHalving(t, data)
	case operation.Direct:
		c.by(operation.ByDirect)
		return c.allReduceDirect(t, data)
	}
	c.by(operation.ByRing)
	return c.allReduceRing(t, data)
}

// sendAll sends data to a peer, segment by segment, and returns the number of the first send.
func (c *call) sendAll(peer int, step uint32, data []byte) (first int) {
	first = c.outUsed
	for i := range c.frames(len(data)) {
		c.send(peer, step, c.cut(data, i))
	}
	return first
}

// receiveAll receives what a peer has sent with sendAll, in place of data.
func (c *call) receiveAll(peer int, step uint32, data []byte) error {
	first := c.inUsed
	c.postAll(peer, step, data)
	return c.waitFor(first, c.inUsed)
}

// postAll asks for what a peer sends with sendAll.
func (c *call) postAll(peer int, step uint32, data []byte) {
	for i := range c.frames(len(data)) {
		c.post(peer, step, c.cut(data, i))
	}
}

const unsent = -1

// receiveCombined receives what a peer has sent with sendAll and combines data with it. Where data
// itself is being sent, first is the number of the first send.
func (c *call) receiveCombined(peer int, step uint32, data []byte, first int) error {
	if c.desc.Op == operation.Adasum {
		return c.receiveAdasum(peer, step, data, first)
	}
	combine := c.desc.Combiner()
	total, each := c.frames(len(data)), min(len(data), c.segment)
	slots := c.scratch(window * each)
	var posted [window]*frame.Incoming
	for i, next := 0, 0; i < total; i++ {
		for ; next < min(i+window, total); next++ {
			posted[next%window] = c.post(peer, step, slots[next%window*each:][:len(c.cut(data, next))])
		}
		if err := c.wait(&posted[i%window].Done); err != nil {
			return err
		}
		if first != unsent {
			if err := c.wait(&c.outs[first+i].Done); err != nil {
				return err
			}
		}
		here, other := c.cut(data, i), posted[i%window].Buf
		if peer < c.g.rank {
			combine(here, other, here)
		} else {
			combine(here, here, other)
		}
	}
	return nil
}

const unfolding = 100 // step in which the ranks that were folded away get the result

// allReduceDoubling is recursive doubling: in each step a rank exchanges all it has with one at
// twice the distance. Where the number of ranks is no power of two, the first few fold in pairs
// before and unfold after. Both partners combine lower ranks first, so that their results are equal
// in every bit.
func (c *call) allReduceDoubling(t team, data []byte) error {
	power := 1
	for power*2 <= t.size {
		power *= 2
	}
	folded := 2 * (t.size - power) // ranks that fold in pairs
	me := t.me - folded/2          // place among the ranks that stay
	if t.me < folded {
		me = t.me / 2
	}
	if t.me < folded && t.me%2 == 1 {
		c.sendAll(t.rank(t.me-1), 0, data)
		if err := c.flush(); err != nil { // the result comes into the same memory
			return err
		}
		return c.receiveAll(t.rank(t.me-1), unfolding, data)
	}
	if t.me < folded {
		if err := c.receiveCombined(t.rank(t.me+1), 0, data, unsent); err != nil {
			return err
		}
	}
	for step, distance := uint32(1), 1; distance < power; step, distance = step+1, distance*2 {
		place := me ^ distance
		if place < folded/2 {
			place *= 2
		} else {
			place += folded / 2
		}
		peer := t.rank(place)
		if err := c.receiveCombined(peer, step, data, c.sendAll(peer, step, data)); err != nil {
			return err
		}
	}
	t.finish(c, data)
	if t.me < folded {
		c.sendAll(t.rank(t.me+1), unfolding, data)
	}
	return nil
}

// allReduceHalving is Rabenseifner's algorithm for a power of two of ranks: each step exchanges
// half of what a rank still answers for with one at half the distance, until it has the result of
// its own part; the parts come together the same way back.
func (c *call) allReduceHalving(t team, data []byte) error {
	size := c.desc.Type.Size()
	span := func(place, parts int) []byte { // the parts of which place has one, aligned
		from := place &^ (parts - 1)
		lo, _ := kernel.Split(len(data)/size, t.size, from)
		_, hi := kernel.Split(len(data)/size, t.size, from+parts-1)
		return data[lo*size : hi*size]
	}
	step := uint32(0)
	for d := t.size / 2; d >= 1; d /= 2 {
		peer := t.rank(t.me ^ d)
		c.sendAll(peer, step, span(t.me^d, d))
		if err := c.receiveCombined(peer, step, span(t.me, d), unsent); err != nil {
			return err
		}
		step++
	}
	t.finish(c, span(t.me, 1))
	if err := c.flush(); err != nil { // results come into the memory that has been sent
		return err
	}
	for d := 1; d < t.size; d *= 2 {
		peer := t.rank(t.me ^ d)
		c.sendAll(peer, step, span(t.me, d))
		if err := c.receiveAll(peer, step, span(t.me^d, d)); err != nil {
			return err
		}
		step++
	}
	return nil
}

// ring is the pipelined ring. The data is cut into one part per rank and each part into segments.
// In the first n−1 rounds a part goes around and every rank combines its own with it; the last of
// them owns the result and divides it for an average; in the other n−1 rounds the result goes
// around. A segment is passed on as soon as it is reduced, not when its part is.
type ring struct {
	*call
	team
	data        []byte
	left, right int // ranks
	slots       []byte
	posted      [window]*frame.Incoming // by position
	at          cursor                  // next receive to post
	position    int                     // its position
}

// cursor walks over the segments that a rank receives, round by round.
type cursor struct{ round, segment int }

func (c *call) allReduceRing(t team, data []byte) error {
	n := t.size
	r := ring{call: c, team: t, data: data, left: t.rank((t.me + n - 1) % n), right: t.rank((t.me + 1) % n)}
	each := min(len(r.chunk(0))+operation.Widest, c.segment) // no chunk has more than one element more
	r.slots = c.scratch(window * each)
	before := c.outUsed
	c.sentBefore = c.sentBefore[:0]
	for i := range 2*n - 1 {
		c.sentBefore = append(c.sentBefore, before)
		before += c.segments(len(r.chunk(i)))
	}
	own := r.chunk(0)
	for i := range c.segments(len(own)) {
		c.send(r.right, 0, c.cut(own, i))
	}
	combine := c.desc.Combiner()
	done := 0
	for here := r.skip(cursor{1, 0}); here.round <= 2*n-2; here = r.skip(cursor{here.round, here.segment + 1}) {
		if err := r.postUpTo(done, each); err != nil {
			return err
		}
		in := r.posted[done%window]
		if err := c.wait(&in.Done); err != nil {
			return err
		}
		part := c.cut(r.chunk(here.round), here.segment)
		if here.round < n {
			combine(part, in.Buf, part)
		}
		if here.round == n-1 {
			t.finish(c, part)
		}
		if here.round < 2*n-2 {
			c.send(r.right, uint32(here.round), part)
		}
		done++
	}
	return nil
}

// chunk is what this rank sends in a round, and has received in the round before: first its own
// part, then those of the ranks to its left.
func (r *ring) chunk(round int) []byte {
	return r.part(r.call, r.data, ((r.me-round)%r.size+r.size)%r.size)
}

// skip moves past the end of a chunk; round 2n−1 is the end.
func (r *ring) skip(at cursor) cursor {
	for at.round <= 2*r.size-2 && at.segment >= r.segments(len(r.chunk(at.round))) {
		at = cursor{at.round + 1, 0}
	}
	return at
}

// postUpTo posts receives ahead of the one at position done, and that one itself in any case. A
// result comes into the memory from which this rank's part was sent, so that send must be complete:
// it waits for it only where nothing else can go on, since the peer's own progress may depend on
// what is posted here.
func (r *ring) postUpTo(done, each int) error {
	if r.position == 0 {
		r.at = r.skip(cursor{1, 0})
	}
	n := r.size
	for ; r.at.round <= 2*n-2 && r.position < done+window; r.position++ {
		part := r.cut(r.chunk(r.at.round), r.at.segment)
		buf := part
		if r.at.round < n {
			buf = r.slots[r.position%window*each:][:len(part)]
		} else {
			before := r.sentBefore[r.at.round-n] + r.at.segment
			if r.position > done && (before >= r.outUsed || !r.outs[before].Done.Load()) {
				return nil
			}
			if err := r.wait(&r.outs[before].Done); err != nil {
				return err
			}
		}
		r.posted[r.position%window] = r.post(r.left, uint32(r.at.round-1), buf)
		r.at = r.skip(cursor{r.at.round, r.at.segment + 1})
	}
	return nil
}

// allReduceDirect sends every part to its owner, who combines them in the order of the ranks and
// sends the result to all, each segment as soon as it is there. What is small goes to all at once
// instead, and every rank combines all of it.
func (c *call) allReduceDirect(t team, data []byte) error {
	if len(data) <= operation.Thresholds.OneShot {
		first := c.outUsed
		for d := 1; d < t.size; d++ {
			c.sendAll(t.rank((t.me+d)%t.size), 0, data)
		}
		return c.combineFrom(t, data, data, first, nil)
	}
	parts := c.outUsed
	longest := c.frames(len(t.part(c, data, 0))) // the first part is a longest one
	for i := range longest {
		for d := 1; d < t.size; d++ { // each to another one first
			to := (t.me + d) % t.size
			if p := t.part(c, data, to); i < c.frames(len(p)) {
				c.send(t.rank(to), 0, c.cut(p, i))
			}
		}
	}
	sent := c.outUsed
	own := t.part(c, data, t.me)
	err := c.combineFrom(t, own, own, unsent, func(part []byte) {
		for d := 1; d < t.size; d++ {
			c.send(t.rank((t.me+d)%t.size), 1, part)
		}
	})
	if err != nil {
		return err
	}
	for _, o := range c.outs[parts:sent] { // the results come into the same memory
		if err := c.wait(&o.Done); err != nil {
			return err
		}
	}
	first := c.inUsed
	for i := range longest {
		for d := 1; d < t.size; d++ {
			from := (t.me - d + t.size) % t.size
			if p := t.part(c, data, from); i < c.frames(len(p)) {
				c.post(t.rank(from), 1, c.cut(p, i))
			}
		}
	}
	return c.waitFor(first, c.inUsed)
}
