package elastictest_test

import (
	"context"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// TestSpares: after a death the next world is as large as before, and no commit is lost.
func TestSpares(t *testing.T) {
	inTime(t, func(t *testing.T) {
		waiting := newWaiters()
		job := begin(elastictest.Config{
			Hosts:  []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 2}},
			Driver: driver.Config{Size: job.Size{NP: 2, Min: 1, Spares: 2, Elastic: true}, Events: waiting.observe},
			Worker: func(ctx context.Context) error {
				w, err := elastic.Init(ctx)
				if err != nil {
					return err
				}
				defer w.Close()
				weights, step := make([]float64, 50_000), 0
				state := elastic.NewState(w, elastic.Tensor("weights", weights), elastic.Value("step", &step))
				return elastic.Run(ctx, state, func(ctx context.Context) error {
					for ; step < 1_000_000; step++ {
						one := []float64{1}
						if err := collective.AllReduce(ctx, w.Group(), one, collective.Average); err != nil {
							return err
						}
						for i := range weights {
							if weights[i] != float64(step) {
								t.Errorf("weight %d is %v after step %d", i, weights[i], step)
								return nil
							}
							weights[i] += one[0]
						}
						step++
						err := state.Commit()
						step--
						if err != nil {
							step++
							return err
						}
					}
					return nil
				})
			},
		})
		ready := func(s elastictest.Status) bool { return waiting.count() == 2 && elastictest.Size(2)(s) }
		var last uint64
		for range 3 {
			if err := job.Await(ready); err != nil {
				t.Fatal(err)
			}
			if err := job.Await(elastictest.Commit(last + 200)); err != nil {
				t.Fatal(err)
			}
			var before uint64
			if err := job.Await(func(s elastictest.Status) bool { before, last = s.World.Generation, s.LastCommit; return true }); err != nil {
				t.Fatal(err)
			}
			job.Kill(1)
			var size int
			if err := job.Await(func(s elastictest.Status) bool { size = s.World.Size(); return s.World.Generation > before }); err != nil {
				t.Fatal(err)
			}
			if size != 2 {
				t.Errorf("the world after a death has %d workers", size)
			}
			if err := job.Await(func(s elastictest.Status) bool { return s.LastCommit > last }); err != nil {
				t.Fatal(err)
			}
		}
		if err := job.Stop(); err != nil {
			t.Fatal(err)
		}
	})
}

// waiters are the slots whose workers have joined but are in no world.
type waiters struct {
	mu    sync.Mutex
	slots map[plan.SlotID]bool
}

func newWaiters() *waiters { return &waiters{slots: map[plan.SlotID]bool{}} }

func (w *waiters) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.slots)
}

func (w *waiters) observe(e job.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var slot plan.SlotID
	for _, f := range e.Fields {
		switch v := f.Value.(type) {
		case string:
			if f.Key == "host" {
				slot.Host = v
			}
		case int:
			if f.Key == "slot" {
				slot.Index = v
			}
		case []job.PublishedSlot:
			for _, s := range v {
				delete(w.slots, plan.SlotID{Host: s.Host, Index: s.Slot})
			}
		}
	}
	switch e.Name {
	case job.WorkerReady:
		w.slots[slot] = true
	case job.WorkerExited:
		delete(w.slots, slot)
	}
}
