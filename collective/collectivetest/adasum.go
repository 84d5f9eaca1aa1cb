package collectivetest

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// testAdasum compares results with the formula, computed in float64 over all ranks' vectors, and
// checks that all ranks have the same bits.
func testAdasum(t *testing.T, newGroups NewGroups) {
	for _, n := range sizes([]int{1, 2, 3, 4, 5, 6, 7, 8}, 2, 5, 8) {
		groups := newGroups(t, n)
		lengths := []int{0, 1, 513}
		if n == 5 {
			lengths = append(lengths, 2, 2000, 70_000)
		}
		for _, length := range lengths {
			checkAdasum(t, groups, length, 1e-6, func(v float64) float32 { return float32(v) }, func(v float32) float64 { return float64(v) })
			if length > 2000 {
				continue // only the number of segments differs
			}
			checkAdasum(t, groups, length, 1e-12, func(v float64) float64 { return v }, func(v float64) float64 { return v })
			checkAdasum(t, groups, length, 1.0/1024, func(v float64) collective.Float16 { return collective.ToFloat16(float32(v)) },
				func(v collective.Float16) float64 { return float64(v.Float32()) })
			checkAdasum(t, groups, length, 1.0/128, func(v float64) collective.BFloat16 { return collective.ToBFloat16(float32(v)) },
				func(v collective.BFloat16) float64 { return float64(v.Float32()) })
		}
		closeAll(t, groups)
	}
	testAdasumKinds(t, newGroups)
}

// checkAdasum reduces random vectors, one by one, and in the background together with others. near
// bounds the difference from the reference in each of the log2(n) steps, relative to the largest
// element.
func checkAdasum[T collective.Element](t *testing.T, groups []*collective.Group, length int, near float64,
	from func(float64) T, to func(T) float64) {
	t.Helper()
	n := len(groups)
	inputs, vectors := make([][]T, n), make([][]float64, n)
	for rank := range inputs {
		r := rand.New(rand.NewPCG(uint64(rank), uint64(length)))
		for i := range length {
			v := from(float64(i%7-3)/4 + r.Float64()*2 - 1) // partly the same way
			inputs[rank] = append(inputs[rank], v)
			vectors[rank] = append(vectors[rank], to(v))
		}
	}
	want := adasumOf(vectors)
	largest := 1.0
	for _, v := range want {
		largest = max(largest, math.Abs(v))
	}
	alone, together := make([][]T, n), make([][]T, n)
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		rank := g.Rank()
		alone[rank] = append([]T{}, inputs[rank]...)
		together[rank] = append([]T{}, inputs[rank]...)
		if err := collective.AllReduce(ctx, g, alone[rank], collective.Adasum); err != nil {
			return err
		}
		other := append([]T{}, inputs[rank]...)
		return collective.GroupedAllReduce(ctx, g, fmt.Sprintf("adasum %T %d", other, length), [][]T{other, together[rank]}, collective.Adasum)
	}))
	for rank := range alone {
		if !equal(alone[rank], alone[0]) || !equal(together[rank], alone[0]) {
			t.Fatalf("Adasum of %d %T over %d: rank %d has other bits", length, *new(T), n, rank)
		}
	}
	for i, v := range alone[0] {
		if d := math.Abs(to(v) - want[i]); !(d <= 4*near*largest) {
			t.Fatalf("Adasum of %d %T over %d: element %d is %v, want %v", length, v, n, i, to(v), want[i])
		}
	}
}

