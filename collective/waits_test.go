package collective_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
)

// TestWaits: the ranks keep the durations of the same operations, and a rank that comes late to an
// operation has the shortest.
func TestWaits(t *testing.T) {
	for _, async := range []bool{false, true} {
		t.Run(fmt.Sprint("async=", async), func(t *testing.T) {
			groups := collective.Local(3)
			const rounds, late = 12, 20 * time.Millisecond
			err := collectiveEach(groups, func(g *collective.Group) error {
				data := []float32{1}
				for range rounds {
					if g.Rank() == 2 {
						await(late)
					}
					if async {
						if err := collective.AllReduceAsync(t.Context(), g, "t", data, collective.Sum).Wait(); err != nil {
							return err
						}
						continue
					}
					if err := collective.AllReduce(t.Context(), g, data, collective.Sum); err != nil {
						return err
					}
				}
				if async { // the last ranks may still be ending the operation that has ended here
					return collective.Barrier(t.Context(), g)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			of := map[uint64][]time.Duration{}
			for _, g := range groups {
				waits := g.Waits()
				if len(waits) < rounds {
					t.Errorf("rank %d has %d waits", g.Rank(), len(waits))
				}
				for _, w := range waits {
					of[w.Operation] = append(of[w.Operation], w.For)
				}
				if again := g.Waits(); again != nil {
					t.Errorf("told twice: %v", again)
				}
			}
			compared := 0
			for _, waits := range of {
				if len(waits) != 3 {
					t.Errorf("%d ranks have an operation", len(waits))
					continue
				}
				if waits[0] >= late && waits[1] >= late && waits[2] < min(waits[0], waits[1]) {
					compared++
				}
			}
			if compared < rounds/2 {
				t.Errorf("in %d of %d operations the late rank waited least: %v", compared, rounds, of)
			}
			for _, g := range groups {
				g.Close()
			}
		})
	}
}

// await blocks for d, the time by which a rank is late. The test measures that time.
func await(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	<-ctx.Done()
}

func collectiveEach(groups []*collective.Group, do func(*collective.Group) error) error {
	var all sync.WaitGroup
	errs := make([]error, len(groups))
	for i, g := range groups {
		all.Go(func() { errs[i] = do(g) })
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// TestWaitsAreBounded: between two calls of Waits a limited number of durations is kept. If there
// were too many, fewer are kept from then on, of the same operations on all ranks.
func TestWaitsAreBounded(t *testing.T) {
	groups := collective.Local(2)
	round := func(n int) {
		if err := collectiveEach(groups, func(g *collective.Group) error {
			for range n {
				if err := collective.Barrier(t.Context(), g); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	var last [2][]collective.Wait
	for range 8 {
		round(1000)
		for r, g := range groups {
			if last[r] = g.Waits(); len(last[r]) > collective.MostWaits {
				t.Fatalf("%d waits", len(last[r]))
			}
		}
	}
	if n := len(last[0]); n == 0 || n == collective.MostWaits || n != len(last[1]) {
		t.Errorf("%d and %d waits of 1000 operations", n, len(last[1]))
	}
	for i := range last[0] {
		if last[0][i].Operation != last[1][i].Operation {
			t.Errorf("operation %x and %x", last[0][i].Operation, last[1][i].Operation)
		}
	}
	round(1)
	if (*collective.Group)(nil).Waits() != nil {
		t.Error("a nil group has waits")
	}
}
