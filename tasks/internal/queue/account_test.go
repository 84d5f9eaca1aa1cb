package queue

import (
	"strings"
	"testing"
	"time"
)

// TestUnreadPauses: if a client does not take its results, its tasks wait while those of other
// clients run; they continue once it does.
func TestUnreadPauses(t *testing.T) {
	q, now := New(Config{Unread: 1000}), time.Unix(1000, 0)
	g := q.Group("f@1", MakeDemand(map[string]int64{"cpu": Unit}))
	ran := map[ID]bool{}
	value := make([]byte, 400)
	act := func() {
		for len(q.Out) > 0 {
			out := q.Out
			q.Out = nil
			for _, a := range out {
				switch a.What {
				case Ask:
					q.Granted(now, a.Worker, a.Group)
				case Push:
					ran[a.Task] = true
					q.Done(now, a.Worker, Held{a.Task, a.Attempt}, Result{State: Succeeded, Value: value}, time.Second)
				}
			}
		}
	}
	for _, client := range []uint64{1, 2} {
		for n := range uint64(50) {
			q.Submit(now, Task{ID: ID{client, n}, Group: g, Cost: 1000, Spec: value, Options: &Options{}})
		}
	}
	if q.Bytes() != 100*1000 {
		t.Fatalf("%d bytes for 100 tasks of 1000", q.Bytes())
	}
	q.Join(now, Worker{ID: 9, Name: "w", Functions: map[string]bool{"f@1": true}, Offers: map[string]int64{"cpu": Unit}}, nil)
	read := func(client uint64) {
		for id := range ran {
			if id.Client == client {
				q.Release(now, id)
			}
		}
		act()
	}
	for range 100 {
		act()
		read(2)
	}
	of := map[uint64]int{}
	for id := range ran {
		of[id.Client]++
	}
	// Three results exceed the limit; a few more tasks were already at the worker.
	if of[2] != 50 || of[1] < 2 || of[1] > 5 {
		t.Fatalf("of the client that reads %d have run, of the other %d", of[2], of[1])
	}
	if u := q.Usage(1); !u.Paused || u.Unread != int64(400*of[1]) || u.Over != int64((400+TaskCost)*of[1]) || u.Open != int64(1000*(50-of[1])) {
		t.Errorf("%d of its tasks are over: %+v", of[1], u)
	}
	if all := q.ExplainFunction(now, "f"); len(all) == 0 || !strings.Contains(all[0].Why, "bytes of results that it has not taken") {
		t.Errorf("%+v", all)
	}
	for range 50 {
		read(1)
	}
	if len(ran) != 100 || q.Bytes() != 0 || len(q.accounts) != 0 {
		t.Errorf("%d of 100 have run, and %d bytes are left, of %d clients", len(ran), q.Bytes(), len(q.accounts))
	}
}

// TestBytesOfAChain: the memory of tasks is given back however they end: by the failure of a task
// before them, by a cancel, or when a stored result was lost and is computed again.
func TestBytesOfAChain(t *testing.T) {
	q, now := New(Config{}), time.Unix(1000, 0)
	g := q.Group("f@1", MakeDemand(map[string]int64{"cpu": Unit}))
	join := func(id uint64, host string) {
		q.Join(now, Worker{ID: id, Host: host, Functions: map[string]bool{"f@1": true}, Offers: map[string]int64{"cpu": Unit}}, nil)
		q.Granted(now, id, g)
	}
	next := func(r Result) {
		for _, a := range q.Out {
			if a.What == Push {
				q.Out = nil
				q.Done(now, a.Worker, Held{a.Task, a.Attempt}, r, time.Second)
				return
			}
		}
		t.Fatal("nothing runs")
	}
	for n := range uint64(3) {
		o := &Options{Needs: []ID{{1, n - 1}}, Retries: 3}
		if n == 0 {
			o = nil
		}
		q.Submit(now, Task{ID: ID{1, n}, Group: g, Cost: 600, Options: o})
	}
	join(8, "a")
	stored := Result{State: Succeeded, Object: Object{1}, Size: 1 << 20}
	next(stored)
	q.Out = nil
	q.Lose(now, 8) // the second task waits for the first, which runs again
	if q.Bytes() != 3*600 {
		t.Errorf("%d bytes of 3 tasks of which none is over", q.Bytes())
	}
	join(9, "b")
	next(stored)
	next(Result{State: Failed, Failure: ByUser, Text: strings.Repeat("x", 100)})
	if want := int64(600 + TaskCost + 100 + TaskCost); q.Bytes() != want {
		t.Errorf("%d bytes of a stored result, a text and a task that has failed for it; want %d", q.Bytes(), want)
	}
	for n := range uint64(3) {
		q.Release(now, ID{1, n})
	}
	q.Submit(now, Task{ID: ID{1, 9}, Group: g, Cost: 600})
	q.Cancel(now, ID{1, 9})
	q.Release(now, ID{1, 9})
	if q.Bytes() != 0 || len(q.accounts) != 0 {
		t.Errorf("%d bytes of %d clients are left", q.Bytes(), len(q.accounts))
	}
}
