package decide

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
	"github.com/hvdrun/hvdrun/driver/decide/internal/ledger"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// snapshot is the machine's whole state between two steps. A journal holds it in place of the
// records that led to it, as one JSON object with the parts of Machine.
type snapshot struct {
	Last      time.Time     `json:"last"` // when the machine was last stepped
	State     job.State     `json:"state,omitempty"`
	StateFrom time.Time     `json:"state_from,omitzero"`
	Size      job.Size      `json:"size"`
	Ledger    *ledger.Saved `json:"ledger,omitempty"`
	savedFleet
	savedHistory
	savedGeneration
	savedEnding
}

type savedFleet struct {
	Hosts   hosts.State   `json:"hosts"`
	Wants   []slotRun     `json:"wants,omitempty"`
	Fixed   []slotRun     `json:"fixed,omitempty"`
	Queued  int           `json:"queued,omitempty"`
	Workers []savedWorker `json:"workers,omitempty"`
}

type savedHistory struct {
	Seq      uint64      `json:"seq,omitempty"`
	Started  bool        `json:"started,omitempty"`
	Joined   time.Time   `json:"joined,omitzero"`
	NewsFrom time.Time   `json:"news_from,omitzero"`
	Ran      []savedSlot `json:"ran,omitempty"`
	Failures []savedSlot `json:"failures,omitempty"`
	Progress bool        `json:"progress,omitempty"`
	Stucks   int         `json:"stucks,omitempty"`
	savedFaults
	Partings int               `json:"partings,omitempty"`
	PartFrom time.Time         `json:"part_from,omitzero"`
	Resets   int               `json:"resets,omitempty"`
	ResetsBy map[job.Cause]int `json:"resets_by,omitempty"`
	ResetsAt []time.Time       `json:"resets_at,omitempty"`
	Wrote    uint64            `json:"wrote,omitempty"`
	Term     uint64            `json:"term,omitempty"`
}

type savedFaults struct {
	Faults  int          `json:"faults,omitempty"`
	FaultOf uint64       `json:"fault_of,omitempty"`
	Taken   []savedTaken `json:"taken,omitempty"`
}

type savedTaken struct {
	Host  string        `json:"host"`
	Slot  int           `json:"slot,omitempty"`
	Run   string        `json:"run,omitempty"`
	Until time.Time     `json:"until,omitzero"`
	Pause time.Duration `json:"pause,omitempty"`
}

type savedGeneration struct {
	World     plan.World    `json:"world"`
	Members   []string      `json:"members,omitempty"` // of the world, by rank
	Gone      []savedWorker `json:"gone,omitempty"`    // members that have exited
	Root      int           `json:"root,omitempty"`
	RootSeq   uint64        `json:"root_seq,omitempty"` // notification number when the world was published
	Commits   uint64        `json:"commits,omitempty"`
	Base      uint64        `json:"base,omitempty"`
	Committed bool          `json:"committed,omitempty"`
	Backends  []string      `json:"backends,omitempty"`
	Entry     *savedEntry   `json:"entry,omitempty"`
	Trains    bool          `json:"trains,omitempty"`
	Jam       bool          `json:"jam,omitempty"`
	Announced plan.Change   `json:"announced,omitempty"`
	savedLoss
	savedTransition
}

type savedLoss struct {
	Dead      []int           `json:"dead,omitempty"`
	Told      int             `json:"told,omitempty"`
	Sought    []int           `json:"sought,omitempty"`
	DeadFrom  time.Time       `json:"dead_from,omitzero"`
	Given     bool            `json:"given,omitempty"`
	Unwritten *savedUnwritten `json:"unwritten,omitempty"`
}

type savedTransition struct {
	ChangeFrom time.Time   `json:"remove_from,omitzero"`
	ResetFrom  time.Time   `json:"reset_from,omitzero"`
	Cause      job.Cause   `json:"cause,omitempty"`
	ShortFrom  time.Time   `json:"short_from,omitzero"`
	Short      bool        `json:"short,omitempty"`
	Reminded   bool        `json:"reminded,omitempty"`
	Unready    bool        `json:"unready,omitempty"`
	Bad        *savedError `json:"bad,omitempty"`
	Others     int         `json:"others,omitempty"`
	Went       bool        `json:"went,omitempty"`
}

