package collective_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
)

// TestKill: a worker in a goroutine is killed at any time. All others report it as dead, and no
// call of the group returns to it.
func TestKill(t *testing.T) {
	for _, cfg := range []collective.Config{{}, {Encrypt: true}} {
		for round := range collectivetest.Rounds(24) {
			killOne(t, newWorkers(t, cfg, 3), round)
		}
	}
}

func killOne(t *testing.T, w *workers, victim int) {
	groups := w.connect(t, 3)
	victim %= 3
	var running sync.WaitGroup
	reached := make(chan struct{}, 6)
	train := func(rank int, name string, op func(ctx context.Context) error) {
		running.Go(func() {
			returned := false
			defer func() {
				if returned == (rank == victim) {
					t.Errorf("rank %d, %s: returned %v, killed %v", rank, name, returned, rank == victim)
				}
			}()
			var err error
			for n := 0; err == nil; n++ {
				if n == 3 {
					reached <- struct{}{}
				}
				err = op(t.Context())
			}
			var a *collective.AbortedError
			if rank != victim && (!errors.As(err, &a) || !slices.Equal(a.Dead, []int{victim})) {
				t.Errorf("rank %d, %s: %v", rank, name, err)
			}
			returned = true
		})
	}
	for rank, g := range groups {
		train(rank, "AllReduce", func(ctx context.Context) error {
			return collective.AllReduce(ctx, g, make([]float32, 1000), collective.Sum)
		})
		train(rank, "AllReduceAsync", func(ctx context.Context) error {
			return collective.AllReduceAsync(ctx, g, "x", make([]float32, 1000), collective.Sum).Wait()
		})
	}
	for range 2 * len(groups) {
		<-reached
	}
	w.endpoints[victim].Kill()
	running.Wait()
	for _, g := range groups {
		running.Go(func() { g.Close() })
	}
	running.Wait()
	// Nothing listens at the victim's address any more.
	for rank, err := range w.try(100, (victim+1)%3, (victim+2)%3) {
		var a *collective.AbortedError
		if rank != victim && (!errors.As(err, &a) || !slices.Equal(a.Dead, []int{victim})) {
			t.Errorf("connect of rank %d: %v", rank, err)
		}
	}
	if _, err := w.endpoints[victim].Connect(t.Context(), collective.Peers{Key: dataKey, Generation: 101, Rank: victim, Addrs: w.addrs}); err == nil {
		t.Error("the dead can connect")
	}
}

// TestErr: the ranks of a host see at once that one of them has given up. A working group has no
// error.
func TestErr(t *testing.T) {
	w := newWorkers(t, collective.Config{}, 4)
	w.hosts = "aabb"
	groups := w.connect(t, 4)
	for rank, g := range groups {
		if err := g.Err(); err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	groups[0].Abort(errors.New("enough"))
	var a *collective.AbortedError
	if err := groups[1].Err(); !errors.As(err, &a) || !slices.Equal(a.Dead, []int{0}) {
		t.Errorf("rank 1: %v", err)
	}
	if err := (*collective.Group)(nil).Err(); err != nil {
		t.Error(err)
	}
}
