package decide

import (
	"maps"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Begin sets the time at which the job began. Call it once, before the first Step; otherwise the
// job begins with the first Step.
func (m *Machine) Begin(now time.Time) { m.ledger.Begin(now) }

// Goodput returns how the job's time until now was spent.
func (m *Machine) Goodput(now time.Time) job.Goodput { return m.ledger.Until(now) }

// ResetsBy returns the number of resets whose next world was published, by cause.
func (m *Machine) ResetsBy() map[job.Cause]int { return maps.Clone(m.ResetCauses) }

// Measured reports whether the goodput is meaningful: there was a world, or workers run tasks. A
// command that does not use hvdrun's library never joins a world.
func (m *Machine) Measured() bool { return m.Current.Generation > 0 || m.size.TasksOnly }

// account assigns the job's time from now on to the part that matches the machine's state.
func (m *Machine) account(now time.Time) {
	part, by := m.partNow()
	m.ledger.Enter(now, part, by)
	if m.Over {
		m.ledger.End(now)
	}
}

func (m *Machine) partNow() (part job.Part, by plan.SlotID) {
	switch m.doing() {
	case job.Waiting:
		return job.PartWaiting, by
	case job.Starting:
		return job.PartStarting, by
	case job.Resetting:
		switch m.LeftFor {
		case job.CauseGrowth:
			return job.PartGrowing, by
		case job.CauseRemoval:
			return job.PartShrinking, by
		}
		return job.PartRecovering, by
	case job.Running:
	default:
		return job.PartStopping, by
	}
	if m.size.TasksOnly {
		return job.PartTraining, by
	}
	if !m.Trains {
		return job.PartSynchronising, by
	}
	if w := m.longestHoldUp(); w != nil {
		return job.PartStalled, w.slot
	}
	if m.Jam {
		return job.PartStalled, by
	}
	return job.PartTraining, by
}

// longestHoldUp returns the worker that has held up the others longest, or nil if no worker does.
func (m *Machine) longestHoldUp() (longest *Worker) {
	for _, w := range m.workers {
		if !w.StalledFrom.IsZero() && (longest == nil || w.StalledFrom.Before(longest.StalledFrom)) {
			longest = w
		}
	}
	return longest
}

// entry describes how the job entered the current world. In a snapshot, durations are in
// nanoseconds.
type entry struct {
	Cause    job.Cause     `json:"cause"`
	From     time.Time     `json:"from,omitzero"`      // since when no step was made
	Training time.Duration `json:"training,omitempty"` // what the ledger had counted as training when the world was published
}

// because sets the cause for which the current world is left, unless a weightier cause is set
// already.
func (m *Machine) because(c job.Cause) {
	if weight(c) > weight(m.LeftFor) {
		m.LeftFor = c
	}
}

func weight(c job.Cause) int { return slices.Index(job.Causes(), c) }

// causeOfLeaving returns why a member joins the next world, as far as the machine knows.
func (m *Machine) causeOfLeaving() job.Cause {
	switch {
	case len(m.Dead) > 0:
		return job.CauseDeath
	case m.Given:
		return job.CauseStall
	case m.Announced&plan.Removed != 0:
		return job.CauseRemoval
	case m.Announced&plan.Added != 0:
		return job.CauseGrowth
	}
	return job.CauseBroken
}

// entryOf returns the entry into the world that follows the current one.
func (m *Machine) entryOf() entry {
	m.because(m.causeOfLeaving())
	e := entry{Cause: m.LeftFor, From: m.ResetFrom, Training: m.ledger.Trained()}
	switch {
	case m.Current.Generation == 0:
		e.Cause, e.From = job.CauseStart, m.ledger.Begun()
	case !m.Committed: // no step was made in the world that is being left
		if e.From = m.Entry.From; weight(m.Entry.Cause) > weight(e.Cause) || m.Entry.Cause == job.CauseStart {
			e.Cause = m.Entry.Cause
		}
	}
	return e
}

// undone records in the ledger the training time that the loss of members has undone. It takes the
// median of what the remaining members report, and at most the time trained in the world that is
// being left.
func (m *Machine) undone(now time.Time, members []*Worker) {
	var lost []time.Duration
	for _, w := range members {
		if w.join.After != 0 && w.join.After == m.Current.Generation && w.join.HoldsState {
			lost = append(lost, w.join.Undone)
		}
	}
	if len(lost) == 0 {
		return
	}
	slices.Sort(lost)
	m.ledger.Count(now)
	most := m.ledger.Trained() - m.Entry.Training
	m.ledger.Owe(now, job.PartRecomputing, plan.SlotID{}, min(lost[(len(lost)-1)/2], most))
}

// begins records that rank 0 of the current world has synchronised and trains.
func (m *Machine) begins(e WorldTrains) {
	if e.Generation == m.Current.Generation {
		m.Trains = true
	}
}

// unjammed records that the members no longer wait for each other.
func (m *Machine) unjammed(e WorldStirred) {
	if e.Generation == m.Current.Generation {
		m.Jam = false
	}
}
