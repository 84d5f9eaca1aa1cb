package queue

import (
	"testing"
	"time"
)

// TestWaits: a task that waits for other tasks lends its processors, however it ends, and keeps its
// other resources. If all tasks that run wait for one that needs these resources, Unserved says so.
func TestWaits(t *testing.T) {
	q, now := New(Config{}), time.Unix(1000, 0)
	demand := map[string]int64{"cpu": Unit, "gpu": Unit}
	plain, onGPU := q.Group("f@1", MakeDemand(map[string]int64{"cpu": Unit})), q.Group("f@1", MakeDemand(demand))
	at := map[ID]Action{}
	act := func() {
		for len(q.Out) > 0 {
			out := q.Out
			q.Out = nil
			for _, a := range out {
				switch a.What {
				case Ask:
					q.Granted(now, a.Worker, a.Group)
				case Push:
					at[a.Task] = a
				}
			}
		}
	}
	join := func(held ...Held) {
		q.Join(now, Worker{ID: 8, Name: "w", Functions: map[string]bool{"f@1": true}, Offers: demand}, held)
		act()
	}
	submit := func(n uint64, g *Group) {
		q.Submit(now, Task{ID: ID{1, n}, Group: g})
		act()
	}
	attempt := func(n uint64) Held { return Held{ID{1, n}, at[ID{1, n}].Attempt} }
	waits := func(task uint64, n int32) {
		q.Waits(now, 8, attempt(task), n)
		act()
	}
	free := func(want int64) {
		t.Helper()
		if got := q.workers[8].free["cpu"]; got != want*Unit {
			t.Errorf("%d of the worker's processors are free, want %d", got/Unit, want)
		}
	}
	join()
	for n := range uint64(20) { // each waits for the next one
		submit(n, plain)
		if at[ID{1, n}].Worker != 8 {
			t.Fatalf("task %d is not sent while those before it wait", n)
		}
		free(0)
		waits(n, 1)
		free(1)
	}
	waits(19, 1) // the -1 arrives in a later message
	waits(19, -1)
	free(1)
	waits(19, -1)
	waits(18, -1)
	free(-1) // one more is taken than there are
	q.Done(now, 8, attempt(19), Result{State: Succeeded}, time.Second)
	free(0)
	q.Done(now, 8, attempt(17), Result{State: Succeeded}, time.Second) // while it waited
	q.Cancel(now, ID{1, 16})
	q.Returned(now, 8, []Held{attempt(16)}) // it has ended
	stopped := attempt(15)
	q.Cancel(now, ID{1, 15})
	free(0)
	join(attempt(0), attempt(18), attempt(15)) // after a reconnection: the others were lost, and the worker reports which of its tasks wait
	free(-2)
	for _, n := range []uint64{0, 18, 15} {
		waits(n, 1)
	}
	if w := q.workers[8]; w.waiting() != 3 || q.why(now, q.tasks[ID{1, 0}]) != "worker w runs it, and it waits for other tasks" {
		t.Errorf("%d wait: %s", w.waiting(), q.why(now, q.tasks[ID{1, 0}]))
	}
	for n := range uint64(20) {
		q.Cancel(now, ID{1, n})
		act()
	}
	for n := range uint64(20) {
		q.Returned(now, 8, []Held{attempt(n)})
	}
	q.Done(now, 8, stopped, Result{}, 0)
	free(1)
	submit(100, onGPU)
	waits(100, 1)
	for n := uint64(101); q.Unserved(now, onGPU) == ""; n++ { // some are sent ahead
		if n > 110 {
			t.Fatal("it is not said that all waits for a task that needs what it holds")
		}
		submit(n, onGPU)
	}
	if why := q.Unserved(now, onGPU); why != "1 tasks of f (cpu=1,gpu=1) do not run: 1 worker is busy with 1 tasks that wait for other tasks, and hold gpu=1" {
		t.Errorf("it is said: %s", why)
	}
	waits(100, -1)
	if why := q.Unserved(now, onGPU); why != "" {
		t.Errorf("a worker that goes on serves: %s", why)
	}
}
