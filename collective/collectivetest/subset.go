package collectivetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

func testSubset(t *testing.T, newGroups NewGroups) {
	t.Run("Ops", func(t *testing.T) { testSubsetOps(t, newGroups) })
	t.Run("Partition", func(t *testing.T) { testPartition(t, newGroups) })
	t.Run("Apart", func(t *testing.T) { testSubsetApart(t, newGroups) })
	t.Run("Nested", func(t *testing.T) { testSubsetNested(t, newGroups) })
	t.Run("Lists", func(t *testing.T) { testSubsetLists(t, newGroups) })
	t.Run("Abort", func(t *testing.T) { testSubsetAbort(t, newGroups) })
	t.Run("Cancel", func(t *testing.T) { testSubsetCancel(t, newGroups) })
	t.Run("Close", func(t *testing.T) { testSubsetClose(t, newGroups) })
	t.Run("Leaks", func(t *testing.T) { testSubsetLeaks(t, newGroups) })
}

// subset makes a subset on every rank and returns the members' groups, by their new ranks.
func subset(t *testing.T, groups []*collective.Group, ranks ...int) []*collective.Group {
	t.Helper()
	subs := make([]*collective.Group, len(ranks))
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		s, err := g.Subset(ctx, ranks)
		if want := slices.Index(ranks, g.Rank()); s.Rank() != want {
			return fmt.Errorf("rank %d is rank %d of the subset %v, not %d (%v)", g.Rank(), s.Rank(), ranks, want, err)
		} else if want >= 0 {
			subs[want] = s
		}
		return err
	}))
	for _, s := range subs {
		if s.Size() != len(ranks) || s.Generation() != groups[0].Generation() {
			t.Fatalf("subset %v has %d ranks of generation %d", ranks, s.Size(), s.Generation())
		}
	}
	return subs
}

func testSubsetOps(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 4)
	defer closeAll(t, groups)
	for _, ranks := range [][]int{{2}, {1, 3}, {3, 0, 2}, {0, 1, 2, 3}, {3, 2, 1, 0}} {
		subs := subset(t, groups, ranks...)
		checkType[float32](t, subs, 0, 7, 5003)
		checkBytes(t, subs, 1000, 300_000)
		checkReduce[int64](t, groups, 3001, collective.Sum)
		closeAll(t, subs)
		checkReduce[int64](t, groups, 10, collective.Sum)
	}
}

// testPartition: several subsets made at once work independently; lists that share a rank, or are
// empty, are refused.
func testPartition(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 5)
	defer closeAll(t, groups)
	for range 2 {
		lists := [][]int{{3, 0}, {1}, {4}}
		subs := make([]*collective.Group, len(groups))
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) (err error) {
			s, err := g.Partition(ctx, lists)
			subs[g.Rank()] = s
			return err
		}))
		for rank, want := range map[int][2]int{0: {1, 2}, 1: {0, 1}, 2: {-1, 0}, 3: {0, 2}, 4: {0, 1}} {
			if s := subs[rank]; s.Rank() != want[0] || s.Size() != want[1] {
				t.Errorf("rank %d is rank %d of %d, not of %v", rank, s.Rank(), s.Size(), want)
			}
		}
		checkReduce[float32](t, []*collective.Group{subs[3], subs[0]}, 7001, collective.Sum)
	}
	for _, lists := range [][][]int{{{0, 1}, {1, 2}}, {{0}, {}}, {}, {{0}, {5}}} {
		for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			_, err := g.Partition(ctx, lists)
			return err
		}) {
			if err == nil || errors.Is(err, collective.ErrAborted) {
				t.Errorf("%v, rank %d: %v", lists, rank, err)
			}
		}
	}
	checkReduce[int64](t, groups, 10, collective.Sum)
}

// testSubsetApart: an operation of the group that waits for a rank does not block one of a subset,
// nor the reverse.
func testSubsetApart(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	defer closeAll(t, groups)
	subs := subset(t, groups, 2, 0)
	for range repeat(20) {
		for _, both := range [][2][]*collective.Group{{groups, subs}, {subs, groups}} {
			waiting := make(chan error, len(both[0]))
			for _, g := range both[0][1:] {
				go func() {
					waiting <- collective.AllReduce(context.Background(), g, make([]float32, 70_000), collective.Sum)
				}()
			}
			checkReduce[float32](t, both[1], 40_000, collective.Sum)
			waiting <- collective.AllReduce(context.Background(), both[0][0], make([]float32, 70_000), collective.Sum)
			for range both[0] {
				if err := <-waiting; err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func testSubsetNested(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 5)
	defer closeAll(t, groups)
	for range repeat(10) {
		outer := subset(t, groups, 4, 2, 0, 1)
		other := subset(t, groups, 3, 1)
		var inner []*collective.Group
		var making sync.WaitGroup
		making.Go(func() { inner = subset(t, outer, 2, 0, 1) }) // ranks 0, 4 and 2 of all
		making.Go(func() { checkReduce[int32](t, subset(t, other, 1, 0), 100, collective.Sum) })
		making.Wait()
		got := make([][]int64, 3)
		must(t, Each(t, inner, func(ctx context.Context, g *collective.Group) (err error) {
			all, err := collective.AllGather(ctx, g, []int64{int64(g.Rank())})
			got[g.Rank()] = slices.Concat(all...)
			return err
		}))
		for _, g := range got {
			if !slices.Equal(g, []int64{0, 1, 2}) {
				t.Fatal(got)
			}
		}
		closeAll(t, outer) // and inner with it
		checkReduce[float64](t, other, 100, collective.Sum)
		if err := collective.Barrier(context.Background(), inner[0]); !errors.Is(err, collective.ErrClosed) {
			t.Fatal(err)
		}
		closeAll(t, other)
	}
}

func testSubsetLists(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	for _, bad := range [][]int{nil, {0, 0}, {3}, {-1}, {0, 1, 2, 1}} {
		for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			_, err := g.Subset(ctx, bad)
			return err
		}) {
			if err == nil || errors.Is(err, collective.ErrAborted) {
				t.Fatalf("list %v, rank %d: %v", bad, rank, err)
			}
		}
	}
	checkType[float32](t, subset(t, groups, 0, 1), 10)
	closeAll(t, groups)
	for _, lists := range [][][]int{{{0, 1}, {0, 1}, {1, 0}}, {{0}, {0, 1}, {0, 1}}} {
		groups := newGroups(t, 3)
		for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			_, err := g.Subset(ctx, lists[g.Rank()])
			return err
		}) {
			checkMismatch(t, err, rank)
		}
		closeAll(t, groups)
	}
	var none *collective.Group
	if _, err := none.Subset(context.Background(), []int{0}); err == nil {
		t.Fatal("a subset of no group")
	}
}

