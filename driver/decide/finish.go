package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// finish waits for the remaining workers once one worker has reported done. What a worker does
// after training, such as saving a model, has its own timeout.
func (m *Machine) finish(now time.Time) {
	for _, w := range m.workers {
		switch w.Phase {
		case waiting:
			m.dismiss(now, w, DismissFinished)
		case starting:
			m.stop(now, w, "")
		}
	}
	if len(m.workers) == 0 {
		if m.Late != nil && (m.Late.Exit.Signal == 0 || !m.DoneExit) {
			m.decide(now, m.Late)
		}
		m.decide(now, nil)
		m.windDown(now)
	}
}

// stopUndone stops a worker that did not report done in time after the first worker did.
func (m *Machine) stopUndone(now time.Time, w *Worker) {
	if w.Phase == training {
		m.log(Warn, "%s (rank %d) is not done %v after the first worker, stopping it", w.slot, w.Rank, m.wait.Finish)
	}
	if w.Phase == training || w.Phase == leaving {
		m.stop(now, w, "")
	}
}

// windDown stops all workers and ends the job when the last has exited.
func (m *Machine) windDown(now time.Time) {
	m.notifyStopping()
	if m.leavesLast() {
		m.answerAll()
	}
	for _, w := range m.workers {
		m.stop(now, w, "")
	}
	if m.EndFrom.IsZero() {
		m.EndFrom, m.Reminded = now, false
	}
	if len(m.workers) > 0 || m.Over {
		return
	}
	m.Over = true
	m.Result.Err = m.withUnwritten(m.Result.Err)
	message := m.remark()
	if m.Result.Err != nil {
		message = m.Result.Err.Error()
	}
	if m.Result.Err == nil && message != "" {
		m.log(Warn, "%s", message)
	}
	m.account(now)
	fields := []job.Field{field("status", job.ExitStatus(m.Result.Err)), field("message", message), field("goodput", m.ledger.Until(now))}
	if n := m.lastCommit(); n > 0 {
		fields = append(fields, field("commits", n))
	}
	if m.Wrote > 0 {
		fields = append(fields, field("checkpoint", m.Wrote))
	}
	m.emit(now, job.JobDone, fields...)
	m.do(FinishJob{m.Result.Err})
}

// lastCommit returns the number of the job's newest commit as far as the machine knows; 0: none. It
// is the median of the numbers from the members that have reported done.
func (m *Machine) lastCommit() uint64 {
	var said []uint64
	for _, w := range m.published.Members {
		if w.Done {
			said = append(said, w.DoneCommits)
		}
	}
	n := max(m.Commits, m.Writes, m.Wrote)
	if slices.Sort(said); m.Agreed && len(said) > 0 {
		n = max(n, said[len(said)/2])
	}
	return n
}

// remark describes what is unusual about a job that has succeeded: each of its programs may have
// trained by itself, or not at all. Empty: nothing is unusual. The machine cannot see whether
// programs communicate without hvdrun.
func (m *Machine) remark() string {
	if m.Result.Err != nil || !m.LeftCleanly || !m.Joined.IsZero() || len(m.ran) < 2 {
		return ""
	}
	return fmt.Sprintf("%d programs have ended with status 0, and none has used hvdrun's library: each ran alone, unless they met in "+
		"another way, such as torch.distributed or MPI. A program of the library joins where it has hvdrun's environment (env -i, sudo "+
		"and containers drop it) and stays in the foreground", len(m.ran))
}

// checkAlive ends the job when no worker is left that can continue it.
func (m *Machine) checkAlive(now time.Time) {
	if !m.Started || m.Decided {
		return
	}
	alive, able := m.queued, false
	for _, w := range m.workers {
		if w.live() {
			alive++
			// Until a member of the current world joins again, it is not known whether it has the
			// state.
			able = able || w.Holds || w.Phase == training
		}
	}
	if m.Progress && !able && m.Base == 0 && slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.unsynced(m.Current.Generation) }) {
		m.Progress = false // despite the reports: a member without the state means that its world has made no commit
	}
	switch {
	case m.hasState() && !able:
		m.decide(now, m.stateLost())
	case alive == 0 && m.FirstFailure != nil && !(m.size.TasksOnly && m.size.Elastic): // for tasks alone, slots may come back
		m.decide(now, m.FirstFailure)
	case alive == 0 && m.LeftCleanly && m.Joined.IsZero():
		m.decide(now, nil) // a command without hvdrun's library ends like this
	}
}

// hasState reports whether the job has a state that its workers can lose.
func (m *Machine) hasState() bool { return m.Progress && !m.size.Stateless }

func (m *Machine) stateLost() error {
	switch {
	case m.FirstFailure == nil:
		return fmt.Errorf("%w: the last worker that had it has left", job.ErrStateLost)
	case m.OtherFailures > 0 && !m.FirstFailure.Own():
		return fmt.Errorf("%w: %s, and %s with errors of their own", job.ErrStateLost, m.FirstFailure.What(), ended(m.OtherFailures))
	}
	return fmt.Errorf("%w: the last worker that had it failed: %s", job.ErrStateLost, m.FirstFailure.What())
}

// ended returns text that says how many other workers have ended.
func ended(n int) string {
	if n == 1 {
		return "1 other worker has ended"
	}
	return fmt.Sprintf("%d other workers have ended", n)
}

// decide sets the job's result; later calls do not change it.
func (m *Machine) decide(now time.Time, err error) {
	if !m.Decided {
		m.Decided, m.Result.Err = true, err
	}
}

// notEnough returns the job's error for an elapsed elastic timeout.
func (m *Machine) notEnough(now time.Time) error {
	need, there := m.size.Min, len(m.withoutTaken(now, m.hosts.Available(now)))
	switch {
	case !m.Started:
		need = m.size.NP
	case m.StartFailed && m.FirstFailure != nil:
		return fmt.Errorf("%w: %d workers needed, %d joined within %v, %d slots available; the first failure: %s",
			job.ErrNotEnoughSlots, need, m.joinedSoFar(), m.wait.Elastic, there, m.FirstFailure.What())
	}
	return fmt.Errorf("%w: %d needed, %d available after %v%s", job.ErrNotEnoughSlots, need, there, m.wait.Elastic, m.lackWords())
}

// joinedSoFar returns how many workers wait for a world.
func (m *Machine) joinedSoFar() (n int) {
	for _, w := range m.workers {
		if w.Phase == waiting {
			n++
		}
	}
	return n
}
