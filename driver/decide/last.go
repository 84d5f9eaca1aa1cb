package decide

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

// The last checkpoint of a job. Where training has come to its end, rank 0 writes it by itself.
// Where the job is stopped or has failed, the worker with the newest commit is told to when its
// join is answered: nobody else knows that no world follows. A worker says when it begins, and what
// came of it.

// unwritten is a last checkpoint that is not on the disk.
type unwritten struct {
	worker  string
	commits uint64
}

// answerAll answers the joins of those that are being sent home because the job ends. Of the ranks
// that have the newest commit the lowest is to write it. A rank is answered when those below it
// have come or are gone, for one of them may be the one; all of them leave their world at the same
// commit.
func (m *Machine) answerAll() {
	var come []*Worker
	awaited := len(m.world.Slots) // the lowest rank that is to come
	for _, w := range m.workers {
		switch {
		case w.atDoor():
			come = append(come, w)
		case w.mayCome() && w.generation == m.world.Generation:
			awaited = min(awaited, w.rank)
		}
	}
	slices.SortStableFunc(come, func(a, b *Worker) int {
		return cmp.Or(cmp.Compare(b.join.Commits, a.join.Commits), cmp.Compare(a.rank, b.rank))
	})
	for _, w := range come {
		if w.generation != 0 && w.generation == m.world.Generation && w.rank > awaited {
			continue
		}
		if w.holds && w.join.Commits > m.writes {
			m.writes, w.last = w.join.Commits, true
		}
		w.comes, w.answered = false, true
		m.release(w)
	}
}

// mayCome tells whether a worker that has been in a world may still join, in a job that ends.
func (w *Worker) mayCome() bool {
	in := w.phase == training || w.phase == stopping
	return in && !w.answered && !w.done && !w.left && w.reason == ""
}

// atDoor tells whether a join of the worker waits, in a job that ends.
func (w *Worker) atDoor() bool { return w.phase == waiting || w.phase == stopping && w.comes }

// leavesLast tells whether joins are answered by answerAll.
func (m *Machine) leavesLast() bool { return m.decided && m.doneFrom.IsZero() }

// writing notes that a worker writes a last checkpoint, in no world any more. Where the others go
// on they do not wait for it.
func (m *Machine) writing(now time.Time, w *Worker, commits uint64) {
	w.writes = commits
	if m.size.Elastic && w.phase == training && !w.done && m.doneFrom.IsZero() {
		w.left, w.since = true, now
		m.beginReset(now)
	}
}

// writesOn gives a worker that writes a last checkpoint the time for more: no bound that the driver
// sets to its end passes while bytes reach the disk.
func (m *Machine) writesOn(now time.Time, e WorkerWrites) {
	w := m.find(e.ID)
	if w == nil || w.writes == 0 {
		return
	}
	if w.wroteAt = now; w.phase == stopping {
		m.do(GiveTime{w.id})
	}
}

// graceFrom is when the time began that the worker has to end, where that was asked for then.
func (w *Worker) graceFrom(asked time.Time) time.Time {
	if w.wroteAt.After(asked) {
		return w.wroteAt
	}
	return asked
}

// inWorld tells whether the worker is a member of the current world that has not left it.
func (w *Worker) inWorld() bool { return w.phase == training && !w.left }

// written notes what came of it.
func (m *Machine) written(w *Worker, commits uint64, well bool) {
	w.writes = 0
	switch {
	case !well:
		w.unwritten = true
		m.missing(w, commits, "could not write it, and its output says why")
	default:
		if m.wrote = max(m.wrote, commits); m.unwritten != nil && commits >= m.unwritten.commits {
			m.unwritten = nil
		}
		m.log(Info, "%s has written the checkpoint of commit %d", w, commits)
	}
}

// stopsWriting notes that a worker has ended.
func (m *Machine) stopsWriting(w *Worker) {
	if w.writes == 0 {
		return
	}
	why := "ended while it wrote it"
	if w.phase == stopping {
		why += fmt.Sprintf(": no more of it reached the disk for %v (--drain-timeout), or it was killed", m.wait.Drain)
	}
	m.missing(w, w.writes, why)
}

func (m *Machine) missing(w *Worker, commits uint64, why string) {
	m.log(Warn, "the checkpoint of commit %d is missing: %s %s", commits, w, why)
	if commits > m.wrote && (m.unwritten == nil || commits >= m.unwritten.commits) {
		m.unwritten = &unwritten{w.String(), commits}
	}
}

// withUnwritten is the job's result where the last checkpoint is missing. A stop is no clean one
// then; any other failure stays what it is.
func (m *Machine) withUnwritten(result error) error {
	var stopped job.StopSignal
	if m.unwritten == nil || result != nil && !errors.As(result, &stopped) {
		return result
	}
	err := fmt.Errorf("%w: commit %d, by %s", job.ErrCheckpoint, m.unwritten.commits, m.unwritten.worker)
	if result != nil {
		err = fmt.Errorf("%w (%w)", err, result)
	}
	return err
}

// whyGone is what a worker is told that has no place any more.
func (w *Worker) whyGone() Dismissal {
	if w.last {
		return DismissLast
	}
	return DismissRemoved
}
