package queue

import (
	"strings"
	"testing"
	"time"
)

// TestStoppedKeepsItsDemand: a function that goes on after its task was cancelled keeps what it
// takes of its worker: the tasks behind it go to others, and none follow until it has ended.
func TestStoppedKeepsItsDemand(t *testing.T) {
	q, now := New(Config{}), time.Unix(1000, 0)
	g := q.Group("f@1", MakeDemand(map[string]int64{"cpu": Unit}))
	at := map[ID]Action{} // where each task is
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
				case TakeBack:
					q.Returned(now, a.Worker, []Held{{a.Task, a.Attempt}})
				}
			}
		}
	}
	join := func(id uint64) {
		q.Join(now, Worker{ID: id, Name: "w", Functions: map[string]bool{"f@1": true}, Offers: map[string]int64{"cpu": Unit}, SaysEnded: true}, nil)
		act()
	}
	join(8)
	for n := range uint64(2) {
		q.Submit(now, Task{ID: ID{1, n}, Group: g, Options: &Options{TimeLimit: time.Second}})
		act()
	}
	if at[ID{1, 1}].Worker != 8 {
		t.Fatal("no task was sent ahead")
	}
	now = now.Add(time.Second)
	q.Tick(now) // the first one's time is up
	now = now.Add(stoppedSoon)
	q.Tick(now)
	act()
	if s := q.Status(now); s.Ready != 1 || len(s.Workers[0].Stopped) != 1 || !strings.Contains(s.Functions[0].Why, "has not ended for") {
		t.Fatalf("while the function goes on: %+v", s)
	}
	join(9)
	if w := at[ID{1, 1}].Worker; w != 9 {
		t.Errorf("the task behind it is with worker %d", w)
	}
	q.Submit(now, Task{ID: ID{1, 2}, Group: g})
	act()
	if w := at[ID{1, 2}].Worker; w != 9 {
		t.Errorf("a later task is with worker %d", w)
	}
	first := at[ID{1, 0}]
	q.Done(now, 8, Held{first.Task, first.Attempt}, Result{State: Succeeded}, time.Second)
	act()
	if r, _ := q.Result(ID{1, 0}); r.Failure != TimedOut {
		t.Errorf("the task has become %v", r)
	}
	if w := at[ID{1, 2}].Worker; w != 8 {
		t.Errorf("after its end the worker has no task: it is with %d", w)
	}
}
