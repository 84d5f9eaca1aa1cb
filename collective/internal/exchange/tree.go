package exchange

import "github.com/hvdrun/hvdrun/collective/internal/frame"

// Agree blocks until every rank has called the same operation. It is a dissemination barrier: a
// rank that returns has heard from all others, directly or through ranks that have compared all
// calls before theirs with their own.
func (c *Call) Agree() error { return c.AgreeAmong(c.WholeTeam()) }

// AgreeAmong is like Agree, for the ranks of a team.
func (c *Call) AgreeAmong(t Team) error {
	step := uint32(0)
	for distance := 1; distance < t.Size; distance *= 2 {
		c.Send(t.Rank((t.Me+distance)%t.Size), step, nil)
		if err := c.Receive(t.Rank((t.Me-distance+t.Size)%t.Size), step, nil); err != nil {
			return err
		}
		step++
	}
	return nil
}

// Disseminate combines data of all ranks by an idempotent operation such as Max, in which a rank's
// data may count twice. It exchanges frames only with the ranks with which Agree does.
func (c *Call) Disseminate(data []byte) error {
	n, rank := c.Size, c.Rank
	combine, in := c.Desc.Combiner(), make([]byte, len(data))
	step := uint32(1)
	for distance := 1; distance < n; distance *= 2 {
		c.Send((rank+distance)%n, step, data)
		if err := c.Receive((rank-distance+n)%n, step, in); err != nil {
			return err
		}
		if err := c.Flush(); err != nil { // data is no longer being sent
			return err
		}
		combine(data, data, in)
		step++
	}
	return nil
}

// TreeStep is the first step of the data of a broadcast; lower steps belong to the agreement.
const TreeStep = 64

// Tree returns a rank's place in the binomial tree of a broadcast: its parent, −1 for the root, and
// its children, those with the largest subtrees first.
func Tree(rank, size, root int) (parent int, children []int) {
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

// BroadcastTree sends data down the tree, each segment as soon as it has arrived. The ranks agree
// on the call first, so that the root, which receives no data, also learns of a mismatch.
func (c *Call) BroadcastTree(data []byte) error {
	if err := c.Agree(); err != nil {
		return err
	}
	parent, children := Tree(c.Rank, c.Size, int(c.Desc.Root))
	var posted [window]*frame.Incoming
	next := 0
	for i := range c.Segments(len(data)) {
		for ; parent >= 0 && next < min(i+window, c.Segments(len(data))); next++ {
			posted[next%window] = c.Post(parent, TreeStep+uint32(next), c.Cut(data, next))
		}
		if parent >= 0 {
			if err := c.wait(&posted[i%window].Done); err != nil {
				return err
			}
		}
		for _, child := range children {
			c.Send(child, TreeStep+uint32(i), c.Cut(data, i))
		}
	}
	return nil
}

// BroadcastBytesTree is like BroadcastTree, for ranks that do not know the length.
func (c *Call) BroadcastBytesTree(data []byte) ([]byte, error) {
	if err := c.Agree(); err != nil {
		return nil, err
	}
	parent, children := Tree(c.Rank, c.Size, int(c.Desc.Root))
	if parent < 0 {
		for i := range c.Frames(len(data)) {
			for _, child := range children {
				c.SendOf(child, TreeStep+uint32(i), uint64(len(data)), c.Cut(data, i))
			}
		}
		return data, nil
	}
	b := Block{Call: c, from: parent, step: TreeStep, size: 1}
	b.got = func(i int, part []byte) {
		for _, child := range children {
			c.SendOf(child, TreeStep+uint32(i), b.count, part)
		}
	}
	if err := b.open(); err != nil {
		return nil, err
	}
	if err := b.Finish(); err != nil {
		return nil, err
	}
	return b.Data, nil
}
