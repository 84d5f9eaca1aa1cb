package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// lossAfter is how long members have to notice a death by themselves. The kernel of a process that
// died resets its connections at once; only the loss of a whole host is silent. While members keep
// dying or joining, no loss is sent: the deaths of a thousand workers take longer than this.
const lossAfter = 20 * time.Millisecond

// lose records that a member of the current world no longer takes part in operations, whether or
// not its process still exists.
func (m *Machine) lose(now time.Time, w *Worker) {
	if slices.Contains(m.Dead, w.Rank) {
		return
	}
	m.Dead = append(m.Dead, w.Rank)
	m.DeadFrom = now
	if m.speaks() {
		m.DeadFrom = now.Add(-lossAfter)
	}
}

// speaks reports whether members of the world speak by their sockets. The collective libraries of
// such members may notice a death only after a long time, and break their connections when told to.
func (m *Machine) speaks() bool {
	return m.spoken && slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.join.Program != "" && w.inWorld() })
}

// spreadLoss sends the dead ranks to the members that still train in the current world, because no
// collective operation can complete any more. A rank that exited with 0 is not among the dead: it
// has closed its connections itself.
func (m *Machine) spreadLoss() {
	m.Told, m.DeadFrom = len(m.Dead), time.Time{}
	m.tellLoss(slices.Sorted(slices.Values(m.Dead)))
}

// tellLoss sends the dead ranks to the members that still train. An empty list gives the world up.
func (m *Machine) tellLoss(ranks []int) {
	var members []*Worker
	for _, w := range m.workers {
		if w.Phase == training {
			members = append(members, w)
		}
	}
	if len(members) > 0 {
		m.do(TellLoss{Generation: m.Current.Generation, Ranks: ranks, Members: members})
	}
}

// If every rank of a world waits in an operation and none is missing, the ranks wait for each other
// or the operation takes very long. No worker is to blame: the world is given up, and its workers
// continue from their last commit in the next one.

// mostStuck is the number of consecutive stuck worlds without a commit between them after which the
// job ends: the program would wait at the same point for ever.
const mostStuck = 3

// stuck gives up a world in which all ranks wait.
func (m *Machine) stuck(now time.Time, e WorldStuck) {
	if !m.runs(e.Generation) {
		return
	}
	m.emit(now, job.Stalled, field("host", nil), field("slot", nil), field("generation", e.Generation), field("what", e.What))
	m.because(job.CauseStall)
	m.Given = true
	m.tellLoss(nil) // even if the job ends now: blocked ranks get no other message
	if m.Stucks++; m.Stucks == mostStuck {
		m.decide(now, fmt.Errorf("driver: in %d worlds in a row, without a commit between them, all workers waited for each other "+
			"for longer than %v (--stall-timeout); the last time %s", m.Stucks, m.wait.Stall, e.What))
		return
	}
	m.log(Warn, "generation %d is given up; its workers continue from their last commit: they waited for each other for "+
		"longer than %v (--stall-timeout), %s", e.Generation, m.wait.Stall, e.What)
	m.beginReset(now)
}
