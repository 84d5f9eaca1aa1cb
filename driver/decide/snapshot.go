package decide

import (
	"cmp"
	"encoding/json"
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
	Ledger ledger.Ledger `json:"ledger,omitzero"`
	savedFleet

	history
	Ran      []savedSlot `json:"ran,omitempty"`
	Failures []savedSlot `json:"failures,omitempty"`

	generation
	savedWorld
	ending
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

type savedWorker struct {
	PID   int         `json:"pid,omitempty"`
	Start StartWorker `json:"start"`
	Join  Join        `json:"join"`
	life
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
	// savedError is a Cause.
	savedError struct {
		Text   string           `json:"text,omitempty"`
		Status int              `json:"status,omitempty"` // exit status of the job package's error that it wraps
		Signal int              `json:"signal,omitempty"` // signal that stopped the job
		Worker *job.WorkerError `json:"worker,omitempty"`
	}
)

// save returns the machine's state.
func (m *Machine) save() snapshot {
	s := snapshot{
		shown: m.shown, history: m.history, generation: m.generation, ending: m.ending,
		Size: m.size, Ledger: m.ledger,
		savedFleet: savedFleet{Hosts: m.hosts.State(), Wants: saveRuns(m.wants), Fixed: saveRuns(m.fixed), Queued: m.queued},
		savedWorld: savedWorld{Root: m.published.Root, RootSeq: m.published.Seq},
	}
	for _, w := range m.workers {
		s.Workers = append(s.Workers, w.save())
	}
	for _, w := range m.published.Members {
		if s.Members = append(s.Members, w.id); m.find(w.id) == nil {
			s.Gone = append(s.Gone, w.save())
		}
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
	m.size, m.queued, m.ledger = s.Size, s.Queued, s.Ledger
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
		gone[x.Start.ID] = x.load()
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

func (w *Worker) save() savedWorker { return savedWorker{w.pid, w.start, w.join, w.life} }

func (s *savedWorker) load() *Worker {
	return &Worker{s.life, identity{id: s.Start.ID, slot: s.Start.Slot.SlotID, pid: s.PID, join: s.Join, start: s.Start}}
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

// MarshalJSON encodes the cause, reduced to what the machine and the exit status use.
func (c Cause) MarshalJSON() ([]byte, error) {
	if c.Err == nil {
		return []byte("null"), nil
	}
	var s savedError
	if failed, is := c.Err.(*job.WorkerError); is {
		s.Worker = failed
		return json.Marshal(s)
	}
	s.Text = c.Err.Error()
	if status := job.ExitStatus(c.Err); job.Sentinel(status) != nil {
		s.Status = status
	}
	if stopped, is := errors.AsType[job.StopSignal](c.Err); is {
		s.Signal = int(stopped.Signal)
	}
	return json.Marshal(s)
}

// UnmarshalJSON decodes what MarshalJSON has encoded.
func (c *Cause) UnmarshalJSON(text []byte) error {
	var s *savedError
	err := decode(text, &s)
	switch {
	case s == nil:
		return err
	case s.Worker != nil:
		c.Err = s.Worker
		return err
	}
	e := &storedError{text: s.Text}
	if known := job.Sentinel(s.Status); known != nil {
		e.is = append(e.is, known)
	}
	if s.Signal != 0 {
		e.is = append(e.is, job.StopSignal{Signal: syscall.Signal(s.Signal)})
	}
	c.Err = e
	return err
}
