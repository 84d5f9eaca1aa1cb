package collective_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
)

// TestCrossesOnce: in every operation, the data of a host's ranks is sent once to each other host,
// however many ranks the hosts have. In an Adasum, the remaining vectors of a host are sent to the
// ranks that combine them.
func TestCrossesOnce(t *testing.T) {
	const count = 1 << 20 // bytes of the whole tensor
	for _, world := range []struct {
		hosts string
		left  int // vectors of an Adasum that no host can combine further
	}{{"aabb", 2}, {"aaab", 3}, {"aabbcc", 3}, {"abababab", 8}, {"aaabbbbc", 6}} {
		hosts := world.hosts
		n, over := len(hosts), 0
		for i := range hosts {
			if !strings.Contains(hosts[:i], hosts[i:i+1]) {
				over++
			}
		}
		pairs := 0 // of ranks of different hosts
		for i := range hosts {
			for j := range hosts {
				if hosts[i] != hosts[j] {
					pairs++
				}
			}
		}
		w := newWorkers(t, collective.Config{}, n)
		w.hosts = hosts
		groups := w.meet(t, n)
		each := count / n
		for _, op := range []struct {
			name  string
			bound int
			do    func(context.Context, *collective.Group) error
		}{
			{"AllReduce", 2 * (over - 1) * count, func(ctx context.Context, g *collective.Group) error {
				return collective.AllReduce(ctx, g, make([]uint8, count), collective.Sum)
			}},
			{"AllReduceAsync", 2 * (over - 1) * count, func(ctx context.Context, g *collective.Group) error {
				return collective.AllReduceAsync(ctx, g, "x", make([]uint8, count), collective.Sum).Wait()
			}},
			{"Adasum", (over - 1) * (world.left*count/over + count), func(ctx context.Context, g *collective.Group) error {
				return collective.AllReduce(ctx, g, make([]float32, count/4), collective.Adasum)
			}},
			{"Broadcast", (over - 1) * count, func(ctx context.Context, g *collective.Group) error {
				return collective.Broadcast(ctx, g, make([]uint8, count), n-1)
			}},
			{"BroadcastBytes", (over - 1) * count, func(ctx context.Context, g *collective.Group) error {
				_, err := collective.BroadcastBytes(ctx, g, make([]uint8, count), 0)
				return err
			}},
			{"AllGather", (over - 1) * count, func(ctx context.Context, g *collective.Group) error {
				_, err := collective.AllGather(ctx, g, make([]uint8, each))
				return err
			}},
			{"ReduceScatter", (over - 1) * count, func(ctx context.Context, g *collective.Group) error {
				_, err := collective.ReduceScatter(ctx, g, make([]uint8, count), collective.Sum)
				return err
			}},
			{"AllToAll", pairs * each, func(ctx context.Context, g *collective.Group) error {
				_, err := collective.AllToAll(ctx, g, slices.Repeat([][]uint8{make([]uint8, each)}, n))
				return err
			}},
			{"ReduceTree", 2 * (over - 1) * count, func(ctx context.Context, g *collective.Group) error {
				held := make([][]collective.Node, n)
				for r := range held {
					held[r] = []collective.Node{{Index: r}}
				}
				p, err := collective.NewPartials(n, held)
				if err != nil {
					return err
				}
				return collective.ReduceTree(ctx, g, p, [][]uint8{make([]uint8, count)}, make([]uint8, count), collective.Sum)
			}},
			{"Barrier", 0, collective.Barrier},
		} {
			if op.name == "ReduceTree" && hosts != "aabb" && hosts != "aabbcc" {
				continue // the leaves of a host do not form one node
			}
			before := sent(groups)
			for rank, err := range collectivetest.Each(t, groups, op.do) {
				if err != nil {
					t.Fatalf("%s over %s, rank %d: %v", op.name, hosts, rank, err)
				}
			}
			if got, most := sent(groups)-before, op.bound+op.bound/50+8<<10; got > most || got < op.bound-op.bound/50 {
				t.Errorf("%s over %s sends %d bytes, not %d", op.name, hosts, got, op.bound)
			}
		}
		closeGroups(groups)
	}
}

func sent(groups []*collective.Group) (all int) {
	for _, g := range groups {
		all += int(g.Sent())
	}
	return all
}

func closeGroups(groups []*collective.Group) {
	done := make(chan struct{}, len(groups))
	for _, g := range groups {
		go func() { g.Close(); done <- struct{}{} }()
	}
	for range groups {
		<-done
	}
}

