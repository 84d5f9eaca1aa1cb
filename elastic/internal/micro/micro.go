// Package micro divides the microbatches of a step among the ranks of a world: Accept determines
// what the ranks already hold, and Share distributes the rest.
package micro

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
)

// Accept determines which of the nodes held by the ranks count. It returns these nodes by rank, and
// the microbatches that are under none of them, in ascending order. A node does not count if a tree
// with the given number of leaves lacks it, or if one of its leaves is under an earlier node that
// counts. The result depends only on the arguments.
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
// nodes of the binary tree as possible, so that few sums are reduced. Without costs, the numbers of
// microbatches of two ranks differ by at most one. costs are the times that one microbatch takes on
// each rank; with costs, the shares are such that the last rank to finish does so as early as
// possible. If a cost is 0, which means unknown, all costs are taken as equal.
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
		for _, first := range left { // never at level 0, which has as many as the ranks still get
			free[level-1] = append(free[level-1], first, first+1<<(level-1))
		}
	}
	for _, s := range shares {
		slices.Sort(s)
	}
	return shares
}

// blocks returns the largest nodes that the microbatches form: by level, the first microbatch of
// each node.
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
	for range n { // the next one goes to the rank that would finish it first
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

// Coalesce repeatedly replaces the two halves of a node by the node, and returns the resulting
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

// Above returns the node of which n is a half, and the other half; nil: the other half is empty, so
// that both nodes have the same value.
func Above(n collective.Node, leaves int) (up collective.Node, with *collective.Node) {
	if s := n.Sibling(); s.First() < leaves {
		with = &s
	}
	return n.Parent(), with
}
