package collectivetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// moved returns tensors of n ranks for the three asynchronous operations other than AllReduce.
func moved[T collective.Element](name string, n, length int) []tensor {
	root := length % n
	data, all, part := make([][]T, n), make([][]T, n), make([][]T, n)
	return []tensor{
		{name + ".broadcast",
			func(ctx context.Context, g *collective.Group) *collective.Handle {
				data[g.Rank()] = input[T](g.Rank(), length, collective.Sum)
				return collective.BroadcastAsync(ctx, g, name+".broadcast", data[g.Rank()], root)
			},
			func(rank int) error {
				if !equal(data[rank], input[T](root, length, collective.Sum)) {
					return fmt.Errorf("BroadcastAsync of %d %T from %d is wrong on rank %d", length, *new(T), root, rank)
				}
				return nil
			}},
		{name + ".gather",
			func(ctx context.Context, g *collective.Group) *collective.Handle {
				all[g.Rank()] = make([]T, n*length)
				own := input[T](g.Rank(), length, collective.Sum)
				if g.Rank()%2 == 0 { // in its place already
					copy(all[g.Rank()][g.Rank()*length:], own)
					own = all[g.Rank()][g.Rank()*length:][:length]
				}
				return collective.AllGatherIntoAsync(ctx, g, name+".gather", own, all[g.Rank()])
			},
			func(rank int) error {
				for from := range n {
					if !equal(all[rank][from*length:][:length], input[T](from, length, collective.Sum)) {
						return fmt.Errorf("AllGatherIntoAsync of %d %T: part %d is wrong on rank %d", length, *new(T), from, rank)
					}
				}
				return nil
			}},
		{name + ".scatter",
			func(ctx context.Context, g *collective.Group) *collective.Handle {
				part[g.Rank()] = make([]T, length)
				return collective.ReduceScatterIntoAsync(ctx, g, name+".scatter", input[T](g.Rank(), n*length, collective.Average), part[g.Rank()], collective.Average)
			},
			func(rank int) error {
				if !equal(part[rank], expect[T](n, n*length, collective.Average)[rank*length:][:length]) {
					return fmt.Errorf("ReduceScatterIntoAsync of %d %T is wrong on rank %d", length, *new(T), rank)
				}
				return nil
			}},
	}
}

// checkCounts checks ReduceScatterCounts of parts of several lengths, some of which are 0.
func checkCounts[T collective.Element](t *testing.T, groups []*collective.Group, length int) {
	t.Helper()
	n := len(groups)
	for skew := range 3 {
		counts := make([]int, n)
		total := 0
		for rank := range counts {
			switch (rank + skew) % 3 {
			case 0:
				counts[rank] = length
			case 1:
				counts[rank] = length/3 + rank
			}
			total += counts[rank]
		}
		whole := expect[T](n, total, collective.Average)
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			data, part := input[T](g.Rank(), total, collective.Average), make([]T, counts[g.Rank()])
			if err := collective.ReduceScatterCounts(ctx, g, data, counts, part, collective.Average); err != nil {
				return err
			}
			begin := 0
			for _, before := range counts[:g.Rank()] {
				begin += before
			}
			if !equal(part, whole[begin:][:len(part)]) || !equal(data, input[T](g.Rank(), total, collective.Average)) {
				return fmt.Errorf("ReduceScatterCounts of %v %T is wrong on rank %d", counts, *new(T), g.Rank())
			}
			return nil
		}))
	}
}

// uncounted returns calls of ReduceScatterCounts that all ranks refuse.
func uncounted() []call {
	scatter := func(length int, counts func(n int) []int, part int) call {
		return func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceScatterCounts(ctx, g, make([]int8, length), counts(g.Size()), make([]int8, part), collective.Sum)
		}
	}
	of := func(first, last int) func(n int) []int {
		return func(n int) []int {
			counts := make([]int, n)
			counts[0], counts[n-1] = first, last
			return counts
		}
	}
	return []call{
		scatter(3, func(n int) []int { return make([]int, n+1) }, 1),
		scatter(5, of(3, 3), 1),
		scatter(5, of(3, 1), 1),
		scatter(5, of(6, -1), 1),
		scatter(5, of(5, 0), 1), // another length of the part on every rank
		func(ctx context.Context, g *collective.Group) error {
			return collective.ReduceScatterCounts(ctx, g, []float32{1}, of(1, 0)(g.Size()), make([]float32, 1-min(1, g.Rank())), collective.Adasum)
		},
	}
}

