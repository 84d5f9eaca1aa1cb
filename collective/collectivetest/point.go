package collectivetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

func testPoints(t *testing.T, newGroups NewGroups) {
	t.Run("Sizes", func(t *testing.T) { testPointSizes(t, newGroups) })
	t.Run("Order", func(t *testing.T) { testPointOrder(t, newGroups) })
	t.Run("Ahead", func(t *testing.T) { testPointAhead(t, newGroups) })
	t.Run("Beside", func(t *testing.T) { testPointBeside(t, newGroups) })
	t.Run("Mismatch", func(t *testing.T) { testPointMismatch(t, newGroups) })
	t.Run("Invalid", func(t *testing.T) { testPointInvalid(t, newGroups) })
	t.Run("Death", func(t *testing.T) {
		CheckPointDeath(t, repeat(20), newGroups, func(g *collective.Group) { g.Abort(errors.New("killed")) })
	})
	t.Run("Cancel", func(t *testing.T) { testPointCancel(t, newGroups) })
	t.Run("Close", func(t *testing.T) { testPointClose(t, newGroups) })
	t.Run("Leaks", func(t *testing.T) { testPointLeaks(t, newGroups) })
}

// shift sends each rank's data to the rank whose number is higher by the given number, modulo the
// size, and checks the received data.
func shift[T collective.Element](ctx context.Context, g *collective.Group, by, length int, later bool) error {
	n := g.Size()
	to, from := (g.Rank()+by)%n, (g.Rank()-by+n)%n
	data, got := input[T](g.Rank(), length, collective.Sum), make([]T, length)
	var err error
	if later {
		sent, received := collective.SendAsync(ctx, g, data, to), collective.RecvAsync(ctx, g, got, from)
		err = errors.Join(received.Wait(), sent.Wait())
	} else {
		sent := collective.SendAsync(ctx, g, data, to)
		err = errors.Join(collective.Recv(ctx, g, got, from), sent.Wait())
	}
	if err == nil && !equal(got, input[T](from, length, collective.Sum)) {
		err = fmt.Errorf("wrong data: %d %T from rank %d to %d", length, *new(T), from, g.Rank())
	}
	return err
}

// testPointSizes: messages of many sizes and of some types, in rings.
func testPointSizes(t *testing.T, newGroups NewGroups) {
	for _, n := range sizes([]int{2, 3, 4, 8}, 2, 3) {
		groups := newGroups(t, n)
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			for i, length := range []int{0, 1, 100, 16 << 10, 70_001, 600_001} {
				err := shift[float32](ctx, g, 1+i%(n-1), length, i%2 == 0)
				if err == nil && length < 100_000 {
					err = errors.Join(shift[uint8](ctx, g, 1, length, true), shift[collective.BFloat16](ctx, g, n-1, length, false),
						shift[int64](ctx, g, 1, length/4, false))
				}
				if err != nil {
					return err
				}
			}
			return nil
		}))
		closeAll(t, groups)
	}
}

// testPointOrder: messages of one pair arrive in the order in which they are sent, whatever their
// sizes and whoever waits first.
func testPointOrder(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 2)
	defer closeAll(t, groups)
	lengths := []int{1, 20_000, 3, 0, 100_000, 7, 7, 16_385, 2}
	message := func(round, i int) []int32 {
		return repeated(lengths[i], func(k int) int32 { return int32(1000*round + 10*i + k) })
	}
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		for round := range repeat(8) {
			var handles []*collective.Handle
			got := make([][]int32, len(lengths))
			for i, length := range lengths {
				var h *collective.Handle
				switch got[i] = make([]int32, length); {
				case g.Rank() == 0 && (i+round)%3 == 0:
					h = collective.SendAsync(ctx, g, message(round, i), 1)
				case g.Rank() == 0:
					if err := collective.Send(ctx, g, message(round, i), 1); err != nil {
						return err
					}
				case (i+round)%4 < 2:
					h = collective.RecvAsync(ctx, g, got[i], 0)
				default:
					if err := collective.Recv(ctx, g, got[i], 0); err != nil {
						return err
					}
				}
				if h != nil {
					handles = append(handles, h)
				}
			}
			slices.Reverse(handles)
			for _, h := range handles {
				if err := h.Wait(); err != nil {
					return err
				}
			}
			for i := range got {
				if g.Rank() == 1 && !equal(got[i], message(round, i)) {
					return fmt.Errorf("round %d, message %d is wrong", round, i)
				}
			}
		}
		return nil
	}))
}

