package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Machine decides. It has no goroutine, lock, clock, socket or process: an input changes the facts
// it keeps, reconcile compares them with what is wanted, and what is to be done about the
// difference comes out as actions. Its fields stand together by how long they live.
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

// limits are what the job was given; a person may change the size.
type limits struct {
	size  job.Size
	blame job.Blame
	wait  job.Timeouts
}

// fleet is the hosts and workers there are now.
type fleet struct {
	hosts   *hostTable
	workers []*Worker // every process that has not exited, in order of start
	byID    map[string]*Worker
	bySlot  map[plan.SlotID]*Worker // a slot has one worker at a time
	fixed   []plan.SlotID           // the slots of a job that is not elastic
	wants   []plan.SlotID           // as of the last step; replaced, never changed
	free    []plan.SlotID           // the available ones, as of freeAt; replaced, never changed
	freeAt  uint64                  // hostTable.Changes
	// holder stays though its slot is not wanted, as of the last step: it alone has the state. Nil:
	// nobody does.
	holder *Worker
	queued int // wanted slots whose workers have no place in the ramp yet, as of the last step
	// rampUntil is when the next worker that starts does not count for its host any more, as of the
	// last step; zero: no slot waits for that.
	rampUntil time.Time
}

// history is what is remembered as long as the job runs.
type history struct {
	seq      uint64               // of the last notification
	started  bool                 // the first start has happened
	joined   time.Time            // when the first worker of the job joined
	newsFrom time.Time            // when a worker that starts has last joined, or the first of them has started
	ran      map[plan.SlotID]bool // where a worker that must not be started again has run
	failures map[plan.SlotID]int  // of workers that failed in slots of listed hosts
	progress bool                 // some worker has committed
	stucks   int                  // worlds in a row that were given up because all waited, with no commit between them
	resets   int
	resetsAt []time.Time // those that count for the limit, where it has a window
	wrote    uint64      // the newest commit that a worker has written as a last checkpoint
}

// generation is the current world and the way to the next: publish begins another one.
type generation struct {
	world     plan.World
	published PublishWorld // as the world was
	commits   uint64       // that its members had, at its beginning or at their first
	committed bool         // some worker has committed in it
	backends  []string     // that its members have told of
	announced plan.Change  // what its members were told last
	loss
	way
}

// loss is what of the current world is lost.
type loss struct {
	dead     []int     // ranks whose processes have died, or do not count any more
	told     int       // how many of them the members were told of
	deadFrom time.Time // when the last died that they were not told of, or one of them came since
	given    bool      // the world was given up, because all waited
	// unwritten is a last checkpoint that is missing; nil: none is.
	unwritten *unwritten
}

// way is what has happened on the way to the next world.
type way struct {
	removeFrom time.Time        // since when members are to leave at a commit
	resetFrom  time.Time        // when the first member left the world
	shortFrom  time.Time        // since when slots are waited for
	short      bool             // a world could not be formed for want of workers
	reminded   bool             // the log has named those who are late, at a reset or at the end
	unready    bool             // some worker has failed before it joined
	bad        *job.WorkerError // the first failure
	went       bool             // a worker has exited with 0 of its own accord
}

// ending is the way to the job's end.
type ending struct {
	doneFrom time.Time        // when the first worker reported done
	doneExit bool             // a worker that reported done has exited with 0
	late     *job.WorkerError // the first failure after done

	decided  bool // the job's result is known, workers are being stopped
	result   error
	endFrom  time.Time // when the workers were stopped
	writes   uint64    // the newest commit that a worker was told to write last; 0: none
	finished bool
}

// shown is what a status tells of the machine itself.
type shown struct {
	last      time.Time // of the last step
	state     job.State
	stateFrom time.Time
}

// phase is where a worker is in its life.
type phase uint8

const (
	starting phase = iota // started, has not joined yet
	waiting               // in a join: at the door, or between two worlds
	training              // a member of the current world
	leaving               // dismissed, expected to exit by itself
	stopping              // asked to end by the driver
)

