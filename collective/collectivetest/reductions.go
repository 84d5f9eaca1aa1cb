package collectivetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// RunReductions runs the part of the kit that depends on the algorithm: AllReduce, and the failures
// that end it.
func RunReductions(t *testing.T, newGroups NewGroups) {
	for _, n := range sizes([]int{1, 2, 3, 4, 6, 8}, 1, 3, 8) {
		groups := newGroups(t, n)
		for _, length := range []int{0, 1, n - 1, n, 8*n - 1, 8 * n, 700, 2049, 20_000} {
			checkReduce[uint8](t, groups, length, collective.Sum)
			checkReduce[float64](t, groups, length, collective.Average)
		}
		checkReduce[int8](t, groups, 1031, collective.Product)
		checkReduce[collective.BFloat16](t, groups, 1031, collective.Max)
		checkReduceScatter[int16](t, groups, 1999, collective.Sum)
		checkSemantics[float32](t, groups, []int{1, 3001})
		checkSemantics[collective.Float16](t, groups, []int{1, 3001})
		checkSemantics[int8](t, groups, []int{1, 3001})
		closeAll(t, groups)
	}
	for seed := range uint64(repeat(20)) {
		checkReductionDeath(t, newGroups, seed)
	}
}

// checkReductionDeath makes one rank end at a random moment of a loop of AllReduces.
func checkReductionDeath(t *testing.T, newGroups NewGroups, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 4))
	n := 2 + r.IntN(4)
	victim, last, length := r.IntN(n), r.IntN(20), []int{10, 2000, 20_000}[r.IntN(3)]
	groups := newGroups(t, n)
	errs := Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		for i := 0; ; i++ {
			if g.Rank() == victim && i == last {
				g.Abort(errors.New("killed"))
			}
			if err := collective.AllReduce(ctx, g, make([]float32, length), collective.Sum); err != nil {
				return err
			}
		}
	})
	for rank, err := range errs {
		checkAborted(t, err, victim, fmt.Sprintf("seed %d, rank %d of %d", seed, rank, n))
	}
	closeAll(t, groups)
}

// CheckSameBits checks that all ways of making groups give the same bits for the same inputs, on
// every rank. If ordered is true, they must be the bits of a reduction in the order of the ranks.
func CheckSameBits(t *testing.T, ordered bool, ways ...NewGroups) {
	t.Helper()
	for _, n := range sizes([]int{2, 3, 4, 8}, 3, 8) {
		for _, length := range []int{1, n, 100, 3000, 20_000} {
			want := make([]float32, length)
			inputs := make([][]float32, n)
			for rank := range inputs {
				r := rand.New(rand.NewPCG(uint64(rank), uint64(length)))
				for i := range want {
					inputs[rank] = append(inputs[rank], r.Float32()-0.5)
					want[i] += inputs[rank][i]
				}
			}
			for way, newGroups := range ways {
				groups := newGroups(t, n)
				got := make([][]float32, n)
				must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
					got[g.Rank()] = slices.Clone(inputs[g.Rank()])
					return collective.AllReduce(ctx, g, got[g.Rank()], collective.Sum)
				}))
				closeAll(t, groups)
				if way == 0 && !ordered {
					want = got[0]
				}
				for rank := range got {
					if i := differ(want, got[rank]); i >= 0 {
						t.Fatalf("%d ranks, %d elements, way %d, rank %d: element %d is %v, not %v",
							n, length, way, rank, i, got[rank][i], want[i])
					}
				}
			}
		}
	}
}
