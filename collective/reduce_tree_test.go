package collective_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
)

// TestCover: a cover has exactly the requested leaves, in as few nodes as possible.
func TestCover(t *testing.T) {
	for leaves := 1; leaves <= 20; leaves++ {
		for first := range leaves + 1 {
			for end := first; end <= leaves; end++ {
				at := first
				nodes := collective.Cover(first, end, leaves)
				for i, n := range nodes {
					if n.First() != at || n.End(leaves) > end {
						t.Fatalf("Cover(%d, %d, %d) = %v", first, end, leaves, nodes)
					}
					if at = n.End(leaves); i > 0 && n.Sibling() == nodes[i-1] {
						t.Fatalf("Cover(%d, %d, %d) = %v: two halves of one node", first, end, leaves, nodes)
					}
				}
				if at != end {
					t.Fatalf("Cover(%d, %d, %d) = %v", first, end, leaves, nodes)
				}
			}
		}
	}
	if got := collective.Cover(0, 20, 20); len(got) != 1 || got[0] != collective.Root(20) {
		t.Errorf("all leaves are covered by %v", got)
	}
}

// values are numbers whose sums depend on their order.
var values = func() (v [1021]float32) {
	r := rand.New(rand.NewPCG(1, 1))
	for i := range v {
		v[i] = float32(math.Ldexp(r.Float64()-0.5, r.IntN(40)-20))
	}
	return v
}()

// leaf returns the value of a leaf.
func leaf(number, count int) []float32 {
	v := make([]float32, 0, count+len(values))
	for v = append(v, values[7*number:]...); len(v) < count; {
		v = append(v, values[:]...)
	}
	return v[:count]
}

// nodeValue returns the value of a node, computed in the order of the tree.
func nodeValue(n collective.Node, leaves, count int) []float32 {
	if n.Level == 0 {
		return leaf(n.Index, count)
	}
	left := collective.Node{Level: n.Level - 1, Index: 2 * n.Index}
	v := nodeValue(left, leaves, count)
	if right := left.Sibling(); right.First() < leaves {
		collective.Combine(v, v, nodeValue(right, leaves, count), collective.Sum)
	}
	return v
}

// scattered assigns runs of leaves to random ranks.
func scattered(r *rand.Rand, leaves, ranks int) [][]collective.Node {
	held := make([][]collective.Node, ranks)
	for first := 0; first < leaves; {
		end := min(first+1+r.IntN(leaves), leaves)
		rank := r.IntN(ranks)
		held[rank] = append(held[rank], collective.Cover(first, end, leaves)...)
		first = end
	}
	for _, nodes := range held {
		r.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	}
	return held
}

// TestReduceTree: the result has the bits of the tree, whichever rank has which leaves, and
// wherever the ranks and the data are.
func TestReduceTree(t *testing.T) {
	for _, world := range []struct {
		hosts     string
		encrypted bool
	}{{hosts: "a"}, {hosts: "aaaa"}, {hosts: "abcd"}, {hosts: "aabb"}, {hosts: "abbb"}, {hosts: "aab", encrypted: true}} {
		t.Run(fmt.Sprint(world), func(t *testing.T) {
			ranks := len(world.hosts)
			w := newWorkers(t, collective.Config{Encrypt: world.encrypted}, ranks)
			w.hosts = world.hosts
			groups := w.meet(t, ranks)
			defer closeGroups(groups)
			for i, c := range []struct {
				count     int
				allocated bool
			}{{0, false}, {1, false}, {1000, false}, {40_000, false}, {60_000, true}, {300_000, false}, {1<<20 + 1, true}} {
				if testing.Short() && c.count > 100_000 {
					c.count /= 2
				}
				r := rand.New(rand.NewPCG(uint64(i), 2))
				leaves := 1 + r.IntN(11)
				held := scattered(r, leaves, ranks)
				p, err := collective.NewPartials(leaves, held)
				if err != nil {
					t.Fatal(err)
				}
				want := nodeValue(collective.Root(leaves), leaves, c.count)
				for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
					return reduceLeaves(ctx, g, p, leaves, held[g.Rank()], want, c.allocated)
				}) {
					if err != nil {
						t.Errorf("%d elements, allocated %t, held %v, rank %d: %v", c.count, c.allocated, held, rank, err)
					}
				}
			}
		})
	}
}

