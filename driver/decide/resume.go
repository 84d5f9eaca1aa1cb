package decide

import (
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

// resume begins the machine's life with another driver, which has been fed all that the one before
// it was, and has performed none of the actions. What must be there is asked for again: the
// workers, the world, and what workers were told. All of it may have been done, or may not. Waits
// go on from where they were when the machine was last stepped: nobody is to blame for the driver's
// absence. Exclusions end when they would have ended.
func (m *Machine) resume(now time.Time) {
	away := now.Sub(m.last)
	for _, t := range m.clocks() {
		*t = t.Add(away)
	}
	m.emit(now, job.Resumed)
	m.log(Info, "resumed in generation %d with %d workers, %v after the last event",
		m.world.Generation, len(m.workers), away.Round(time.Millisecond))
	for _, w := range m.workers {
		w.stalledFrom = time.Time{} // whoever still holds up the others is found, and named, anew
		again := w.start
		again.Again, again.Forked = true, w.pid != 0
		m.do(again)
	}
	if m.world.Generation > 0 {
		m.do(m.published)
	}
	var members []*Worker
	for _, w := range m.workers {
		switch w.phase {
		case training:
			members = append(members, w)
		case leaving:
			why := DismissFinished
			if w.removed {
				why = DismissRemoved
			}
			m.do(DismissWorker{w.id, why})
		case stopping:
			m.do(StopWorker{w.id})
			if w.generation == m.world.Generation && !w.done {
				members = append(members, w) // it may be on its way home
			}
		}
	}
	if m.given {
		m.tellLoss(nil)
	}
	if len(m.dead) > 0 {
		m.told, m.deadFrom = 0, now // it is told in a moment, to all who do not know then
	}
	if m.seq > m.published.Seq && len(members) > 0 {
		m.do(NotifyWorkers{m.seq, m.announced, m.world.Generation, members})
	}
}

// Incarnations returns the ids of all workers that have not exited.
func (m *Machine) Incarnations() []string {
	ids := make([]string, len(m.workers))
	for i, w := range m.workers {
		ids[i] = w.id
	}
	return ids
}
