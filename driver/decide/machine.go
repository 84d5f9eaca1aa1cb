package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
	"github.com/hvdrun/hvdrun/driver/decide/internal/ledger"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Machine is the state machine of a job. Each input changes the facts it keeps; reconcile then
// compares them with what is wanted, and the difference is returned as actions. Its fields are
// grouped by lifetime; the exported ones are saved as they are.
type Machine struct {
	limits
	fleet
	history
	generation
	ending
	shown
	newID  func(plan.SlotID) string
	out    []Action
	ledger ledger.Ledger
	noted  effect // effect of the inputs since the last step
	due    due
	spoken bool // some worker of this driver speaks by its socket
}

// limits are the job's configuration. The scale command changes the size.
type limits struct {
	size  job.Size
	blame job.Blame
	wait  job.Timeouts
}

// fleet is the current hosts and workers.
type fleet struct {
	hosts   *hosts.Table
	workers []*Worker // every process that has not exited, in start order
	byID    map[string]*Worker
	bySlot  map[plan.SlotID]*Worker // a slot has at most one worker
	fixed   []plan.SlotID           // the slots of a job that is not elastic
	wants   []plan.SlotID           // wanted slots as of the last step; replaced, never modified
	free    []plan.SlotID           // available slots as of freeAt; replaced, never modified
	freeAt  uint64                  // value of hosts.Changes for free
	// holder is the only worker with the job's state, as of the last step. It stays although its
	// slot is not wanted. Nil if there is no such worker.
	holder *Worker
	queued int // wanted slots that wait for the ramp to start their workers, as of the last step
	// rampUntil is when the next starting worker no longer counts against its host's ramp, as of
	// the last step. Zero if no slot waits for that.
	rampUntil time.Time
}

// history lasts as long as the job.
type history struct {
	Seq        uint64                       `json:"seq,omitempty"`      // of the last notification
	Started    bool                         `json:"started,omitempty"`  // workers have been started for the first time
	Joined     time.Time                    `json:"joined,omitzero"`    // when the first worker of the job joined
	StartsFrom time.Time                    `json:"news_from,omitzero"` // last join of a starting worker, or start of the first of them
	ran        map[plan.SlotID]bool         // slots in which a worker has run and must not be started again
	failures   map[plan.SlotID]slotFailures // of slots of listed hosts
	Progress   bool                         `json:"progress,omitempty"` // some worker has committed
	Stucks     int                          `json:"stucks,omitempty"`   // consecutive worlds given up because all ranks waited, with no commit in between
	partings
	faults
	Taken       []takenSlot       `json:"taken,omitempty"`
	Resets      int               `json:"resets,omitempty"`
	ResetCauses map[job.Cause]int `json:"resets_by,omitempty"` // number of resets whose next world was published
	ResetsAt    []time.Time       `json:"resets_at,omitempty"` // times of the resets that count towards a limit that has a window
	Wrote       uint64            `json:"wrote,omitempty"`     // newest commit written as a last checkpoint
	DriverNo    uint64            `json:"term,omitempty"`      // number of the job's driver; 0 is the driver that began the job
}

// generation is the current world and the transition to the next; publish replaces it.
type generation struct {
	Current   plan.World   `json:"world"`
	published PublishWorld // the action that published the world
	Commits   uint64       `json:"commits,omitempty"`   // commit number of the members at the world's start, or at their first commit in it
	Base      uint64       `json:"base,omitempty"`      // commit number of the root at the world's start
	Committed bool         `json:"committed,omitempty"` // at least one member has committed in this world
	Backends  []string     `json:"backends,omitempty"`  // reported by the members
	Entry     entry        `json:"entry,omitzero"`
	Trains    bool         `json:"trains,omitempty"`    // rank 0 has synchronised and trains, or a member has committed
	Jam       bool         `json:"jam,omitempty"`       // a report says that all members wait for each other
	Announced plan.Change  `json:"announced,omitempty"` // the last change that the members were notified of
	loss
	transition
}

// loss is the part of the current world that is lost.
type loss struct {
	Dead     []int     `json:"dead,omitempty"`     // ranks whose processes have died or were given up
	Told     int       `json:"told,omitempty"`     // how many of them were sent to the members
	Sought   []int     `json:"sought,omitempty"`   // ranks whose processes were to be checked, because others have lost them
	DeadFrom time.Time `json:"dead_from,omitzero"` // last death not sent to the members yet, or a later join of a member
	Given    bool      `json:"given,omitempty"`    // the world was given up: all ranks waited, or some have left and others have not noticed
	// Unwritten is the last checkpoint that is missing, or nil.
	Unwritten *unwritten `json:"unwritten,omitempty"`
}

// transition is the progress from the current world to the next one.
type transition struct {
	ChangeFrom    time.Time        `json:"remove_from,omitzero"` // since when members have to leave this world at a commit, for any change
	ResetFrom     time.Time        `json:"reset_from,omitzero"`  // when the first member left the world
	LeftFor       job.Cause        `json:"cause,omitempty"`      // why it is left, as far as the machine knows
	ShortFrom     time.Time        `json:"short_from,omitzero"`  // since when the job waits for slots
	Short         bool             `json:"short,omitempty"`      // too few workers joined to form a world
	Reminded      bool             `json:"reminded,omitempty"`   // the log has named the late workers of this reset, or of the end
	StartFailed   bool             `json:"unready,omitempty"`    // a worker has failed before it joined
	FirstFailure  *job.WorkerError `json:"bad,omitempty"`        // the first failure, or that of a machine that explains it
	OtherFailures int              `json:"others,omitempty"`     // number of failures other than firstFailure
	LeftCleanly   bool             `json:"went,omitempty"`       // a worker has exited with 0 that never joined, or that was asked to leave
}

