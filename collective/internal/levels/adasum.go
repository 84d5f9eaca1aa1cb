package levels

import (
	"cmp"
	"context"
	"math/bits"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// If ranks of a host share memory, an Adasum has the same bits as over sockets (allReduceDoubling),
// since the tree of pairs is the same. Pairs whose ranks are all on one host are combined there,
// and each rank combines one part of all vectors of its host. The remaining vectors of each host
// are sent to the other hosts once, to the ranks that combine the corresponding part, and the
// results are sent back once. If the hosts have equal numbers of consecutive ranks, a power of two,
// one vector remains on each host. A pair needs products over whole vectors: each rank computes the
// products of its blocks, and all ranks add the products of all blocks in order.

// pair is two ranks whose vectors are combined. The result replaces the vector of the lower rank.
type pair struct{ a, b int }

// adasumTree describes which pairs are combined on a host and which between hosts.
type adasumTree struct {
	here  [][]pair // on this host, level by level
	left  [][]int  // by host, the ranks whose vectors remain after that
	above [][]pair // between the hosts, level by level
}

// newAdasumTree returns the tree of the ranks on the hosts, for a rank of host here.
func newAdasumTree(hosts [][]int, here int) *adasumTree {
	size := 0
	for _, ranks := range hosts {
		size += len(ranks)
	}
	on := make([]int, size) // by rank, the host of all ranks whose vectors were combined in its place; −1 if there are several
	for host, ranks := range hosts {
		for _, r := range ranks {
			on[r] = host
		}
	}
	t := &adasumTree{left: make([][]int, len(hosts))}
	gone := make([]bool, size) // ranks whose vectors have been combined on their host
	level := make([]int, size)
	for r := range level {
		level[r] = r
	}
	for paired := foldedRanks(size); len(level) > 1; paired = len(level) {
		var next []int
		var within, between []pair
		for i := 0; i < paired; i += 2 {
			p := pair{level[i], level[i+1]}
			next = append(next, p.a)
			if host := on[p.a]; host < 0 || host != on[p.b] {
				on[p.a] = -1
				between = append(between, p)
			} else {
				gone[p.b] = true
				if host == here {
					within = append(within, p)
				}
			}
		}
		level = append(next, level[paired:]...)
		if len(within) > 0 {
			t.here = append(t.here, within)
		}
		if len(between) > 0 {
			t.above = append(t.above, between)
		}
	}
	for host, ranks := range hosts {
		for _, r := range ranks {
			if !gone[r] {
				t.left[host] = append(t.left[host], r)
			}
		}
	}
	return t
}

// foldedRanks returns the number of lowest ranks that form the pairs of the first level.
func foldedRanks(size int) int {
	power := 1 << (bits.Len(uint(size)) - 1)
	return cmp.Or(2*(size-power), size)
}

const productsSize = 24 // bytes of the products of one block

// adasumming is an Adasum of large vectors in progress on one rank.
type adasumming struct {
	c      *Call
	t      kernel.Type
	tree   *adasumTree
	blocks int // of a vector
	parts  []adasumPart
	work   []byte
	memory []byte // what take has not returned yet
	taken  int    // bytes that take has returned
}

// adasumPart is consecutive blocks of all vectors that this rank combines.
type adasumPart struct {
	first   int      // number of the first block
	vectors [][]byte // by rank, this part of the vector in that rank's place in the tree; may be nil
}

func (c *Call) newAdasumming(t kernel.Type, bytes int) *adasumming {
	unit := operation.AdasumBlock * t.Size()
	s := &adasumming{c: c, t: t, tree: c.adasum, blocks: (bytes + unit - 1) / unit, memory: c.Kept()}
	s.work = s.take(operation.AdasumWork)
	return s
}

// end makes Scratch keep as much memory as was needed, for the next Adasum.
func (s *adasumming) end() { s.c.Scratch(s.taken) }

// unit returns the size of a block in bytes.
func (s *adasumming) unit() int { return operation.AdasumBlock * s.t.Size() }

// take returns n bytes, aligned for every element type.
func (s *adasumming) take(n int) []byte {
	room := alignedTo(n)
	s.taken += room
	if room > len(s.memory) {
		return make([]byte, room)[:n]
	}
	b := s.memory[:n:n]
	s.memory = s.memory[room:]
	return b
}

// combine combines the pairs of each level. gather gives each rank's part of a buffer, which has
// unit bytes for each block, to all ranks.
func (s *adasumming) combine(levels [][]pair, gather func(level int, buffer []byte, unit int) error) error {
	for i, pairs := range levels {
		unit := len(pairs) * productsSize
		buffer := s.take(s.blocks * unit)
		s.multiply(pairs, kernel.Elements[float64](buffer))
		if err := gather(i, buffer, unit); err != nil {
			return err
		}
		s.add(pairs, kernel.Elements[float64](buffer))
	}
	return nil
}

// multiply sets the products of this rank's blocks.
func (s *adasumming) multiply(pairs []pair, all []float64) {
	size := s.unit()
	for _, part := range s.parts {
		for i, p := range pairs {
			a, b := part.vectors[p.a], part.vectors[p.b]
			for at, block := 0, part.first; at < len(a); at, block = at+size, block+1 {
				end := min(at+size, len(a))
				of := operation.BlockProducts(s.t, a[at:end], b[at:end], s.work)
				copy(all[3*(block*len(pairs)+i):], []float64{of.AB, of.AA, of.BB})
			}
		}
	}
}

// add combines this rank's parts of the pairs. all are the products of all blocks.
func (s *adasumming) add(pairs []pair, all []float64) {
	for i, p := range pairs {
		var total operation.Products
		for block := range s.blocks {
			of := all[3*(block*len(pairs)+i):]
			total.Add(operation.Products{AB: of[0], AA: of[1], BB: of[2]})
		}
		ofA, ofB := total.Shares()
		for _, part := range s.parts {
			a := part.vectors[p.a]
			operation.AddShares(s.t, a, a, part.vectors[p.b], ofA, ofB, s.work)
		}
	}
}

// within combines the vectors of the ranks of this host. Afterwards this rank has its part of the
// remaining vectors. data is this rank's vector.
func (s *adasumming) within(ctx context.Context, h *Host, m *shm.Member, d shm.Desc, data []byte) error {
	parts := h.parts(data, s.unit())
	own := adasumPart{vectors: make([][]byte, s.c.Size)}
	own.first, _ = kernel.Split(s.blocks, len(h.Ranks), m.Index())
	err := m.AllToAll(ctx, d, parts, func(lengths []int) ([][]byte, error) {
		buffers := make([][]byte, len(lengths))
		for i, r := range h.Ranks {
			buffers[i] = parts[m.Index()]
			if i != m.Index() {
				buffers[i] = s.take(len(buffers[i]))
			}
			own.vectors[r] = buffers[i]
		}
		return buffers, nil // the members have compared the lengths with their calls
	})
	if err != nil {
		return err
	}
	s.parts = []adasumPart{own}
	return s.combine(s.tree.here, func(_ int, buffer []byte, unit int) error {
		return m.Gather(ctx, d, buffer, unit, m.Members())
	})
}

// allReduceAdasum performs Adasum among ranks on several hosts.
func (c *Call) allReduceAdasum(data []byte) error {
	if len(data) <= operation.Thresholds.AdasumThroughOne {
		return c.adasumLeaders(data)
	}
	s := c.newAdasumming(c.Desc.Type, len(data))
	defer s.end()
	h := c.levels
	first, _ := kernel.Split(s.blocks, len(h.ranks()), h.place)
	s.parts = []adasumPart{{first: first, vectors: make([][]byte, c.Size)}}
	s.parts[0].vectors[c.Rank] = data // for a rank that is alone on its host
	on := c.host.Load()
	if err := c.inMemory(func(m *shm.Member, d shm.Desc) error { return s.within(c.Ctx, on, m, d, data) }); err != nil {
		return err
	}
	return c.adasumBetween(s, data)
}

// adasumBetween combines the vectors between hosts, after each rank has its part of the remaining
// vectors of its host.
func (c *Call) adasumBetween(s *adasumming, data []byte) error {
	c.crossings[0] = c.cross(c.crossings[0][:0], data, s.unit())
	all := c.crossings[0]
	received := c.Receives()
	mine := s.parts[0]
	s.parts = nil
	for i := range all {
		x := &all[i]
		x.step = s.resultStep() - 1
		s.parts = append(s.parts, c.adasumCross(s, x, mine))
	}
	if err := c.WaitFor(received, c.Receives()); err != nil {
		return err
	}
	err := s.combine(s.tree.above, func(level int, buffer []byte, unit int) error {
		c.crossings[1] = c.cross(c.crossings[1][:0], buffer, unit)
		for i := range c.crossings[1] {
			c.crossings[1][i].step = uint32(level)
		}
		return c.putTogether(c.crossings[1], buffer, unit)
	})
	if err != nil {
		return err
	}
	for i := range all {
		kernel.Copy(all[i].piece(all[i].Me), s.parts[i].vectors[0])
	}
	if err := c.Flush(); err != nil { // the results are received into memory that is being sent
		return err
	}
	return c.putTogether(all, data, s.unit())
}

// resultStep is the step of the frames that carry results.
func (s *adasumming) resultStep() uint32 { return uint32(len(s.tree.above)) + 1 }

// adasumCross starts to send the parts of a crossing to the ranks that combine them, and posts the
// receives for this rank's part of the remaining vectors of the other hosts.
func (c *Call) adasumCross(s *adasumming, x *crossing, mine adasumPart) adasumPart {
	h := c.levels
	at := (x.first - mine.first) * x.unit // offset of the crossing in this rank's part of its host's vectors
	begin := func(place int) int {
		lo, _ := kernel.Split((len(x.data)+x.unit-1)/x.unit, x.Size, place)
		return lo
	}
	own := adasumPart{first: x.first + begin(x.Me), vectors: make([][]byte, c.Size)}
	for _, r := range s.tree.left[h.here] {
		whole := mine.vectors[r][at:][:len(x.data)]
		for d := 0; d < x.Size; d++ {
			to := (x.Me + d) % x.Size
			part := kernel.Part(whole, x.unit, x.Size, to)
			if d == 0 {
				own.vectors[r] = part
				continue
			}
			c.SendAll(x.Rank(to), 0, part)
		}
	}
	for d := 1; d < x.Size; d++ {
		from := (x.Me + d) % x.Size
		for _, r := range s.tree.left[from] {
			own.vectors[r] = s.take(len(x.piece(x.Me)))
			for i := range c.Frames(len(own.vectors[r])) {
				c.Post(x.Rank(from), 0, c.Cut(own.vectors[r], i))
			}
		}
	}
	return own
}

// putTogether gives this rank's pieces of data, in units of unit bytes, to all ranks, and receives
// theirs.
func (c *Call) putTogether(all []crossing, data []byte, unit int) error {
	for i := range all {
		own := all[i].piece(all[i].Me)
		for s := range c.Frames(len(own)) {
			c.sendResult(&all[i], c.Cut(own, s))
		}
	}
	first := c.Receives()
	c.postResults(all)
	if err := c.WaitFor(first, c.Receives()); err != nil {
		return err
	}
	return c.spread(data, unit)
}

// adasumLeaders performs Adasum with small vectors: all ranks of a host combine the host's vectors,
// and the first ranks of all hosts exchange and combine the remaining vectors.
func (c *Call) adasumLeaders(data []byte) error {
	h, vectors := c.levels, make([][]byte, c.Size)
	most := len(h.ranks())
	for _, left := range c.adasum.left {
		most += len(left)
	}
	memory := c.Scratch(operation.AdasumWork + most*alignedTo(len(data)))
	work := memory[:operation.AdasumWork]
	memory = memory[operation.AdasumWork:]
	vectors[c.Rank] = data
	on := c.host.Load()
	err := c.inMemory(func(m *shm.Member, d shm.Desc) (err error) {
		memory, err = on.adasumAll(c.Ctx, m, d, vectors, memory)
		return err
	})
	if err != nil {
		return err
	}
	combineAdasum(c.Desc.Type, c.adasum.here, vectors, work)
	if h.leads() {
		if err := c.adasumAmongLeaders(data, vectors, memory, work); err != nil {
			return err
		}
	}
	return c.inMemory(func(m *shm.Member, d shm.Desc) error { return m.Broadcast(c.Ctx, d, data, 0) })
}

func (c *Call) adasumAmongLeaders(data []byte, vectors [][]byte, memory, work []byte) error {
	h, tree := c.levels, c.adasum
	received := c.Receives()
	for _, host := range h.others() {
		for _, r := range tree.left[h.here] {
			c.Send(h.leaders.Rank(host), 0, vectors[r])
		}
		for _, r := range tree.left[host] {
			vectors[r] = memory[:len(data)]
			memory = memory[alignedTo(len(data)):]
			c.Post(h.leaders.Rank(host), 0, vectors[r])
		}
	}
	if err := c.Flush(); err != nil { // results overwrite memory that is being sent
		return err
	}
	if err := c.WaitFor(received, c.Receives()); err != nil {
		return err
	}
	combineAdasum(c.Desc.Type, tree.above, vectors, work)
	kernel.Copy(data, vectors[0])
	return nil
}

// adasumAll gathers the vectors of all ranks of this host into memory, and returns the rest of
// memory. vectors already has the vector of this rank.
func (h *Host) adasumAll(ctx context.Context, m *shm.Member, d shm.Desc, vectors [][]byte, memory []byte) (rest []byte, err error) {
	own := vectors[h.c.Rank]
	return memory[len(h.Ranks)*alignedTo(len(own)):], m.AllGather(ctx, d, own, func(lengths []int) ([][]byte, error) {
		buffers := make([][]byte, len(lengths))
		for i, r := range h.Ranks {
			if buffers[i] = own; i != m.Index() {
				buffers[i] = memory[i*alignedTo(len(own)):][:len(own)]
			}
			vectors[r] = buffers[i]
		}
		return buffers, nil // the members have compared the lengths with their calls
	})
}

// combineAdasum combines whole vectors.
func combineAdasum(t kernel.Type, levels [][]pair, vectors [][]byte, work []byte) {
	for _, pairs := range levels {
		for _, p := range pairs {
			operation.AddAdaptively(t, vectors[p.a], vectors[p.a], vectors[p.b], work)
		}
	}
}

// alignedTo returns n rounded up, so that data after n bytes is aligned for every element type.
func alignedTo(n int) int { return (n + operation.Widest - 1) / operation.Widest * operation.Widest }

// AdasumHere performs Adasum if all ranks of the group are on one host.
func (h *Host) AdasumHere(ctx context.Context, m *shm.Member, call shm.Desc, t kernel.Type, data []byte) error {
	c := h.c
	if len(data) <= operation.Thresholds.AdasumAlone {
		vectors := make([][]byte, len(h.Ranks))
		vectors[c.Rank] = data
		memory := c.Scratch(operation.AdasumWork + len(h.Ranks)*alignedTo(len(data)))
		if _, err := h.adasumAll(ctx, m, call, vectors, memory[operation.AdasumWork:]); err != nil {
			return err
		}
		combineAdasum(t, c.adasum.here, vectors, memory[:operation.AdasumWork])
		kernel.Copy(data, vectors[0])
		return nil
	}
	s := c.newAdasumming(t, len(data))
	defer s.end()
	if err := s.within(ctx, h, m, call, data); err != nil {
		return err
	}
	kernel.Copy(kernel.Part(data, s.unit(), m.Members(), m.Index()), s.parts[0].vectors[0])
	return m.Gather(ctx, call, data, s.unit(), m.Members())
}
