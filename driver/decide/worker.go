package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// phase is a worker's position in its life cycle.
type phase uint8

const (
	starting phase = iota // started, has not joined yet
	waiting               // in a join: before its first world, or between two worlds
	training              // a member of the current world
	leaving               // dismissed; expected to exit by itself
	stopping              // being stopped by the driver
)

// Worker is one incarnation: the process in a slot, from start to exit.
type Worker struct {
	life
	identity
}

// life is the part of a worker's state that a snapshot contains unchanged.
type life struct {
	// The fields that each step reads come first so that they share one 64-byte cache line; a job
	// may have thousands of workers.
	Since      time.Time `json:"since,omitzero"`       // when it entered the phase
	Begun      time.Time `json:"begun,omitzero"`       // when it was started
	Generation uint64    `json:"generation,omitempty"` // of its last world; 0: none
	Rank       int       `json:"rank,omitempty"`       // in its last world; before the first world, in the trial assignment
	Phase      phase     `json:"phase,omitempty"`
	Holds      bool      `json:"holds,omitempty"`
	Done       bool      `json:"done,omitempty"`
	Trains     bool      `json:"trains,omitempty"`  // its training in its last world has not ended, according to its heartbeats after a report of done, or to its join
	Wanted     bool      `json:"wanted,omitempty"`  // its slot is one of fleet.wants
	Spare      bool      `json:"spare,omitempty"`   // its slot is not wanted, but the worker waits for a place
	Removed    bool      `json:"removed,omitempty"` // dismissed because its slot is not wanted
	Asked      bool      `json:"asked,omitempty"`   // was asked to leave, but not by this driver
	Stays      bool      `json:"stays,omitempty"`   // the log has said why it stays although it should leave

	departure
	lateness
}

// identity is a worker's identity and what it reported last.
type identity struct {
	id    string
	slot  plan.SlotID
	pid   int
	join  Join
	start StartWorker
}

// departure is what is known about a worker's end before it exits.
type departure struct {
	Reason    string    `json:"reason,omitempty"`    // why it was stopped; if not empty, that counts as its failure
	Comes     bool      `json:"comes,omitempty"`     // it waits in a join although it is being stopped
	Answered  bool      `json:"answered,omitempty"`  // its join was answered because the job ends
	Last      bool      `json:"last,omitempty"`      // the answer asked it to write the last checkpoint
	Left      bool      `json:"left,omitempty"`      // it has left its world on its own and still writes a checkpoint
	Writes    uint64    `json:"writes,omitempty"`    // commit of the last checkpoint it is writing; 0: none
	WroteAt   time.Time `json:"wrote_at,omitzero"`   // when that checkpoint was last seen to grow on disk
	Unwritten bool      `json:"unwritten,omitempty"` // it could not write its last checkpoint; its exit code may say so
	Said      string    `json:"said,omitempty"`      // what its program has reported about its error
}

// lateness is how long others have waited for a worker.
type lateness struct {
	StalledFrom time.Time `json:"stalled_from,omitzero"`  // when it was reported as holding up the others
	MovedFrom   time.Time `json:"moved_from,omitzero"`    // when it was last seen moving to the next world
	DoneFrom    time.Time `json:"done_from,omitzero"`     // when it reported done
	DoneCommits uint64    `json:"done_commits,omitempty"` // its commit number then, as it reported
	Reminded    bool      `json:"reminded,omitempty"`     // the log has named it because it has not exited since
	Parted      int       `json:"parted,omitempty"`       // number of worlds counted by partings in which it was lost
}

func (w *Worker) live() bool { return w.Phase == starting || w.Phase == waiting || w.Phase == training }

// ID returns the worker's incarnation.
func (w *Worker) ID() string { return w.id }

// NewWorker returns a worker with only its incarnation set, for tests of the driver.
func NewWorker(id string) *Worker { return &Worker{identity: identity{id: id}} }

// Place returns the worker's slot, the id of its process (0: none is known), and its rank in its
// last world.
func (w *Worker) Place() (slot plan.SlotID, pid, rank int) { return w.slot, w.pid, w.Rank }

// DataAddrs returns the addresses on which peers reach the worker, from its last join.
func (w *Worker) DataAddrs() []string { return w.join.DataAddrs }

// Handle returns what peers need to reach the worker's program, from its last join.
func (w *Worker) Handle() []byte { return w.join.Handle }

