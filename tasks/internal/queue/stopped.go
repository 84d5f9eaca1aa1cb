package queue

import (
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/tasks/report"
)

// stoppedSoon is how long an attempt that was told to stop may take to end before what its worker
// has behind it is given to others.
const stoppedSoon = 50 * time.Millisecond

// endAgain is how long after it was asked for that the end of a worker is asked for again.
const endAgain = 10 * time.Second

// stop tells the worker of a task to end its attempt, and takes the task from it. The attempt keeps
// its place and what it takes of the worker until the worker says that it has ended: its function
// may ignore its context. why is for people.
func (q *Queue) stop(now time.Time, t *task, why string) {
	w := t.worker
	q.do(Action{What: Stop, Worker: w.ID, Task: t.ID, Attempt: t.number})
	if !w.SaysEnded {
		q.unsend(t)
		return
	}
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

// stoppedAttempt returns what stands for an attempt that was told to stop, or nil.
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

// stoppedEnded gives back what an attempt took that was told to stop.
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

// tickStopped asks for what a worker has behind attempts that do not end.
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
			w.endAt = now.Add(endAgain) // where that was not heard, or the worker trains
			q.due(w.endAt)
			q.do(Action{What: End, Worker: w.ID, Task: oldest.ID, Group: oldest.Group})
		}
	}
	if !late || w.closed() {
		return
	}
	for _, t := range slices.Clone(w.sent[w.running:]) {
		if t.Pin == 0 && !t.Group.Demand.fits(w.free, 1) {
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

// stoppedStatus reports what stands for an attempt that was told to stop.
func (t *task) stoppedStatus(now time.Time) report.StoppedStatus {
	return report.StoppedStatus{Function: t.Group.Name(), N: t.ID.N, Why: t.result.Text, ForMS: now.Sub(t.began).Milliseconds()}
}

// Stopped reports the attempt of a task that was told to stop and has not ended; false: there is
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

// allStopped returns what stands for attempts that were told to stop.
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