type savedEnding struct {
	DoneFrom time.Time   `json:"done_from,omitzero"`
	Agreed   bool        `json:"agreed,omitempty"`
	DoneExit bool        `json:"done_exit,omitempty"`
	Late     *savedError `json:"late,omitempty"`
	Decided  bool        `json:"decided,omitempty"`
	Result   *savedError `json:"result,omitempty"`
	EndFrom  time.Time   `json:"end_from,omitzero"`
	Writes   uint64      `json:"writes,omitempty"`
	Finished bool        `json:"finished,omitempty"`
}

type savedWorker struct {
	ID    string     `json:"id"`
	PID   int        `json:"pid,omitempty"`
	Start savedStart `json:"start"`
	Join  Join       `json:"join"`

	Since      time.Time `json:"since,omitzero"`
	Begun      time.Time `json:"begun,omitzero"`
	Generation uint64    `json:"generation,omitempty"`
	Rank       int       `json:"rank,omitempty"`
	Phase      phase     `json:"phase,omitempty"`
	Holds      bool      `json:"holds,omitempty"`
	Done       bool      `json:"done,omitempty"`
	Trains     bool      `json:"trains,omitempty"`
	Wanted     bool      `json:"wanted,omitempty"`
	Spare      bool      `json:"spare,omitempty"`
	Removed    bool      `json:"removed,omitempty"`
	Asked      bool      `json:"asked,omitempty"`
	Stays      bool      `json:"stays,omitempty"`
	savedDeparture
	savedLateness
}

type savedDeparture struct {
	Reason    string    `json:"reason,omitempty"`
	Comes     bool      `json:"comes,omitempty"`
	Answered  bool      `json:"answered,omitempty"`
	Last      bool      `json:"last,omitempty"`
	Left      bool      `json:"left,omitempty"`
	Writes    uint64    `json:"writes,omitempty"`
	WroteAt   time.Time `json:"wrote_at,omitzero"`
	Unwritten bool      `json:"unwritten,omitempty"`
	Said      string    `json:"said,omitempty"`
}

type savedLateness struct {
	StalledFrom time.Time `json:"stalled_from,omitzero"`
	MovedFrom   time.Time `json:"moved_from,omitzero"`
	DoneFrom    time.Time `json:"done_from,omitzero"`
	DoneCommits uint64    `json:"done_commits,omitempty"`
	Reminded    bool      `json:"reminded,omitempty"`
	Parted      int       `json:"parted,omitempty"`
}

type savedStart struct {
	Slot      plan.Slot `json:"slot"`
	Size      int       `json:"size,omitempty"` // of the trial world, as are the next three
	GroupRank int       `json:"group_rank,omitempty"`
	GroupSize int       `json:"group_size,omitempty"`
	First     string    `json:"first,omitempty"`
	Resets    int       `json:"resets,omitempty"`
	Again     bool      `json:"again,omitempty"`
	Forked    bool      `json:"forked,omitempty"`
}

type (
	// slotRun is a run of consecutive slots of a host, because a job may have 100,000 slots.
	slotRun struct {
		Host string `json:"host"`
		From int    `json:"from,omitempty"`
		N    int    `json:"n"`
	}
	// savedSlot is a slot and its failures.
	savedSlot struct {
		Host     string `json:"host"`
		Slot     int    `json:"slot,omitempty"`
		N        int    `json:"n,omitempty"`
		Unjoined int    `json:"unjoined,omitempty"`
	}
	savedUnwritten struct {
		Worker  string `json:"worker"`
		Commits uint64 `json:"commits,omitempty"`
	}
	// savedError is an error, reduced to what the machine and the exit status use.
	savedError struct {
		Text   string       `json:"text,omitempty"`
		Status int          `json:"status,omitempty"` // exit status of the job package's error that it wraps
		Signal int          `json:"signal,omitempty"` // signal that stopped the job
		Worker *savedFailed `json:"worker,omitempty"`
	}
	// savedFailed is a *WorkerError.
	savedFailed struct {
		Host       string `json:"host"`
		Slot       int    `json:"slot,omitempty"`
		Rank       int    `json:"rank,omitempty"`
		Reason     string `json:"reason,omitempty"`
		Code       int    `json:"code,omitempty"`
		Signal     int    `json:"signal,omitempty"`
		Error      string `json:"error,omitempty"`
		Evicted    bool   `json:"evicted,omitempty"`
		TakenBy    string `json:"taken_by,omitempty"`
		Unkillable bool   `json:"unkillable,omitempty"`
		Early      bool   `json:"early,omitempty"`
		Said       string `json:"said,omitempty"`
		Lost       bool   `json:"lost,omitempty"`
		Why        string `json:"why,omitempty"`
	}
)