func (m *Machine) reported(now time.Time, e WorkerReported) effect {
	w := m.find(e.ID)
	if w == nil {
		return factsOnly
	}
	switch e.Report {
	case ReportDraining:
		m.draining(now, w)
	case ReportFetching:
		m.fetching(now, w)
	case ReportWriting:
		m.writing(now, w, e.Commits)
	case ReportWritten, ReportNotWritten:
		m.written(w, e.Commits, e.Report == ReportWritten)
	case ReportLeaving:
		m.log(Debug, "%s (rank %d) is about to leave", w.slot, w.Rank)
		return factsOnly
	case ReportDone:
		// A report of an older generation was sent before a reset and does not finish the job.
		if e.Generation == m.Current.Generation && w.Generation == e.Generation {
			m.claimDone(now, w, e.Commits)
		}
	case ReportCommitted:
		if e.Generation != m.Current.Generation || w.Generation != e.Generation || m.Committed {
			return factsOnly // each rank reports the first commit
		}
		m.Committed, m.Progress, m.Commits = true, true, e.Commits
		if m.Base > 0 {
			m.Commits = m.Base + 1 // regardless of the number in the report
		}
		m.Stucks, m.faults = 0, faults{}
		m.rejoined()
		m.Trains = true
		m.emit(now, job.FirstCommit, field("generation", e.Generation), field("commits", m.Commits),
			field("cause", m.Entry.Cause), field("seconds", max(0, now.Sub(m.Entry.From)).Seconds()))
		// A commit ends with a collective check, which a member reaches only after its sync.
		for _, w := range m.workers {
			w.Holds = w.Holds || w.Phase == training
		}
	}
	return anyEffect
}

// fetching restarts the start timeout of a worker that receives the state from members of the
// world. The others wait for it no longer than they wait for enough slots, regardless of its
// reports.
func (m *Machine) fetching(now time.Time, w *Worker) {
	if w.Phase != starting {
		return
	}
	if w.Since = now; !m.overdue(now, w) {
		m.StartsFrom = now
	}
}

// overdue reports whether a worker has been starting for longer than others wait for it.
func (m *Machine) overdue(now time.Time, w *Worker) bool {
	return !now.Before(w.Begun.Add(m.wait.Elastic))
}

// mostBackends bounds the recorded backends of a world: its ranks agree on one backend for each
// kind of group.
const mostBackends = 8

// backendTold records the collective backend of the current world's GPUs.
func (m *Machine) backendTold(now time.Time, e BackendTold) {
	w := m.find(e.ID)
	if w == nil || e.Generation != m.Current.Generation || w.Generation != e.Generation ||
		slices.Contains(m.Backends, e.Backend) || len(m.Backends) == mostBackends {
		return
	}
	m.Backends = append(m.Backends, e.Backend)
	m.emit(now, job.Backend, field("generation", e.Generation), field("backend", e.Backend), field("size", len(m.Current.Slots)))
}

// ended removes a worker and determines the cause of its exit.
func (m *Machine) ended(now time.Time, e WorkerEnded) {
	w := m.find(e.ID)
	if w == nil {
		return
	}
	m.remove(w)
	m.writerEnded(w)
	ran := e.Ran
	if !m.serves(w) {
		ran = nil
	}
	cause := m.cause(w, e.Exit, len(ran) > 0)
	e.Exit.Early = cause == causeFailed && e.Exit.Clean() && len(ran) == 0
	if e.Exit.Clean() {
		e.Exit.Said = ""
	} else if w.Said != "" {
		e.Exit.Said = w.Said
	}
	signal := any(nil)
	if e.Exit.Signal != 0 {
		signal = int(e.Exit.Signal)
	}
	fields := []job.Field{field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", w.pid),
		field("rank", w.Rank), field("code", e.Exit.Code), field("signal", signal), field("cause", cause)}
	if e.Exit.Said != "" {
		fields = append(fields, field("error", e.Exit.Said))
	}
	if e.Exit.Why != "" && cause == causeFailed {
		fields = append(fields, field("why", e.Exit.Why))
	}
	if len(ran) > 0 && cause == causeFailed {
		fields = append(fields, field("tasks", ran))
	}
	m.emit(now, job.WorkerExited, fields...)
	if w.Generation != 0 && w.Generation == m.Current.Generation && !e.Exit.Clean() {
		m.lose(now, w)
	}
	if e.Exit.Unkillable {
		m.giveUpSlot(now, w, e.Exit)
	}
	switch cause {
	case causeDone:
		m.DoneExit = true
	case causeLeft:
		if w.live() || w.Asked || w.Left {
			m.departed(now, w, e.Exit)
		}
	case causeFailed:
		err := &job.WorkerError{Slot: w.slot, Rank: w.Rank, Exit: e.Exit}
		switch {
		case w.Reason != "": // its failure was counted when it was stopped
		case len(ran) > 0:
			m.failedByTask(now, w, err, ran)
		default:
			m.failed(now, w, err)
		}
	}
}

