package queue

import (
	"strings"
	"testing"
	"time"
)

// TestStoppedKeepsItsDemand: a function that continues after its task was cancelled keeps its
// resources of the worker: tasks queued behind it go to other workers, and none follow until it has
// ended. After a grace period the queue asks repeatedly for the worker's end.
func TestStoppedKeepsItsDemand(t *testing.T) {
	q, now := New(Config{Grace: 30 * time.Second}), time.Unix(1000, 0)
	g := q.Group("f@1", MakeDemand(map[string]int64{"cpu": Unit}))
	at := map[ID]Action{} // where each task is
	var ends []uint64     // workers whose end the queue asks for
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
				case End:
					ends = append(ends, a.Worker)
				case TakeBack:
					q.Returned(now, a.Worker, []Held{{a.Task, a.Attempt}})
				}
			}
		}
	}
	join := func(id uint64) {
		q.Join(now, Worker{ID: id, Name: "w", Functions: map[string]bool{"f@1": true}, Offers: map[string]int64{"cpu": Unit}}, nil)
		act()
	}
	join(8)
	q.Submit(now, Task{ID: ID{1, 0}, Group: g, Options: &Options{TimeLimit: time.Second}})
	act()
	q.Submit(now, Task{ID: ID{1, 1}, Group: g})
	act()
	if at[ID{1, 1}].Worker != 8 {
		t.Fatal("no task was sent ahead")
	}
	now = now.Add(time.Second)
	q.Tick(now) // the first task's time is up
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
	if all := q.ExplainTask(now.Add(46*time.Second), 0); len(all) != 2 || all[1].Why != "worker w runs an attempt that, whose time is up, has not ended for 46s" {
		t.Errorf("it is explained as %+v", all)
	}
	for range 3 {
		for q.Tick(now); now.Before(time.Unix(1031, 0)); q.Tick(now) {
			now = q.Next
		}
		act()
		if len(ends) != 1 || ends[0] != 8 || now.Unix() != 1031 {
			t.Errorf("after 30 s the workers %v are to be ended, at %v", ends, now.Unix())
		}
	}
	now = now.Add(endAgain)
	if q.Tick(now); len(q.Out) != 1 {
		t.Errorf("it is not asked for again: %v", q.Out)
	}
	act()
	q.Done(now, 8, Held{first.Task, first.Attempt}, Result{State: Succeeded}, time.Second)
	act()
	if r, _ := q.Result(ID{1, 0}); r.Failure != TimedOut {
		t.Errorf("the task has become %v", r)
	}
	now = now.Add(time.Hour)
	if q.Tick(now); len(q.Out) > 0 || len(ends) != 2 {
		t.Errorf("after its end: %v, %v", q.Out, ends)
	}
	if w := at[ID{1, 2}].Worker; w != 8 {
		t.Errorf("after its end the worker has no task: it is with %d", w)
	}
}
