package driver

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"
)

// A process that waits in the kernel, for a dead file server say, cannot be killed. Its slot is given up after a time: neither
// newcomers nor the end of the job wait for it.

// killGrace is how long after the drain timeout, when it has been killed, a worker may still be there. Launchers give up before.
const killGrace = 30 * time.Second

// giveUpStopped takes workers off the books that do not end though they were killed, and of which the launcher says nothing.
func (m *machine) giveUpStopped(now time.Time) {
	var late []*worker
	for _, w := range m.workers {
		if w.phase == stopping && !now.Before(m.endsBy(w)) {
			late = append(late, w)
		}
	}
	for _, w := range late {
		exit := Exit{Code: 137, Unkillable: true, Err: fmt.Errorf("process %d has not ended %v after it was told to", w.pid, now.Sub(w.graceFrom(w.since)))}
		m.ended(now, workerEnded{w.id, exit})
		m.do(forgetWorker{w.id})
	}
}

// endsBy is until when a worker that is being stopped is waited for.
func (m *machine) endsBy(w *worker) time.Time {
	return w.graceFrom(w.since).Add(m.wait.Drain + killGrace)
}

// giveUpSlot names a process that could not be killed. Its slot rests, however the worker came to be stopped.
func (m *machine) giveUpSlot(now time.Time, w *worker, x Exit) {
	m.log(logrus.WarnLevel, "%s %s: its slot is given up, and its memory and devices may still be in use", w, x)
	if _, out := m.hosts.Excluded(now, w.slot); !out && m.size.Elastic && !m.decided {
		m.exclude(now, m.hosts.ExcludeSlot(now, w.slot))
	}
}
