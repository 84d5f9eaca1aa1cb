package queue

import (
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/tasks/report"
)

// stoppedSoon is how long an attempt may take to end after it was asked to stop. Then the tasks
// that wait behind it on its worker are given to other workers.
const stoppedSoon = 50 * time.Millisecond

// endAgain is the pause before the end of a worker is requested again.
const endAgain = 10 * time.Second

// stop asks the worker of a task to stop the attempt, and takes the task away from the worker. The
// attempt keeps its place and its resources on the worker until the worker reports its end, because
// its function may ignore its context. why is shown to users.
func (q *Queue) stop(now time.Time, t *task, why string) {
	w := t.worker
	q.do(Action{What: Stop, Worker: w.ID, Task: t.ID, Attempt: t.number})
	w.sent[slices.Index(w.sent, t)] = &task{
		Task: Task{ID: t.ID, Group: t.Group, Priority: t.Priority, Options: &defaults}, state: Sent,
		attempt: attempt{worker: w, number: t.number, waits: t.waits, stopped: true}, more: &more{began: now, result: Result{Text: why}},
	}
	t.waits = 0
	w.stopped++
	if t.taking {
		w.asked--
		t.taking = false
	}
	q.due(now.Add(stoppedSoon))
}

// stoppedAttempt returns the placeholder of an attempt that was asked to stop, or nil.
func (w *worker) stoppedAttempt(h Held) *task {
	if w.stopped == 0 {
		return nil
	}
	i := slices.IndexFunc(w.sent, func(t *task) bool { return t.stopped && t.ID == h.ID && t.number == h.Attempt })
	if i < 0 {
		return nil
	}
	return w.sent[i]
}

// stoppedEnded frees the place and resources of an attempt that was asked to stop and has ended.
func (q *Queue) stoppedEnded(now time.Time, worker uint64, h Held) {
	w := q.workers[worker]
	if w == nil {
		return
	}
	if t := w.stoppedAttempt(h); t != nil {
		q.unsend(t)
		q.begin(now, w)
		q.fill(now, w)
	}
}

// tickStopped takes back the tasks that wait on a worker behind attempts that do not end, and
// requests the end of the worker after the grace.
func (q *Queue) tickStopped(now time.Time, w *worker) {
	late := false
	var oldest *task
	for _, t := range w.sent {
		if !t.stopped {
			continue
		}
		late = q.passed(now, t.began.Add(stoppedSoon)) || late
		if oldest == nil || t.began.Before(oldest.began) {
			oldest = t
		}
	}
	if at := oldest.began.Add(q.cfg.Grace); q.cfg.Grace > 0 {
		if w.endAt.Before(at) {
			w.endAt = at
		}
		if q.passed(now, w.endAt) {
			w.endAt = now.Add(endAgain) // in case the request is lost, or the worker trains now
			q.due(w.endAt)
			q.do(Action{What: End, Worker: w.ID, Task: oldest.ID, Group: oldest.Group})
		}
	}
	if !late || w.closed() {
		return
	}
	for _, t := range slices.Clone(w.sent[w.running:]) {
		if t.Pin == 0 && !t.Group.Demand.Fits(w.free) {
			q.takeBack(now, w, t)
		}
	}
}

func (w *worker) stoppedStatus(now time.Time) (all []report.StoppedStatus) {
	for _, t := range w.sent {
		if t.stopped {
			all = append(all, t.stoppedStatus(now))
		}
	}
	return all
}

// stoppedStatus describes the placeholder of an attempt that was asked to stop.
func (t *task) stoppedStatus(now time.Time) report.StoppedStatus {
	return report.StoppedStatus{Function: t.Group.Name(), N: t.ID.N, Why: t.result.Text, ForMS: now.Sub(t.began).Milliseconds()}
}

// Stopped describes the attempt of a task that was asked to stop and has not ended; false: there is
// none.
func (q *Queue) Stopped(now time.Time, worker uint64, id ID) (report.StoppedStatus, bool) {
	w := q.workers[worker]
	if w == nil {
		return report.StoppedStatus{}, false
	}
	i := slices.IndexFunc(w.sent, func(t *task) bool { return t.stopped && t.ID == id })
	if i < 0 {
		return report.StoppedStatus{}, false
	}
	return w.sent[i].stoppedStatus(now), true
}

// allStopped returns the placeholders of all attempts that were asked to stop.
func (q *Queue) allStopped() (all []*task) {
	for _, w := range q.list {
		for _, t := range w.sent {
			if t.stopped {
				all = append(all, t)
			}
		}
	}
	return all
}
