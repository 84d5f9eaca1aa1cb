package driver

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// machine decides. It has no goroutine, lock, clock, socket or process: an event changes the facts it keeps, reconcile
// compares them with what is wanted, and what is to be done about the difference comes out as actions.
type machine struct {
	size  Size
	blame Blame
	wait  Timeouts
	newID func(plan.SlotID) string

	hosts   *discovery.Hosts
	workers []*worker // every process that has not exited, in order of start
	byID    map[string]*worker
	bySlot  map[plan.SlotID]*worker // a slot has one worker at a time
	wants   []plan.SlotID           // as of the last step; replaced, never changed
	free    []plan.SlotID           // the available ones, as of freeAt; replaced, never changed
	freeAt  uint64                  // discovery.Hosts.Changes
	holder  *worker                 // stays though its slot is not wanted, as of the last step: it alone has the state; nil: none does
	world   plan.World
	seq     uint64

	started    bool                 // the first start has happened
	queued     int                  // wanted slots whose workers have no place in the ramp yet, as of the last step
	newsFrom   time.Time            // when a worker that starts has last joined, or the first of them has started
	unready    bool                 // some worker has failed before it joined, since the last world
	ran        map[plan.SlotID]bool // where a worker that must not be started again has run
	fixed      []plan.SlotID        // the slots of a job that is not elastic
	joined     time.Time            // when the first worker of the job joined
	progress   bool                 // some worker has committed
	committed  bool                 // some worker has committed in this generation
	backends   []string             // that members of this generation have told of
	announced  plan.Change          // what the members of this generation were told last
	short      bool                 // a world could not be formed for want of workers
	shortFrom  time.Time            // since when slots are waited for
	resetFrom  time.Time            // when the first member left the current world
	reminded   bool                 // the log has named those who have not, or those who are to leave and do not
	removeFrom time.Time            // since when members are to leave at a commit
	dead       []int                // ranks of the current world whose processes have died, or do not count any more
	told       int                  // how many of them the members were told of
	deadFrom   time.Time            // when the last died that they were not told of, or one of them came since
	given      bool                 // the current world was given up, because all waited
	stucks     int                  // worlds in a row that were, with no commit between them
	resets     int
	resetsAt   []time.Time         // those that count for the limit, where it has a window
	failures   map[plan.SlotID]int // of workers that failed in slots of listed hosts
	commits    uint64              // that the members of the current world had, at its beginning or at their first

	doneFrom time.Time    // when the first worker reported done
	doneExit bool         // a worker that reported done has exited with 0
	bad      *WorkerError // the first failure since the last world was published
	went     bool         // a worker has exited with 0 of its own accord since then
	late     *WorkerError // the first failure after done

	decided bool // the job's result is known, workers are being stopped
	result  error
	endFrom time.Time // when the workers were stopped

	writes    uint64     // the newest commit that a worker was told to write last; 0: none
	wrote     uint64     // the newest commit that a worker has written last
	unwritten *unwritten // the last checkpoint, where it is missing
	finished  bool

	last      time.Time // of the last step
	state     control.State
	stateFrom time.Time
	published publishWorld // as the current world was

	out []action
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

// worker is one incarnation: the process in a slot, from its start to its exit.
type worker struct {
	// What each step looks at comes first, for the sake of thousands of workers: 64 bytes are read at a time.
	since      time.Time // when it entered the phase
	begun      time.Time // when it was started
	generation uint64    // of the last world it was in, 0 for none
	rank       int       // in its last world; before the first, in the trial assignment
	phase      phase
	holds      bool
	done       bool
	wanted     bool // its slot is one of machine.wants
	removed    bool // dismissed because its slot is not wanted
	asked      bool // to leave, by others than this driver
	stays      bool // all the same, and the log says why

	id     string
	slot   plan.SlotID
	pid    int
	join   rendezvous.Joining
	start  startWorker
	reason string // why it was stopped, where that is a failure of its own

	comes     bool      // a join of it waits, though it is being stopped
	answered  bool      // its join was answered because the job ends
	last      bool      // so that it writes the last checkpoint
	left      bool      // its world by itself, though it is a process still: it writes a checkpoint
	writes    uint64    // the commit of the last checkpoint that it writes now; 0: none
	wroteAt   time.Time // when more of that was last seen on the disk
	unwritten bool      // it could not write its last checkpoint, which its exit may say

	stalledFrom time.Time // when it was named for holding up the others
	movedFrom   time.Time // when it was seen last on its way to the next world
	doneFrom    time.Time // when it reported done
	reminded    bool      // the log has named it for not exiting since
}

func (w *worker) live() bool { return w.phase == starting || w.phase == waiting || w.phase == training }

// What can happen to the machine.
type (
	event interface{}

	hostsFound   struct{ hosts []plan.Host }
	sourceFailed struct{ err error } // the first discovery failed
	sourceStale  struct {
		err error
		age time.Duration
	} // a later one did
	workerForked struct {
		id  string
		pid int
	}
	workerJoined struct {
		id   string
		join rendezvous.Joining
	}
	workerReport struct {
		id                  string
		report              rendezvous.Report
		generation, commits uint64
	}
	workerEnded struct {
		id   string
		exit Exit
	}
	// workerWrites: more of the last checkpoint that it writes is on the disk.
	workerWrites   struct{ id string }
	interrupted    struct{ cause error }
	deadlinePassed struct{}
	resumed        struct{} // by another driver, after the death of the one that was fed so far
)

// What the machine wants done.
type (
	action interface{}

	startWorker struct {
		id     string
		slot   plan.Slot
		trial  trialWorld
		resets int
		// again: a driver before this one has started it, or was about to; if forked, it has.
		again, forked bool
	}
	// trialWorld is how a worker that starts sees the world that there would be if all wanted slots were filled. It keeps
	// nothing of it: the trials of a thousand workers would be a million slots.
	trialWorld struct {
		size                 int
		groupRank, groupSize int    // of the worker's host, as plan.World.Group has them
		first                string // the host of rank 0
	}
	stopWorker   struct{ id string }
	giveTime     struct{ id string } // a worker that is being stopped has its whole grace anew
	publishWorld struct {
		world   plan.World
		members []*worker // by rank
		root    int
		seq     uint64
	}
	dismissWorker struct {
		id  string
		why error
	}
	notifyWorkers struct {
		seq        uint64
		change     plan.Change
		generation uint64
		members    []*worker
	}
	tellLoss struct {
		loss    notify.Loss
		members []*worker
	}
	emitEvent struct{ event Event }
	// forgetWorker: nobody waits for the worker any more, whose process could not be ended.
	forgetWorker struct{ id string }
	logLine      struct {
		level logrus.Level
		text  string
	}
	finishJob struct{ err error }
)

func newMachine(cfg Config, newID func(plan.SlotID) string) *machine {
	return &machine{
		size: cfg.Size, blame: cfg.Blame, wait: cfg.Timeouts, newID: newID,
		byID: make(map[string]*worker), bySlot: make(map[plan.SlotID]*worker),
		failures: make(map[plan.SlotID]int), ran: make(map[plan.SlotID]bool),
		hosts: discovery.NewHosts(hostsConfig(cfg.Blame)),
	}
}

func hostsConfig(b Blame) discovery.HostsConfig {
	return discovery.HostsConfig{CooldownMin: b.CooldownMin, CooldownMax: b.CooldownMax, Forever: b.forever()}
}

// step takes note of what happened and returns what to do about it, in order.
func (m *machine) step(now time.Time, ev event) []action {
	m.out = nil
	if m.finished {
		return nil
	}
	defer func() { m.last = now }()
	switch e := ev.(type) {
	case hostsFound:
		m.emit(now, HostsFound, Field{"hosts", foundHosts(e.hosts)})
		m.hosts.Update(now, e.hosts)
		m.forgetFailures()
	case sourceFailed:
		m.emit(now, DiscoveryFailed, Field{"error", e.err.Error()})
		m.decide(now, fmt.Errorf("%w: %w", ErrDiscovery, e.err))
	case sourceStale:
		m.emit(now, DiscoveryFailed, Field{"error", e.err.Error()})
	case workerForked:
		m.forked(now, e)
	case workerJoined:
		m.workerJoined(now, e)
	case workerReport:
		m.reported(now, e)
	case workerWrites:
		m.writesOn(now, e)
	case workerEnded:
		m.ended(now, e)
	case interrupted:
		m.decide(now, e.cause)
	case workerStalled:
		m.stalled(now, e)
	case workerStirred:
		m.stirred(now, m.member(e.id, e.generation))
	case workerHung:
		m.hung(now, e)
	case workerMoved:
		m.moved(now, e)
	case workerDying:
		m.dying(now, e)
	case worldJammed:
		m.jammed(now, e)
	case worldStuck:
		m.stuck(now, e)
	case deadlinePassed:
	case commanded:
		m.obey(now, e.Command)
	case resumed:
		m.resume(now)
	default:
		panic(fmt.Sprintf("driver: unknown event %T", ev))
	}
	m.reconcile(now)
	m.noteState(now)
	return m.out
}

func (m *machine) forked(now time.Time, e workerForked) {
	if w := m.find(e.id); w != nil && w.pid != e.pid { // else another driver was told already
		w.pid = e.pid
		m.emit(now, WorkerStarted, Field{"host", w.slot.Host}, Field{"slot", w.slot.Index}, Field{"pid", e.pid})
	}
}

// workerJoined notes that a worker asks for a world newer than its last: it is ready. A repeated join counts once, one of
// a worker that was told to go is too late.
func (m *machine) workerJoined(now time.Time, e workerJoined) {
	w := m.find(e.id)
	if w == nil {
		return
	}
	if w.phase == stopping && m.leavesLast() {
		w.join, w.holds, w.comes = e.join, e.join.HoldsState, true // answerAll has the rest
	} else if w.phase == stopping {
		m.release(w)
	}
	if !w.live() {
		return // one that was dismissed has its answer
	}
	if e.join.After < w.generation {
		return // a repeated one, which the world that it is in now has answered
	}
	if m.joined.IsZero() {
		m.joined = now
	}
	w.join, w.holds = e.join, e.join.HoldsState
	m.progress = m.progress || e.join.Commits > 0
	switch w.phase {
	case starting:
		m.newsFrom = now
		m.emit(now, WorkerReady, Field{"host", w.slot.Host}, Field{"slot", w.slot.Index})
	case training:
		m.stirred(now, w)
		if !m.deadFrom.IsZero() {
			m.deadFrom = now // they notice by themselves
		}
		if e.join.Cause != "" {
			m.log(logrus.DebugLevel, "%s left generation %d: %s", w.slot, w.generation, e.join.Cause)
		}
		if m.doneFrom.IsZero() {
			m.beginReset(now)
		}
	}
	m.enter(now, w, waiting)
}

func (m *machine) reported(now time.Time, e workerReport) {
	w := m.find(e.id)
	if w == nil {
		return
	}
	switch e.report {
	case rendezvous.Draining:
		m.draining(now, w)
	case rendezvous.Fetching:
		if w.phase == starting {
			w.since, m.newsFrom = now, now // as long as more of the state comes, it is waited for
		}
	case rendezvous.Writing:
		m.writing(now, w, e.commits)
	case rendezvous.Written, rendezvous.NotWritten:
		m.written(w, e.commits, e.report == rendezvous.Written)
	case rendezvous.Leaving:
		m.log(logrus.DebugLevel, "%s (rank %d) is about to leave", w.slot, w.rank)
	case rendezvous.Done:
		// Only the current world can finish the job: a report of an older one is from before a reset.
		if e.generation == m.world.Generation && w.generation == e.generation {
			if !w.done {
				w.done, w.doneFrom = true, now
			}
			if m.doneFrom.IsZero() {
				m.doneFrom = now
				m.log(logrus.DebugLevel, "%s is done, waiting up to %v for the others", w.slot, m.wait.Finish)
			}
		}
	case rendezvous.OverNCCL, rendezvous.OverIPC, rendezvous.OverIPCHosts, rendezvous.OverStaging:
		name := e.report.Backend()
		if e.generation == m.world.Generation && w.generation == e.generation && !slices.Contains(m.backends, name) {
			m.backends = append(m.backends, name)
			m.emit(now, Backend, Field{"generation", e.generation}, Field{"backend", name}, Field{"size", len(m.world.Slots)})
		}
	case rendezvous.Committed:
		if e.generation != m.world.Generation || m.committed {
			return
		}
		m.committed, m.progress, m.commits = true, true, e.commits
		m.stucks = 0
		m.emit(now, FirstCommit, Field{"generation", e.generation}, Field{"commits", e.commits})
		// A commit ends with a collective check, which every member came to with its sync behind it.
		for _, w := range m.workers {
			w.holds = w.holds || w.phase == training
		}
	}
}

// ended takes a worker off the books and finds out whose doing its end was.
func (m *machine) ended(now time.Time, e workerEnded) {
	w := m.find(e.id)
	if w == nil {
		return
	}
	m.remove(w)
	m.stopsWriting(w)
	cause := m.cause(w, e.exit)
	signal := any(nil)
	if e.exit.Signal != 0 {
		signal = int(e.exit.Signal)
	}
	m.emit(now, WorkerExited, Field{"host", w.slot.Host}, Field{"slot", w.slot.Index}, Field{"pid", w.pid},
		Field{"rank", w.rank}, Field{"code", e.exit.Code}, Field{"signal", signal}, Field{"cause", cause})
	if w.generation != 0 && w.generation == m.world.Generation && !e.exit.clean() {
		m.lose(now, w)
	}
	if e.exit.Unkillable {
		m.giveUpSlot(now, w, e.exit)
	}
	switch cause {
	case causeDone:
		m.doneExit = true
	case causeLeft:
		if w.live() || w.asked || w.left {
			m.departed(now, w, e.exit)
		}
	case causeFailed:
		if w.reason == "" { // one that was stopped for its failure has been blamed then
			m.failed(now, w, &WorkerError{Slot: w.slot, Rank: w.rank, Exit: e.exit})
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

func (m *machine) cause(w *worker, x Exit) exitCause {
	switch {
	case w.phase == stopping && w.reason != "":
		return causeFailed
	case w.phase == stopping && w.done && x.clean():
		return causeDone
	case w.phase == stopping:
		return causeStopped
	case x.clean() && w.done:
		return causeDone
	case x.clean(), w.removed, w.asked, x.Evicted && m.size.Elastic:
		return causeLeft
	}
	return causeFailed
}

// departed deals with a worker that has left, was not done, and was not sent away by us. Its slot rests like one that
// failed, since whoever ended the worker will not want the next one either.
func (m *machine) departed(now time.Time, w *worker, x Exit) {
	how := ""
	if x.clean() {
		m.went = true
		if delete(m.ran, w.slot); m.joined.IsZero() {
			m.ran[w.slot] = true
		}
	} else {
		how = ", it " + x.String()
		if m.bad == nil { // nobody is to blame, but if nobody is left it was no success either
			m.bad = &WorkerError{Slot: w.slot, Rank: w.rank, Exit: x}
		}
	}
	if !m.size.Elastic || !m.doneFrom.IsZero() {
		return
	}
	if x.Evicted && x.Err != nil {
		m.log(logrus.InfoLevel, "%s: nothing is started: %v", w.slot, x.Err)
		m.rest(now, m.hosts.RestSlot(now, w.slot))
		return
	}
	m.log(logrus.InfoLevel, "%s (rank %d) has left%s", w.slot, w.rank, how)
	m.rest(now, m.hosts.ExcludeSlot(now, w.slot))
	if !x.clean() && w.generation != 0 && w.generation == m.world.Generation {
		m.beginReset(now) // its peers cannot go on
	}
}

// failed deals with a failure that is the worker's own.
func (m *machine) failed(now time.Time, w *worker, err *WorkerError) {
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
	m.log(logrus.WarnLevel, "%s", err.what())
	if m.blame.Policy == BlameHost {
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

// failedLate deals with a failure after training was done everywhere. What a worker says by its exit code counts; a
// signal is taken for a lost machine, which harms nothing any more as long as another worker ends well.
func (m *machine) failedLate(w *worker, err *WorkerError) {
	if w.unwritten && err.Exit.Signal == 0 {
		return // that is what it says, and more exactly
	}
	m.log(logrus.WarnLevel, "%s (rank %d) %s after training was done", w.slot, w.rank, err.Exit)
	if m.late == nil || (m.late.Exit.Signal != 0 && err.Exit.Signal == 0) {
		m.late = err
	}
}

// beginReset notes that the current world is being left, and counts it.
func (m *machine) beginReset(now time.Time) {
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
		m.decide(now, fmt.Errorf("%w: number of resets exceeded limit %d%s", ErrResetLimit, *limit, within))
		return
	}
	m.emit(now, Reset, Field{"count", m.resets})
}

// resetsWithin returns the number of resets that count for the limit, of which one has begun now.
func (m *machine) resetsWithin(now time.Time) int {
	window := m.blame.ResetWindow
	if window == 0 {
		return m.resets
	}
	m.resetsAt = slices.DeleteFunc(m.resetsAt, func(at time.Time) bool { return !now.Before(at.Add(window)) })
	m.resetsAt = append(m.resetsAt, now)
	return len(m.resetsAt)
}

// stop asks a worker to end. A reason makes that the worker's own failure.
func (m *machine) stop(now time.Time, w *worker, reason string) {
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
	m.do(stopWorker{w.id})
	if reason != "" {
		m.failed(now, w, &WorkerError{Slot: w.slot, Rank: w.rank, Reason: reason})
	}
}

func (m *machine) dismiss(now time.Time, w *worker, why error) {
	m.enter(now, w, leaving)
	w.removed = errors.Is(why, rendezvous.ErrRemoved)
	m.do(dismissWorker{w.id, why})
}

// decide fixes the job's result; the first one stands.
func (m *machine) decide(now time.Time, err error) {
	if !m.decided {
		m.decided, m.result = true, err
	}
}

func (m *machine) enter(now time.Time, w *worker, p phase) { w.phase, w.since = p, now }

// find returns nil where there is no such worker, as does in.
func (m *machine) find(id string) *worker { return m.byID[id] }

func (m *machine) in(slot plan.SlotID) *worker { return m.bySlot[slot] }

func (m *machine) add(w *worker) {
	m.workers = append(m.workers, w)
	m.byID[w.id], m.bySlot[w.slot] = w, w
}

func (m *machine) remove(w *worker) {
	m.workers = slices.DeleteFunc(m.workers, func(o *worker) bool { return o == w })
	delete(m.byID, w.id)
	delete(m.bySlot, w.slot)
}

func (m *machine) any(p phase) bool {
	return slices.ContainsFunc(m.workers, func(w *worker) bool { return w.phase == p })
}

// exclude tells of an exclusion for a failure, rest of one for which nobody is to blame.
func (m *machine) exclude(now time.Time, x discovery.Exclusion) {
	m.tellOut(now, x, logrus.WarnLevel, "is excluded")
}

func (m *machine) rest(now time.Time, x discovery.Exclusion) {
	m.tellOut(now, x, logrus.InfoLevel, "rests")
}

func (m *machine) tellOut(now time.Time, x discovery.Exclusion, level logrus.Level, does string) {
	until, long := any(nil), "ever"
	if !x.Forever {
		until, long = x.Until.UTC(), x.Until.Sub(now).String()
	}
	m.emit(now, Excluded, Field{"host", x.Host}, Field{"slot", x.Slot}, Field{"until", until})
	m.log(level, "%s %s for %s", excludedName(x), does, long)
}

func excludedName(x discovery.Exclusion) string { return placeName(x.Host, x.Slot) }

// placeName names a slot, or where that is nil a whole host, for a person.
func placeName(host string, slot *int) string {
	if slot == nil {
		return "host " + host
	}
	return "slot " + plan.SlotID{Host: host, Index: *slot}.String()
}

func (m *machine) do(a action) { m.out = append(m.out, a) }

func (m *machine) emit(now time.Time, name EventName, fields ...Field) {
	m.do(emitEvent{Event{Time: now, Name: name, Fields: fields}})
}

func (m *machine) log(level logrus.Level, format string, args ...any) {
	m.do(logLine{level, fmt.Sprintf(format, args...)})
}