// testPointAhead: both ranks first send small messages, 1 MiB in total, and then receive; the sent
// data may be changed meanwhile.
func testPointAhead(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 2)
	defer closeAll(t, groups)
	for _, each := range []int{0, 1, 64 << 10} {
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			other := 1 - g.Rank()
			data := make([]uint8, each)
			for i := range 16 {
				for k := range data {
					data[k] = uint8(i + g.Rank())
				}
				if err := collective.Send(ctx, g, data, other); err != nil {
					return err
				}
			}
			for i := range 16 {
				if err := collective.Recv(ctx, g, data, other); err != nil {
					return err
				}
				if each > 0 && (data[0] != uint8(i+other) || data[each-1] != uint8(i+other)) {
					return fmt.Errorf("message %d is %d", i, data[0])
				}
			}
			return nil
		}))
	}
}

// testPointBeside: messages of several goroutines, of a group and of a subset, run concurrently
// with operations of all ranks.
func testPointBeside(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 4)
	defer closeAll(t, groups)
	subs := subset(t, groups, 3, 1)
	var running sync.WaitGroup
	run := func(groups []*collective.Group, f func(ctx context.Context, g *collective.Group) error) {
		running.Go(func() {
			for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
				for range repeat(8) {
					if err := f(ctx, g); err != nil {
						return err
					}
				}
				return nil
			}) {
				if err != nil {
					t.Errorf("rank %d: %v", rank, err)
				}
			}
		})
	}
	run(groups, func(ctx context.Context, g *collective.Group) error { return shift[float32](ctx, g, 1, 30_001, true) })
	run(groups, func(ctx context.Context, g *collective.Group) error { return shift[uint16](ctx, g, 2, 70, false) })
	run(subs, func(ctx context.Context, g *collective.Group) error { return shift[float64](ctx, g, 1, 5003, true) })
	run(groups, func(ctx context.Context, g *collective.Group) error { return all(ctx, g, 5000) })
	running.Wait()
}

// testPointMismatch: a different length or type is an error on both ranks, and on all others.
func testPointMismatch(t *testing.T, newGroups NewGroups) {
	type start func(ctx context.Context, g *collective.Group) error
	send := func(length int) start {
		return func(ctx context.Context, g *collective.Group) error {
			return collective.SendAsync(ctx, g, make([]float32, length), 1).Wait()
		}
	}
	for i, c := range []struct {
		sent, received       start
		callsSend, callsRecv string
	}{
		{send(10), func(ctx context.Context, g *collective.Group) error {
			return collective.Recv(ctx, g, make([]float32, 11), 2)
		},
			"Send of 10 float32", "Recv of 11 float32"},
		{send(500_000), func(ctx context.Context, g *collective.Group) error {
			return collective.Recv(ctx, g, make([]float32, 5), 2)
		},
			"Send of 500000 float32", "Recv of 5 float32"},
		{send(0), func(ctx context.Context, g *collective.Group) error {
			return collective.RecvAsync(ctx, g, make([]float32, 5), 2).Wait()
		}, "Send of 0 float32", "Recv of 5 float32"},
		{send(10), func(ctx context.Context, g *collective.Group) error {
			return collective.Recv(ctx, g, make([]int32, 10), 2)
		},
			"Send of 10 float32", "Recv of 10 int32"},
	} {
		groups := newGroups(t, 3)
		for rank, err := range Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			switch g.Rank() {
			case 1:
				return c.received(ctx, g)
			case 2:
				return c.sent(ctx, g)
			}
			return collective.Barrier(ctx, g)
		}) {
			var m *collective.MismatchError
			if !errors.As(err, &m) || m.Ranks != [2]int{1, 2} || m.Calls != [2]string{c.callsRecv, c.callsSend} {
				t.Fatalf("pair %d, rank %d: %v", i, rank, err)
			}
		}
		closeAll(t, groups)
	}
}

// testPointInvalid: a rank that does not exist, and the caller's own rank, are refused without an
// effect.
func testPointInvalid(t *testing.T, newGroups NewGroups) {
	groups := newGroups(t, 2)
	defer closeAll(t, groups)
	must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
		for _, peer := range []int{-1, 2, g.Rank()} {
			for _, err := range []error{
				collective.Send(ctx, g, []int8{1}, peer), collective.Recv(ctx, g, []int8{1}, peer),
				collective.SendAsync(ctx, g, []int8{1}, peer).Wait(), collective.RecvAsync(ctx, g, []int8{1}, peer).Wait(),
			} {
				if err == nil || errors.Is(err, collective.ErrAborted) || !strings.Contains(err.Error(), fmt.Sprint("rank ", peer)) {
					return fmt.Errorf("a message with rank %d: %v", peer, err)
				}
			}
		}
		return shift[int8](ctx, g, 1, 5, false)
	}))
	if err := collective.Send(context.Background(), nil, []int8{1}, 0); err == nil {
		t.Fatal("a message in no group")
	}
}

