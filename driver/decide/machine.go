package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Machine is the state machine of a job. Each input changes the facts it keeps; reconcile then
// compares them with what is wanted, and the difference is returned as actions. Its fields are
// grouped by lifetime.
type Machine struct {
	limits
	fleet
	history
	generation
	ending
	shown
	newID func(plan.SlotID) string
	out   []Action
}

// limits are the job's configuration. The scale command changes the size.
type limits struct {
	size  job.Size
	blame job.Blame
	wait  job.Timeouts
}

// fleet is the current hosts and workers.
type fleet struct {
	hosts   *hostTable
	workers []*Worker // every process that has not exited, in start order
	byID    map[string]*Worker
	bySlot  map[plan.SlotID]*Worker // a slot has at most one worker
	fixed   []plan.SlotID           // the slots of a job that is not elastic
	wants   []plan.SlotID           // wanted slots as of the last step; replaced, never modified
	free    []plan.SlotID           // available slots as of freeAt; replaced, never modified
	freeAt  uint64                  // value of hostTable.Changes for free
	// holder is the only worker with the job's state. It stays although its slot is not wanted, as
	// of the last step. Nil if there is no such worker.
	holder *Worker
	queued int // wanted slots that wait for the ramp to start their workers, as of the last step
	// rampUntil is when the next starting worker no longer counts against its host's ramp, as of
	// the last step. Zero if no slot waits for that.
	rampUntil time.Time
}

// history lasts as long as the job.
type history struct {
	seq        uint64               // of the last notification
	started    bool                 // workers have been started for the first time
	joined     time.Time            // when the first worker of the job joined
	startsFrom time.Time            // last join of a starting worker, or start of the first of them
	ran        map[plan.SlotID]bool // slots in which a worker has run and must not be started again
	failures   map[plan.SlotID]int  // number of failed workers per slot of listed hosts
	progress   bool                 // some worker has committed
	stucks     int                  // consecutive worlds given up because all ranks waited, with no commit in between
	resets     int
	resetsAt   []time.Time // resets that count towards a limit that has a window
	wrote      uint64      // newest commit written as a last checkpoint
}

// generation is the current world and the transition to the next; publish replaces it.
type generation struct {
	world     plan.World
	published PublishWorld // the action that published the world
	commits   uint64       // commit number of its members at its start, or at their first commit in it
	committed bool         // at least one worker has committed in it
	backends  []string     // reported by its members
	announced plan.Change  // last change that its members were notified of
	loss
	transition
}

// loss is the part of the current world that is lost.
type loss struct {
	dead     []int     // ranks whose processes have died or were given up
	told     int       // how many of them were sent to the members
	deadFrom time.Time // last death not sent to the members yet, or a later join of a member
	given    bool      // the world was given up because all ranks waited
	// unwritten is the last checkpoint that is missing, or nil.
	unwritten *unwritten
}

// transition is the progress from the current world to the next one.
type transition struct {
	removeFrom   time.Time        // since when members have to leave at a commit
	resetFrom    time.Time        // when the first member left the world
	shortFrom    time.Time        // since when the job waits for slots
	short        bool             // too few workers joined to form a world
	reminded     bool             // the log has named the late workers of this reset, or of the end
	startFailed  bool             // a worker has failed before it joined
	firstFailure *job.WorkerError // the first failure
	leftCleanly  bool             // a worker has exited with 0 without being asked to
}

// ending is the end of the job.
type ending struct {
	doneFrom time.Time        // when the first worker reported done
	doneExit bool             // a worker that reported done has exited with 0
	late     *job.WorkerError // the first failure after done

	decided  bool // the result is known; workers are being stopped
	result   error
	endFrom  time.Time // when the driver began to stop the workers
	writes   uint64    // newest commit that a worker was told to write as the last checkpoint; 0: none
	finished bool
}

