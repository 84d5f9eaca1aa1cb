package decide

import (
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

// A process that waits in the kernel, for a dead file server say, cannot be killed. Its slot is
// given up after a time: neither newcomers nor the end of the job wait for it.

// killGrace is how long after the drain timeout, when it has been killed, a worker may still be
// there. Launchers give up before.
const killGrace = 30 * time.Second

// giveUpProcess takes a worker off the books that does not end though it was killed, and of which
// the launcher says nothing.
func (m *Machine) giveUpProcess(now time.Time, w *Worker) {
	exit := job.Exit{Code: 137, Unkillable: true,
		Err: fmt.Errorf("process %d has not ended %v after it was told to", w.pid, now.Sub(w.graceFrom(w.since)))}
	m.ended(now, WorkerEnded{w.id, exit})
	m.do(ForgetWorker{w.id})
}

// endsBy is until when a worker that is being stopped is waited for.
func (m *Machine) endsBy(w *Worker) time.Time {
	return w.graceFrom(w.since).Add(m.wait.Drain + killGrace)
}

// giveUpSlot names a process that could not be killed. Its slot rests, however the worker came to
// be stopped.
func (m *Machine) giveUpSlot(now time.Time, w *Worker, x job.Exit) {
	m.log(Warn, "%s %s: its slot is given up, and its memory and devices may still be in use", w, x)
	if _, out := m.hosts.Excluded(now, w.slot); !out && m.size.Elastic && !m.decided {
		m.exclude(now, m.hosts.ExcludeSlot(now, w.slot))
	}
}
