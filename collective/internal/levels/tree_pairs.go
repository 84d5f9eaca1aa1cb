package levels

import (
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// peers are the ranks among which a tree is folded in pairs.
type peers struct {
	others []int // ranks reached by frames
	here   []int // ranks reached in memory, including this one
	meet   func(body func(inMember) error) error
}

// peers returns all ranks of the group.
func (c *Call) peers() peers {
	if c.levels != nil {
		return peers{c.elsewhere(), c.levels.ranks(), c.withMember}
	}
	return peers{others: c.AllOthers(), here: []int{c.Rank}}
}

// foldPairs computes the result piece by piece. It is used if ranks share no memory, if hosts have
// unequal numbers of ranks, or if a rank of a single host has more nodes than fit its slots. Each
// rank gets one share of the piece of all values, computes that share of the result, and gives it
// to all: by frames to ranks of other hosts, and in memory to ranks of its own host. All lengths
// are known, so data is received into its final place, and parts are not copied for other hosts.
func (c *Call) foldPairs(among peers, p *Tree, parts [][]byte, result []byte, size int) error {
	f, others := &c.folding, among.others
	received := make([][]byte, c.Size)
	operands := make([][]byte, len(p.order.Operands))
	count, pieces := len(result)/size, (len(result)+operation.Thresholds.FoldPiece-1)/operation.Thresholds.FoldPiece
	for i := range pieces {
		lo, hi := kernel.Split(count, pieces, i)
		share := sharesOf(lo, hi, size, c.Size)
		from, to := share(c.Rank)
		n := to - from
		f.cutReceived(p, received, c.Rank, n)
		first := c.Receives()
		for _, r := range others {
			for j := range p.counts[r] {
				c.PostAll(r, 0, received[r][j*n:][:n])
			}
		}
		for _, r := range others {
			from, to := share(r)
			for _, part := range parts {
				c.SendAll(r, 0, part[from:to])
			}
		}
		if err := c.exchangeHere(among, parts, share, received); err != nil {
			return err
		}
		if err := c.WaitFor(first, c.Receives()); err != nil {
			return err
		}
		for j, o := range p.order.Operands {
			if o.Rank == c.Rank {
				operands[j] = parts[o.Number][from:to]
			} else {
				operands[j] = received[o.Rank][o.Number*n:][:n]
			}
		}
		f.All(p.order, result[from:to], operands)

		first = c.Receives()
		for _, r := range others {
			from, to := share(r)
			c.PostAll(r, 0, result[from:to])
		}
		for _, r := range others {
			c.SendAll(r, 0, result[from:to])
		}
		if err := c.returnHere(among, share, result); err != nil {
			return err
		}
		if err := c.WaitFor(first, c.Receives()); err != nil {
			return err
		}
	}
	return nil
}

// cutReceived allocates memory for the values of all ranks but own, n bytes of each value.
func (f *folder) cutReceived(p *Tree, received [][]byte, own, n int) {
	total := 0
	for r, k := range p.counts {
		if r != own {
			total += k * n
		}
	}
	f.packed = slices.Grow(f.packed[:0], total)
	rest := f.packed[:total]
	for r, k := range p.counts {
		if r != own {
			received[r], rest = rest[:k*n:k*n], rest[k*n:]
		}
	}
}

// exchangeHere gives every rank of this host its share of parts, and stores the shares that they
// give in received.
func (c *Call) exchangeHere(among peers, parts [][]byte, share func(int) (from, to int), received [][]byte) error {
	here := among.here
	if len(here) == 1 {
		return nil
	}
	f := &c.folding
	given, at := f.given[:0], make([]int, len(here)+1)
	for i, r := range here {
		if r != c.Rank {
			from, to := share(r)
			given = joined(given, parts, from, to)
		}
		at[i+1] = len(given)
	}
	f.given = given
	each := make([][]byte, len(here))
	for i := range here {
		each[i] = given[at[i]:at[i+1]]
	}
	return among.meet(func(x inMember) error {
		return x.m.AllToAll(x.ctx, x.call, each, func(lengths []int) ([][]byte, error) {
			return placeFor(here, c.Rank, lengths, func(r int) []byte { return received[r] })
		})
	})
}

// returnHere gives this rank's share of the result to the ranks of this host.
func (c *Call) returnHere(among peers, share func(int) (from, to int), result []byte) error {
	if len(among.here) == 1 {
		return nil
	}
	of := func(r int) []byte {
		from, to := share(r)
		return result[from:to]
	}
	return among.meet(func(x inMember) error {
		return x.m.AllGather(x.ctx, x.call, of(c.Rank), func(lengths []int) ([][]byte, error) {
			return placeFor(among.here, c.Rank, lengths, of)
		})
	})
}

// placeFor returns the buffers for the data of the ranks of a host. It returns an error if the
// lengths differ from those of the buffers.
func placeFor(here []int, own int, lengths []int, of func(rank int) []byte) ([][]byte, error) {
	all := make([][]byte, len(here))
	for i, r := range here {
		if r == own {
			continue
		}
		if all[i] = of(r); len(all[i]) != lengths[i] {
			return nil, &shareError{r, lengths[i], len(all[i])}
		}
	}
	return all, nil
}
