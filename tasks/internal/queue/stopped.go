package queue

import (
	"slices"
	"time"
)

// stoppedSoon is how long an attempt that was told to stop may take to end before what its worker
// has behind it is given to others.
const stoppedSoon = 50 * time.Millisecond

// stop tells the worker of a task to end its attempt, and takes the task from it. The attempt keeps
// its place and what it takes of the worker until the worker says that it has ended: its function
// may not heed its context. why is for people.
func (q *Queue) stop(now time.Time, t *task, force bool, why string) {
	w := t.worker
	q.do(Action{What: Stop, Worker: w.ID, Task: t.ID, Attempt: t.attempt, Force: force})
	if !w.SaysEnded {
		q.unsend(t)
		return
	}
	w.sent[slices.Index(w.sent, t)] = &task{
		Task: Task{ID: t.ID, Group: t.Group, Options: &defaults}, state: Sent, worker: w, attempt: t.attempt, stopped: true,
		more: &more{began: now, result: Result{Text: why}},
	}
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
	i := slices.IndexFunc(w.sent, func(t *task) bool { return t.stopped && t.ID == h.ID && t.attempt == h.Attempt })
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
	for _, t := range w.sent {
		late = late || t.stopped && q.passed(now, t.began.Add(stoppedSoon))
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

func (w *worker) stoppedStatus(now time.Time) (all []StoppedStatus) {
	for _, t := range w.sent {
		if t.stopped {
			all = append(all, StoppedStatus{Function: t.Group.Name(), N: t.ID.N, Why: t.result.Text, ForMS: now.Sub(t.began).Milliseconds()})
		}
	}
	return all
}
