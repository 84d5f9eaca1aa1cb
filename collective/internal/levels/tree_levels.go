package levels

import (
	"github.com/hvdrun/hvdrun/collective/internal/fold"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// twoLevels describes how a tree is reduced within hosts and then between them. It depends only on
// the tree and the hosts.
type twoLevels struct {
	of   *Tree
	here []*fold.Program // programs of the nodes all of whose leaves are on this host; the operands are the parts of its ranks, by place
	each []int           // by host, the number of such nodes
	top  *fold.Program   // program whose operands are these nodes, by host
}

// levelsOf returns the two levels of a tree, or nil if operations have one level or the hosts have
// unequal numbers of ranks. The result is cached until another tree is reduced.
func (c *Call) levelsOf(p *Tree) *twoLevels {
	h := c.levels
	if h == nil || h.column.Size == 0 {
		return nil
	}
	f := &c.folding
	if f.levels != nil && f.levels.of == p {
		return f.levels
	}
	l := &twoLevels{of: p, each: make([]int, len(h.hosts))}
	at := map[fold.Node]fold.Operand{}
	for host, ranks := range h.hosts {
		held := map[fold.Node]fold.Operand{}
		for place, r := range ranks {
			for i, n := range p.held[r] {
				held[n] = fold.Operand{Rank: place, Number: i}
			}
		}
		for _, n := range fold.Largest(fold.Root(p.leaves), p.leaves, held) {
			at[n] = fold.Operand{Rank: host, Number: l.each[host]}
			l.each[host]++
			if host == h.here {
				program, _ := fold.Compile(n, p.leaves, held)
				l.here = append(l.here, program)
			}
		}
	}
	l.top, _ = fold.Compile(fold.Root(p.leaves), p.leaves, at)
	f.levels = l
	return l
}

// foldHierarchical computes the result piece by piece. Each rank of a host gets one share of the
// values of the host's ranks, and reduces it as far as the tree allows. The ranks with the same
// place on all hosts reduce their shares together, and the ranks of each host exchange the results.
func (c *Call) foldHierarchical(p *Tree, l *twoLevels, parts [][]byte, result []byte, size int) error {
	h := c.levels
	count, pieces := len(result)/size, (len(result)+operation.Thresholds.HostPiece-1)/operation.Thresholds.HostPiece
	for i := range pieces {
		lo, hi := kernel.Split(count, pieces, i)
		share := sharesOf(lo, hi, size, len(h.ranks()))
		if err := c.Flush(); err != nil { // sent memory is about to be reused
			return err
		}
		from, to := share(h.place)
		operands, err := c.gatherShares(p, parts, share)
		if err != nil {
			return err
		}
		if err := c.foldColumn(l, operands, result[from:to], size); err != nil {
			return err
		}
		if err := c.spread(result[lo*size:hi*size], size); err != nil {
			return err
		}
	}
	return nil
}

// gatherShares returns this rank's share of the values of all ranks of its host, by place: the
// shares of a rank's parts one after another.
func (c *Call) gatherShares(p *Tree, parts [][]byte, share func(place int) (from, to int)) ([][]byte, error) {
	h := c.levels
	from, to := share(h.place)
	given := c.folding.cutParts(parts, len(h.ranks()), share)
	all := [][]byte{given[h.place]} // for a rank that is alone on its host
	err := c.withMember(func(x inMember) (err error) {
		all, err = x.allToAll(given, p, to-from)
		return err
	})
	return all, err
}

// foldColumn computes result, this rank's share of the result, from the shares of its host and
// those of the ranks with the same place on the other hosts.
func (c *Call) foldColumn(l *twoLevels, shares [][]byte, result []byte, size int) error {
	t, n := c.levels.column, len(result)
	f, piece := &c.folding, sharesOf(0, n/size, size, t.Size)
	// The pieces of this host's nodes, followed by those that the other hosts send.
	own := f.room.Take(l.each[t.Me] * n)
	for host, at := 0, 0; host < t.Size; host++ {
		from, to := piece(host)
		for i := range l.here {
			f.All(l.here[i], own[at:at+to-from], pickShares(l.here[i], shares, n, from, to))
			at += to - from
		}
		if host != t.Me {
			c.SendAll(t.Rank(host), 0, own[at-l.each[t.Me]*(to-from):at])
		}
	}
	from, to := piece(t.Me)
	received, first := make([][]byte, t.Size), c.Receives()
	for d := 1; d < t.Size; d++ {
		host := (t.Me + d) % t.Size
		received[host] = f.room.Take(l.each[host] * (to - from))
		c.PostAll(t.Rank(host), 0, received[host])
	}
	if err := c.WaitFor(first, c.Receives()); err != nil {
		return err
	}
	received[t.Me] = own[l.each[t.Me]*from : l.each[t.Me]*to]
	f.Finish = f.atRoot
	f.All(l.top, result[from:to], l.top.Pick(received, to-from))
	f.Finish = nil
	first = c.Receives()
	for d := 1; d < t.Size; d++ {
		host := (t.Me + d) % t.Size
		c.SendAll(t.Rank(host), 0, result[from:to])
		a, b := piece(host)
		c.PostAll(t.Rank(host), 0, result[a:b])
	}
	return c.WaitFor(first, c.Receives())
}

// pickShares returns the bytes [from, to) of each operand of a program; operands have n bytes.
func pickShares(p *fold.Program, shares [][]byte, n, from, to int) [][]byte {
	all := p.Pick(shares, n)
	for i := range all {
		all[i] = all[i][from:to]
	}
	return all
}
