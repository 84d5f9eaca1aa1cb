// Package micro divides the microbatches of a step among the ranks of a world.
package micro

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
)

// Accept returns which of the nodes that the ranks hold count, by rank, and the microbatches that
// are under none of them, ascending. A node does not count if a tree of so many leaves lacks it, or
// if one of its leaves is under an earlier node that counts. The result depends on the arguments
// alone.
func Accept(leaves int, held [][]collective.Node) (kept [][]collective.Node, missing []int) {
	taken := make([]bool, leaves)
	kept = make([][]collective.Node, len(held))
	for r, nodes := range held {
		for _, n := range nodes {
			if !valid(n, leaves) || slices.Contains(taken[n.First():n.End(leaves)], true) {
				continue
			}
			for i := n.First(); i < n.End(leaves); i++ {
				taken[i] = true
			}
			kept[r] = append(kept[r], n)
		}
	}
	for i, t := range taken {
		if !t {
			missing = append(missing, i)
		}
	}
	return kept, missing
}

func valid(n collective.Node, leaves int) bool {
	return n.Level >= 0 && n.Level <= collective.Root(leaves).Level && n.Index >= 0 && n.Index <= leaves>>n.Level && n.First() < leaves
}

// Share divides microbatches, which are in ascending order, among ranks. Each rank gets as few
// nodes of the binary tree as can be, so that few sums are reduced; the numbers of microbatches
// differ by one at most. With costs, the times that one microbatch takes on each rank, they are
// such that the slowest rank needs the least time; a cost of 0 is unknown, and then all are taken
// as equal.
func Share(missing []int, ranks int, costs []uint64) [][]int {
	shares := make([][]int, ranks)
	counts := lengths(len(missing), ranks, costs)
	free := blocks(missing)
	for level := len(free) - 1; level >= 0; level-- {
		left := free[level]
		slices.Sort(left)
		for r := range shares {
			for counts[r]>>level > 0 && len(left) > 0 {
				for i := range 1 << level {
					shares[r] = append(shares[r], left[0]+i)
				}
				counts[r] -= 1 << level
				left = left[1:]
			}
		}
		for _, first := range left { // none: level 0 has as many as the ranks still get
			free[level-1] = append(free[level-1], first, first+1<<(level-1))
		}
	}
	for _, s := range shares {
		slices.Sort(s)
	}
	return shares
}

// blocks returns the largest nodes that microbatches make up: by level, the first one of each.
func blocks(all []int) (firsts [][]int) {
	for i := 0; i < len(all); {
		n := 1
		for all[i]%(2*n) == 0 && i+2*n <= len(all) && all[i+2*n-1] == all[i]+2*n-1 {
			n *= 2
		}
		level := bits.Len(uint(n)) - 1
		for len(firsts) <= level {
			firsts = append(firsts, nil)
		}
		firsts[level] = append(firsts[level], all[i])
		i += n
	}
	return firsts
}

func lengths(n, ranks int, costs []uint64) []int {
	all := make([]int, ranks)
	if len(costs) != ranks || slices.Contains(costs, 0) {
		for r := range all {
			all[r] = n / ranks
			if r < n%ranks {
				all[r]++
			}
		}
		return all
	}
	for range n { // the next one goes to where it is done first
		best, least := 0, [2]uint64{}
		for r := range all {
			hi, lo := bits.Mul64(costs[r], uint64(all[r])+1)
			if done := [2]uint64{hi, lo}; r == 0 || slices.Compare(done[:], least[:]) < 0 {
				best, least = r, done
			}
		}
		all[best]++
	}
	return all
}

// Coalesce replaces halves by the node that they make up, as long as there are any, and returns the
// nodes in ascending order of their leaves.
func Coalesce(nodes []collective.Node, leaves int) []collective.Node {
	has := make(map[collective.Node]bool, len(nodes))
	for _, n := range nodes {
		for {
			up, with := Above(n, leaves)
			if with != nil && !has[*with] || n.Level == collective.Root(leaves).Level {
				break
			}
			if with != nil {
				delete(has, *with)
			}
			n = up
		}
		has[n] = true
	}
	all := make([]collective.Node, 0, len(has))
	for n := range has {
		all = append(all, n)
	}
	slices.SortFunc(all, func(a, b collective.Node) int { return cmp.Compare(a.First(), b.First()) })
	return all
}

// Above returns the node that n is a half of, and the other half; nil: that one is empty, and both
// nodes have the same value.
func Above(n collective.Node, leaves int) (up collective.Node, with *collective.Node) {
	if s := n.Sibling(); s.First() < leaves {
		with = &s
	}
	return n.Parent(), with
}
