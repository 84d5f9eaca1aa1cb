package decide

import (
	"fmt"
	"time"
)

// A worker reports done when its training function has returned, which then returns on every rank
// of its world. One false report must not end the job. A report is therefore a claim: the other
// members confirm it by their own reports, or refute it by joins and heartbeats that show that they
// still train. Until the claim is settled, the machine neither starts nor dismisses nor stops any
// worker.

const (
	// leastDoubt is the shortest time that members have to refute a claim: a little more than two
	// heartbeat intervals. In a world of more than a hundred workers, heartbeats are less frequent.
	leastDoubt    = 5 * time.Second
	doubtPerBeats = 3 * time.Second
	beatsASecond  = 100
)

// claimDone records a report of done for the current world.
func (m *Machine) claimDone(now time.Time, w *Worker, commits uint64) {
	if !w.Done {
		w.Done, w.DoneFrom, w.DoneCommits = true, now, commits
	}
	if m.DoneFrom.IsZero() {
		m.DoneFrom = now
		m.log(Debug, "%s is done, waiting up to %v for the others", w.slot, m.wait.Finish)
		m.do(WatchDone{m.Current.Generation})
	}
}

// claimed reports whether a worker has reported done and the claim is not settled yet.
func (m *Machine) claimed() bool { return !m.DoneFrom.IsZero() && !m.Agreed }

// trainsOn records that heartbeats of a member refute a claim of done.
func (m *Machine) trainsOn(e WorkerTrains) {
	w := m.find(e.ID)
	if w != nil && !w.Done && w.Generation == e.Generation && e.Generation == m.Current.Generation && m.claimed() {
		w.Trains = true
	}
}

// doubtBy returns the time until which members of the world can refute a claim.
func (m *Machine) doubtBy() time.Time {
	beats := time.Duration(m.Current.Size()/beatsASecond) * doubtPerBeats
	return m.DoneFrom.Add(max(m.wait.Finish, leastDoubt+beats))
}

// doneBy returns the time by which the worker has to report done.
func (m *Machine) doneBy(w *Worker) time.Time {
	by := w.graceFrom(m.DoneFrom).Add(m.wait.Finish)
	if doubt := m.doubtBy(); m.claimed() && by.Before(doubt) {
		return doubt
	}
	return by
}

// settleDone decides on a claim of done as soon as enough members have confirmed or refuted it.
// late means that the time for that has passed, so that it decides without the members that are
// silent. Dead members do not count.
func (m *Machine) settleDone(now time.Time, late bool) {
	if !m.claimed() || m.Decided {
		return
	}
	done, train, open := 0, 0, 0
	for _, w := range m.published.Members {
		switch {
		case w.Done:
			done++
		case w.Trains:
			train++
		case w.inWorld() && m.find(w.id) == w:
			open++
		}
	}
	switch size := m.Current.Size(); {
	case 2*done > size:
		m.Agreed = true
	case open > 0 && !late && 2*train < size:
	case done > train:
		m.Agreed = true
	default:
		m.refuteDone(now)
	}
}

// refuteDone counts a false report of done as a failure of the worker that made it. The job
// continues.
func (m *Machine) refuteDone(now time.Time) {
	var train []string
	for _, w := range m.published.Members {
		if w.Trains && !w.Done {
			train = append(train, fmt.Sprint(w.Rank))
		}
	}
	reason := "reported that training is done, but by their own account these ranks still train: " + named(train)
	m.ending = ending{}
	for _, w := range m.published.Members {
		if !w.Done {
			continue
		}
		w.Done, w.DoneFrom = false, time.Time{}
		switch member := w.Phase == training; {
		case m.find(w.id) != w:
			m.failed(now, w, workerError(w, reason))
		case w.Phase == stopping && w.Reason == "":
			w.Reason = reason
			m.failed(now, w, workerError(w, reason))
		default:
			m.stop(now, w, reason)
			if member {
				m.loseAtOnce(now, w)
			}
		}
	}
}

// denies reports whether a join says that the worker's training function has not returned in the
// current world.
func (m *Machine) denies(w *Worker, j Join) bool {
	return w.Generation != 0 && w.Generation == m.Current.Generation && j.Trained != nil && !*j.Trained
}

// stopsUndone handles the deadline of a worker that has not reported done.
func (m *Machine) stopsUndone(now time.Time, w *Worker) {
	m.settleDone(now, true)
	if m.Agreed {
		m.stopUndone(now, w)
	}
}