// Worker is one incarnation: the process in a slot, from its start to its exit.
type Worker struct {
	// What each step looks at comes first, for the sake of thousands of workers: 64 bytes are read
	// at a time.
	since      time.Time // when it entered the phase
	begun      time.Time // when it was started
	generation uint64    // of the last world it was in, 0 for none
	rank       int       // in its last world; before the first, in the trial assignment
	phase      phase
	holds      bool
	done       bool
	wanted     bool // its slot is one of fleet.wants
	removed    bool // dismissed because its slot is not wanted
	asked      bool // to leave, by others than this driver
	stays      bool // all the same, and the log says why

	identity
	departure
	lateness
}

// identity is who a worker is, and what it last said of itself.
type identity struct {
	id    string
	slot  plan.SlotID
	pid   int
	join  Join
	start StartWorker
}

// departure is what is known of a worker's end before it comes.
type departure struct {
	reason    string    // why it was stopped, where that is a failure of its own
	comes     bool      // a join of it waits, though it is being stopped
	answered  bool      // its join was answered because the job ends
	last      bool      // so that it writes the last checkpoint
	left      bool      // its world by itself, though it is a process still: it writes a checkpoint
	writes    uint64    // the commit of the last checkpoint that it writes now; 0: none
	wroteAt   time.Time // when more of that was last seen on the disk
	unwritten bool      // it could not write its last checkpoint, which its exit may say
}

// lateness is how others wait for a worker.
type lateness struct {
	stalledFrom time.Time // when it was named for holding up the others
	movedFrom   time.Time // when it was seen last on its way to the next world
	doneFrom    time.Time // when it reported done
	reminded    bool      // the log has named it for not exiting since
}

func (w *Worker) live() bool { return w.phase == starting || w.phase == waiting || w.phase == training }

// Config is what a machine goes by. Its values have passed their WithDefaults.
type Config struct {
	Size     job.Size
	Blame    job.Blame
	Timeouts job.Timeouts
}

// New returns a machine that nothing has happened to. NewID names each worker that it starts.
func New(cfg Config, newID func(plan.SlotID) string) *Machine {
	return &Machine{
		limits: limits{cfg.Size, cfg.Blame, cfg.Timeouts},
		fleet: fleet{
			hosts: newHosts(hostsConfig(cfg.Blame)),
			byID:  make(map[string]*Worker), bySlot: make(map[plan.SlotID]*Worker),
		},
		history: history{ran: make(map[plan.SlotID]bool), failures: make(map[plan.SlotID]int)},
		newID:   newID,
	}
}

func hostsConfig(b job.Blame) cooldowns {
	return cooldowns{CooldownMin: b.CooldownMin, CooldownMax: b.CooldownMax, Forever: b.Forever()}
}

// Step takes note of what happened and returns what to do about it, in order.
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
		m.writesOn(now, e)
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
		m.obey(now, e.Command)
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
	if w := m.find(e.ID); w != nil && w.pid != e.PID { // else another driver was told already
		w.pid = e.PID
		m.emit(now, job.WorkerStarted, field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", e.PID))
	}
}