// shown is what a status reports about the machine itself.
type shown struct {
	last      time.Time // of the last step
	state     job.State
	stateFrom time.Time
}

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
	// The fields that each step reads come first so that they share one 64-byte cache line; a job
	// may have thousands of workers.
	since      time.Time // when it entered the phase
	begun      time.Time // when it was started
	generation uint64    // of its last world; 0: none
	rank       int       // in its last world; before the first world, in the trial assignment
	phase      phase
	holds      bool
	done       bool
	wanted     bool // its slot is one of fleet.wants
	removed    bool // dismissed because its slot is not wanted
	asked      bool // to leave, but not by this driver
	stays      bool // the log has said why it stays although it should leave

	identity
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
	reason    string    // why it was stopped; not empty if that counts as its failure
	comes     bool      // it waits in a join although it is being stopped
	answered  bool      // its join was answered because the job ends
	last      bool      // that answer told it to write the last checkpoint
	left      bool      // it has left its world by itself and still writes a checkpoint
	writes    uint64    // commit of the last checkpoint it is writing; 0: none
	wroteAt   time.Time // when that checkpoint was last seen to grow on disk
	unwritten bool      // it could not write its last checkpoint; its exit code may say so
}

// lateness is how long others have waited for a worker.
type lateness struct {
	stalledFrom time.Time // when it was reported as holding up the others
	movedFrom   time.Time // when it was last seen moving to the next world
	doneFrom    time.Time // when it reported done
	reminded    bool      // the log has named it because it has not exited since
}

func (w *Worker) live() bool { return w.phase == starting || w.phase == waiting || w.phase == training }

// Config configures a machine. Its values come from their WithDefaults.
type Config struct {
	Size     job.Size
	Blame    job.Blame
	Timeouts job.Timeouts
}

// New returns a machine that has had no input. newID names each worker that it starts.
func New(cfg Config, newID func(plan.SlotID) string) *Machine {
	return &Machine{
		limits: limits{cfg.Size, cfg.Blame, cfg.Timeouts},
		fleet: fleet{
			hosts: newHosts(cooldownsOf(cfg.Blame)),
			byID:  make(map[string]*Worker), bySlot: make(map[plan.SlotID]*Worker),
		},
		history: history{ran: make(map[plan.SlotID]bool), failures: make(map[plan.SlotID]int)},
		newID:   newID,
	}
}

func cooldownsOf(b job.Blame) cooldowns {
	return cooldowns{CooldownMin: b.CooldownMin, CooldownMax: b.CooldownMax, Forever: b.Forever()}
}

// Step processes an input and returns the actions to perform, in order.
func (m *Machine) Step(now time.Time, in Input) []Action {
	m.out = nil
	if m.finished {
		return nil
	}
	defer func() { m.last = now }()
	switch e := in.(type) {
	case HostsFound:
		m.emit(now, job.HostsFound, field("hosts", foundHosts(e.Hosts)))
		m.hosts.Update(now, e.Hosts)
		m.forgetFailures()
	case SourceFailed:
		m.emit(now, job.DiscoveryFailed, field("error", e.Err.Error()))
		m.decide(now, fmt.Errorf("%w: %w", job.ErrDiscovery, e.Err))
	case SourceStale:
		m.emit(now, job.DiscoveryFailed, field("error", e.Err.Error()))
	case WorkerForked:
		m.forked(now, e)
	case WorkerJoined:
		m.workerJoined(now, e)
	case WorkerReported:
		m.reported(now, e)
	case WorkerWrites:
		m.writerProgress(now, e)
	case WorkerEnded:
		m.ended(now, e)
	case Interrupted:
		m.decide(now, e.Cause)
	case WorkerStalled:
		m.stalled(now, e)
	case WorkerStirred:
		m.stirred(now, m.member(e.ID, e.Generation))
	case WorkerHung:
		m.hung(now, e)
	case WorkerMoved:
		m.moved(now, e)
	case WorkerDying:
		m.dying(now, e)
	case WorldJammed:
		m.jammed(now, e)
	case WorldStuck:
		m.stuck(now, e)
	case DeadlinePassed:
	case Commanded:
		m.command(now, e.Command)
	case Resumed:
		m.resume(now)
	case BackendTold:
		m.backendTold(now, e)
	default:
		panic(fmt.Sprintf("driver: unknown input %T", in))
	}
	m.reconcile(now)
	m.noteState(now)
	return m.out
}

