package collective

import (
	"errors"
	"math"

	"github.com/hvdrun/hvdrun/collective/kernel"
)

const firstMemory = 16 << 20 // taken on the word of a header; more only as bytes arrive

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
	posted []*incoming
}

var errTooLarge = errors.New("sent a length that does not fit memory")

// open waits for the first header and posts as much as fits the first memory.
func (b *block) open() error {
	h, err := b.peek(b.from)
	if err != nil {
		return err
	}
	if h.seq != b.seq { // then it is of an operation that this rank has not called yet
		b.g.fail(gone(errInvalid, b.from))
		return b.lost()
	}
	if h.call.count > uint64(math.MaxInt/b.size) {
		b.g.fail(gone(errTooLarge, b.from))
		return b.lost()
	}
	b.count = h.call.count
	b.total = int(b.count) * b.size
	b.data = make([]byte, min(b.total, firstMemory))
	for i := range max(1, segments(len(b.data))) {
		b.posted = append(b.posted, b.post(b.from, b.step+uint32(i), cut(b.data, i)))
	}
	return nil
}

// finish waits for all of it.
func (b *block) finish() error {
	for i := 0; i < max(1, segments(b.total)); i++ {
		if i == len(b.posted) {
			bigger := make([]byte, min(b.total, 2*len(b.data)))
			copy(bigger, b.data)
			b.data = bigger
			for j := i; j < segments(len(b.data)); j++ {
				b.posted = append(b.posted, b.post(b.from, b.step+uint32(j), cut(b.data, j)))
			}
		}
		if err := b.wait(&b.posted[i].done); err != nil {
			return err
		}
		if b.got != nil {
			b.got(i, cut(b.data, i))
		}
	}
	return nil
}

// exchange sends part(j) to every rank j and returns what they have sent, by rank; nil for this one. Every pair of ranks
// talks directly: the same bytes as a ring, in one step.
func (c *call) exchange(part func(to int) []byte) ([][]byte, error) {
	n, rank, size := c.g.size, c.g.rank, c.desc.dtype.Size()
	longest := 0
	for j := range n {
		if j != rank {
			longest = max(longest, len(part(j)))
		}
	}
	for i := range max(1, segments(longest)) {
		for d := 1; d < n; d++ { // each to another one first
			to := (rank + d) % n
			if p := part(to); i < max(1, segments(len(p))) {
				c.sendOf(to, uint32(i), uint64(len(p)/size), cut(p, i))
			}
		}
	}
	blocks := make([]block, n)
	for d := 1; d < n; d++ {
		from := (rank - d + n) % n
		blocks[from] = block{call: c, from: from, size: size}
		if err := blocks[from].open(); err != nil {
			return nil, err
		}
	}
	all := make([][]byte, n)
	for d := 1; d < n; d++ {
		from := (rank - d + n) % n
		if err := blocks[from].finish(); err != nil {
			return nil, err
		}
		all[from] = blocks[from].data
	}
	return all, nil
}

// reduceScatter puts this rank's part of the reduced data into result. Every rank sends each part to its owner, who combines
// them in the order of the ranks, segment by segment; data is not changed.
func (c *call) reduceScatter(data, result []byte) error {
	n, rank, size := c.g.size, c.g.rank, c.desc.dtype.Size()
	part := func(of int) []byte {
		lo, hi := kernel.Split(len(data)/size, n, of)
		return data[lo*size : hi*size]
	}
	for i := range max(1, segments(len(part(0)))) { // the first part is a longest one
		for d := 1; d < n; d++ {
			to := (rank + d) % n
			if p := part(to); i < max(1, segments(len(p))) {
				c.send(to, uint32(i), cut(p, i))
			}
		}
	}
	combine := c.desc.combiner()
	own := part(rank)
	ahead := 2 // segments posted, of every rank
	if n > 16 {
		ahead = 1
	}
	slots := c.scratch(ahead * n * min(len(own), segment))
	posted := make([]*incoming, ahead*n)
	total, next := max(1, segments(len(own))), 0
	for i := range total {
		for ; next < min(i+ahead, total); next++ {
			for from := range n {
				if from != rank {
					at := next%ahead*n + from
					buf := slots[at*min(len(own), segment):][:len(cut(own, next))]
					posted[at] = c.post(from, uint32(next), buf)
				}
			}
		}
		if err := c.combineAll(combine, cut(result, i), cut(own, i), posted[i%ahead*n:][:n]); err != nil {
			return err
		}
	}
	return nil
}

// combineAll combines one segment of all ranks, in their order.
func (c *call) combineAll(combine combiner, result, own []byte, posted []*incoming) error {
	var before []byte
	for from := range c.g.size {
		one := own
		if from != c.g.rank {
			if err := c.wait(&posted[from].done); err != nil {
				return err
			}
			one = posted[from].buf
		}
		if from == 0 {
			before = one
			continue
		}
		combine(result, before, one)
		before = result
	}
	if c.g.size == 1 {
		copy(result, own)
	}
	if c.desc.reduce == Average {
		c.desc.divide(result, c.g.size)
	}
	return nil
}
