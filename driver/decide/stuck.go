package decide

import (
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

// Where every rank of a world waits in an operation and none is missing, the program has its ranks
// wait for each other, or the operation takes very long. Nobody is to blame then: the world as a
// whole is given up, and its workers go on from their last commit in the next one.

// mostStuck is how many worlds in a row may get stuck without a commit between them before the job
// ends: a program that waits at the same place each time would do so for ever.
const mostStuck = 3

// stuck gives up a world in which all wait.
func (m *Machine) stuck(now time.Time, e WorldStuck) {
	if !m.runs(e.Generation) {
		return
	}
	m.emit(now, job.Stalled, field("host", nil), field("slot", nil), field("generation", e.Generation), field("what", e.What))
	m.given = true
	m.tellLoss(nil) // whatever comes of it: those who wait for each other hear nothing else
	if m.stucks++; m.stucks == mostStuck {
		m.decide(now, fmt.Errorf("driver: in %d worlds in a row, without a commit between them, all workers waited for each other "+
			"for longer than %v (--stall-timeout); the last time %s", m.stucks, m.wait.Stall, e.What))
		return
	}
	m.log(Warn, "generation %d is given up, its workers go on from their last commit: they waited for each other for "+
		"longer than %v (--stall-timeout), %s", e.Generation, m.wait.Stall, e.What)
	m.beginReset(now)
}