// exitCause is the "cause" of a worker_exited event.
type exitCause string

const (
	causeDone    exitCause = "done"
	causeLeft    exitCause = "left"
	causeFailed  exitCause = "failed"
	causeStopped exitCause = "stopped"
)

// cause returns the cause of an exit. tasks means that the worker was running tasks and has not
// said that it leaves. Success must be reported: a worker that has joined and exits with status 0
// before it is done has failed, unless it was asked to leave. A command that never joins may end at
// any time.
func (m *Machine) cause(w *Worker, x job.Exit, tasks bool) exitCause {
	switch {
	case w.Phase == stopping && w.Reason != "":
		return causeFailed
	case w.Phase == stopping && w.Done && x.Clean():
		return causeDone
	case w.Phase == stopping:
		return causeStopped
	case x.Clean() && w.Done:
		return causeDone
	case x.Clean() && (w.Phase == waiting || w.Phase == training) && !w.Asked && !w.Left && m.DoneFrom.IsZero():
		return causeFailed
	case x.Clean() && !tasks, w.Removed, w.Asked, x.Evicted && m.size.Elastic, x.TakenBy != "":
		return causeLeft
	}
	return causeFailed
}

// departed handles a worker that left before it was done, without being dismissed by this driver.
// Its slot rests like that of a failed worker, because the cause of the exit is likely to end a new
// worker as well.
func (m *Machine) departed(now time.Time, w *Worker, x job.Exit) {
	how := ""
	if x.TakenBy != "" {
		m.slotTaken(now, w, x)
		return
	}
	if x.Clean() {
		m.LeftCleanly = true
		if delete(m.ran, w.slot); m.Joined.IsZero() {
			m.ran[w.slot] = true
		}
	} else {
		how = ", it " + x.String()
		m.noteFailure(&job.WorkerError{Slot: w.slot, Rank: w.Rank, Exit: x}) // not a failure, but the job's result if no worker remains
	}
	if !m.size.Elastic || !m.DoneFrom.IsZero() {
		return
	}
	if x.Evicted && x.Err != nil {
		m.log(Info, "%s: no worker was started: %v", w.slot, x.Err)
		m.rest(now, m.hosts.RestSlot(now, w.slot))
		return
	}
	m.log(Debug, "%s (rank %d) has left%s", w.slot, w.Rank, how)
	m.rest(now, m.hosts.ExcludeSlot(now, w.slot))
	if w.Generation == 0 || w.Generation != m.Current.Generation {
		return
	}
	if m.because(job.CauseDeparture); !x.Clean() {
		m.beginReset(now) // its peers cannot continue
	}
}

// failed handles a failure of the worker itself.
func (m *Machine) failed(now time.Time, w *Worker, err *job.WorkerError) {
	if !m.DoneFrom.IsZero() {
		m.failedLate(w, err)
		return
	}
	f := m.failures[w.slot]
	f.all++
	m.failures[w.slot] = f
	m.StartFailed = m.StartFailed || w.Generation == 0
	m.noteFailure(err)
	if !m.size.Elastic {
		m.decide(now, err)
		return
	}
	m.log(Warn, "%s", err.What())
	if m.faulty(now, w, err); m.Decided {
		return
	}
	if m.blame.Policy == job.BlameHost {
		m.exclude(now, m.hosts.ExcludeHost(now, w.slot.Host))
		for _, o := range m.workers {
			if o.slot.Host == w.slot.Host {
				m.stop(now, o, "")
			}
		}
	} else {
		m.exclude(now, m.hosts.ExcludeSlot(now, w.slot))
	}
	if w.Generation != 0 && w.Generation == m.Current.Generation {
		m.because(job.CauseDeath)
		m.beginReset(now)
	}
}

