package exchange

import (
	"errors"
	"math"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// FirstMemory bounds the memory, in bytes, that a rank allocates for data whose length another rank
// has announced, before any byte has arrived. It allocates more as bytes arrive.
const FirstMemory = 16 << 20

// Block receives data whose length is in the header of the first frame.
type Block struct {
	*Call
	Data  []byte // what has arrived; after Finish, all of it
	from  int
	step  uint32                   // of the first frame
	size  int                      // bytes of an element
	count uint64                   // elements, after open
	got   func(i int, part []byte) // called with each segment when it has arrived; may be nil

	total  int
	posted []*frame.Incoming
}

// ErrTooLarge is the reason why a rank that announces too much data counts as gone.
var ErrTooLarge = errors.New("it has announced more data than memory can hold")

// OpenBlock starts to receive data of a rank, in elements of size bytes.
func (c *Call) OpenBlock(from, size int) (b Block, err error) {
	b = Block{Call: c, from: from, size: size}
	return b, b.open()
}

// open waits for the first header and posts the receives that fit FirstMemory.
func (b *Block) open() error {
	h, err := b.peek(b.from)
	if err != nil {
		return err
	}
	if h.Seq != b.seq { // the frame belongs to an operation that this rank has not called yet
		b.Group.Fail(frame.Gone(frame.ErrInvalid, b.from))
		return b.Lost()
	}
	if h.Call.Count > uint64(math.MaxInt/b.size) {
		b.Group.Fail(frame.Gone(ErrTooLarge, b.from))
		return b.Lost()
	}
	b.count = h.Call.Count
	b.total = int(b.count) * b.size
	b.Data = make([]byte, min(b.total, FirstMemory))
	for i := range b.Frames(len(b.Data)) {
		b.posted = append(b.posted, b.Post(b.from, b.step+uint32(i), b.Cut(b.Data, i)))
	}
	return nil
}

// Finish waits until all data has arrived.
func (b *Block) Finish() error {
	for i := 0; i < b.Frames(b.total); i++ {
		if i == len(b.posted) {
			bigger := make([]byte, min(b.total, 2*len(b.Data)))
			kernel.Copy(bigger, b.Data)
			b.Data = bigger
			for j := i; j < b.Segments(len(b.Data)); j++ {
				b.posted = append(b.posted, b.Post(b.from, b.step+uint32(j), b.Cut(b.Data, j)))
			}
		}
		if err := b.wait(&b.posted[i].Done); err != nil {
			return err
		}
		if b.got != nil {
			b.got(i, b.Cut(b.Data, i))
		}
	}
	return nil
}

// ExchangePairs sends part(j) to every other rank j and returns the received data, by rank; the
// element of this rank is nil. Every pair of ranks exchanges data directly: as many bytes as in a
// ring, in one step.
func (c *Call) ExchangePairs(part func(to int) []byte) ([][]byte, error) {
	all := make([][]byte, c.Size)
	with := c.AllOthers()
	c.SendParts(with, part)
	return all, c.ReceiveParts(with, all)
}

// SendParts starts to send part(j) to each rank j of to, which receives it by ReceiveParts.
func (c *Call) SendParts(to []int, part func(to int) []byte) {
	size, longest := c.Desc.Type.Size(), 0
	for _, j := range to {
		longest = max(longest, len(part(j)))
	}
	for i := range c.Frames(longest) {
		for _, j := range to {
			if p := part(j); i < c.Frames(len(p)) {
				c.SendOf(j, uint32(i), uint64(len(p)/size), c.Cut(p, i))
			}
		}
	}
}

// ReceiveParts receives the parts that the ranks in from send by SendParts, and stores them in all,
// by rank.
func (c *Call) ReceiveParts(from []int, all [][]byte) error {
	blocks := make([]Block, len(from))
	for i := range from {
		var err error
		if blocks[i], err = c.OpenBlock(from[len(from)-1-i], c.Desc.Type.Size()); err != nil {
			return err
		}
	}
	for i := range blocks {
		if err := blocks[i].Finish(); err != nil {
			return err
		}
		all[blocks[i].from] = blocks[i].Data
	}
	return nil
}

// ReduceScatterDirect writes this rank's part of the reduced data to result. Every rank sends
// part(j) to its owner, rank j, which combines the parts in the order of the ranks, segment by
// segment. The parts are not changed.
func (c *Call) ReduceScatterDirect(part func(rank int) []byte, result []byte) error {
	t := c.WholeTeam()
	longest := 0
	for j := range t.Size {
		longest = max(longest, len(part(j)))
	}
	for i := range c.Frames(longest) {
		for d := 1; d < t.Size; d++ {
			to := (t.Me + d) % t.Size
			if p := part(to); i < c.Frames(len(p)) {
				c.Send(to, 0, c.Cut(p, i))
			}
		}
	}
	return c.combineFrom(t, part(t.Me), result, unsent, nil)
}

// combineFrom receives what every other rank of a team has sent in step 0 and combines it with own,
// in the order of the ranks, into result, which may be own. If own itself is being sent to all
// ranks, in the same segments, first is the number of the first send. done, if not nil, is called
// with each segment when it is complete.
func (c *Call) combineFrom(t Team, own, result []byte, first int, done func(part []byte)) error {
	ahead := 2 // number of segments posted for every rank
	if t.Size > 16 {
		ahead = 1
	}
	each := min(len(own), c.segment)
	slots := c.Scratch(ahead * t.Size * each)
	c.posted = slices.Grow(c.posted[:0], ahead*t.Size)[:ahead*t.Size]
	total, next := c.Frames(len(own)), 0
	for i := range total {
		for ; next < min(i+ahead, total); next++ {
			for from := range t.Size {
				if from != t.Me {
					at := next%ahead*t.Size + from
					c.posted[at] = c.Post(t.Rank(from), 0, slots[at*each:][:len(c.Cut(own, next))])
				}
			}
		}
		for d := 0; first != unsent && d < t.Size-1; d++ {
			if err := c.WaitSent(first+d*total+i, first+d*total+i+1); err != nil {
				return err
			}
		}
		if err := c.combineAll(t, c.Cut(result, i), c.Cut(own, i), c.posted[i%ahead*t.Size:][:t.Size]); err != nil {
			return err
		}
		if done != nil {
			done(c.Cut(result, i))
		}
	}
	return nil
}

// CombineReceived combines one segment of all ranks of a team, in their order, into result; own is
// this rank's. receive returns the number of the receive for another place's segment.
func (c *Call) CombineReceived(t Team, result, own []byte, receive func(place int) int) error {
	c.posted = slices.Grow(c.posted[:0], t.Size)[:t.Size]
	for place := range t.Size {
		if place != t.Me {
			c.posted[place] = c.ins[receive(place)]
		}
	}
	return c.combineAll(t, result, own, c.posted)
}

// combineAll combines one segment of all ranks, in their order. result may be own: until own has
// been combined, partial results are written to the first rank's buffer.
func (c *Call) combineAll(t Team, result, own []byte, posted []*frame.Incoming) error {
	if c.Desc.Means() && t.Size > 1 {
		return c.meanOfAll(t, result, own, posted)
	}
	combine := c.Desc.Combiner()
	var before []byte
	for from := range t.Size {
		one := own
		if from != t.Me {
			if err := c.wait(&posted[from].Done); err != nil {
				return err
			}
			one = posted[from].Buf
		}
		switch {
		case from == 0:
			before = one
		case from < t.Me:
			combine(before, before, one)
		default:
			combine(result, before, one)
			before = result
		}
	}
	if t.Size == 1 {
		kernel.Copy(result, own)
	}
	t.finish(c, result)
	return nil
}

// meanOfAll is like combineAll, for a mean.
func (c *Call) meanOfAll(t Team, result, own []byte, posted []*frame.Incoming) error {
	c.operands = slices.Grow(c.operands[:0], t.Size)[:t.Size]
	for from := range t.Size {
		c.operands[from] = own
		if from != t.Me {
			if err := c.wait(&posted[from].Done); err != nil {
				return err
			}
			c.operands[from] = posted[from].Buf
		}
	}
	kernel.Mean(c.Desc.Type, result, c.operands, t.Weights, t.divide)
	return nil
}

// Into is memory with one part for every rank, all of the same number of bytes.
type Into struct {
	Memory []byte
	Each   int
}

// Of returns the part of a rank.
func (p Into) Of(rank int) []byte { return p.Memory[rank*p.Each:][:p.Each:p.Each] }

// AllOthers returns all ranks but this one. Each rank's list begins with a different rank.
func (c *Call) AllOthers() []int {
	with := make([]int, 0, c.Size-1)
	for d := 1; d < c.Size; d++ {
		with = append(with, (c.Rank+d)%c.Size)
	}
	return with
}

// ExchangeInto sends part(j) to each rank j in with, and receives the parts of these ranks into
// result.
func (c *Call) ExchangeInto(with []int, part func(to int) []byte, result Into) error {
	for s := range c.Frames(result.Each) {
		for _, to := range with {
			c.Send(to, 0, c.Cut(part(to), s))
		}
	}
	first := c.inUsed
	c.PostInto(with, result)
	return c.WaitFor(first, c.inUsed)
}

// PostInto posts the receives for the parts of the ranks in from.
func (c *Call) PostInto(from []int, result Into) {
	for _, r := range from {
		for s := range c.Frames(result.Each) {
			c.Post(r, 0, c.Cut(result.Of(r), s))
		}
	}
}

// By returns the parts of some ranks.
func (p Into) By(ranks []int) [][]byte {
	parts := make([][]byte, len(ranks))
	for i, r := range ranks {
		parts[i] = p.Of(r)
	}
	return parts
}

// Place returns the function that package shm calls for the buffers of the given ranks, which are
// their parts.
func (p Into) Place(ranks []int) func(lengths []int) ([][]byte, error) {
	return func([]int) ([][]byte, error) { return p.By(ranks), nil } // the lengths were compared with the members' calls
}
