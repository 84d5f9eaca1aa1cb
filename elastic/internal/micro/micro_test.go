package micro

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// TestShare: every microbatch is assigned to one rank, and the sizes of the shares are inversely
// proportional to the ranks' costs, as far as possible.
func TestShare(t *testing.T) {
	for _, c := range []struct {
		n, ranks int
		costs    []uint64
		want     []int
	}{
		{0, 3, nil, []int{0, 0, 0}},
		{2, 3, nil, []int{1, 1, 0}},
		{32, 3, nil, []int{11, 11, 10}},
		{32, 4, []uint64{1, 1, 1, 1}, []int{8, 8, 8, 8}},
		{32, 2, []uint64{3, 1}, []int{8, 24}},
		{5, 2, []uint64{1000, 1}, []int{0, 5}},
		{4, 2, []uint64{0, 7}, []int{2, 2}},
		{4, 2, []uint64{7}, []int{2, 2}},
		{3, 2, []uint64{1 << 63, 1 << 63}, []int{2, 1}},
	} {
		missing := make([]int, c.n)
		for i := range missing {
			missing[i] = 3 * i
		}
		shares := Share(missing, c.ranks, c.costs)
		var got []int
		for _, s := range shares {
			got = append(got, len(s))
		}
		if !slices.Equal(got, c.want) || !slices.Equal(slices.Concat(shares...), missing) {
			t.Errorf("%d among %d ranks with costs %v: %v", c.n, c.ranks, c.costs, shares)
		}
	}
}

// TestOneNode: if the number of microbatches is the number of ranks times a power of two, each rank
// has one node. docs/steps.md has examples.
func TestOneNode(t *testing.T) {
	for ranks := 1; ranks <= 9; ranks++ {
		for leaves := ranks; leaves <= 256; leaves *= 2 {
			if got := nodesOfAll(leaves, ranks); got != ranks {
				t.Errorf("%d microbatches, %d ranks: %d nodes", leaves, ranks, got)
			}
		}
	}
	for leaves, want := range map[int][]int{24: {1, 4, 3, 8, 9, 6, 11, 16}, 32: {1, 2, 8, 4, 12, 12, 11, 8},
		40: {1, 4, 9, 8, 5, 16, 14, 16}, 48: {1, 4, 3, 8, 10, 6, 20, 16}} {
		for i, n := range want {
			if got := nodesOfAll(leaves, i+1); got != n {
				t.Errorf("%d microbatches, %d ranks: %d nodes, not %d", leaves, i+1, got, n)
			}
		}
	}
}

func nodesOfAll(leaves, ranks int) (n int) {
	_, missing := Accept(leaves, nil)
	for _, share := range Share(missing, ranks, nil) {
		var nodes []collective.Node
		for _, i := range share {
			nodes = append(nodes, collective.Node{Index: i})
		}
		n += len(Coalesce(nodes, leaves))
	}
	return n
}

// TestShareTakesNodes: if all microbatches are shared, each share consists of as few nodes as its
// length has one bits. The shares of a subset are a partition of it.
func TestShareTakesNodes(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		leaves, ranks := 1<<r.IntN(7), 1+r.IntN(8)
		var costs []uint64
		for range ranks {
			costs = append(costs, uint64(r.IntN(9)))
		}
		var all, some []int
		for i := range leaves {
			if all = append(all, i); r.IntN(4) > 0 {
				some = append(some, i)
			}
		}
		for _, s := range Share(all, ranks, costs) {
			var nodes []collective.Node
			for _, i := range s {
				nodes = append(nodes, collective.Node{Index: i})
			}
			if got, want := len(Coalesce(nodes, leaves)), bits.OnesCount(uint(len(s))); got != want {
				t.Errorf("%d of %d microbatches, for %d ranks, are %d nodes, not %d: %v", len(s), leaves, ranks, got, want, s)
			}
		}
		shares := Share(some, ranks, costs)
		for i, n := range lengths(len(some), ranks, costs) {
			if len(shares[i]) != n || !slices.IsSorted(shares[i]) {
				t.Errorf("rank %d gets %v, not %d in ascending order", i, shares[i], n)
			}
		}
		if got := slices.Sorted(slices.Values(slices.Concat(shares...))); !slices.Equal(got, some) {
			t.Fatalf("the shares of %v are %v", some, shares)
		}
	}
}

// TestAccept: whatever nodes the ranks claim to hold, each microbatch either is below exactly one
// accepted node, or is missing.
func TestAccept(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		leaves := 1 + r.IntN(20)
		held := make([][]collective.Node, 1+r.IntN(5))
		for i := range held {
			for range r.IntN(4) {
				held[i] = append(held[i], collective.Node{Level: r.IntN(8) - 1, Index: r.IntN(22) - 1})
			}
		}
		kept, missing := Accept(leaves, held)
		for _, i := range missing {
			kept[0] = append(kept[0], collective.Node{Index: i})
		}
		for i := range kept {
			kept[i] = Coalesce(kept[i], leaves)
		}
		if _, err := collective.NewPartials(leaves, kept); err != nil {
			t.Fatalf("%d leaves, held %v: %v", leaves, held, err)
		}
	}
}

// TestCoalesce: the result is the smallest set of nodes with the same leaves.
func TestCoalesce(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		leaves := 1 + r.IntN(20)
		first := r.IntN(leaves)
		end := first + 1 + r.IntN(leaves-first)
		var nodes []collective.Node
		for at := first; at < end; {
			next := min(at+1+r.IntN(4), end)
			nodes = append(nodes, collective.Cover(at, next, leaves)...)
			at = next
		}
		r.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		if got, want := Coalesce(nodes, leaves), collective.Cover(first, end, leaves); !slices.Equal(got, want) {
			t.Fatalf("%d leaves, %v become %v, not %v", leaves, nodes, got, want)
		}
	}
}