// serves reports whether the worker is available for tasks: it neither trains nor was asked to
// leave, and may be replaced.
func (m *Machine) serves(w *Worker) bool {
	trains := w.Generation != 0 && w.Generation == m.Current.Generation
	return w.live() && !trains && m.size.Elastic && m.DoneFrom.IsZero()
}

// taskPause is how long a slot rests after a task has ended its worker.
const taskPause = time.Second

// failedByTask handles a failure of a worker that was running tasks. The failure is attributed to
// the tasks and the slot rests briefly, until tasks of several functions have ended workers in the
// slot.
func (m *Machine) failedByTask(now time.Time, w *Worker, err *job.WorkerError, ran []string) {
	if m.hosts.EndedBy(now, w.slot, ran) {
		m.log(Warn, "slot %s is blamed: tasks of %d functions have ended workers there", w.slot, hosts.MostEnders)
		m.failed(now, w, err)
		return
	}
	m.log(Warn, "%s while it ran a task of %s; the slot is not blamed", err.What(), strings.Join(ran, " or "))
	if !m.blame.Forever() {
		m.rest(now, m.hosts.PauseSlot(now, w.slot, taskPause))
	}
}

// taskStuck ends a worker that runs a task that does not end, so that another worker starts in its
// slot. That counts as nobody's failure. A worker that trains continues.
func (m *Machine) taskStuck(now time.Time, e TasksTold) {
	w := m.find(e.Incarnation)
	if w == nil || !m.serves(w) {
		return
	}
	m.do(EmitEvent{e.Event(now)})
	m.log(Warn, "%s is ended and started again, as a task does not end: task %d of %s, %s", w.slot, e.N, e.Function, e.Text)
	m.stop(now, w, "")
}

// noteFailure keeps the first failure, which is the job's result if no worker is left. In a job
// without state, only failures of the program itself are kept, because otherwise the job waits for
// other slots. A failure of a machine, or by a signal, replaces earlier errors of programs, which
// it may have caused.
func (m *Machine) noteFailure(err *job.WorkerError) {
	switch {
	case m.size.Stateless && !err.Own():
	case m.FirstFailure == nil:
		m.FirstFailure = err
	case err.Own():
		m.OtherFailures++
	case m.FirstFailure.Own():
		m.FirstFailure, m.OtherFailures = err, m.OtherFailures+1
	}
}

// faults counts consecutive worlds without a commit that failures of the program have ended: the
// program is likely to fail at the same step for ever.
type faults struct {
	Worlds int    `json:"faults,omitempty"`
	Last   uint64 `json:"fault_of,omitempty"` // newest of these worlds
}

// slotFailures counts failed workers of a slot.
type slotFailures struct {
	all int
	// unjoined is the number of consecutive workers that the program has failed before they joined.
	unjoined int
}

// faulty counts a failure of the program, and ends the job if the program fails again and again.
func (m *Machine) faulty(now time.Time, w *Worker, err *job.WorkerError) {
	if m.size.Stateless || !err.Faulty() {
		return
	}
	if w.Phase == starting {
		f := m.failures[w.slot]
		f.unjoined++
		m.failures[w.slot] = f
		m.faultyStarts(now, err)
	}
	if w.Generation == 0 || w.Generation != m.Current.Generation || m.faults.Last == w.Generation {
		return
	}
	m.faults = faults{m.faults.Worlds + 1, w.Generation}
	limit := m.blame.FailureLimit
	if limit <= 0 || m.faults.Worlds < limit {
		return
	}
	commit := fmt.Sprint(m.Commits)
	if m.Committed { // only the first commit of a world is reported
		commit += " or a later one"
	}
	if limit == 1 {
		m.decide(now, fmt.Errorf("driver: the program has failed after commit %s (--failure-limit 1): %s", commit, err.What()))
		return
	}
	m.decide(now, fmt.Errorf("driver: in %d worlds in a row the program has failed after commit %s, without a commit between them "+
		"(--failure-limit); the last time %s", m.faults.Worlds, commit, err.What()))
}

