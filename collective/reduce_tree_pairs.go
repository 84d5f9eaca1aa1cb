package collective

import "slices"

// foldPairs computes the result piece by piece, where hosts share no memory or have unequal numbers
// of ranks. Each rank gets one share of the piece of all values, computes that share of the result,
// and gives it to all: directly to ranks of other hosts, to those of its own in memory. All lengths
// are known, so what comes is received where it is needed, and nothing of parts is copied for other
// hosts.
func (c *call) foldPairs(p *Partials, parts [][]byte, result []byte, size int) error {
	g, f := c.g, &c.g.folding
	others, here := c.allOthers(), []int{g.rank}
	if g.levels != nil {
		others, here = c.elsewhere(), g.levels.ranks()
	}
	received := make([][]byte, g.size)
	operands := make([][]byte, len(p.order.operands))
	count, pieces := len(result)/size, (len(result)+thresholds.foldPiece-1)/thresholds.foldPiece
	for i := range pieces {
		share := shares(count, size, pieces, i, g.size)
		from, to := share(g.rank)
		n := to - from
		f.cutReceived(p, received, g.rank, n)
		first := c.inUsed
		for _, r := range others {
			for j := range p.counts[r] {
				c.postAll(r, 0, received[r][j*n:][:n])
			}
		}
		for _, r := range others {
			from, to := share(r)
			for _, part := range parts {
				c.sendAll(r, 0, part[from:to])
			}
		}
		if err := c.exchangeHere(here, p, parts, share, received); err != nil {
			return err
		}
		if err := c.waitFor(first, c.inUsed); err != nil {
			return err
		}
		for j, o := range p.order.operands {
			if o.rank == g.rank {
				operands[j] = parts[o.number][from:to]
			} else {
				operands[j] = received[o.rank][o.number*n:][:n]
			}
		}
		f.all(result[from:to], operands)

		first = c.inUsed
		for _, r := range others {
			from, to := share(r)
			c.postAll(r, 0, result[from:to])
		}
		for _, r := range others {
			c.sendAll(r, 0, result[from:to])
		}
		if err := c.returnHere(here, share, result); err != nil {
			return err
		}
		if err := c.waitFor(first, c.inUsed); err != nil {
			return err
		}
	}
	return nil
}

// cutReceived makes room for the values of all ranks but the own one, n bytes of each.
func (f *folder) cutReceived(p *Partials, received [][]byte, own, n int) {
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

// exchangeHere gives every rank of this host its share of parts, and puts what they give into
// received.
func (c *call) exchangeHere(here []int, p *Partials, parts [][]byte, share func(int) (from, to int), received [][]byte) error {
	if len(here) == 1 {
		return nil
	}
	f := &c.g.folding
	given, at := f.given[:0], make([]int, len(here)+1)
	for i, r := range here {
		if r != c.g.rank {
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
	return c.withMember(func(x inMember) error {
		return x.m.AllToAll(x.ctx, x.call, each, func(lengths []int) ([][]byte, error) {
			return placeFor(here, c.g.rank, lengths, func(r int) []byte { return received[r] })
		})
	})
}

// returnHere gives this rank's share of the result to the ranks of this host.
func (c *call) returnHere(here []int, share func(int) (from, to int), result []byte) error {
	if len(here) == 1 {
		return nil
	}
	return c.withMember(func(x inMember) error { return x.returnShare(share, result) })
}

// placeFor returns where what the ranks of a host give is put, if the lengths are those.
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