// testSubsetAbort: a death at a random moment ends all groups on all ranks; in each group the error
// has the victim's number in that group.
func testSubsetAbort(t *testing.T, newGroups NewGroups) {
	CheckSubsetDeath(t, repeat(30), newGroups, func(g *collective.Group) { g.Abort(errors.New("killed")) })
}

// CheckSubsetDeath is like CheckDeath, for a group of five ranks and two subsets that work at the
// same time.
func CheckSubsetDeath(t *testing.T, seeds int, newGroups NewGroups, kill func(g *collective.Group)) {
	t.Helper()
	lists := [][]int{{0, 1, 2, 3, 4}, {3, 1, 4}, {2, 0}}
	for seed := range uint64(seeds) {
		r := rand.New(rand.NewPCG(seed, 4))
		victim, after, length := r.IntN(5), r.IntN(200), []int{10, 3000, longest() / 2}[r.IntN(3)]
		groups := newGroups(t, 5)
		sets := [][]*collective.Group{groups, subset(t, groups, lists[1]...), subset(t, groups, lists[2]...)}
		var running sync.WaitGroup
		began := make(chan struct{}, 10)
		for s, set := range sets {
			dead := slices.Index(lists[s], victim)
			running.Go(func() {
				errs := Each(t, set, func(ctx context.Context, g *collective.Group) error {
					began <- struct{}{}
					for {
						if err := all(ctx, g, length); err != nil {
							return err
						}
					}
				})
				for rank, err := range errs {
					var a *collective.AbortedError
					switch {
					case dead == rank:
					case dead >= 0:
						checkAborted(t, err, dead, fmt.Sprintf("seed %d, set %d, rank %d", seed, s, rank))
					case !errors.As(err, &a) || len(a.Dead) > 0:
						t.Errorf("seed %d, set %d, rank %d, the victim being outside: %v", seed, s, rank, err)
					}
				}
			})
		}
		<-began
		for range after {
			runtime.Gosched()
		}
		if s := 1 + r.IntN(2); slices.Contains(lists[s], victim) { // by any of its groups
			kill(sets[s][slices.Index(lists[s], victim)])
		} else {
			kill(groups[victim])
		}
		running.Wait()
		closeAll(t, groups)
	}
}

// testSubsetCancel: if one rank's context ends in Subset, the generation ends, and no rank hangs.
func testSubsetCancel(t *testing.T, newGroups NewGroups) {
	for i := range repeat(10) {
		groups := newGroups(t, 3)
		ctx, cancel := context.WithCancel(context.Background())
		errs := Each(t, groups, func(bounded context.Context, g *collective.Group) error {
			if g.Rank() == 1 {
				go cancel()
				if i%2 == 0 {
					<-ctx.Done()
				}
				_, err := g.Subset(ctx, []int{2, 1})
				if err == nil { // it was complete before
					g.Abort(nil)
				}
				return nil
			}
			if _, err := g.Subset(bounded, []int{2, 1}); err != nil {
				return err
			}
			return collective.Barrier(bounded, g)
		})
		for rank, err := range errs {
			if rank != 1 && !errors.Is(err, collective.ErrAborted) {
				t.Fatalf("rank %d: %v", rank, err)
			}
		}
		closeAll(t, groups)
	}
}

// testSubsetClose: closing a subset does not affect the group; operations of the subset that need
// the rank that closed it fail, and with them all groups of the generation.
func testSubsetClose(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 3)
	defer closeAll(t, groups)
	closeAll(t, subset(t, groups, 0, 1, 2))
	subs := subset(t, groups, 2, 0)
	if err := subs[1].Close(); err != nil {
		t.Fatal(err)
	}
	checkReduce[int8](t, groups, 100, collective.Max)
	checkAborted(t, collective.Barrier(context.Background(), subs[0]), 1, "the subset")
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		for {
			if err := collective.Barrier(ctx, g); err != nil {
				checkAborted(t, err, 0, "the group")
				return nil
			}
		}
	}))
}

func testSubsetLeaks(t *testing.T, newGroups NewGroups) {
	checkLeaks(t, 60, func(t *testing.T, i int) {
		groups := newGroups(t, 3)
		subs := subset(t, groups, 2, 0)
		subset(t, groups, 1)
		checkReduce[float32](t, subs, 10, collective.Sum)
		switch i % 3 {
		case 1:
			subs[i/3%2].Abort(nil)
		case 2:
			closeAll(t, subs)
		}
		closeAll(t, groups)
	})
}