// TestGuess: if the same small tensors are submitted step after step, they are reduced without a
// vote, correctly in every type. Tensors that a rank submits in addition, later, or no longer, are
// reduced as well.
func TestGuess(t *testing.T) {
	for _, hosts := range []string{"", "aaaa", "aabb"} {
		t.Run("hosts "+hosts, func(t *testing.T) {
			w := newWorkers(t, collective.Config{}, 4)
			w.hosts = hosts
			groups := w.meet(t, 4)
			check := func(name string, do func(context.Context, *collective.Group) error) {
				t.Helper()
				for rank, err := range collectivetest.Each(t, groups, do) {
					if err != nil {
						t.Fatalf("%s, rank %d: %v", name, rank, err)
					}
				}
			}
			for _, op := range []collective.Op{collective.Sum, collective.Average, collective.Min, collective.Max, collective.Product} {
				check(fmt.Sprint(op, " of uint8"), guessed[uint8](op))
				check(fmt.Sprint(op, " of int64"), guessed[int64](op))
				check(fmt.Sprint(op, " of float32"), guessed[float32](op))
				check(fmt.Sprint(op, " of float16"), guessed[collective.Float16](op))
				check(fmt.Sprint(op, " of bfloat16"), guessed[collective.BFloat16](op))
			}
			if n := collective.Guesses(groups[0]); n < 10 {
				t.Errorf("%d guesses were right", n)
			}
			check("more of rank 1", func(ctx context.Context, g *collective.Group) error {
				var more *collective.Handle
				for step := range 6 {
					if g.Rank() == 1 && step == 3 || g.Rank() != 1 && step == 5 {
						more = collective.AllReduceAsync(ctx, g, "more", []float64{1}, collective.Sum)
					}
					if err := one(ctx, g, "same", step); err != nil {
						return err
					}
				}
				return more.Wait()
			})
			check("another tensor", func(ctx context.Context, g *collective.Group) error {
				for step := range 8 {
					if err := one(ctx, g, fmt.Sprint("tensor", step/4), step); err != nil {
						return err
					}
				}
				return nil
			})
			check("ranks that have joined", func(ctx context.Context, g *collective.Group) error {
				for step := range 4 + g.Rank() {
					h := collective.AllReduceAsync(ctx, g, "joining", []int32{1}, collective.Sum)
					if err := h.Wait(); err != nil {
						return fmt.Errorf("step %d: %w", step, err)
					}
				}
				_, err := collective.Join(ctx, g)
				return err
			})
			closeGroups(groups)
		})
	}
}

func one(ctx context.Context, g *collective.Group, name string, step int) error {
	data := []float64{float64(step), float64(g.Rank())}
	if err := collective.AllReduceAsync(ctx, g, name, data, collective.Sum).Wait(); err != nil {
		return err
	}
	if want := []float64{float64(4 * step), 6}; !slices.Equal(data, want) {
		return fmt.Errorf("step %d: %v, not %v", step, data, want)
	}
	return nil
}

// guessed reduces vectors of ones of a type seven times.
func guessed[T collective.Element](op collective.Op) func(context.Context, *collective.Group) error {
	return func(ctx context.Context, g *collective.Group) error {
		unit := T(1)
		switch v := any(&unit).(type) {
		case *collective.Float16:
			*v = collective.ToFloat16(1)
		case *collective.BFloat16:
			*v = collective.ToBFloat16(1)
		}
		sum := []T{unit}
		if err := collective.AllReduce(ctx, g, sum, op); err != nil {
			return err
		}
		for _, n := range []int{1000, 10_003} { // the larger one is reduced in place
			for step := range 7 {
				data := slices.Repeat([]T{unit}, n)
				if err := collective.AllReduceAsync(ctx, g, fmt.Sprintf("%d %T %v", n, unit, op), data, op).Wait(); err != nil {
					return err
				}
				if data[0] != sum[0] || data[n-1] != sum[0] {
					return fmt.Errorf("step %d: %v, %v, not %v", step, data[0], data[n-1], sum[0])
				}
			}
		}
		return nil
	}
}

