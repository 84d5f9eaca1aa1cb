package decide

import (
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// resume continues the machine under another driver. The machine has replayed all inputs, but this
// driver has performed none of the actions. resume emits again every action whose effect must exist
// (starts, the world, notifications), because the previous driver may or may not have performed it.
// Waits are shifted by the time without a driver, so that no worker is blamed for it. Exclusions
// end when they would have ended.
func (m *Machine) resume(now time.Time) {
	m.DriverNo++
	away := now.Sub(m.Stepped)
	for _, t := range m.clocks() {
		*t = t.Add(away)
	}
	m.emit(now, job.Resumed)
	m.log(Info, "resumed in generation %d with %d workers; the previous driver's last event was %v ago",
		m.Current.Generation, len(m.workers), away.Round(time.Millisecond))
	for _, w := range m.workers {
		w.StalledFrom = time.Time{} // a worker that still holds up others will be detected again
		again := w.start
		again.Again, again.Forked = true, w.pid != 0
		m.do(again)
	}
	if m.Current.Generation > 0 {
		m.do(m.published)
	}
	var members []*Worker
	for _, w := range m.workers {
		switch w.Phase {
		case training:
			members = append(members, w)
		case leaving:
			why := DismissFinished
			if w.Removed {
				why = DismissRemoved
			}
			m.do(DismissWorker{w.id, why})
		case stopping:
			m.do(StopWorker{ID: w.id})
			if w.Generation == m.Current.Generation && !w.Done {
				members = append(members, w) // it may still leave at a commit
			}
		}
	}
	if m.claimed() {
		m.do(WatchDone{m.Current.Generation})
	}
	if m.Given {
		m.tellLoss(nil)
	}
	if len(m.Dead) > 0 {
		m.Told, m.DeadFrom = 0, now // the loss is sent again after lossAfter
	}
	if m.Seq > m.published.Seq && len(members) > 0 {
		m.do(NotifyWorkers{m.Seq, m.Announced, m.Current.Generation, members})
	}
}

// Term returns the number of the job's driver: 0 for the driver that began the job, and one more
// for each driver that has taken over.
func (m *Machine) Term() uint64 { return m.DriverNo }

// Incarnations returns the slots of all workers that have not exited, by incarnation.
func (m *Machine) Incarnations() map[string]plan.SlotID {
	slots := make(map[string]plan.SlotID, len(m.workers))
	for _, w := range m.workers {
		slots[w.id] = w.slot
	}
	return slots
}
