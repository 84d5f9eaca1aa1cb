package exchange

import (
	"math/bits"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

const window = 4 // number of receives posted ahead, so that the next segments arrive while one is reduced

// Team is a set of ranks of a group that run an algorithm among themselves.
type Team struct {
	Ranks  []int // by place; nil for all ranks of the group
	Me     int   // the place of this rank
	Size   int
	divide int // divisor of the result; 0 if it is not divided

	Weights []int // by place, the number by which that rank's mean has been divided; nil if no mean has been divided
}

// WholeTeam returns the team of all ranks, which divides the result of an average.
func (c *Call) WholeTeam() Team {
	t := Team{Me: c.Rank, Size: c.Size}
	return c.Dividing(t)
}

// Rank returns the rank at a place.
func (t *Team) Rank(place int) int {
	if t.Ranks == nil {
		return place
	}
	return t.Ranks[place]
}

// part returns part i of data, which is divided into one part for each rank.
func (t *Team) part(c *Call, data []byte, i int) []byte {
	return kernel.Part(data, c.Desc.Type.Size(), t.Size, i)
}

func (t *Team) finish(c *Call, part []byte) {
	if t.divide > 1 {
		c.Desc.Divide(part, t.divide)
	}
}

// Segments returns the number of segments into which n bytes are cut: 0 for 0 bytes.
func (c *Call) Segments(n int) int { return (n + c.segment - 1) / c.segment }

// Frames returns the number of frames for n bytes. It is at least 1, since an empty frame informs
// the peer of the call.
func (c *Call) Frames(n int) int { return max(1, c.Segments(n)) }

// Cut returns segment i of b.
func (c *Call) Cut(b []byte, i int) []byte { return b[i*c.segment : min((i+1)*c.segment, len(b))] }

// Dividing returns the team with the divisor of its results if the operation is an average.
func (c *Call) Dividing(t Team) Team {
	if c.Desc.Op == operation.Average {
		t.divide = c.Contributing()
	}
	return t
}

// AllReduceFlat reduces data among the ranks of a team. They call it at the same point of the
// operation.
func (c *Call) AllReduceFlat(t Team, data []byte) error {
	if c.Desc.Op == operation.Adasum {
		c.By(operation.ByDoubling)
		return c.allReduceDoubling(t, data)
	}
	c.Suit(len(data) / t.Size)
	a := c.Algorithm().Over(t.Size, len(data))
	if c.Desc.Means() { // a mean needs all operands on one rank
		a = operation.Direct
	}
	switch a {
	case operation.Doubling:
		c.By(operation.ByDoubling)
		return c.allReduceDoubling(t, data)
	case operation.Rabenseifner:
		c.By(operation.ByRabenseifner)
		return c.allReduceHalving(t, data)
	case operation.Direct:
		c.By(operation.ByDirect)
		return c.AllReduceDirect(t, data)
	}
	c.By(operation.ByRing)
	return c.allReduceRing(t, data)
}

// SendAll starts to send data to a peer, segment by segment, and returns the number of the first
// send.
func (c *Call) SendAll(peer int, step uint32, data []byte) (first int) {
	first = c.outUsed
	for i := range c.Frames(len(data)) {
		c.Send(peer, step, c.Cut(data, i))
	}
	return first
}

// receiveAll receives into data what a peer sends by SendAll.
func (c *Call) receiveAll(peer int, step uint32, data []byte) error {
	first := c.inUsed
	c.PostAll(peer, step, data)
	return c.WaitFor(first, c.inUsed)
}

// PostAll posts the receives for what a peer sends by SendAll.
func (c *Call) PostAll(peer int, step uint32, data []byte) {
	for i := range c.Frames(len(data)) {
		c.Post(peer, step, c.Cut(data, i))
	}
}

const unsent = -1

// receiveCombined receives what a peer sends by SendAll and combines it into data. If data itself
// is being sent, first is the number of the first send; otherwise it is unsent.
func (c *Call) receiveCombined(peer int, step uint32, data []byte, first int) error {
	if c.Desc.Op == operation.Adasum {
		return c.receiveAdasum(peer, step, data, first)
	}
	combine := c.Desc.Combiner()
	total, each := c.Frames(len(data)), min(len(data), c.segment)
	slots := c.Scratch(window * each)
	var posted [window]*frame.Incoming
	for i, next := 0, 0; i < total; i++ {
		for ; next < min(i+window, total); next++ {
			posted[next%window] = c.Post(peer, step, slots[next%window*each:][:len(c.Cut(data, next))])
		}
		if err := c.wait(&posted[i%window].Done); err != nil {
			return err
		}
		if first != unsent {
			if err := c.WaitSent(first+i, first+i+1); err != nil {
				return err
			}
		}
		here, other := c.Cut(data, i), posted[i%window].Buf
		if peer < c.Rank {
			combine(here, other, here)
		} else {
			combine(here, here, other)
		}
	}
	return nil
}

const unfolding = 100 // step of the frames that bring folded ranks the result

// allReduceDoubling is recursive doubling: in each step a rank exchanges all its data with a rank
// at twice the distance. If the number of ranks is not a power of two, the lowest ranks first
// combine their data in pairs; the higher rank of each pair then waits for the result. Both
// partners of an exchange combine lower ranks first, so that their results have the same bits.
func (c *Call) allReduceDoubling(t Team, data []byte) error {
	power := 1 << (bits.Len(uint(t.Size)) - 1)
	folded := 2 * (t.Size - power) // ranks that fold in pairs
	me := t.Me - folded/2          // place among the remaining ranks
	if t.Me < folded {
		me = t.Me / 2
	}
	if t.Me < folded && t.Me%2 == 1 {
		c.SendAll(t.Rank(t.Me-1), 0, data)
		if err := c.Flush(); err != nil { // the result is received into the same memory
			return err
		}
		return c.receiveAll(t.Rank(t.Me-1), unfolding, data)
	}
	if t.Me < folded {
		if err := c.receiveCombined(t.Rank(t.Me+1), 0, data, unsent); err != nil {
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
		peer := t.Rank(place)
		if err := c.receiveCombined(peer, step, data, c.SendAll(peer, step, data)); err != nil {
			return err
		}
	}
	t.finish(c, data)
	if t.Me < folded {
		c.SendAll(t.Rank(t.Me+1), unfolding, data)
	}
	return nil
}

// allReduceHalving is Rabenseifner's algorithm for a power of two of ranks: in each step a rank
// exchanges half of the data that it still combines with a rank at half the distance, until it has
// the result of its own part. The parts are then gathered in reverse order.
func (c *Call) allReduceHalving(t Team, data []byte) error {
	size := c.Desc.Type.Size()
	span := func(place, parts int) []byte { // the aligned block of parts that contains the part of place
		from := place &^ (parts - 1)
		lo, _ := kernel.Split(len(data)/size, t.Size, from)
		_, hi := kernel.Split(len(data)/size, t.Size, from+parts-1)
		return data[lo*size : hi*size]
	}
	step := uint32(0)
	for d := t.Size / 2; d >= 1; d /= 2 {
		peer := t.Rank(t.Me ^ d)
		c.SendAll(peer, step, span(t.Me^d, d))
		if err := c.receiveCombined(peer, step, span(t.Me, d), unsent); err != nil {
			return err
		}
		step++
	}
	t.finish(c, span(t.Me, 1))
	if err := c.Flush(); err != nil { // results are received into memory that is being sent
		return err
	}
	for d := 1; d < t.Size; d *= 2 {
		peer := t.Rank(t.Me ^ d)
		c.SendAll(peer, step, span(t.Me, d))
		if err := c.receiveAll(peer, step, span(t.Me^d, d)); err != nil {
			return err
		}
		step++
	}
	return nil
}

// ring is the pipelined ring. The data is cut into one part per rank and each part into segments.
// In the first n−1 rounds a part is passed around the ring, and every rank combines its own data
// with it; the last rank owns the result, and divides it for an average. In the other n−1 rounds
// the result is passed around. A segment is passed on as soon as it is reduced, before the rest of
// its part.
type ring struct {
	*Call
	Team
	data        []byte
	left, right int // ranks
	slots       []byte
	posted      [window]*frame.Incoming // by position
	at          cursor                  // the next receive to post
	position    int                     // the position of that receive
}

// cursor iterates over the segments that a rank receives, round by round.
type cursor struct{ round, segment int }

func (c *Call) allReduceRing(t Team, data []byte) error {
	n := t.Size
	r := ring{Call: c, Team: t, data: data, left: t.Rank((t.Me + n - 1) % n), right: t.Rank((t.Me + 1) % n)}
	each := min(len(r.chunk(0))+operation.Widest, c.segment) // no chunk is longer by more than one element
	r.slots = c.Scratch(window * each)
	before := c.outUsed
	c.sentBefore = c.sentBefore[:0]
	for i := range 2*n - 1 {
		c.sentBefore = append(c.sentBefore, before)
		before += c.Segments(len(r.chunk(i)))
	}
	own := r.chunk(0)
	for i := range c.Segments(len(own)) {
		c.Send(r.right, 0, c.Cut(own, i))
	}
	combine := c.Desc.Combiner()
	done := 0
	for here := r.skip(cursor{1, 0}); here.round <= 2*n-2; here = r.skip(cursor{here.round, here.segment + 1}) {
		if err := r.postUpTo(done, each); err != nil {
			return err
		}
		in := r.posted[done%window]
		if err := c.wait(&in.Done); err != nil {
			return err
		}
		part := c.Cut(r.chunk(here.round), here.segment)
		if here.round < n {
			combine(part, in.Buf, part)
		}
		if here.round == n-1 {
			t.finish(c, part)
		}
		if here.round < 2*n-2 {
			c.Send(r.right, uint32(here.round), part)
		}
		done++
	}
	return nil
}

// chunk returns the part that this rank sends in a round and has received in the round before:
// first its own part, then those of the ranks to its left.
func (r *ring) chunk(round int) []byte {
	return r.part(r.Call, r.data, ((r.Me-round)%r.Size+r.Size)%r.Size)
}

// skip moves the cursor past the end of a chunk; round 2n−1 is the end.
func (r *ring) skip(at cursor) cursor {
	for at.round <= 2*r.Size-2 && at.segment >= r.Segments(len(r.chunk(at.round))) {
		at = cursor{at.round + 1, 0}
	}
	return at
}

// postUpTo posts the receive at position done and, as far as possible, receives ahead of it. A
// result is received into the memory from which this rank's part was sent, so that send must be
// complete. postUpTo waits for the send only if nothing else can continue, since the peer's own
// progress may depend on the receives posted here.
func (r *ring) postUpTo(done, each int) error {
	if r.position == 0 {
		r.at = r.skip(cursor{1, 0})
	}
	n := r.Size
	for ; r.at.round <= 2*n-2 && r.position < done+window; r.position++ {
		part := r.Cut(r.chunk(r.at.round), r.at.segment)
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
		r.posted[r.position%window] = r.Post(r.left, uint32(r.at.round-1), buf)
		r.at = r.skip(cursor{r.at.round, r.at.segment + 1})
	}
	return nil
}

// AllReduceDirect sends every part to its owner, which combines the parts in the order of the ranks
// and sends the result to all, each segment as soon as it is complete. Small data is instead sent
// to all ranks at once, and every rank combines all of it.
func (c *Call) AllReduceDirect(t Team, data []byte) error {
	if len(data) <= operation.Thresholds.OneShot {
		first := c.outUsed
		for d := 1; d < t.Size; d++ {
			c.SendAll(t.Rank((t.Me+d)%t.Size), 0, data)
		}
		return c.combineFrom(t, data, data, first, nil)
	}
	parts := c.outUsed
	longest := c.Frames(len(t.part(c, data, 0))) // no part is longer than the first
	for i := range longest {
		for d := 1; d < t.Size; d++ { // every rank begins with a different peer
			to := (t.Me + d) % t.Size
			if p := t.part(c, data, to); i < c.Frames(len(p)) {
				c.Send(t.Rank(to), 0, c.Cut(p, i))
			}
		}
	}
	sent := c.outUsed
	own := t.part(c, data, t.Me)
	err := c.combineFrom(t, own, own, unsent, func(part []byte) {
		for d := 1; d < t.Size; d++ {
			c.Send(t.Rank((t.Me+d)%t.Size), 1, part)
		}
	})
	if err != nil {
		return err
	}
	if err := c.WaitSent(parts, sent); err != nil { // the results are received into the same memory
		return err
	}
	first := c.inUsed
	for i := range longest {
		for d := 1; d < t.Size; d++ {
			from := (t.Me - d + t.Size) % t.Size
			if p := t.part(c, data, from); i < c.Frames(len(p)) {
				c.Post(t.Rank(from), 1, c.Cut(p, i))
			}
		}
	}
	return c.WaitFor(first, c.inUsed)
}
