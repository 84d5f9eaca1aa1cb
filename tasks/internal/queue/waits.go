package queue

import (
	"fmt"
	"slices"
	"time"
)

// Waits records that the function of an attempt has begun to wait for other tasks or, if n is -1,
// that it continues. Reports of the same time may arrive in any order.
func (q *Queue) Waits(now time.Time, worker uint64, h Held, n int32) {
	w := q.workers[worker]
	if w == nil {
		return
	}
	t := q.of(worker, h)
	if t == nil {
		if t = w.stoppedAttempt(h); t == nil {
			return
		}
	}
	if i := slices.Index(w.sent, t); i >= w.running { // it has begun, which was not known yet
		w.sent = slices.Insert(slices.Delete(w.sent, i, i+1), w.running, t)
		t.Group.Demand.take(w.free, 1)
		w.running++
	}
	q.setWaits(t, max(t.waits+n, 0))
	q.begin(now, w)
	q.fill(now, w)
}

// setWaits makes a running task lend its processors, or take them again even if others use them
// now.
func (q *Queue) setWaits(t *task, waits int32) {
	was, is := t.waits > 0, waits > 0
	if t.waits = waits; was == is {
		return
	}
	n := int64(1)
	if is {
		n = -1
	}
	t.worker.lease(t.Group).sent += int(n)
	for _, a := range t.Group.Demand {
		if a.Name == CPU {
			t.worker.free[CPU] -= n * a.Milli
		}
	}
}

// waiting returns the number of the worker's tasks that wait for others.
func (w *worker) waiting() (n int) {
	for _, t := range w.sent[:w.running] {
		if t.waits > 0 {
			n++
		}
	}
	return n
}

// jammed reports whether the worker cannot take a task of the group because everything that it runs
// waits for tasks.
func (w *worker) jammed(q *Queue, g *Group) bool {
	return w.running > 0 && w.waiting() == w.running && !(g.Demand.Fits(w.free) && w.mayHave(q, g))
}

// whyJammed describes the resources that the worker's waiting tasks hold.
func (w *worker) whyJammed() string {
	held := map[string]int64{}
	for _, t := range w.sent[:w.running] {
		for _, a := range t.Group.Demand {
			if a.Name != CPU {
				held[a.Name] += a.Milli
			}
		}
	}
	why := fmt.Sprintf("is busy with %d tasks that wait for other tasks", w.running)
	if len(held) > 0 {
		why += ", and hold " + MakeDemand(held).String()
	}
	return why
}