// CheckAdasumBits checks that all ways of making groups give the same bits of an Adasum, on every
// rank.
func CheckAdasumBits(t *testing.T, ways ...Way) {
	for _, n := range sizes([]int{2, 3, 4, 5, 6, 7, 8}, 4, 7) {
		want32, want64, want16 := map[int][]float32{}, map[int][]float64{}, map[int][]collective.Float16{}
		inputs := make([][]float64, n)
		for rank := range inputs {
			r := rand.New(rand.NewPCG(uint64(rank), uint64(n)))
			for i := range 70_001 {
				inputs[rank] = append(inputs[rank], float64(i%7-3)/4+r.Float64()*2-1)
			}
		}
		inputs32 := converted(inputs, func(v float64) float32 { return float32(v) })
		inputs16 := converted(inputs, func(v float64) collective.Float16 { return collective.ToFloat16(float32(v)) })
		for _, way := range ways {
			groups := way.NewGroups(t, n)
			for _, length := range []int{1, 2049, 4095, 4097, 8193, 45_000, 70_001} {
				checkAdasumBits(t, way.Hosts, groups, length, want32, inputs32)
				checkAdasumBits(t, way.Hosts, groups, length, want64, inputs)
				checkAdasumBits(t, way.Hosts, groups, length, want16, inputs16)
			}
			closeAll(t, groups)
		}
	}
}

func converted[T collective.Element](inputs [][]float64, from func(float64) T) [][]T {
	all := make([][]T, len(inputs))
	for rank, input := range inputs {
		for _, v := range input {
			all[rank] = append(all[rank], from(v))
		}
	}
	return all
}

// checkAdasumBits compares results with want[length]. If that is missing, it is set to rank 0's
// result.
func checkAdasumBits[T collective.Element](t *testing.T, hosts string, groups []*collective.Group, length int,
	want map[int][]T, inputs [][]T) {
	t.Helper()
	got := make([][]T, len(groups))
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		data := slices.Clone(inputs[g.Rank()][:length])
		got[g.Rank()] = data
		return collective.AllReduce(ctx, g, data, collective.Adasum)
	}))
	if want[length] == nil {
		want[length] = got[0]
	}
	for rank := range got {
		if !equal(got[rank], want[length]) {
			t.Fatalf("Adasum of %d %T over %d ranks, hosts %q: rank %d has other bits", length, *new(T), len(groups), hosts, rank)
		}
	}
}

// adasumOf computes the formula over the tree of any number of ranks.
func adasumOf(vectors [][]float64) []float64 {
	n, power := len(vectors), 1
	for 2*power <= n {
		power *= 2
	}
	var level [][]float64
	for i := 0; i < n; i++ {
		if i < 2*(n-power) {
			level = append(level, adasumPair(vectors[i], vectors[i+1]))
			i++
			continue
		}
		level = append(level, vectors[i])
	}
	for len(level) > 1 {
		var next [][]float64
		for i := 0; i < len(level); i += 2 {
			next = append(next, adasumPair(level[i], level[i+1]))
		}
		level = next
	}
	return level[0]
}

func adasumPair(a, b []float64) []float64 {
	dot := func(x, y []float64) (sum float64) {
		for i := range x {
			sum += x[i] * y[i]
		}
		return sum
	}
	coefficient := func(norm float64) float64 {
		if norm == 0 {
			return 1
		}
		return 1 - dot(a, b)/(2*norm)
	}
	p, q := coefficient(dot(a, a)), coefficient(dot(b, b))
	sum := make([]float64, len(a))
	for i := range a {
		sum[i] = p*a[i] + q*b[i]
	}
	return sum
}

// testAdasumKinds: vectors of one direction are averaged, orthogonal ones added, and zeros change
// nothing.
func testAdasumKinds(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 4)
	defer closeAll(t, groups)
	for _, c := range []struct {
		name   string
		inputs [4][4]float32
		want   [4]float32
	}{
		{"parallel", [4][4]float32{{2, 4}, {2, 4}, {2, 4}, {2, 4}}, [4]float32{2, 4}},
		{"orthogonal", [4][4]float32{{1}, {0, 2}, {0, 0, 3}, {0, 0, 0, 4}}, [4]float32{1, 2, 3, 4}},
		{"zeros", [4][4]float32{{}, {}, {5, -1}, {}}, [4]float32{5, -1}},
		{"nothing", [4][4]float32{}, [4]float32{}},
	} {
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			data := c.inputs[g.Rank()]
			if err := collective.AllReduce(ctx, g, data[:], collective.Adasum); err != nil || data != c.want {
				return fmt.Errorf("%s: %v, %w", c.name, data, err)
			}
			return nil
		}))
	}
}