// testAsyncMoves: invalid calls are refused on all ranks, and a different call with the same name
// on one rank is an error on all ranks.
func testAsyncMoves(t *testing.T, newGroups NewGroups) {
	type start func(g *collective.Group) *collective.Handle
	ctx := context.Background()
	broadcast := func(length, root int) start {
		return func(g *collective.Group) *collective.Handle {
			return collective.BroadcastAsync(ctx, g, "x", make([]float32, length), root)
		}
	}
	gather := func(length, total int) start {
		return func(g *collective.Group) *collective.Handle {
			return collective.AllGatherIntoAsync(ctx, g, "x", make([]float32, length), make([]float32, total))
		}
	}
	scatter := func(length, part int, op collective.Op) start {
		return func(g *collective.Group) *collective.Handle {
			return collective.ReduceScatterIntoAsync(ctx, g, "x", make([]float32, length), make([]float32, part), op)
		}
	}
	groups := newGroups(t, 3)
	for i, invalid := range []start{broadcast(1, 3), broadcast(1, -1), gather(2, 5), scatter(6, 3, collective.Sum), scatter(6, 2, collective.Adasum), scatter(6, 2, 99)} {
		for rank, err := range Each(t, groups, func(_ context.Context, g *collective.Group) error { return invalid(g).Wait() }) {
			if err == nil || errors.Is(err, collective.ErrAborted) || sameMismatch(err) || !strings.Contains(err.Error(), "Async: ") {
				t.Fatalf("invalid call %d, rank %d: %v", i, rank, err)
			}
		}
	}
	must(t, Each(t, groups, func(_ context.Context, g *collective.Group) error {
		return errors.Join(broadcast(3, 2)(g).Wait(), gather(2, 6)(g).Wait(), scatter(6, 2, collective.Max)(g).Wait())
	}))
	closeAll(t, groups)
	for i, pair := range [][2]start{
		{broadcast(3, 0), broadcast(3, 1)}, {broadcast(3, 0), gather(3, 9)}, {gather(3, 9), gather(2, 6)},
		{scatter(6, 2, collective.Sum), scatter(6, 2, collective.Max)}, {broadcast(3, 0), broadcast(3, 9)},
		{scatter(6, 2, collective.Sum), func(g *collective.Group) *collective.Handle {
			return collective.AllReduceAsync(ctx, g, "x", make([]float32, 6), collective.Sum)
		}},
	} {
		groups := newGroups(t, 3)
		for rank, err := range Each(t, groups, func(_ context.Context, g *collective.Group) error {
			return pair[min(1, g.Rank()/2)](g).Wait()
		}) {
			var m *collective.MismatchError
			if !errors.As(err, &m) || m.Tensor != "x" || m.Calls[0] == m.Calls[1] {
				t.Fatalf("pair %d, rank %d: %v", i, rank, err)
			}
		}
		closeAll(t, groups)
	}
	testMovesJoined(t, newGroups)
}

// testMovesJoined: if a rank has joined, the group ends with an error that says so.
func testMovesJoined(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 2)
	defer closeAll(t, groups)
	errs := Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		if g.Rank() == 1 {
			_, err := collective.Join(ctx, g)
			return err
		}
		return collective.BroadcastAsync(ctx, g, "weights", make([]float32, 3), 0).Wait()
	})
	for rank, err := range errs {
		if !errors.Is(err, collective.ErrAborted) || !strings.Contains(err.Error(), "has called Join") {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
}
