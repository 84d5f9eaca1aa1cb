package decide

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// The last checkpoint of a job. When training ends, rank 0 writes it on its own. When the job is
// stopped or fails, workers do not know that no world follows, so the answer to its join tells the
// worker with the newest commit to write it. It reports the start and the result.

// unwritten is a last checkpoint that is not on disk.
type unwritten struct {
	Worker  string `json:"worker"`
	Commits uint64 `json:"commits,omitempty"`
}

// answerAll answers the joins of workers that leave because the job ends. The lowest rank with the
// newest commit writes it. A rank is answered only once all lower ranks have joined or ended,
// because one of them may be the writer; all ranks leave the world at the same commit.
func (m *Machine) answerAll() {
	var come []*Worker
	awaited := len(m.Current.Slots) // the lowest rank that may still join
	for _, w := range m.workers {
		switch {
		case w.inJoin():
			come = append(come, w)
		case w.mayJoin() && w.Generation == m.Current.Generation:
			awaited = min(awaited, w.Rank)
		}
	}
	most := m.credibleAtEnd(come)
	slices.SortStableFunc(come, func(a, b *Worker) int {
		return cmp.Or(cmp.Compare(b.join.Commits, a.join.Commits), cmp.Compare(a.Rank, b.Rank))
	})
	for _, w := range come {
		if w.Generation != 0 && w.Generation == m.Current.Generation && w.Rank > awaited {
			continue
		}
		if w.Holds && w.join.Commits <= most && w.join.Commits > m.Writes {
			m.Writes, w.Last = w.join.Commits, true
		}
		w.Comes, w.Answered = false, true
		m.release(w)
	}
}

// credibleAtEnd returns the highest commit number that can be true of the workers in come, given
// the numbers of the workers that have been answered already.
func (m *Machine) credibleAtEnd(come []*Worker) uint64 {
	said := slices.Clone(come)
	for _, w := range m.published.Members {
		if w.Answered {
			said = append(said, w)
		}
	}
	return m.credible(said)
}

// mayJoin reports, while the job ends, whether a worker that was in a world may still join.
func (w *Worker) mayJoin() bool {
	in := w.Phase == training || w.Phase == stopping
	return in && !w.Answered && !w.Done && !w.Left && w.Reason == ""
}

// inJoin reports, while the job ends, whether the worker waits in a join.
func (w *Worker) inJoin() bool { return w.Phase == waiting || w.Phase == stopping && w.Comes }

// leavesLast reports whether answerAll answers joins.
func (m *Machine) leavesLast() bool { return m.Decided && !m.Agreed }

// writesLast reports whether the worker may have to write a last checkpoint: it was asked to, or is
// rank 0 of the world.
func (m *Machine) writesLast(w *Worker) bool {
	return w.Last || w.Rank == 0 && w.Generation != 0 && w.Generation == m.Current.Generation
}

// writing records that a worker has left its world and writes a last checkpoint. If the job
// continues, the others do not wait for it.
func (m *Machine) writing(now time.Time, w *Worker, commits uint64) {
	if !m.writesLast(w) {
		m.log(Warn, "%s reports that it writes the last checkpoint, which is not its duty: the report is ignored", w)
		return
	}
	w.Writes = commits
	if m.size.Elastic && w.Phase == training && !w.Done && m.DoneFrom.IsZero() {
		w.Left, w.Since = true, now
		m.beginReset(now)
	}
}

// writerProgress extends the deadlines of a worker that writes a last checkpoint, so that none of
// them passes while the file grows.
func (m *Machine) writerProgress(now time.Time, e WorkerWrites) {
	w := m.find(e.ID)
	if w == nil || w.Writes == 0 {
		return
	}
	if w.WroteAt = now; w.Phase == stopping {
		m.do(GiveTime{w.id})
	}
}

// graceFrom returns the time from which the worker's time to end counts: asked, or the last
// progress of its checkpoint if that is later.
func (w *Worker) graceFrom(asked time.Time) time.Time {
	if w.WroteAt.After(asked) {
		return w.WroteAt
	}
	return asked
}

// inWorld reports whether the worker is a member of the current world and has not left it.
func (w *Worker) inWorld() bool { return w.Phase == training && !w.Left }

// written records the result of a last checkpoint.
func (m *Machine) written(w *Worker, commits uint64, well bool) {
	if w.Writes == 0 && !m.writesLast(w) {
		return
	}
	w.Writes = 0
	switch {
	case !well:
		w.Unwritten = true
		m.missing(w, commits, "could not write it, and its output says why")
	default:
		if m.Wrote = max(m.Wrote, commits); m.Unwritten != nil && commits >= m.Unwritten.Commits {
			m.Unwritten = nil
		}
		m.log(Info, "%s has written the checkpoint of commit %d", w, commits)
	}
}

// writerEnded records a missing checkpoint if a worker ended while it wrote one.
func (m *Machine) writerEnded(w *Worker) {
	if w.Writes == 0 {
		return
	}
	why := "ended while it wrote it"
	if w.Phase == stopping {
		why += fmt.Sprintf(": no more of it reached the disk for %v (--drain-timeout), or it was killed", m.wait.Drain)
	}
	m.missing(w, w.Writes, why)
}

func (m *Machine) missing(w *Worker, commits uint64, why string) {
	m.log(Warn, "the checkpoint of commit %d is missing: %s %s", commits, w, why)
	if commits > m.Wrote && (m.Unwritten == nil || commits >= m.Unwritten.Commits) {
		m.Unwritten = &unwritten{w.String(), commits}
	}
}

// withUnwritten adds a missing last checkpoint to the job's result if that result is success or a
// stop. Other failures take precedence.
func (m *Machine) withUnwritten(result error) error {
	var stopped job.StopSignal
	if m.Unwritten == nil || result != nil && !errors.As(result, &stopped) {
		return result
	}
	err := fmt.Errorf("%w: commit %d, by %s", job.ErrCheckpoint, m.Unwritten.Commits, m.Unwritten.Worker)
	if result != nil {
		err = fmt.Errorf("%w (%w)", err, result)
	}
	return err
}

// dismissal returns the answer to a worker that has no place in the next world.
func (w *Worker) dismissal() Dismissal {
	if w.Last {
		return DismissLast
	}
	return DismissRemoved
}
