package collective

import "github.com/hvdrun/hvdrun/collective/internal/frame"

// agree returns once every rank has called the operation that this one has: a dissemination
// barrier, in which a rank that returns has heard from all the others, directly or through ranks
// that found every call before them equal to theirs.
func (c *call) agree() error { return c.agreeAmong(c.wholeTeam()) }

// agreeAmong is agree of a team.
func (c *call) agreeAmong(t team) error {
	step := uint32(0)
	for distance := 1; distance < t.size; distance *= 2 {
		c.send(t.rank((t.me+distance)%t.size), step, nil)
		if err := c.receive(t.rank((t.me-distance+t.size)%t.size), step, nil); err != nil {
			return err
		}
		step++
	}
	return nil
}

// disseminate combines data of all ranks by an operation that may take what a rank has twice, such
// as Max. It meets the ranks that agree meets, and no others.
func (c *call) disseminate(data []byte) error {
	n, rank := c.g.size, c.g.rank
	combine, in := c.desc.Combiner(), make([]byte, len(data))
	step := uint32(1)
	for distance := 1; distance < n; distance *= 2 {
		c.send((rank+distance)%n, step, data)
		if err := c.receive((rank-distance+n)%n, step, in); err != nil {
			return err
		}
		if err := c.flush(); err != nil { // data is sent no more
			return err
		}
		combine(data, data, in)
		step++
	}
	return nil
}

const treeStep = 64 // first step of the data of a broadcast, after those of the agreement

// tree gives this rank's place in the binomial tree of a broadcast: its parent, −1 for the root,
// and its children, those with the most ranks behind them first.
func tree(rank, size, root int) (parent int, children []int) {
	place := (rank - root + size) % size
	parent = -1
	low := 1
	for low < size && place&low == 0 {
		low *= 2
	}
	if place != 0 {
		parent = (place - low + root) % size
	}
	for d := low / 2; d > 0; d /= 2 {
		if place+d < size {
			children = append(children, (place+d+root)%size)
		}
	}
	return parent, children
}

// broadcastTree sends data down the tree, each segment as soon as it has arrived. The ranks agree
// on the call first, so that a mismatch reaches the root too, which receives nothing otherwise.
func (c *call) broadcastTree(data []byte) error {
	if err := c.agree(); err != nil {
		return err
	}
	parent, children := tree(c.g.rank, c.g.size, int(c.desc.Root))
	var posted [window]*frame.Incoming
	next := 0
	for i := range c.segments(len(data)) {
		for ; parent >= 0 && next < min(i+window, c.segments(len(data))); next++ {
			posted[next%window] = c.post(parent, treeStep+uint32(next), c.cut(data, next))
		}
		if parent >= 0 {
			if err := c.wait(&posted[i%window].Done); err != nil {
				return err
			}
		}
		for _, child := range children {
			c.send(child, treeStep+uint32(i), c.cut(data, i))
		}
	}
	return nil
}

// broadcastBytesTree is broadcast for ranks that do not know the length.
func (c *call) broadcastBytesTree(data []byte) ([]byte, error) {
	if err := c.agree(); err != nil {
		return nil, err
	}
	parent, children := tree(c.g.rank, c.g.size, int(c.desc.Root))
	if parent < 0 {
		for i := range c.frames(len(data)) {
			for _, child := range children {
				c.sendOf(child, treeStep+uint32(i), uint64(len(data)), c.cut(data, i))
			}
		}
		return data, nil
	}
	b := block{call: c, from: parent, step: treeStep, size: 1}
	b.got = func(i int, part []byte) {
		for _, child := range children {
			c.sendOf(child, treeStep+uint32(i), b.count, part)
		}
	}
	if err := b.open(); err != nil {
		return nil, err
	}
	if err := b.finish(); err != nil {
		return nil, err
	}
	return b.data, nil
}
