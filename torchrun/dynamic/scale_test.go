package dynamic

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

// network is a store behind a network: each call takes about a millisecond of the test's time.
type network struct {
	storetest.Memory
	calls atomic.Int64
	polls bool // Wait reports no change, so callers poll, as torchelastic does
}

func (n *network) delay() {
	n.calls.Add(1)
	<-time.After(500*time.Microsecond + rand.N(time.Millisecond))
}

func (n *network) Get(ctx context.Context, key string) (store.Entry, error) {
	n.delay()
	return n.Memory.Get(ctx, key)
}

func (n *network) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	n.delay()
	return n.Memory.CompareAndSet(ctx, key, version, value)
}

func (n *network) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	if n.polls {
		<-ctx.Done()
		return store.Entry{}, context.Cause(ctx)
	}
	n.delay()
	return n.Memory.Wait(ctx, key, version)
}

// TestManyNodes: all nodes of a large run arrive at once; later one in a hundred dies and all
// others meet again. Both take a bounded number of calls of the store.
func TestManyNodes(t *testing.T) {
	nodes := 200
	if testing.Short() {
		nodes = 40
	}
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		set := *settings(nodes/2, nodes)
		set.KeepAliveInterval = 5 * time.Second
		began := time.Now()
		all := make([]*Handler, nodes)
		for i := range all {
			all[i] = handler(t, n, set)
		}
		rounds := together(t, all...)
		check := func(rounds []Round, number, size int) {
			t.Helper()
			ranks := make([]bool, size)
			for _, r := range rounds {
				if r.Number != number || len(r.Members) != size || ranks[r.Rank] {
					t.Fatalf("round %d of %d with rank %d; want round %d of %d, and each rank once", r.Number, len(r.Members), r.Rank, number, size)
				}
				ranks[r.Rank] = true
			}
		}
		check(rounds, 0, nodes)
		joined, took := n.calls.Load(), time.Since(began)
		t.Logf("%d nodes join in %v: %d calls of the store, %.1f of each", nodes, took, joined, float64(joined)/float64(nodes))
		if most := int64(40 * nodes); joined > most {
			t.Errorf("%d calls of the store, more than %d", joined, most)
		}

		dead := max(1, nodes/100)
		for _, h := range all[:dead] {
			h.Stop()
		}
		died := time.Now()
		n.calls.Store(0)
		left := all[dead:]
		second := make([]Round, len(left))
		var again sync.WaitGroup
		for i, h := range left {
			again.Go(func() {
				if _, err := h.Changed(t.Context(), nil); err != nil {
					t.Error(err)
				}
				var err error
				if second[i], err = h.Next(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		again.Wait()
		check(second, 1, len(left))
		if most := int64(150 * nodes); n.calls.Load() > most { // including those for heartbeats and polls
			t.Errorf("%d calls of the store, more than %d", n.calls.Load(), most)
		}
		t.Logf("%d die: the others meet again after %v: %d calls, %.1f of each", dead, time.Since(died), n.calls.Load(),
			float64(n.calls.Load())/float64(len(left)))
		for _, h := range left {
			h.Stop()
		}
	})
}

// asTorchelastic uses the record as torchelastic's nodes do: it polls once a second, and retries a
// change at once when another node's write came first.
type asTorchelastic struct{ *storeHolder }

func (asTorchelastic) lose(context.Context, int) error { return nil }

func (a asTorchelastic) await(ctx context.Context, most time.Duration) error {
	return retry.Pause(ctx, most)
}

// TestJoinsBesideTorchelastic: nodes meet sooner than torchelastic's, or, if there are a thousand,
// with a quarter of the calls of the store.
func TestJoinsBesideTorchelastic(t *testing.T) {
	nodes := 200
	if testing.Short() {
		nodes = 40
	}
	join := func(wrap func(*storeHolder) holder) (calls int64, took time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			n := &network{}
			set := *settings(nodes, nodes)
			began := time.Now()
			var all sync.WaitGroup
			for range nodes {
				h := handler(t, n, set)
				all.Go(func() {
					err := h.jitter(t.Context())
					if err == nil {
						err = run(t.Context(), wrap(h.holder), h.node, "", &h.cfg.Settings, joinOp, operation{what: "joining", limit: time.Minute})
					}
					if err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			calls, took = n.calls.Load(), time.Since(began)
		})
		return calls, took
	}
	ours, took := join(func(h *storeHolder) holder { return h })
	theirs, before := join(func(h *storeHolder) holder { return asTorchelastic{h} })
	t.Logf("%d nodes: %d calls in %v; as torchelastic %d in %v", nodes, ours, took, theirs, before)
	if nodes < 1000 && took >= before || nodes >= 1000 && ours > theirs/4 {
		t.Error("that is no gain")
	}
}