func (m *Machine) forked(now time.Time, e WorkerForked) {
	if w := m.find(e.ID); w != nil && w.pid != e.PID { // otherwise a previous driver has recorded it
		w.pid = e.PID
		m.emit(now, job.WorkerStarted, field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", e.PID))
	}
}

// workerJoined handles a worker's request for a world newer than its last. A repeated join counts
// once; the join of a worker that is being stopped is answered with a dismissal.
func (m *Machine) workerJoined(now time.Time, e WorkerJoined) {
	w := m.find(e.ID)
	if w == nil {
		return
	}
	if w.phase == stopping && m.leavesLast() {
		w.join, w.holds, w.comes = e.Join, e.Join.HoldsState, true // answerAll answers it
	} else if w.phase == stopping {
		m.release(w)
	}
	if !w.live() {
		return // a dismissed worker already has its answer
	}
	if e.Join.After < w.generation {
		return // a repeated join that its current world has answered
	}
	if m.joined.IsZero() {
		m.joined = now
	}
	w.join, w.holds = e.Join, e.Join.HoldsState
	m.progress = m.progress || e.Join.Commits > 0
	switch w.phase {
	case starting:
		m.startsFrom = now
		m.emit(now, job.WorkerReady, field("host", w.slot.Host), field("slot", w.slot.Index))
	case training:
		m.stirred(now, w)
		if !m.deadFrom.IsZero() {
			m.deadFrom = now // members notice the death by themselves
		}
		if e.Join.Cause != "" {
			m.log(Debug, "%s left generation %d: %s", w.slot, w.generation, e.Join.Cause)
		}
		if m.doneFrom.IsZero() {
			m.beginReset(now)
		}
	}
	m.enter(now, w, waiting)
}

func (m *Machine) reported(now time.Time, e WorkerReported) {
	w := m.find(e.ID)
	if w == nil {
		return
	}
	switch e.Report {
	case ReportDraining:
		m.draining(now, w)
	case ReportFetching:
		if w.phase == starting {
			w.since, m.startsFrom = now, now // its start timeout restarts while it receives state
		}
	case ReportWriting:
		m.writing(now, w, e.Commits)
	case ReportWritten, ReportNotWritten:
		m.written(w, e.Commits, e.Report == ReportWritten)
	case ReportLeaving:
		m.log(Debug, "%s (rank %d) is about to leave", w.slot, w.rank)
	case ReportDone:
		// A report of an older generation was sent before a reset and does not finish the job.
		if e.Generation == m.world.Generation && w.generation == e.Generation {
			if !w.done {
				w.done, w.doneFrom = true, now
			}
			if m.doneFrom.IsZero() {
				m.doneFrom = now
				m.log(Debug, "%s is done, waiting up to %v for the others", w.slot, m.wait.Finish)
			}
		}
	case ReportCommitted:
		if e.Generation != m.world.Generation || m.committed {
			return
		}
		m.committed, m.progress, m.commits = true, true, e.Commits
		m.stucks = 0
		m.emit(now, job.FirstCommit, field("generation", e.Generation), field("commits", e.Commits))
		// A commit ends with a collective check, which a member reaches only after its sync.
		for _, w := range m.workers {
			w.holds = w.holds || w.phase == training
		}
	}
}

// backendTold records the collective backend of the current world's GPUs.
func (m *Machine) backendTold(now time.Time, e BackendTold) {
	w := m.find(e.ID)
	if w == nil || e.Generation != m.world.Generation || w.generation != e.Generation ||
		slices.Contains(m.backends, e.Backend) {
		return
	}
	m.backends = append(m.backends, e.Backend)
	m.emit(now, job.Backend, field("generation", e.Generation), field("backend", e.Backend), field("size", len(m.world.Slots)))
}

// ended removes a worker and determines the cause of its exit.
func (m *Machine) ended(now time.Time, e WorkerEnded) {
	w := m.find(e.ID)
	if w == nil {
		return
	}
	m.remove(w)
	m.writerEnded(w)
	cause := m.cause(w, e.Exit)
	signal := any(nil)
	if e.Exit.Signal != 0 {
		signal = int(e.Exit.Signal)
	}
	m.emit(now, job.WorkerExited, field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", w.pid),
		field("rank", w.rank), field("code", e.Exit.Code), field("signal", signal), field("cause", cause))
	if w.generation != 0 && w.generation == m.world.Generation && !e.Exit.Clean() {
		m.lose(now, w)
	}
	if e.Exit.Unkillable {
		m.giveUpSlot(now, w, e.Exit)
	}
	switch cause {
	case causeDone:
		m.doneExit = true
	case causeLeft:
		if w.live() || w.asked || w.left {
			m.departed(now, w, e.Exit)
		}
	case causeFailed:
		if w.reason == "" { // a worker stopped for its failure was counted when it was stopped
			m.failed(now, w, &job.WorkerError{Slot: w.slot, Rank: w.rank, Exit: e.Exit})
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

func (m *Machine) cause(w *Worker, x job.Exit) exitCause {
	switch {
	case w.phase == stopping && w.reason != "":
		return causeFailed
	case w.phase == stopping && w.done && x.Clean():
		return causeDone
	case w.phase == stopping:
		return causeStopped
	case x.Clean() && w.done:
		return causeDone
	case x.Clean(), w.removed, w.asked, x.Evicted && m.size.Elastic:
		return causeLeft
	}
	return causeFailed
}

// departed handles a worker that left before it was done, without being dismissed by this driver.
// Its slot rests like that of a failed worker, because the cause of the exit is likely to end a new
// worker as well.
func (m *Machine) departed(now time.Time, w *Worker, x job.Exit) {
	how := ""
	if x.Clean() {
		m.leftCleanly = true
		if delete(m.ran, w.slot); m.joined.IsZero() {
			m.ran[w.slot] = true
		}
	} else {
		how = ", it " + x.String()
		if m.firstFailure == nil { // not a failure, but the job's result if no worker remains
			m.firstFailure = &job.WorkerError{Slot: w.slot, Rank: w.rank, Exit: x}
		}
	}
	if !m.size.Elastic || !m.doneFrom.IsZero() {
		return
	}
	if x.Evicted && x.Err != nil {
		m.log(Info, "%s: no worker was started: %v", w.slot, x.Err)
		m.rest(now, m.hosts.RestSlot(now, w.slot))
		return
	}
	m.log(Info, "%s (rank %d) has left%s", w.slot, w.rank, how)
	m.rest(now, m.hosts.ExcludeSlot(now, w.slot))
	if !x.Clean() && w.generation != 0 && w.generation == m.world.Generation {
		m.beginReset(now) // its peers cannot continue
	}
}

// failed handles a failure of the worker itself.
func (m *Machine) failed(now time.Time, w *Worker, err *job.WorkerError) {
	if !m.doneFrom.IsZero() {
		m.failedLate(w, err)
		return
	}
	m.failures[w.slot]++
	m.startFailed = m.startFailed || w.generation == 0
	if m.firstFailure == nil {
		m.firstFailure = err
	}
	if !m.size.Elastic {
		m.decide(now, err)
		return
	}
	m.log(Warn, "%s", err.What())
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
	if w.generation != 0 && w.generation == m.world.Generation {
		m.beginReset(now)
	}
}

// failedLate handles a failure after all workers reported done. An exit code is a failure of the
// program. A signal is treated as a lost machine, which is harmless if another worker exits
// cleanly.
func (m *Machine) failedLate(w *Worker, err *job.WorkerError) {
	if w.unwritten && err.Exit.Signal == 0 {
		return // the missing checkpoint already is the more precise error
	}
	m.log(Warn, "%s (rank %d) %s after training was done", w.slot, w.rank, err.Exit)
	if m.late == nil || (m.late.Exit.Signal != 0 && err.Exit.Signal == 0) {
		m.late = err
	}
}

// beginReset records and counts that the current world is being left.
func (m *Machine) beginReset(now time.Time) {
	if m.world.Generation == 0 || !m.resetFrom.IsZero() || m.decided {
		return
	}
	m.resetFrom, m.reminded = now, false
	m.resets++
	if limit := m.blame.ResetLimit; limit != nil && m.resetsWithin(now) > *limit {
		within := ""
		if m.blame.ResetWindow > 0 {
			within = fmt.Sprintf(" within %v", m.blame.ResetWindow)
		}
		m.decide(now, fmt.Errorf("%w: number of resets exceeded limit %d%s", job.ErrResetLimit, *limit, within))
		return
	}
	m.emit(now, job.Reset, field("count", m.resets))
}

// resetsWithin returns the number of resets that count towards the limit, including one at now.
func (m *Machine) resetsWithin(now time.Time) int {
	window := m.blame.ResetWindow
	if window == 0 {
		return m.resets
	}
	m.resetsAt = slices.DeleteFunc(m.resetsAt, func(at time.Time) bool { return !now.Before(at.Add(window)) })
	m.resetsAt = append(m.resetsAt, now)
	return len(m.resetsAt)
}

// stop ends a worker. A reason counts as the worker's own failure.
func (m *Machine) stop(now time.Time, w *Worker, reason string) {
	if w.phase == stopping {
		return
	}
	if w.phase == waiting && m.leavesLast() {
		w.comes = !w.answered
	} else if w.phase == waiting {
		m.release(w)
	}
	m.enter(now, w, stopping)
	w.reason = reason
	m.do(StopWorker{w.id})
	if reason != "" {
		m.failed(now, w, &job.WorkerError{Slot: w.slot, Rank: w.rank, Reason: reason})
	}
}

func (m *Machine) dismiss(now time.Time, w *Worker, why Dismissal) {
	m.enter(now, w, leaving)
	w.removed = why != DismissFinished
	m.do(DismissWorker{w.id, why})
}

// decide sets the job's result; later calls do not change it.
func (m *Machine) decide(now time.Time, err error) {
	if !m.decided {
		m.decided, m.result = true, err
	}
}

func (m *Machine) enter(now time.Time, w *Worker, p phase) { w.phase, w.since = p, now }

// find and in return nil if there is no such worker.
func (m *Machine) find(id string) *Worker { return m.byID[id] }

func (m *Machine) in(slot plan.SlotID) *Worker { return m.bySlot[slot] }

func (m *Machine) add(w *Worker) {
	m.workers = append(m.workers, w)
	m.byID[w.id], m.bySlot[w.slot] = w, w
}

func (m *Machine) remove(w *Worker) {
	m.workers = slices.DeleteFunc(m.workers, func(o *Worker) bool { return o == w })
	delete(m.byID, w.id)
	delete(m.bySlot, w.slot)
}

func (m *Machine) any(p phase) bool {
	return slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.phase == p })
}

// exclude reports an exclusion for a failure; rest reports one without blame.
func (m *Machine) exclude(now time.Time, x exclusion) {
	m.reportOut(now, x, Warn, "is excluded")
}

func (m *Machine) rest(now time.Time, x exclusion) {
	m.reportOut(now, x, Info, "rests")
}

func (m *Machine) reportOut(now time.Time, x exclusion, level Level, does string) {
	until, long := any(nil), "ever"
	if !x.Forever {
		until, long = x.Until.UTC(), x.Until.Sub(now).String()
	}
	m.emit(now, job.Excluded, field("host", x.Host), field("slot", x.Slot), field("until", until))
	m.log(level, "%s %s for %s", excludedName(x), does, long)
}

func excludedName(x exclusion) string { return targetName(x.Host, x.Slot) }

// targetName names a slot, or the whole host if slot is nil, for log lines and messages.
func targetName(host string, slot *int) string {
	if slot == nil {
		return "host " + host
	}
	return "slot " + plan.SlotID{Host: host, Index: *slot}.String()
}

func (m *Machine) do(a Action) { m.out = append(m.out, a) }

// field returns a field of an event.
func field(key string, value any) job.Field { return job.Field{Key: key, Value: value} }

func (m *Machine) emit(now time.Time, name job.EventName, fields ...job.Field) {
	m.do(EmitEvent{job.Event{Time: now, Name: name, Fields: fields}})
}

func (m *Machine) log(level Level, format string, args ...any) {
	m.do(LogLine{level, fmt.Sprintf(format, args...)})
}

// ID returns the worker's incarnation.
func (w *Worker) ID() string { return w.id }

// DataAddrs returns the addresses on which peers reach the worker, from its last join.
func (w *Worker) DataAddrs() []string { return w.join.DataAddrs }

// NotifyAddr returns the address on which the driver reaches the worker, from its last join.
func (w *Worker) NotifyAddr() string { return w.join.NotifyAddr }

// Finished reports whether the job has ended, and its result.
func (m *Machine) Finished() (bool, error) { return m.finished, m.result }

// Resetting reports whether the current world is being left.
func (m *Machine) Resetting() bool { return !m.resetFrom.IsZero() }

// Last returns the time of the last step.
func (m *Machine) Last() time.Time { return m.last }

// Hosts returns the listed hosts, oldest first.
func (m *Machine) Hosts() []plan.Host { return m.hosts.Listed() }

// World returns the current world; its generation is 0 before the first.
func (m *Machine) World() plan.World { return m.world }

// NameBy replaces the function that names new workers.
func (m *Machine) NameBy(newID func(plan.SlotID) string) { m.newID = newID }

// foundHosts converts hosts for an event.
func foundHosts(hosts []plan.Host) []job.FoundHost {
	found := make([]job.FoundHost, len(hosts))
	for i, h := range hosts {
		found[i] = job.FoundHost{Host: h.Name, Slots: h.Slots, Draining: h.Draining}
	}
	return found
}