// save returns the machine's state.
func (m *Machine) save() snapshot {
	s := snapshot{
		Last: m.last, State: m.state, StateFrom: m.stateFrom, Size: m.size, Ledger: m.ledger.Save(),
		savedFleet: savedFleet{
			Hosts: m.hosts.State(), Wants: saveRuns(m.wants), Fixed: saveRuns(m.fixed), Queued: m.queued,
		},
		savedHistory: savedHistory{
			Seq: m.seq, Started: m.started, Joined: m.joined, NewsFrom: m.startsFrom, Progress: m.progress,
			Stucks: m.stucks, savedFaults: savedFaults{Faults: m.faults.worlds, FaultOf: m.faults.last}, Partings: m.partings.worlds, PartFrom: m.partings.from, Resets: m.resets, ResetsBy: m.resetsBy, ResetsAt: m.resetsAt, Wrote: m.wrote,
			Term: m.term,
		},
		savedGeneration: savedGeneration{
			World: m.world, Root: m.published.Root, RootSeq: m.published.Seq, Commits: m.commits, Base: m.base,
			Committed: m.committed, Backends: m.backends, Announced: m.announced,
			Entry: m.entry.save(), Trains: m.trains, Jam: m.jam,
			savedLoss: savedLoss{Dead: m.dead, Told: m.told, Sought: m.sought, DeadFrom: m.deadFrom, Given: m.given},
			savedTransition: savedTransition{
				ChangeFrom: m.changeFrom, ResetFrom: m.resetFrom, Cause: m.leftFor, ShortFrom: m.shortFrom, Short: m.short,
				Reminded: m.reminded, Unready: m.startFailed, Bad: saveFailed(m.firstFailure), Others: m.otherFailures, Went: m.leftCleanly,
			},
		},
		savedEnding: savedEnding{
			DoneFrom: m.doneFrom, Agreed: m.agreed, DoneExit: m.doneExit, Late: saveFailed(m.late), Decided: m.decided,
			Result: saveError(m.result), EndFrom: m.endFrom, Writes: m.writes, Finished: m.finished,
		},
	}
	for _, w := range m.workers {
		s.Workers = append(s.Workers, w.save())
	}
	for _, w := range m.published.Members {
		if s.Members = append(s.Members, w.id); m.find(w.id) == nil {
			s.Gone = append(s.Gone, w.save())
		}
	}
	if m.unwritten != nil {
		s.Unwritten = &savedUnwritten{m.unwritten.worker, m.unwritten.commits}
	}
	for _, t := range m.taken {
		s.Taken = append(s.Taken, savedTaken{t.slot.Host, t.slot.Index, t.run, t.until, t.pause})
	}
	for id := range m.ran {
		s.Ran = append(s.Ran, savedSlot{Host: id.Host, Slot: id.Index})
	}
	for id, f := range m.failures {
		s.Failures = append(s.Failures, savedSlot{id.Host, id.Index, f.all, f.unjoined})
	}
	for _, slots := range [][]savedSlot{s.Ran, s.Failures} {
		slices.SortFunc(slots, func(a, b savedSlot) int { return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.Slot, b.Slot)) })
	}
	return s
}