// workerJoined notes that a worker asks for a world newer than its last: it is ready. A repeated
// join counts once, one of a worker that was told to go is too late.
func (m *Machine) workerJoined(now time.Time, e WorkerJoined) {
	w := m.find(e.ID)
	if w == nil {
		return
	}
	if w.phase == stopping && m.leavesLast() {
		w.join, w.holds, w.comes = e.Join, e.Join.HoldsState, true // answerAll has the rest
	} else if w.phase == stopping {
		m.release(w)
	}
	if !w.live() {
		return // one that was dismissed has its answer
	}
	if e.Join.After < w.generation {
		return // a repeated one, which the world that it is in now has answered
	}
	if m.joined.IsZero() {
		m.joined = now
	}
	w.join, w.holds = e.Join, e.Join.HoldsState
	m.progress = m.progress || e.Join.Commits > 0
	switch w.phase {
	case starting:
		m.newsFrom = now
		m.emit(now, job.WorkerReady, field("host", w.slot.Host), field("slot", w.slot.Index))
	case training:
		m.stirred(now, w)
		if !m.deadFrom.IsZero() {
			m.deadFrom = now // they notice by themselves
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
			w.since, m.newsFrom = now, now // as long as more of the state comes, it is waited for
		}
	case ReportWriting:
		m.writing(now, w, e.Commits)
	case ReportWritten, ReportNotWritten:
		m.written(w, e.Commits, e.Report == ReportWritten)
	case ReportLeaving:
		m.log(Debug, "%s (rank %d) is about to leave", w.slot, w.rank)
	case ReportDone:
		// Only the current world can finish the job: a report of an older one is from before a
		// reset.
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
		// A commit ends with a collective check, which every member came to with its sync behind
		// it.
		for _, w := range m.workers {
			w.holds = w.holds || w.phase == training
		}
	}
}

// backendTold notes how the GPUs of the current world compute together.
func (m *Machine) backendTold(now time.Time, e BackendTold) {
	w := m.find(e.ID)
	if w == nil || e.Generation != m.world.Generation || w.generation != e.Generation ||
		slices.Contains(m.backends, e.Backend) {
		return
	}
	m.backends = append(m.backends, e.Backend)
	m.emit(now, job.Backend, field("generation", e.Generation), field("backend", e.Backend), field("size", len(m.world.Slots)))
}

