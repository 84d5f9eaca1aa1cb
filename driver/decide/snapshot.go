package decide

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
	"github.com/hvdrun/hvdrun/driver/decide/internal/ledger"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// snapshot is the machine's whole state between two steps. A journal holds it in place of the
// records that led to it, as one JSON object. The exported fields of the machine's parts are saved
// as they are, and the others in another form.
type snapshot struct {
	shown
	Size   job.Size      `json:"size"`
	Ledger *ledger.Saved `json:"ledger,omitempty"`
	savedFleet

	history
	Ran      []savedSlot  `json:"ran,omitempty"`
	Failures []savedSlot  `json:"failures,omitempty"`
	Taken    []savedTaken `json:"taken,omitempty"`

	generation
	savedWorld
	Bad *savedError `json:"bad,omitempty"` // transition.firstFailure

	ending
	Late   *savedError `json:"late,omitempty"`
	Result *savedError `json:"result,omitempty"`
}

type savedFleet struct {
	Hosts   hosts.State   `json:"hosts"`
	Wants   []slotRun     `json:"wants,omitempty"`
	Fixed   []slotRun     `json:"fixed,omitempty"`
	Queued  int           `json:"queued,omitempty"`
	Workers []savedWorker `json:"workers,omitempty"`
}

// savedWorld is generation.published, without what generation.Current has.
type savedWorld struct {
	Members []string      `json:"members,omitempty"` // by rank
	Gone    []savedWorker `json:"gone,omitempty"`    // members that have exited
	Root    int           `json:"root,omitempty"`
	RootSeq uint64        `json:"root_seq,omitempty"` // notification number when the world was published
}

type savedTaken struct {
	Host string `json:"host"`
	Slot int    `json:"slot,omitempty"`
	takenSlot
}

type savedWorker struct {
	ID    string     `json:"id"`
	PID   int        `json:"pid,omitempty"`
	Start savedStart `json:"start"`
	Join  Join       `json:"join"`
	life
}

type savedStart struct {
	Slot plan.Slot `json:"slot"`
	TrialWorld
	Resets int  `json:"resets,omitempty"`
	Again  bool `json:"again,omitempty"`
	Forked bool `json:"forked,omitempty"`
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
		shown: m.shown, history: m.history, generation: m.generation, ending: m.ending,
		Size: m.size, Ledger: m.ledger.Save(),
		savedFleet: savedFleet{Hosts: m.hosts.State(), Wants: saveRuns(m.wants), Fixed: saveRuns(m.fixed), Queued: m.queued},
		savedWorld: savedWorld{Root: m.published.Root, RootSeq: m.published.Seq},
		Bad:        saveFailed(m.firstFailure), Late: saveFailed(m.late), Result: saveError(m.result),
	}
	for _, w := range m.workers {
		s.Workers = append(s.Workers, w.save())
	}
	for _, w := range m.published.Members {
		if s.Members = append(s.Members, w.id); m.find(w.id) == nil {
			s.Gone = append(s.Gone, w.save())
		}
	}
	for _, t := range m.taken {
		s.Taken = append(s.Taken, savedTaken{t.slot.Host, t.slot.Index, t})
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
	if _, err := s.Size.WithDefaults(); err != nil {
		return err
	}
	s.ran, s.failures = m.ran, m.failures
	if s.ResetCauses == nil {
		s.ResetCauses = m.ResetCauses
	}
	m.shown, m.history, m.generation, m.ending = s.shown, s.history, s.generation, s.ending
	m.size, m.queued, m.ledger = s.Size, s.Queued, s.Ledger.Load()
	m.firstFailure, m.late, m.result = s.Bad.failed(), s.Late.failed(), s.Result.load()
	for _, x := range s.Taken {
		x.slot = plan.SlotID{Host: x.Host, Index: x.Slot}
		m.taken = append(m.taken, x.takenSlot)
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
		if m.find(w.id) != nil || m.in(w.slot) != nil || gone[w.id] != nil || w.Phase > stopping {
			return fmt.Errorf("worker %s is not valid", w.id)
		}
		m.add(w)
	}
	if len(s.Members) != len(s.Current.Slots) || s.Current.Generation > 0 && (s.Root < 0 || s.Root >= len(s.Members)) {
		return errors.New("the world is not valid")
	}
	m.published = PublishWorld{World: s.Current, Root: s.Root, Seq: s.RootSeq}
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
	start := w.start
	return savedWorker{w.id, w.pid, savedStart{start.Slot, start.Trial, start.Resets, start.Again, start.Forked}, w.join, w.life}
}

func (s *savedWorker) load() *Worker {
	start := s.Start
	return &Worker{s.life, identity{
		id: s.ID, slot: start.Slot.SlotID, pid: s.PID, join: s.Join,
		start: StartWorker{s.ID, start.Slot, start.TrialWorld, start.Resets, start.Again, start.Forked},
	}}
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