// TestGuessInPlace: a tensor that is reduced in place has the bits of every AllReduce, even if each
// rank's guess in turn is wrong.
func TestGuessInPlace(t *testing.T) {
	right, lengths := 0, []int{2100, 20_001, 65_536, 200_003}
	if testing.Short() {
		lengths = []int{2100, 65_537}
	}
	for _, hosts := range []string{"aaa", "aabb", "aaabbb", "abab", "aabbcc", "aabbc", "ab", "abc"} {
		n := len(hosts)
		w := newWorkers(t, collective.Config{}, n)
		w.hosts = hosts
		groups := w.meet(t, n)
		way := collectivetest.Way{Hosts: hosts}
		for _, length := range lengths {
			inputs := make([][]float32, n)
			for rank := range inputs {
				for i := range length {
					inputs[rank] = append(inputs[rank], float32(i%89)/float32(rank+3))
				}
			}
			want := way.InOrder(inputs)
			for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				var more *collective.Handle
				for step := range 12 + n {
					if step == 5+g.Rank() {
						more = collective.AllReduceAsync(ctx, g, fmt.Sprint("more ", length), []float64{1}, collective.Sum)
					}
					data := slices.Clone(inputs[g.Rank()])
					if err := collective.AllReduceAsync(ctx, g, fmt.Sprint(length), data, collective.Sum).Wait(); err != nil {
						return err
					}
					if !slices.Equal(data, want) {
						return fmt.Errorf("step %d has other bits", step)
					}
				}
				return more.Wait()
			}) {
				if err != nil {
					t.Fatalf("hosts %s, %d elements, rank %d: %v", hosts, length, rank, err)
				}
			}
		}
		right += collective.Guesses(groups[0])
		closeGroups(groups)
	}
	if right == 0 { // the exact number depends on timing
		t.Error("no guess was right")
	}
}

// TestManyHosts: with many hosts, an AllReduce runs rings between them, and an asynchronous
// AllReduce still combines in the order of the hosts. Both hold for hosts with different numbers of
// ranks too.
func TestManyHosts(t *testing.T) {
	for _, hosts := range []string{"aabbccddeeffgghhii", "aaabccddeeffgghhiij"} {
		n := len(hosts)
		w := newWorkers(t, collective.Config{}, n)
		w.hosts = hosts
		groups := w.meet(t, n)
		way := collectivetest.Way{Hosts: hosts}
		for _, length := range []int{0, 1, 700, 3000, 100_003} {
			inputs := make([][]float32, n)
			var sum []int64
			for rank := range inputs {
				for i := range length {
					inputs[rank] = append(inputs[rank], float32(i%97)/float32(rank+3))
				}
			}
			for i := range length {
				sum = append(sum, int64(n*i+n*(n-1)/2))
			}
			want := way.InOrder(inputs)
			for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				whole := make([]int64, length)
				for i := range whole {
					whole[i] = int64(i + g.Rank())
				}
				if err := collective.AllReduce(ctx, g, whole, collective.Sum); err != nil {
					return err
				}
				if !slices.Equal(whole, sum) {
					return fmt.Errorf("AllReduce of %d is wrong", length)
				}
				data := slices.Clone(inputs[g.Rank()])
				if err := collective.AllReduceAsync(ctx, g, fmt.Sprint(length), data, collective.Sum).Wait(); err != nil {
					return err
				}
				if !slices.Equal(data, want) {
					return fmt.Errorf("AllReduceAsync of %d has other bits", length)
				}
				return nil
			}) {
				if err != nil {
					t.Fatalf("%s, rank %d: %v", hosts, rank, err)
				}
			}
		}
		collectivetest.CheckMeans(t, groups)
		closeGroups(groups)
	}
}

// TestBetweenTwoOperations: a rank of one host can be in the next operation while ranks of another
// host return from the previous one, or have only compared their calls for it.
func TestBetweenTwoOperations(t *testing.T) {
	for _, hosts := range []string{"abbb", "aabb"} {
		w := newWorkers(t, collective.Config{Encrypt: true}, len(hosts))
		w.hosts = hosts
		groups := w.meet(t, len(hosts))
		for rank, err := range collectivetest.Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			nothing := make([][]uint8, len(hosts))
			for i := range 300 {
				if err := collective.Barrier(ctx, g); err != nil {
					return fmt.Errorf("barrier %d: %w", i, err)
				}
				if _, err := collective.AllToAll(ctx, g, nothing); err != nil {
					return fmt.Errorf("all-to-all %d: %w", i, err)
				}
			}
			return nil
		}) {
			if err != nil {
				t.Errorf("hosts %s, rank %d: %v", hosts, rank, err)
			}
		}
		closeGroups(groups)
	}
}