// ended takes a worker off the books and finds out whose doing its end was.
func (m *Machine) ended(now time.Time, e WorkerEnded) {
	w := m.find(e.ID)
	if w == nil {
		return
	}
	m.remove(w)
	m.stopsWriting(w)
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
		if w.reason == "" { // one that was stopped for its failure has been blamed then
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

// departed deals with a worker that has left, was not done, and was not sent away by us. Its slot
// rests like one that failed, since whoever ended the worker will not want the next one either.
func (m *Machine) departed(now time.Time, w *Worker, x job.Exit) {
	how := ""
	if x.Clean() {
		m.went = true
		if delete(m.ran, w.slot); m.joined.IsZero() {
			m.ran[w.slot] = true
		}
	} else {
		how = ", it " + x.String()
		if m.bad == nil { // nobody is to blame, but if nobody is left it was no success either
			m.bad = &job.WorkerError{Slot: w.slot, Rank: w.rank, Exit: x}
		}
	}
	if !m.size.Elastic || !m.doneFrom.IsZero() {
		return
	}
	if x.Evicted && x.Err != nil {
		m.log(Info, "%s: nothing is started: %v", w.slot, x.Err)
		m.rest(now, m.hosts.RestSlot(now, w.slot))
		return
	}
	m.log(Info, "%s (rank %d) has left%s", w.slot, w.rank, how)
	m.rest(now, m.hosts.ExcludeSlot(now, w.slot))
	if !x.Clean() && w.generation != 0 && w.generation == m.world.Generation {
		m.beginReset(now) // its peers cannot go on
	}
}

// failed deals with a failure that is the worker's own.
func (m *Machine) failed(now time.Time, w *Worker, err *job.WorkerError) {
	if !m.doneFrom.IsZero() {
		m.failedLate(w, err)
		return
	}
	m.failures[w.slot]++
	m.unready = m.unready || w.generation == 0
	if m.bad == nil {
		m.bad = err
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

// failedLate deals with a failure after training was done everywhere. What a worker says by its
// exit code counts; a signal is taken for a lost machine, which harms nothing any more as long as
// another worker ends well.
func (m *Machine) failedLate(w *Worker, err *job.WorkerError) {
	if w.unwritten && err.Exit.Signal == 0 {
		return // that is what it says, and more exactly
	}
	m.log(Warn, "%s (rank %d) %s after training was done", w.slot, w.rank, err.Exit)
	if m.late == nil || (m.late.Exit.Signal != 0 && err.Exit.Signal == 0) {
		m.late = err
	}
}

// beginReset notes that the current world is being left, and counts it.
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

// resetsWithin returns the number of resets that count for the limit, of which one has begun now.
func (m *Machine) resetsWithin(now time.Time) int {
	window := m.blame.ResetWindow
	if window == 0 {
		return m.resets
	}
	m.resetsAt = slices.DeleteFunc(m.resetsAt, func(at time.Time) bool { return !now.Before(at.Add(window)) })
	m.resetsAt = append(m.resetsAt, now)
	return len(m.resetsAt)
}

// stop asks a worker to end. A reason makes that the worker's own failure.
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

// decide fixes the job's result; the first one stands.
func (m *Machine) decide(now time.Time, err error) {
	if !m.decided {
		m.decided, m.result = true, err
	}
}

func (m *Machine) enter(now time.Time, w *Worker, p phase) { w.phase, w.since = p, now }

// find returns nil where there is no such worker, as does in.
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

// exclude tells of an exclusion for a failure, rest of one for which nobody is to blame.
func (m *Machine) exclude(now time.Time, x exclusion) {
	m.tellOut(now, x, Warn, "is excluded")
}

func (m *Machine) rest(now time.Time, x exclusion) {
	m.tellOut(now, x, Info, "rests")
}

func (m *Machine) tellOut(now time.Time, x exclusion, level Level, does string) {
	until, long := any(nil), "ever"
	if !x.Forever {
		until, long = x.Until.UTC(), x.Until.Sub(now).String()
	}
	m.emit(now, job.Excluded, field("host", x.Host), field("slot", x.Slot), field("until", until))
	m.log(level, "%s %s for %s", excludedName(x), does, long)
}

func excludedName(x exclusion) string { return placeName(x.Host, x.Slot) }

// placeName names a slot, or where that is nil a whole host, for a person.
func placeName(host string, slot *int) string {
	if slot == nil {
		return "host " + host
	}
	return "slot " + plan.SlotID{Host: host, Index: *slot}.String()
}

func (m *Machine) do(a Action) { m.out = append(m.out, a) }

// field is one of an event.
func field(key string, value any) job.Field { return job.Field{Key: key, Value: value} }

func (m *Machine) emit(now time.Time, name job.EventName, fields ...job.Field) {
	m.do(EmitEvent{job.Event{Time: now, Name: name, Fields: fields}})
}

func (m *Machine) log(level Level, format string, args ...any) {
	m.do(LogLine{level, fmt.Sprintf(format, args...)})
}

// Members of worlds, as actions name them.

// ID is the worker's incarnation.
func (w *Worker) ID() string { return w.id }

// DataAddrs are where peers reach the worker, as it said when it joined last.
func (w *Worker) DataAddrs() []string { return w.join.DataAddrs }

// NotifyAddr is where the driver reaches it, likewise.
func (w *Worker) NotifyAddr() string { return w.join.NotifyAddr }

// Finished tells whether the job has come to its end, and with which result.
func (m *Machine) Finished() (bool, error) { return m.finished, m.result }

// Resetting tells whether a world is being left.
func (m *Machine) Resetting() bool { return !m.resetFrom.IsZero() }

// Last is when the machine was last stepped.
func (m *Machine) Last() time.Time { return m.last }

// Hosts are those listed, the oldest first.
func (m *Machine) Hosts() []plan.Host { return m.hosts.Listed() }

// World is the newest that was published; its generation is 0 before the first.
func (m *Machine) World() plan.World { return m.world }

// NameBy has newID name the workers from now on.
func (m *Machine) NameBy(newID func(plan.SlotID) string) { m.newID = newID }

// foundHosts are the hosts as an event tells them.
func foundHosts(hosts []plan.Host) []job.FoundHost {
	found := make([]job.FoundHost, len(hosts))
	for i, h := range hosts {
		found[i] = job.FoundHost{Host: h.Name, Slots: h.Slots, Draining: h.Draining}
	}
	return found
}