// load restores a snapshot into a new machine, which takes ownership of it.
func (m *Machine) load(s snapshot) (err error) {
	m.last, m.size = s.Last, s.Size
	if _, err := s.Size.WithDefaults(); err != nil {
		return err
	}
	m.state, m.stateFrom, m.queued = s.State, s.StateFrom, s.Queued
	m.seq, m.started, m.joined, m.startsFrom, m.progress = s.Seq, s.Started, s.Joined, s.NewsFrom, s.Progress
	m.stucks, m.resets, m.resetsAt, m.wrote, m.term = s.Stucks, s.Resets, s.ResetsAt, s.Wrote, s.Term
	maps.Copy(m.resetsBy, s.ResetsBy)
	m.ledger = s.Ledger.Load()
	m.partings, m.faults = partings{s.Partings, s.PartFrom}, faults{s.Faults, s.FaultOf}
	m.generation = generation{
		world: s.World, commits: s.Commits, base: s.Base, committed: s.Committed, backends: s.Backends, announced: s.Announced,
		entry: s.Entry.load(), trains: s.Trains, jam: s.Jam,
		loss: loss{dead: s.Dead, told: s.Told, sought: s.Sought, deadFrom: s.DeadFrom, given: s.Given},
		transition: transition{
			changeFrom: s.ChangeFrom, resetFrom: s.ResetFrom, leftFor: s.Cause, shortFrom: s.ShortFrom, short: s.Short,
			reminded: s.Reminded, startFailed: s.Unready, firstFailure: s.Bad.failed(), otherFailures: s.Others, leftCleanly: s.Went,
		},
	}
	m.ending = ending{
		doneFrom: s.DoneFrom, agreed: s.Agreed, doneExit: s.DoneExit, late: s.Late.failed(), decided: s.Decided,
		result: s.Result.load(), endFrom: s.EndFrom, writes: s.Writes, finished: s.Finished,
	}
	if s.Unwritten != nil {
		m.unwritten = &unwritten{s.Unwritten.Worker, s.Unwritten.Commits}
	}
	for _, t := range s.Taken {
		m.taken = append(m.taken, takenSlot{plan.SlotID{Host: t.Host, Index: t.Slot}, t.Run, t.Until, t.Pause})
	}
	for _, x := range s.Ran {
		m.ran[plan.SlotID{Host: x.Host, Index: x.Slot}] = true
	}
	for _, x := range s.Failures {
		m.failures[plan.SlotID{Host: x.Host, Index: x.Slot}] = slotFailures{x.N, x.Unjoined}
	}
	if m.hosts, err = hosts.Restore(cooldownsOf(m.blame), s.Hosts); err != nil {
		return err
	}
	if m.wants, err = loadRuns(s.Wants); err != nil {
		return err
	}
	if m.fixed, err = loadRuns(s.Fixed); err != nil {
		return err
	}
	return m.loadWorkers(s)
}

// loadWorkers restores the workers and the world.
func (m *Machine) loadWorkers(s snapshot) error {
	gone := make(map[string]*Worker, len(s.Gone))
	for _, x := range s.Gone {
		gone[x.ID] = x.load()
	}
	for _, x := range s.Workers {
		w := x.load()
		if m.find(w.id) != nil || m.in(w.slot) != nil || gone[w.id] != nil || w.phase > stopping {
			return fmt.Errorf("worker %s is not valid", w.id)
		}
		m.add(w)
	}
	if len(s.Members) != len(s.World.Slots) || s.World.Generation > 0 && (s.Root < 0 || s.Root >= len(s.Members)) {
		return errors.New("the world is not valid")
	}
	m.published = PublishWorld{World: s.World, Root: s.Root, Seq: s.RootSeq}
	for _, id := range s.Members {
		w := m.find(id)
		if w == nil {
			w = gone[id]
		}
		if w == nil {
			return fmt.Errorf("there is no worker %s", id)
		}
		m.published.Members = append(m.published.Members, w)
	}
	return nil
}

func (w *Worker) save() savedWorker {
	return savedWorker{
		ID: w.id, PID: w.pid, Join: w.join,
		Start: savedStart{
			Slot: w.start.Slot, Size: w.start.Trial.Size, GroupRank: w.start.Trial.GroupRank,
			GroupSize: w.start.Trial.GroupSize, First: w.start.Trial.First,
			Resets: w.start.Resets, Again: w.start.Again, Forked: w.start.Forked,
		},
		Since: w.since, Begun: w.begun, Generation: w.generation, Rank: w.rank, Phase: w.phase,
		Holds: w.holds, Done: w.done, Trains: w.trains, Wanted: w.wanted, Spare: w.spare, Removed: w.removed, Asked: w.asked, Stays: w.stays,
		savedDeparture: savedDeparture{
			Reason: w.reason, Comes: w.comes, Answered: w.answered, Last: w.last, Left: w.left,
			Writes: w.writes, WroteAt: w.wroteAt, Unwritten: w.unwritten, Said: w.said,
		},
		savedLateness: savedLateness{
			StalledFrom: w.stalledFrom, MovedFrom: w.movedFrom, DoneFrom: w.doneFrom, DoneCommits: w.doneCommits, Reminded: w.reminded, Parted: w.parted,
		},
	}
}