// TestReduceTreeOfManyNodes: a rank can have more nodes than fit into the memory that the ranks of
// a host share.
func TestReduceTreeOfManyNodes(t *testing.T) {
	const leaves, count = 5000, 70
	held := make([][]collective.Node, 2)
	for i := range leaves {
		held[i%2] = append(held[i%2], collective.Node{Index: i})
	}
	p, err := collective.NewPartials(leaves, held)
	if err != nil {
		t.Fatal(err)
	}
	number := func(i int) []float32 {
		v := make([]float32, count)
		for j := range v {
			v[j] = values[(i+7*j)%len(values)]
		}
		return v
	}
	level := make([][]float32, leaves)
	for i := range level {
		level[i] = number(i)
	}
	for len(level) > 1 {
		for i := 0; i < len(level); i += 2 {
			if i+1 < len(level) {
				collective.Combine(level[i], level[i], level[i+1], collective.Sum)
			}
			level[i/2] = level[i]
		}
		level = level[:(len(level)+1)/2]
	}
	w := newWorkers(t, collective.Config{}, 2)
	w.hosts = "aa"
	groups := w.meet(t, 2)
	defer closeGroups(groups)
	for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		var parts [][]float32
		for _, n := range held[g.Rank()] {
			parts = append(parts, number(n.Index))
		}
		result := make([]float32, count)
		if err := collective.ReduceTree(ctx, g, p, parts, result, collective.Sum); err != nil {
			return err
		}
		if !slices.Equal(result, level[0]) {
			return errors.New("other bits")
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

// reduceLeaves checks one reduction on one rank.
func reduceLeaves(ctx context.Context, g *collective.Group, p *collective.Partials, leaves int, held []collective.Node, want []float32, allocated bool) error {
	memory := func(n int) []float32 {
		if !allocated {
			return make([]float32, n)
		}
		v, err := collective.Alloc[float32](n)
		if err != nil {
			panic(err)
		}
		return v
	}
	var parts [][]float32
	for _, n := range held {
		v := memory(len(want))
		copy(v, nodeValue(n, leaves, len(want)))
		parts = append(parts, v)
	}
	result := memory(len(want))
	if allocated {
		defer func() {
			collective.Free(result)
			for _, v := range parts {
				collective.Free(v)
			}
		}()
	}
	if err := collective.ReduceTree(ctx, g, p, parts, result, collective.Sum); err != nil {
		return err
	}
	if !slices.Equal(result, want) {
		return errors.New("other bits")
	}
	if err := collective.ReduceTree(ctx, g, p, parts, result, collective.Average); err != nil {
		return err
	}
	for i := range result {
		if result[i] != want[i]/float32(leaves) {
			return errors.New("not the average")
		}
	}
	return nil
}

// TestNewPartialsRefuses nodes that do not form a tree.
func TestNewPartialsRefuses(t *testing.T) {
	node := func(level, index int) collective.Node { return collective.Node{Level: level, Index: index} }
	for name, c := range map[string]struct {
		leaves int
		held   [][]collective.Node
	}{
		"no leaves":             {0, make([][]collective.Node, 2)},
		"too many leaves":       {1<<24 + 1, nil},
		"a leaf is missing":     {3, [][]collective.Node{{node(0, 0)}, {node(0, 2)}}},
		"a leaf is there twice": {2, [][]collective.Node{{node(0, 0), node(0, 1)}, {node(0, 0)}}},
		"a leaf in two nodes":   {2, [][]collective.Node{{node(1, 0)}, {node(0, 1)}}},
		"beyond the tree":       {2, [][]collective.Node{{node(1, 0)}, {node(0, 2)}}},
		"above the root":        {2, [][]collective.Node{{node(2, 0)}, nil}},
		"negative":              {2, [][]collective.Node{{node(1, 0)}, {node(-1, 0)}}},
	} {
		if _, err := collective.NewPartials(c.leaves, c.held); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestReduceTreeRefuses: arguments that do not match the partials are errors. If they are wrong on
// all ranks, the group remains usable.
func TestReduceTreeRefuses(t *testing.T) {
	p, err := collective.NewPartials(2, [][]collective.Node{{{}}, {{Index: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func(context.Context, *collective.Group) error{
		"no partials": func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceTree(ctx, g, nil, nil, make([]float32, 4), collective.Sum)
		},
		"zero partials": func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceTree(ctx, g, new(collective.Partials), nil, make([]float32, 4), collective.Sum)
		},
		"no part": func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceTree(ctx, g, p, nil, make([]float32, 4), collective.Sum)
		},
		"a short part": func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceTree(ctx, g, p, [][]float32{make([]float32, 3)}, make([]float32, 4), collective.Sum)
		},
		"Adasum": func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceTree(ctx, g, p, [][]float32{make([]float32, 4)}, make([]float32, 4), collective.Adasum)
		},
	} {
		groups := collective.Local(2)
		for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			if err := do(ctx, g); err == nil || errors.Is(err, collective.ErrAborted) {
				return fmt.Errorf("the error is %v", err)
			}
			return collective.Barrier(ctx, g)
		}) {
			if err != nil {
				t.Errorf("%s, rank %d: %v", name, rank, err)
			}
		}
		closeGroups(groups)
	}
}

// TestReduceTreeMismatch: if one rank has different partials or lengths, all ranks return an error.
func TestReduceTreeMismatch(t *testing.T) {
	for _, hosts := range []string{"aa", "ab"} {
		for _, wrong := range []string{"nodes", "length"} {
			w := newWorkers(t, collective.Config{}, 2)
			w.hosts = hosts
			groups := w.meet(t, 2)
			for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				held, count := [][]collective.Node{{{}}, {{Index: 1}}}, 10
				if g.Rank() == 1 && wrong == "nodes" {
					slices.Reverse(held)
				} else if g.Rank() == 1 {
					count = 11
				}
				p, err := collective.NewPartials(2, held)
				if err != nil {
					return err
				}
				return collective.ReduceTree(ctx, g, p, [][]float32{make([]float32, count)}, make([]float32, count), collective.Sum)
			}) {
				if !errors.As(err, new(*collective.MismatchError)) {
					t.Errorf("other %s over %s, rank %d: %v", wrong, hosts, rank, err)
				}
			}
			closeGroups(groups)
		}
	}
}
