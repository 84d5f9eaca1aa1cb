package decide

import (
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Workers leave without losing work if they are asked to leave, if their host drains, or if the job
// is stopped. They leave at a step boundary: the members are notified that a member is removed, all
// ranks leave the world at the same commit, and the unwanted workers are dismissed when they join.

// draining records that a worker was asked to leave by the operator of its host. Its slot is not
// wanted while the worker exists and rests afterwards. The report may repeat.
func (m *Machine) draining(now time.Time, w *Worker) {
	if w.Asked || !w.live() || w.Done || m.Decided || !m.DoneFrom.IsZero() {
		return
	}
	w.Asked = true
	m.emit(now, job.Draining, field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", w.pid), field("rank", w.Rank))
	if !m.size.Elastic {
		m.decide(now, &job.WorkerError{Slot: w.slot, Rank: w.Rank, Reason: "was asked to leave, and the job is not elastic"})
		return
	}
	m.log(Info, "%s (rank %d) was asked to leave and leaves at the next step boundary", w.slot, w.Rank)
}

// logStays logs, once for each, the workers that should leave but have to stay for now.
func (m *Machine) logStays() {
	for _, w := range m.workers {
		if w.Asked && !w.Stays && w.Wanted {
			w.Stays = true
			m.log(Info, "%s (rank %d) alone has the job's state: it stays until another has it", w.slot, w.Rank)
		}
	}
	if w := m.holder; w != nil && m.size.Max == 1 && !w.Stays {
		w.Stays = true
		m.log(Warn, "%s (rank %d) is to leave and alone has the job's state, and --max-np 1 leaves no room for another "+
			"worker to take it over: it stays; raise the bound with hvdrun scale", w.slot, w.Rank)
	}
}

// withoutAsked returns the free slots without those of workers that were asked to leave.
func (m *Machine) withoutAsked(free []plan.SlotID) []plan.SlotID {
	if !slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.Asked }) {
		return free
	}
	return slices.DeleteFunc(slices.Clone(free), func(id plan.SlotID) bool {
		w := m.in(id)
		return w != nil && w.Asked
	})
}

// mustLeave reports whether an operator or discovery waits for the unwanted worker to leave.
func (m *Machine) mustLeave(now time.Time, w *Worker) bool {
	_, held := m.hosts.Held(now, w.slot)
	return w.Asked || held || slices.ContainsFunc(m.hosts.Listed(), func(h plan.Host) bool {
		return h.Name == w.slot.Host && h.Draining
	})
}

// releaseAsked dismisses workers that must leave while too few workers have joined for a world,
// because the job may be waiting for their slots.
func (m *Machine) releaseAsked(now time.Time) {
	for _, w := range m.workers {
		if w.Phase == waiting && !w.Wanted && m.mustLeave(now, w) {
			m.dismiss(now, w, DismissRemoved)
		}
	}
}

// notifyStopping notifies members that are about to be stopped of their removal, so that they leave
// their world at the same step. release then answers their joins.
func (m *Machine) notifyStopping() {
	var members []*Worker
	for _, w := range m.workers {
		if w.Phase == training && !w.Done {
			members = append(members, w)
		}
	}
	if len(members) > 0 {
		m.Seq++
		m.Announced = plan.Removed
		m.do(NotifyWorkers{m.Seq, m.Announced, m.Current.Generation, members})
	}
}

// release answers the join of a worker that is being stopped: a training worker treats SIGTERM as a
// request to leave and joins in order to.
func (m *Machine) release(w *Worker) {
	why := w.dismissal()
	if m.Agreed {
		why = DismissFinished
	}
	m.do(DismissWorker{w.id, why})
}