func (s *savedWorker) load() *Worker {
	return &Worker{
		since: s.Since, begun: s.Begun, generation: s.Generation, rank: s.Rank, phase: s.Phase,
		holds: s.Holds, done: s.Done, trains: s.Trains, wanted: s.Wanted, spare: s.Spare, removed: s.Removed, asked: s.Asked, stays: s.Stays,
		identity: identity{
			id: s.ID, slot: s.Start.Slot.SlotID, pid: s.PID, join: s.Join,
			start: StartWorker{
				ID: s.ID, Slot: s.Start.Slot, Resets: s.Start.Resets, Again: s.Start.Again, Forked: s.Start.Forked,
				Trial: TrialWorld{s.Start.Size, s.Start.GroupRank, s.Start.GroupSize, s.Start.First},
			},
		},
		departure: departure{
			reason: s.Reason, comes: s.Comes, answered: s.Answered, last: s.Last, left: s.Left,
			writes: s.Writes, wroteAt: s.WroteAt, unwritten: s.Unwritten, said: s.Said,
		},
		lateness: lateness{
			stalledFrom: s.StalledFrom, movedFrom: s.MovedFrom, doneFrom: s.DoneFrom, doneCommits: s.DoneCommits, reminded: s.Reminded,
			parted: s.Parted,
		},
	}
}

func saveRuns(ids []plan.SlotID) (runs []slotRun) {
	for _, id := range ids {
		if n := len(runs) - 1; n >= 0 && runs[n].Host == id.Host && runs[n].From+runs[n].N == id.Index {
			runs[n].N++
		} else {
			runs = append(runs, slotRun{id.Host, id.Index, 1})
		}
	}
	return runs
}

func loadRuns(runs []slotRun) (ids []plan.SlotID, err error) {
	for _, r := range runs {
		if r.From < 0 || r.N < 0 || r.From+r.N > plan.MaxSlots {
			return nil, fmt.Errorf("host %s has no slots %d to %d", r.Host, r.From, r.From+r.N-1)
		}
		for i := range r.N {
			ids = append(ids, plan.SlotID{Host: r.Host, Index: r.From + i})
		}
	}
	return ids, nil
}

// storedError is a restored error that wraps the job package's errors.
type storedError struct {
	text string
	is   []error
}

func (e *storedError) Error() string   { return e.text }
func (e *storedError) Unwrap() []error { return e.is }

func saveError(err error) *savedError {
	if err == nil {
		return nil
	}
	var failed *job.WorkerError
	if errors.As(err, &failed) && failed == err {
		return saveFailed(failed)
	}
	s := &savedError{Text: err.Error()}
	if status := job.ExitStatus(err); job.Sentinel(status) != nil {
		s.Status = status
	}
	var stopped job.StopSignal
	if errors.As(err, &stopped) {
		s.Signal = int(stopped.Signal)
	}
	return s
}

func (s *savedError) load() error {
	switch {
	case s == nil:
		return nil
	case s.Worker != nil:
		return s.failed()
	}
	e := &storedError{text: s.Text}
	if known := job.Sentinel(s.Status); known != nil {
		e.is = append(e.is, known)
	}
	if s.Signal != 0 {
		e.is = append(e.is, job.StopSignal{Signal: syscall.Signal(s.Signal)})
	}
	return e
}

func saveFailed(e *job.WorkerError) *savedError {
	if e == nil {
		return nil
	}
	f := &savedFailed{
		Host: e.Slot.Host, Slot: e.Slot.Index, Rank: e.Rank, Reason: e.Reason,
		Code: e.Exit.Code, Signal: int(e.Exit.Signal), Evicted: e.Exit.Evicted, Unkillable: e.Exit.Unkillable,
		TakenBy: e.Exit.TakenBy, Early: e.Exit.Early, Said: e.Exit.Said,
		Lost: e.Exit.Lost, Why: e.Exit.Why,
	}
	if e.Exit.Err != nil {
		f.Error = e.Exit.Err.Error()
	}
	return &savedError{Worker: f}
}

// failed returns the saved *WorkerError, or nil.
func (s *savedError) failed() *job.WorkerError {
	if s == nil || s.Worker == nil {
		return nil
	}
	f := s.Worker
	e := &job.WorkerError{
		Slot: plan.SlotID{Host: f.Host, Index: f.Slot}, Rank: f.Rank, Reason: f.Reason,
		Exit: job.Exit{
			Code: f.Code, Signal: syscall.Signal(f.Signal), Evicted: f.Evicted, Unkillable: f.Unkillable,
			TakenBy: f.TakenBy, Early: f.Early, Said: f.Said, Lost: f.Lost, Why: f.Why,
		},
	}
	if f.Error != "" {
		e.Exit.Err = errors.New(f.Error)
	}
	return e
}
