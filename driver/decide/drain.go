package decide

import (
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// How workers leave without loss: one that was asked to, those of a host that drains, and all when
// the job is stopped. All of them go at a step boundary: members are told that somebody is to be
// removed, so all ranks leave the world at the same commit, and who is not wanted is dismissed when
// it joins.

// draining notes that a worker was asked to leave, by whoever runs its host. Its slot is not wanted
// as long as it is there, and rests when it is gone. It may say so more than once.
func (m *Machine) draining(now time.Time, w *Worker) {
	if w.asked || !w.live() || w.done || m.decided || !m.doneFrom.IsZero() {
		return
	}
	w.asked = true
	m.emit(now, job.Draining, field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", w.pid), field("rank", w.rank))
	if !m.size.Elastic {
		m.decide(now, &job.WorkerError{Slot: w.slot, Rank: w.rank, Reason: "was asked to leave, and the job is not elastic"})
		return
	}
	m.log(Info, "%s (rank %d) was asked to leave, and does at the next step boundary", w.slot, w.rank)
}

// sayWhoStays tells of those who cannot leave yet, once.
func (m *Machine) sayWhoStays() {
	for _, w := range m.workers {
		if w.asked && !w.stays && w.wanted {
			w.stays = true
			m.log(Info, "%s (rank %d) alone has the job's state: it stays until another has it", w.slot, w.rank)
		}
	}
	if w := m.holder; w != nil && m.size.Max == 1 && !w.stays {
		w.stays = true
		m.log(Warn, "%s (rank %d) is to leave and alone has the job's state, and --max-np 1 leaves no room for another "+
			"worker to take it over: it stays; raise the bound with hvdrun scale", w.slot, w.rank)
	}
}

// withoutAsked returns the slots but those whose workers were asked to leave.
func (m *Machine) withoutAsked(free []plan.SlotID) []plan.SlotID {
	if !slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.asked }) {
		return free
	}
	return slices.DeleteFunc(slices.Clone(free), func(id plan.SlotID) bool {
		w := m.in(id)
		return w != nil && w.asked
	})
}

// mustGo tells of a worker that is not wanted whether there is somebody who waits for it to go.
func (m *Machine) mustGo(now time.Time, w *Worker) bool {
	_, held := m.hosts.Held(now, w.slot)
	return w.asked || held || slices.ContainsFunc(m.hosts.Listed(), func(h plan.Host) bool {
		return h.Name == w.slot.Host && h.Draining
	})
}

// releaseAsked sends those away that must go while there is no world to be dismissed from, because
// too few have come for one: perhaps it is their slots that are waited for.
func (m *Machine) releaseAsked(now time.Time) {
	for _, w := range m.workers {
		if w.phase == waiting && !w.wanted && m.mustGo(now, w) {
			m.dismiss(now, w, DismissRemoved)
		}
	}
}

// sendHome tells members that are about to be stopped that they have no place any more, so that
// they leave their world at the same step. Their joins are answered by release then.
func (m *Machine) sendHome() {
	var members []*Worker
	for _, w := range m.workers {
		if w.phase == training && !w.done {
			members = append(members, w)
		}
	}
	if len(members) > 0 {
		m.seq++
		m.announced = plan.Removed
		m.do(NotifyWorkers{m.seq, m.announced, m.world.Generation, members})
	}
}

// release answers the join of a worker that is being stopped: in training it takes SIGTERM for a
// request to leave, and comes here to do so.
func (m *Machine) release(w *Worker) {
	why := w.whyGone()
	if !m.doneFrom.IsZero() {
		why = DismissFinished
	}
	m.do(DismissWorker{w.id, why})
}
