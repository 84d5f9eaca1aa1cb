package decide

import (
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

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
	m.given = true
	m.tellLoss(nil) // even if the job ends now: blocked ranks get no other message
	if m.stucks++; m.stucks == mostStuck {
		m.decide(now, fmt.Errorf("driver: in %d worlds in a row, without a commit between them, all workers waited for each other "+
			"for longer than %v (--stall-timeout); the last time %s", m.stucks, m.wait.Stall, e.What))
		return
	}
	m.log(Warn, "generation %d is given up; its workers continue from their last commit: they waited for each other for "+
		"longer than %v (--stall-timeout), %s", e.Generation, m.wait.Stall, e.What)
	m.beginReset(now)
}
