package collective

import (
	"errors"
	"math"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

const firstMemory = 16 << 20 // taken before any byte arrives; more only as bytes arrive

// block receives data whose length its sender tells, in the header of the first frame.
type block struct {
	*call
	from  int
	step  uint32 // of the first frame
	size  int    // bytes of an element
	count uint64 // elements, after open
	data  []byte // as far as it has arrived, after finish all of it
	got   func(i int, part []byte)

	total  int
	posted []*frame.Incoming
}

var errTooLarge = errors.New("sent a length that does not fit memory")

// open waits for the first header and posts as much as fits the first memory.
func (b *block) open() error {
	h, err := b.peek(b.from)
	if err != nil {
		return err
	}
	if h.Seq != b.seq { // it belongs to an operation that this rank has not called yet
		b.g.fail(frame.Gone(frame.ErrInvalid, b.from))
		return b.lost()
	}
	if h.Call.Count > uint64(math.MaxInt/b.size) {
		b.g.fail(frame.Gone(errTooLarge, b.from))
		return b.lost()
	}
	b.count = h.Call.Count
	b.total = int(b.count) * b.size
	b.data = make([]byte, min(b.total, firstMemory))
	for i := range b.frames(len(b.data)) {
		b.posted = append(b.posted, b.post(b.from, b.step+uint32(i), b.cut(b.data, i)))
	}
	return nil
}

// finish waits for all of it.
func (b *block) finish() error {
	for i := 0; i < b.frames(b.total); i++ {
		if i == len(b.posted) {
			bigger := make([]byte, min(b.total, 2*len(b.data)))
			kernel.Copy(bigger, b.data)
			b.data = bigger
			for j := i; j < b.segments(len(b.data)); j++ {
				b.posted = append(b.posted, b.post(b.from, b.step+uint32(j), b.cut(b.data, j)))
			}
		}
		if err := b.wait(&b.posted[i].Done); err != nil {
			return err
		}
		if b.got != nil {
			b.got(i, b.cut(b.data, i))
		}
	}
	return nil
}

// exchangePairs sends part(j) to every rank j and returns what they have sent, by rank; nil for
// this one. Every pair of ranks talks directly: the same bytes as a ring, in one step.
func (c *call) exchangePairs(part func(to int) []byte) ([][]byte, error) {
	all := make([][]byte, c.g.size)
	with := c.allOthers()
	c.sendParts(with, part)
	return all, c.receiveParts(with, all)
}

// sendParts sends part(j) to each of some ranks, which receive it with receiveParts.
func (c *call) sendParts(to []int, part func(to int) []byte) {
	size, longest := c.desc.Type.Size(), 0
	for _, j := range to {
		longest = max(longest, len(part(j)))
	}
	for i := range c.frames(longest) {
		for _, j := range to {
			if p := part(j); i < c.frames(len(p)) {
				c.sendOf(j, uint32(i), uint64(len(p)/size), c.cut(p, i))
			}
		}
	}
}

// receiveParts puts what some ranks have sent to this one with sendParts into all.
func (c *call) receiveParts(from []int, all [][]byte) error {
	blocks := make([]block, len(from))
	for i := range from {
		blocks[i] = block{call: c, from: from[len(from)-1-i], size: c.desc.Type.Size()}
		if err := blocks[i].open(); err != nil {
			return err
		}
	}
	for i := range blocks {
		if err := blocks[i].finish(); err != nil {
			return err
		}
		all[blocks[i].from] = blocks[i].data
	}
	return nil
}

// reduceScatterDirect puts this rank's part of the reduced data into result. Every rank sends
// part(j) to its owner, rank j, who combines them in the order of the ranks, segment by segment;
// the parts are not changed.
func (c *call) reduceScatterDirect(part func(rank int) []byte, result []byte) error {
	t := c.wholeTeam()
	longest := 0
	for j := range t.size {
		longest = max(longest, len(part(j)))
	}
	for i := range c.frames(longest) {
		for d := 1; d < t.size; d++ {
			to := (t.me + d) % t.size
			if p := part(to); i < c.frames(len(p)) {
				c.send(to, 0, c.cut(p, i))
			}
		}
	}
	return c.combineFrom(t, part(t.me), result, unsent, nil)
}

// combineFrom receives what every other rank of a team has sent in step 0 and combines it with own,
// in the order of the ranks, into result, which may be own. Where own itself is being sent, in as
// many pieces to all, first is the number of the first send. Each segment is handed to done, if
// there is one, when it is complete.
func (c *call) combineFrom(t team, own, result []byte, first int, done func(part []byte)) error {
	ahead := 2 // segments posted, of every rank
	if t.size > 16 {
		ahead = 1
	}
	each := min(len(own), c.segment)
	slots := c.scratch(ahead * t.size * each)
	c.posted = slices.Grow(c.posted[:0], ahead*t.size)[:ahead*t.size]
	total, next := c.frames(len(own)), 0
	for i := range total {
		for ; next < min(i+ahead, total); next++ {
			for from := range t.size {
				if from != t.me {
					at := next%ahead*t.size + from
					c.posted[at] = c.post(t.rank(from), 0, slots[at*each:][:len(c.cut(own, next))])
				}
			}
		}
		for d := 0; first != unsent && d < t.size-1; d++ {
			if err := c.wait(&c.outs[first+d*total+i].Done); err != nil {
				return err
			}
		}
		if err := c.combineAll(t, c.cut(result, i), c.cut(own, i), c.posted[i%ahead*t.size:][:t.size]); err != nil {
			return err
		}
		if done != nil {
			done(c.cut(result, i))
		}
	}
	return nil
}

// combineAll combines one segment of all ranks, in their order. Until own has been used, which
// result may be, results go to the first rank's slot.
func (c *call) combineAll(t team, result, own []byte, posted []*frame.Incoming) error {
	if c.desc.Means() && t.size > 1 {
		return c.meanOfAll(t, result, own, posted)
	}
	combine := c.desc.Combiner()
	var before []byte
	for from := range t.size {
		one := own
		if from != t.me {
			if err := c.wait(&posted[from].Done); err != nil {
				return err
			}
			one = posted[from].Buf
		}
		switch {
		case from == 0:
			before = one
		case from < t.me:
			combine(before, before, one)
		default:
			combine(result, before, one)
			before = result
		}
	}
	if t.size == 1 {
		kernel.Copy(result, own)
	}
	t.finish(c, result)
	return nil
}

// meanOfAll is combineAll of a mean.
func (c *call) meanOfAll(t team, result, own []byte, posted []*frame.Incoming) error {
	c.operands = slices.Grow(c.operands[:0], t.size)[:t.size]
	for from := range t.size {
		c.operands[from] = own
		if from != t.me {
			if err := c.wait(&posted[from].Done); err != nil {
				return err
			}
			c.operands[from] = posted[from].Buf
		}
	}
	kernel.Mean(c.desc.Type, result, c.operands, t.weights, t.divide)
	return nil
}
