package decide

import (
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

// A process that blocks in the kernel, for example on a dead file server, cannot be killed. Its
// slot is given up after a time, so that neither new workers nor the end of the job wait for it.

// killGrace is how long after SIGKILL, that is after the drain timeout, the machine waits for a
// process to end. Launchers report an unkillable process earlier.
const killGrace = 30 * time.Second

// giveUpProcess removes a worker that has not ended after SIGKILL and of which the launcher has
// reported nothing.
func (m *Machine) giveUpProcess(now time.Time, w *Worker) {
	exit := job.Exit{Code: 137, Unkillable: true,
		Err: fmt.Errorf("process %d has not ended %v after it was stopped", w.pid, now.Sub(w.graceFrom(w.since)))}
	m.ended(now, WorkerEnded{w.id, exit})
	m.do(ForgetWorker{w.id})
}

// endsBy returns the deadline for the end of a worker that is being stopped.
func (m *Machine) endsBy(w *Worker) time.Time {
	return w.graceFrom(w.since).Add(m.wait.Drain + killGrace)
}

// giveUpSlot logs a process that could not be killed. Its slot rests, for whatever reason the
// worker was stopped.
func (m *Machine) giveUpSlot(now time.Time, w *Worker, x job.Exit) {
	m.log(Warn, "%s %s: its slot is given up, and its memory and devices may still be in use", w, x)
	if _, out := m.hosts.Excluded(now, w.slot); !out && m.size.Elastic && !m.decided {
		m.exclude(now, m.hosts.ExcludeSlot(now, w.slot))
	}
}
