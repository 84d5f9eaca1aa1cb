package queue

import (
	"testing"
	"time"
)

// TestPinned: a task for one worker fails if that worker can never run it: it lacks the function,
// offers too little, or enters a world first.
func TestPinned(t *testing.T) {
	q, now := New(Config{}), time.Unix(1000, 0)
	one := MakeDemand(map[string]int64{CPU: Unit})
	g := q.Group("f@1", one)
	q.Join(now, Worker{ID: 8, Functions: map[string]bool{"f@1": true}, Offers: map[string]int64{CPU: Unit}}, nil)
	submit := func(n uint64, g *Group) {
		q.Submit(now, Task{ID: ID{1, n}, Group: g, Options: &Options{Pin: 8}})
		q.Granted(now, 8, g)
	}
	over := func(n uint64, why string) {
		t.Helper()
		if r, ok := q.Result(ID{1, n}); !ok || r.Failure != NoMember || r.Text != why {
			t.Errorf("task %d has become %+v, not %q", n, r, why)
		}
	}
	submit(1, q.Group("g@1", one))
	over(1, "its worker has no such function, or offers less than cpu=1")
	submit(2, q.Group("f@1", MakeDemand(map[string]int64{CPU: 2 * Unit})))
	over(2, "its worker has no such function, or offers less than cpu=2")
	for n := range uint64(4) {
		submit(3+n, g)
	}
	if s := q.Status(now); s.Running != 2 || s.Ready != 2 {
		t.Errorf("%d tasks are sent and %d are ready, not 2 and 2", s.Running, s.Ready)
	}
	offered := func(want float64) {
		t.Helper()
		if all := q.Status(now).Offered; len(all) != 1 || all[0].CPU != want {
			t.Errorf("%+v is offered, not %v processors", all, want)
		}
	}
	offered(1)
	q.Train(now, 8, true)
	offered(0)
	for n := range uint64(4) {
		over(3+n, "its worker trains")
	}
	submit(7, g)
	over(7, "its worker trains")
	q.Left(now, 8)
	submit(8, g)
	over(8, "its worker is gone")
}