// ending is the end of the job.
type ending struct {
	DoneFrom time.Time        `json:"done_from,omitzero"`  // when the first worker reported done
	Agreed   bool             `json:"agreed,omitempty"`    // enough members of its world have confirmed the report
	DoneExit bool             `json:"done_exit,omitempty"` // a worker that reported done has exited with 0
	Late     *job.WorkerError `json:"late,omitempty"`      // the first failure after done

	Decided bool      `json:"decided,omitempty"` // the result is known; workers are being stopped
	Result  Cause     `json:"result,omitzero"`
	EndFrom time.Time `json:"end_from,omitzero"` // when the driver began to stop the workers
	Writes  uint64    `json:"writes,omitempty"`  // newest commit that a worker was asked to write as the last checkpoint; 0: none
	Over    bool      `json:"finished,omitempty"`
}

// shown is what a status reports about the machine itself.
type shown struct {
	Stepped   time.Time `json:"last"` // of the last step
	State     job.State `json:"state,omitempty"`
	StateFrom time.Time `json:"state_from,omitzero"`
}

// Config configures a machine. The caller has filled in the defaults of its values by their
// WithDefaults methods.
type Config struct {
	Size     job.Size
	Blame    job.Blame
	Timeouts job.Timeouts
}

// New returns a machine that has processed no input. It calls newID to name each worker that it
// starts.
func New(cfg Config, newID func(plan.SlotID) string) *Machine {
	return &Machine{
		limits: limits{cfg.Size, cfg.Blame, cfg.Timeouts},
		fleet: fleet{
			hosts: hosts.New(cooldownsOf(cfg.Blame)),
			byID:  make(map[string]*Worker), bySlot: make(map[plan.SlotID]*Worker),
		},
		history: history{ran: make(map[plan.SlotID]bool), failures: make(map[plan.SlotID]slotFailures), ResetCauses: make(map[job.Cause]int)},
		newID:   newID,
	}
}

func cooldownsOf(b job.Blame) hosts.Cooldowns {
	return hosts.Cooldowns{CooldownMin: b.CooldownMin, CooldownMax: b.CooldownMax, Forever: b.Forever()}
}

// find returns the worker with the incarnation id, or nil if no such worker exists.
func (m *Machine) find(id string) *Worker { return m.byID[id] }

func (m *Machine) in(slot plan.SlotID) *Worker { return m.bySlot[slot] }

func (m *Machine) add(w *Worker) {
	m.workers = append(m.workers, w)
	m.byID[w.id], m.bySlot[w.slot] = w, w
	m.spoken = m.spoken || w.join.Program != ""
}

func (m *Machine) remove(w *Worker) {
	m.workers = slices.DeleteFunc(m.workers, func(o *Worker) bool { return o == w })
	delete(m.byID, w.id)
	delete(m.bySlot, w.slot)
}

func (m *Machine) any(p phase) bool {
	return slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.Phase == p })
}

// exclude reports an exclusion for a failure; rest reports one without blame.
func (m *Machine) exclude(now time.Time, x hosts.Exclusion) {
	m.reportOut(now, x, Warn, "is excluded")
}

func (m *Machine) rest(now time.Time, x hosts.Exclusion) {
	m.reportOut(now, x, Debug, "rests")
}

func (m *Machine) reportOut(now time.Time, x hosts.Exclusion, level Level, does string) {
	until, long := any(nil), "ever"
	if !x.Forever {
		until, long = x.Until.UTC(), x.Until.Sub(now).String()
	}
	m.emit(now, job.Excluded, field("host", x.Host), field("slot", x.Slot), field("until", until))
	m.log(level, "%s %s for %s", excludedName(x), does, long)
}

func excludedName(x hosts.Exclusion) string { return targetName(x.Host, x.Slot) }

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

// Finished reports whether the job has ended, and its result.
func (m *Machine) Finished() (bool, error) { return m.Over, m.Result.Err }

// Resetting reports whether the current world is being left.
func (m *Machine) Resetting() bool { return !m.ResetFrom.IsZero() }

// Last returns the time of the last step.
func (m *Machine) Last() time.Time { return m.Stepped }

// Hosts returns the listed hosts, oldest first.
func (m *Machine) Hosts() []plan.Host { return m.hosts.Listed() }

// World returns the current world; its generation is 0 before the first.
func (m *Machine) World() plan.World { return m.Current }

// Members returns the workers that are still in the current world, by rank.
func (m *Machine) Members() (all []*Worker) {
	for _, s := range m.Current.Slots {
		if w := m.in(s.SlotID); w != nil && w.inWorld() && w.Generation == m.Current.Generation {
			all = append(all, w)
		}
	}
	return all
}

// NameBy replaces the function that names new workers.
func (m *Machine) NameBy(newID func(plan.SlotID) string) { m.newID = newID }