// faultyStarts ends a job that waits for workers if too few slots remain in which the program has
// not repeatedly failed before it joined.
func (m *Machine) faultyStarts(now time.Time, err *job.WorkerError) {
	limit := m.blame.FailureLimit
	if limit <= 0 || m.failures[err.Slot].unjoined < limit || m.ShortFrom.IsZero() {
		return
	}
	good := 0
	for _, h := range m.hosts.Listed() {
		for i := range h.Slots {
			if m.failures[plan.SlotID{Host: h.Name, Index: i}].unjoined < limit {
				good++
			}
		}
	}
	if good < m.size.Min {
		m.decide(now, fmt.Errorf("driver: in slot %s the program has failed %d times in a row before it joined (--failure-limit), and %d workers "+
			"are needed, and %d other slots are left; the last time %s", err.Slot, m.failures[err.Slot].unjoined, m.size.Min, good, err.What()))
	}
}

// failing keeps what a program reports about its error before it ends.
func (m *Machine) failing(e WorkerFailing) {
	if w := m.find(e.ID); w != nil && w.Said == "" {
		w.Said = e.Said
	}
}

// failedLate handles a failure after all workers reported done. An exit code is a failure of the
// program. A signal is treated as a lost machine, which is harmless if another worker exits
// cleanly.
func (m *Machine) failedLate(w *Worker, err *job.WorkerError) {
	if w.Unwritten && err.Exit.Signal == 0 {
		return // the missing checkpoint is the more precise error
	}
	m.log(Warn, "%s (rank %d) %s after training was done", w.slot, w.Rank, err.Exit)
	if m.Late == nil || (m.Late.Exit.Signal != 0 && err.Exit.Signal == 0) {
		m.Late = err
	}
}

// stop ends a worker. If reason is not empty, that counts as the worker's own failure.
func (m *Machine) stop(now time.Time, w *Worker, reason string) {
	m.stopAs(now, w, reason, workerError(w, reason))
}

// stopAs is like stop, but a reason counts as the failure err. In a job that ends, a worker that
// holds up the others gets no time to end, because they wait for it, unless it writes a checkpoint.
func (m *Machine) stopAs(now time.Time, w *Worker, reason string, err *job.WorkerError) {
	if w.Phase == stopping {
		return
	}
	if w.Phase == waiting && m.leavesLast() {
		w.Comes = !w.Answered
	} else if w.Phase == waiting {
		m.release(w)
	}
	m.enter(now, w, stopping)
	w.Reason = reason
	m.do(StopWorker{w.id, m.Decided && !w.StalledFrom.IsZero() && w.Writes == 0})
	if reason != "" {
		m.failed(now, w, err)
	}
}

func (m *Machine) dismiss(now time.Time, w *Worker, why Dismissal) {
	m.enter(now, w, leaving)
	w.Removed = why != DismissFinished
	m.do(DismissWorker{w.id, why})
}

func (m *Machine) enter(now time.Time, w *Worker, p phase) { w.Phase, w.Since = p, now }

// A process that blocks in the kernel, for example on a dead file server, cannot be killed. Its
// slot is given up after a time, so that neither new workers nor the end of the job wait for it.

// killGrace is how long after SIGKILL, that is after the drain timeout, the machine waits for a
// process to end. Launchers report an unkillable process earlier.
const killGrace = 30 * time.Second

// giveUpProcess removes a worker that has not ended after SIGKILL and about which the launcher has
// reported nothing.
func (m *Machine) giveUpProcess(now time.Time, w *Worker) {
	after := now.Sub(w.graceFrom(w.Since)).Round(time.Second)
	err := fmt.Errorf("process %d has not ended %v after it was stopped", w.pid, after)
	if w.pid == 0 {
		err = fmt.Errorf("its host %s has reported neither its start nor, within %v, its end", w.slot.Host, after)
	}
	exit := job.Exit{Code: 137, Unkillable: true, Err: err}
	m.ended(now, WorkerEnded{ID: w.id, Exit: exit})
	m.do(ForgetWorker{w.id})
}

// endsBy returns the deadline by which a worker that is being stopped must have ended.
func (m *Machine) endsBy(w *Worker) time.Time {
	return w.graceFrom(w.Since).Add(m.wait.Drain + killGrace)
}

// giveUpSlot logs that a process could not be killed. The slot rests, regardless of why the worker
// was stopped.
func (m *Machine) giveUpSlot(now time.Time, w *Worker, x job.Exit) {
	m.log(Warn, "%s %s: its slot is given up, and its memory and devices may still be in use", w, x)
	if _, out := m.hosts.Excluded(now, w.slot); !out && m.size.Elastic && !m.Decided {
		m.exclude(now, m.hosts.ExcludeSlot(now, w.slot))
	}
}
