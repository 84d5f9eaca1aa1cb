package collective

import "github.com/hvdrun/hvdrun/collective/kernel"

const (
	segment     = 256 << 10 // bytes of one frame of a large operation; fits a core's second-level cache with its partner
	smallReduce = 8 << 10   // up to here an AllReduce exchanges whole buffers
	window      = 4         // receives posted ahead, so that the next segments arrive while one is reduced
)

// segments is the number of frames that n bytes take; none for nothing.
func segments(n int) int { return (n + segment - 1) / segment }

// cut returns segment i of b.
func cut(b []byte, i int) []byte { return b[i*segment : min((i+1)*segment, len(b))] }

func (c *call) allReduce(data []byte) error {
	if len(data) <= smallReduce || c.g.size == 1 {
		return c.doubling(data)
	}
	return c.ring(data)
}

// doubling is recursive doubling: in each step a rank exchanges all it has with one at twice the distance. Where the number of
// ranks is no power of two, the first few fold in pairs before and unfold after. Both partners combine lower ranks
// first, so that their results are equal in every bit.
func (c *call) doubling(data []byte) error {
	combine := c.desc.combiner()
	rank, power := c.g.rank, 1
	for power*2 <= c.g.size {
		power *= 2
	}
	folded := 2 * (c.g.size - power) // ranks that fold in pairs
	me := rank - folded/2            // place among the ranks that stay
	if rank < folded {
		me = rank / 2
	}
	other := c.scratch(len(data))
	if rank < folded && rank%2 == 1 {
		c.send(rank-1, 0, data)
		if err := c.flush(); err != nil { // the result comes into the same memory
			return err
		}
		return c.receive(rank-1, 100, data)
	}
	if rank < folded {
		if err := c.receive(rank+1, 0, other); err != nil {
			return err
		}
		combine(data, data, other)
	}
	for step, distance := uint32(1), 1; distance < power; step, distance = step+1, distance*2 {
		peer := me ^ distance
		if peer < folded/2 {
			peer *= 2
		} else {
			peer += folded / 2
		}
		sent := c.send(peer, step, data)
		if err := c.receive(peer, step, other); err != nil {
			return err
		}
		if err := c.wait(&sent.done); err != nil {
			return err
		}
		if peer < rank {
			combine(data, other, data)
		} else {
			combine(data, data, other)
		}
	}
	if c.desc.reduce == Average {
		c.desc.divide(data, c.g.size)
	}
	if rank < folded {
		c.send(rank+1, 100, data)
	}
	return nil
}

// ring is the pipelined ring. The data is cut into one chunk per rank and each chunk into segments. In the first n−1 rounds a
// chunk goes around and every rank adds its part; the last of them owns the result and divides it for an average; in
// the other n−1 rounds the result goes around. A segment is passed on as soon as it is reduced, not when its chunk is.
type ring struct {
	*call
	data        []byte
	left, right int
	sent        []int // sends before those of round i
	slots       []byte
	posted      []*incoming // window, by position
	at          cursor      // next receive to post
	position    int         // its position
}

// cursor walks over the segments that a rank receives, round by round.
type cursor struct{ round, segment int }

func (c *call) ring(data []byte) error {
	n := c.g.size
	r := ring{call: c, data: data, left: (c.g.rank + n - 1) % n, right: (c.g.rank + 1) % n,
		sent: make([]int, 2*n-1), slots: c.scratch(window * segment), posted: make([]*incoming, window)}
	for i := 1; i < len(r.sent); i++ {
		r.sent[i] = r.sent[i-1] + segments(len(r.chunk(i-1)))
	}
	own := r.chunk(0)
	for i := range segments(len(own)) {
		c.send(r.right, 0, cut(own, i))
	}
	combine := c.desc.combiner()
	done := 0
	for here := r.skip(cursor{1, 0}); here.round <= 2*n-2; here = r.skip(cursor{here.round, here.segment + 1}) {
		if err := r.postUpTo(done); err != nil {
			return err
		}
		in := r.posted[done%window]
		if err := c.wait(&in.done); err != nil {
			return err
		}
		part := cut(r.chunk(here.round), here.segment)
		if here.round < n {
			combine(part, in.buf, part)
		}
		if here.round == n-1 && c.desc.reduce == Average {
			c.desc.divide(part, n)
		}
		if here.round < 2*n-2 {
			c.send(r.right, uint32(here.round), part)
		}
		done++
	}
	return nil
}

// chunk is what this rank sends in a round, and has received in the round before: its own first, then those of the ranks to
// its left.
func (r *ring) chunk(round int) []byte {
	n, size := r.g.size, r.desc.dtype.Size()
	i := ((r.g.rank-round)%n + n) % n
	lo, hi := kernel.Split(len(r.data)/size, n, i)
	return r.data[lo*size : hi*size]
}

// skip moves past the end of a chunk; round 2n−1 is the end.
func (r *ring) skip(at cursor) cursor {
	for at.round <= 2*r.g.size-2 && at.segment >= segments(len(r.chunk(at.round))) {
		at = cursor{at.round + 1, 0}
	}
	return at
}

// postUpTo posts receives ahead of the one at position done, and that one itself in any case. A result comes into the memory
// from which this rank's part was sent, so that send must be complete: it waits for it only where nothing else can go on,
// since the peer's own progress may depend on what is posted here.
func (r *ring) postUpTo(done int) error {
	if r.position == 0 {
		r.at = r.skip(cursor{1, 0})
	}
	n := r.g.size
	for ; r.at.round <= 2*n-2 && r.position < done+window; r.position++ {
		part := cut(r.chunk(r.at.round), r.at.segment)
		buf := r.slots[r.position%window*segment:][:len(part)]
		if r.at.round >= n {
			before := r.sent[r.at.round-n] + r.at.segment
			if r.position > done && (before >= r.outUsed || !r.outs[before].done.Load()) {
				return nil
			}
			if err := r.wait(&r.outs[before].done); err != nil {
				return err
			}
			buf = part
		}
		r.posted[r.position%window] = r.post(r.left, uint32(r.at.round-1), buf)
		r.at = r.skip(cursor{r.at.round, r.at.segment + 1})
	}
	return nil
}