// CheckPointDeath is like CheckDeath, for messages.
func CheckPointDeath(t *testing.T, seeds int, newGroups NewGroups, kill func(g *collective.Group)) {
	t.Helper()
	for seed := range seeds {
		n := 2 + seed%3
		m := murder{t: t, seed: uint64(seed), groups: newGroups(t, n), victim: seed % n, after: seed * 777 % 5000, kill: kill}
		m.check(func(ctx context.Context, g *collective.Group) error {
			return shift[float32](ctx, g, 1, []int{1, 100_001}[seed%2], seed%4 < 2)
		}, func(g *collective.Group) error {
			return collective.Recv(context.Background(), g, []int8{1}, (g.Rank()+1)%n)
		})
	}
}

// testPointCancel: the end of a context ends the group, both before the other rank calls and while
// a message waits for an earlier one.
func testPointCancel(t *testing.T, newGroups NewGroups) {
	for way := range 4 {
		groups := newGroups(t, 3)
		if way%2 == 1 { // connected
			must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error { return shift[int8](ctx, g, 1, 1, true) }))
		}
		ctx, cancel := context.WithCancel(context.Background())
		errs := Each(t, groups, func(bounded context.Context, g *collective.Group) error {
			if g.Rank() != 1 {
				return collective.Barrier(bounded, g)
			}
			if way >= 2 {
				first := collective.RecvAsync(bounded, g, []int8{1}, 0)
				second := collective.RecvAsync(ctx, g, []int8{1}, 0)
				cancel()
				err := second.Wait()
				checkAborted(t, first.Wait(), 1, "the message before")
				return err
			}
			h := collective.RecvAsync(ctx, g, []int8{1}, 0)
			cancel()
			return h.Wait()
		})
		cancel()
		if !errors.Is(errs[1], context.Canceled) || errors.Is(errs[1], collective.ErrAborted) {
			t.Fatalf("way %d, rank 1: %v", way, errs[1])
		}
		checkAborted(t, errs[0], 1, "rank 0")
		checkAborted(t, errs[2], 1, "rank 2")
		closeAll(t, groups)
	}
	groups := newGroups(t, 2)
	ctx, cancel := context.WithCancel(context.Background())
	began := make(chan struct{})
	errs := Each(t, groups, func(bounded context.Context, g *collective.Group) error {
		if g.Rank() == 0 {
			<-began
			cancel()
			return collective.Barrier(bounded, g)
		}
		close(began)
		return collective.Recv(ctx, g, []int8{1}, 0)
	})
	if !errors.Is(errs[1], context.Canceled) || errors.Is(errs[1], collective.ErrAborted) {
		t.Fatalf("rank 1: %v", errs[1])
	}
	checkAborted(t, errs[0], 1, "rank 0")
	closeAll(t, groups)
}

// testPointClose: small messages that were sent before the sender closes arrive. A rank that waits
// for a message of a closed rank gets an error. If a rank closes while one of its own messages is
// in progress, that message fails.
func testPointClose(t *testing.T, newGroups NewGroups) {
	for range repeat(8) {
		groups := newGroups(t, 2)
		must(t, Each(t, groups, func(ctx context.Context, g *collective.Group) error {
			if g.Rank() == 0 {
				if err := collective.Send(ctx, g, []int32{41, 42}, 1); err != nil {
					return err
				}
				return g.Close()
			}
			got := make([]int32, 2)
			if err := collective.Recv(ctx, g, got, 0); err != nil || got[1] != 42 {
				return fmt.Errorf("%v: %w", got, err)
			}
			err := collective.Recv(ctx, g, got, 0)
			checkAborted(t, err, 0, "a message of a rank that has left")
			return nil
		}))
		if err := collective.Send(context.Background(), groups[0], []int8{1}, 1); !errors.Is(err, collective.ErrClosed) {
			t.Fatal(err)
		}
		closeAll(t, groups)
	}
	groups := newGroups(t, 2)
	h := collective.RecvAsync(context.Background(), groups[0], []int8{1}, 1)
	if err := groups[0].Close(); err != nil {
		t.Fatal(err)
	}
	checkAborted(t, h.Wait(), 0, "a message under way")
	closeAll(t, groups)
}

func testPointLeaks(t *testing.T, newGroups NewGroups) {
	leaks(t, newGroups, 40, func(i int, groups, subs []*collective.Group) {
		must(t, Each(t, slices.Concat(groups, subs), func(ctx context.Context, g *collective.Group) error {
			return shift[float32](ctx, g, 1, 100, i%2 == 0)
		}))
	})
}
