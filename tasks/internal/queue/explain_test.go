package queue

import (
	"strings"
	"testing"
	"time"
)

// TestExplain: each reason for which a task does not run is explained.
func TestExplain(t *testing.T) {
	now := time.Unix(1000, 0)
	q := New(Config{})
	cpu := func(milli int64) Demand { return MakeDemand(map[string]int64{"cpu": milli}) }
	f, large, unknown := q.Group("f@1", cpu(1000)), q.Group("large@1", cpu(9000)), q.Group("unknown@1", cpu(1000))
	submit := func(n uint64, g *Group, o *Options) {
		q.Submit(now, Task{ID: ID{7, n}, Group: g, Options: o})
	}
	why := func(n uint64, want ...string) {
		t.Helper()
		all := q.ExplainTask(now, n)
		if len(all) != 1 {
			t.Fatalf("%d explanations of task %d", len(all), n)
		}
		for _, text := range want {
			if !strings.Contains(all[0].State+": "+all[0].Why, text) {
				t.Errorf("task %d is %s: %s; not %q", n, all[0].State, all[0].Why, text)
			}
		}
	}
	submit(1, f, nil)
	why(1, "ready: there is no worker")
	q.Join(now, Worker{ID: 50, Name: "w", Host: "h", Functions: map[string]bool{"f@1": true, "large@1": true}, Offers: map[string]int64{"cpu": 1000}}, nil)
	why(1, "1 worker has been asked for a lease 0s ago")
	q.Refused(now, 50, f, "it trains")
	why(1, "has refused: it trains")
	now = now.Add(leaseAgain)
	q.Tick(now)
	q.Granted(now, 50, f)
	why(1, "running: worker w runs it")
	submit(2, f, nil)
	why(2, "running: worker w has it, and runs it after 1 others")
	for n := uint64(3); n < 6; n++ {
		submit(n, f, nil)
	}
	why(5, "ready: 2 tasks go before it; 1 worker is busy")
	submit(6, f, &Options{Needs: []ID{{7, 1}, {7, 5}}})
	why(6, "waiting: it waits for task 1 (f, running), task 5 (f, ready)")
	submit(7, large, nil)
	why(7, "offers cpu=1, less than cpu=9")
	submit(8, unknown, nil)
	why(8, "has no such function")
	submit(9, f, &Options{Pin: 50})
	why(9, "it is for worker w alone, which is busy")
	submit(10, f, &Options{Prefer: "other"})
	why(10, "it prefers host other")
	if all := q.ExplainFunction(now, "f"); len(all) != 8 || all[0].N != 6 || all[len(all)-1].State != "running" {
		t.Errorf("%+v", all)
	}
	if q.ExplainFunction(now, "none") != nil || q.ExplainTask(now, 99) != nil {
		t.Error("what there is not is explained")
	}
	q.Cancel(now, ID{7, 8})
	why(8, "cancelled: it was cancelled")
}

// TestListed: a function is listed as long as it has tasks, and for listedFor after that.
func TestListed(t *testing.T) {
	q, now := New(Config{}), time.Unix(1000, 0)
	q.Submit(now, Task{ID: ID{1, 1}, Group: q.Group("f@1", nil)})
	for _, c := range []struct {
		later    time.Duration
		released bool
		listed   int
	}{{24 * time.Hour, false, 1}, {0, true, 1}, {listedFor, true, 1}, {1, true, 0}} {
		if now = now.Add(c.later); c.released {
			q.Release(now, ID{1, 1})
		}
		if got := len(q.Status(now).Functions); got != c.listed {
			t.Errorf("%d functions are listed after %v more, want %d", got, c.later, c.listed)
		}
	}
}
