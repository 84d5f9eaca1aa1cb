package decide

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/driver/audit"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// JournalVersion is the version of a journal's records and of the machine's reaction to them. A
// journal of another version is refused. It changes when a record that earlier versions wrote means
// something else or cannot be read any more. A new kind of record, or a new field that earlier
// records lack, leaves it as it is: a program that does not know them refuses the journal when it
// comes to one, with errUnknown.
const JournalVersion = 6

// JobRecord is the first record of a job's journal: the machine's configuration, and what a driver
// that takes over must have in common with its predecessor.
type JobRecord struct {
	Version    int          `json:"version"`
	Begun      int64        `json:"begun"` // nanoseconds since 1970
	Size       job.Size     `json:"size"`
	Blame      job.Blame    `json:"blame"`
	Timeouts   job.Timeouts `json:"timeouts"`
	Listen     string       `json:"listen"` // address and port of the rendezvous
	MasterPort int          `json:"master_port"`
}

// Record is any further record: an input, the time of its step, and the names of the workers
// started in that step. The inputs of a step are consecutive records. The first Record may hold a
// snapshot instead, which replaces all records before it.
type Record struct {
	Time int64    `json:"t"` // nanoseconds since 1970
	Kind string   `json:"event"`
	IDs  []string `json:"ids,omitempty"`
	More bool     `json:"more,omitempty"` // the next record's input is of the same step

	Hosts      []plan.Host    `json:"hosts,omitempty"`
	Error      string         `json:"error,omitempty"`
	Age        int64          `json:"age,omitempty"` // nanoseconds
	Worker     string         `json:"worker,omitempty"`
	PID        int            `json:"pid,omitempty"`
	Join       *Join          `json:"join,omitempty"`
	Report     Report         `json:"report,omitempty"`
	Generation uint64         `json:"generation,omitempty"`
	Commits    uint64         `json:"commits,omitempty"`
	Code       int            `json:"code,omitempty"`
	Signal     int            `json:"signal,omitempty"` // that ended a worker or the job
	Evicted    bool           `json:"evicted,omitempty"`
	TakenBy    string         `json:"taken_by,omitempty"`
	Unkillable bool           `json:"unkillable,omitempty"`
	Ran        []string       `json:"ran,omitempty"` // functions whose tasks a worker ran when it ended
	Command    *job.Command   `json:"command,omitempty"`
	What       string         `json:"what,omitempty"`
	Where      string         `json:"where,omitempty"`
	Audit      *audit.Record  `json:"audit,omitempty"`
	Tasks      *job.TaskEvent `json:"tasks,omitempty"`
	Snapshot   *saved         `json:"snapshot,omitempty"`
}

// saved is the job between two steps: the machine, and the driver's state that a journal restores.
type saved struct {
	Machine snapshot          `json:"machine"`
	Recent  []json.RawMessage `json:"recent,omitempty"`
	Mark    json.RawMessage   `json:"mark,omitempty"` // the driver's Config.Mark
}

// The kinds of records.
const (
	kindHosts       = "hosts"
	kindFailed      = "discovery_failed_first"
	kindStale       = "discovery_failed"
	kindForked      = "forked"
	kindJoined      = "joined"
	kindReport      = "report"
	kindBackend     = "backend"
	kindEnded       = "ended"
	kindFailing     = "failing"
	kindWrites      = "writes"
	kindInterrupted = "interrupted"
	kindStalled     = "stalled"
	kindLocated     = "located"
	kindStirred     = "stall_ended"
	kindHung        = "hung"
	kindMoved       = "moved"
	kindTrains      = "trains"
	kindJammed      = "jammed"
	kindStuck       = "stuck"
	kindUnjammed    = "jam_ended"
	kindBegan       = "world_trains"
	kindDying       = "dying"
	kindDeadline    = "deadline"
	kindCommanded   = "commanded"
	kindAudited     = "audited"
	kindTasks       = "tasks"
	kindResumed     = "resumed"
	kindSnapshot    = "snapshot"
)

// NewRecords returns the records of a step's inputs, with the names given to workers in the step.
func NewRecords(now time.Time, inputs []Input, ids []string) []Record {
	records := make([]Record, len(inputs))
	for i, in := range inputs {
		records[i] = NewRecord(now, in, nil)
		records[i].More = true
	}
	last := &records[len(inputs)-1]
	last.IDs, last.More = ids, false
	return records
}

// NewRecord returns the record of a step's only input, with the names given to workers in the step.
// Errors are recorded as text.
func NewRecord(now time.Time, in Input, ids []string) Record {
	r := Record{Time: now.UnixNano(), IDs: ids}
	switch e := in.(type) {
	case HostsFound:
		r.Kind, r.Hosts = kindHosts, e.Hosts
	case SourceFailed:
		r.Kind, r.Error = kindFailed, e.Err.Error()
	case SourceStale:
		r.Kind, r.Error, r.Age = kindStale, e.Err.Error(), int64(e.Age)
	case WorkerForked:
		r.Kind, r.Worker, r.PID = kindForked, e.ID, e.PID
	case WorkerJoined:
		r.Kind, r.Worker, r.Join = kindJoined, e.ID, &e.Join
	case WorkerReported:
		r.Kind, r.Worker, r.Report, r.Generation, r.Commits = kindReport, e.ID, e.Report, e.Generation, e.Commits
	case BackendTold:
		r.Kind, r.Worker, r.Generation, r.What = kindBackend, e.ID, e.Generation, e.Backend
	case WorkerFailing:
		r.Kind, r.Worker, r.What = kindFailing, e.ID, e.Said
	case WorkerWrites:
		r.Kind, r.Worker = kindWrites, e.ID
	case WorkerEnded:
		r.Kind, r.Worker, r.Code, r.Signal = kindEnded, e.ID, e.Exit.Code, int(e.Exit.Signal)
		r.Evicted, r.Unkillable, r.Ran, r.TakenBy = e.Exit.Evicted, e.Exit.Unkillable, e.Ran, e.Exit.TakenBy
		if e.Exit.Err != nil {
			r.Error = e.Exit.Err.Error()
		}
	case Interrupted:
		r.Kind, r.Error = kindInterrupted, e.Cause.Error()
		var stopped job.StopSignal
		if errors.As(e.Cause, &stopped) {
			r.Signal = int(stopped.Signal)
		}
	case WorkerStalled:
		r.Kind, r.Worker, r.Generation, r.What, r.Age = kindStalled, e.ID, e.Generation, e.What, int64(e.Long)
	case WorkerLocated:
		r.Kind, r.Worker, r.Generation, r.What, r.Where = kindLocated, e.ID, e.Generation, e.What, e.Where
	case WorkerStirred:
		r.Kind, r.Worker, r.Generation = kindStirred, e.ID, e.Generation
	case WorkerHung:
		r.Kind, r.Worker, r.Generation, r.What = kindHung, e.ID, e.Generation, e.What
	case WorkerMoved:
		r.Kind, r.Worker, r.Generation, r.Age = kindMoved, e.ID, e.Generation, int64(e.Ago)
	case WorkerTrains:
		r.Kind, r.Worker, r.Generation = kindTrains, e.ID, e.Generation
	case WorldJammed:
		r.Kind, r.Generation, r.What, r.Age = kindJammed, e.Generation, e.What, int64(e.Long)
	case WorldStirred:
		r.Kind, r.Generation = kindUnjammed, e.Generation
	case WorldTrains:
		r.Kind, r.Generation = kindBegan, e.Generation
	case WorldStuck:
		r.Kind, r.Generation, r.What = kindStuck, e.Generation, e.What
	case WorkerDying:
		r.Kind, r.Worker, r.What, r.Signal = kindDying, e.ID, e.What, int(e.Signal)
	case DeadlinePassed:
		r.Kind = kindDeadline
	case Commanded:
		r.Kind, r.Command = kindCommanded, &e.Command
	case Audited:
		r.Kind, r.Audit = kindAudited, &e.Record
	case TasksTold:
		r.Kind, r.Tasks = kindTasks, &e.TaskEvent
	case Resumed:
		r.Kind = kindResumed
	default:
		panic(fmt.Sprintf("driver: unknown input %T", in))
	}
	return r
}

// input returns the input that NewRecord was given.
func (r *Record) input() (Input, error) {
	switch r.Kind {
	case kindHosts:
		return HostsFound{r.Hosts}, plan.CheckHosts(r.Hosts)
	case kindFailed:
		return SourceFailed{errors.New(r.Error)}, nil
	case kindStale:
		return SourceStale{errors.New(r.Error), time.Duration(r.Age)}, nil
	case kindForked:
		return WorkerForked{r.Worker, r.PID}, nil
	case kindJoined:
		if r.Join == nil {
			return nil, errors.New("a join record without a join")
		}
		return WorkerJoined{r.Worker, *r.Join}, nil
	case kindReport:
		return WorkerReported{r.Worker, r.Report, r.Generation, r.Commits}, nil
	case kindBackend:
		return BackendTold{r.Worker, r.Generation, r.What}, nil
	case kindFailing:
		return WorkerFailing{r.Worker, r.What}, nil
	case kindWrites:
		return WorkerWrites{r.Worker}, nil
	case kindEnded:
		exit := job.Exit{Code: r.Code, Signal: syscall.Signal(r.Signal), Evicted: r.Evicted, Unkillable: r.Unkillable, TakenBy: r.TakenBy}
		if r.Error != "" {
			exit.Err = errors.New(r.Error)
		}
		return WorkerEnded{r.Worker, exit, r.Ran}, nil
	case kindInterrupted:
		if r.Signal != 0 {
			return Interrupted{job.StopSignal{Signal: syscall.Signal(r.Signal)}}, nil
		}
		return Interrupted{errors.New(r.Error)}, nil
	case kindStalled:
		return WorkerStalled{r.Worker, r.Generation, r.What, time.Duration(r.Age)}, nil
	case kindLocated:
		return WorkerLocated{r.Worker, r.Generation, r.What, r.Where}, nil
	case kindStirred:
		return WorkerStirred{r.Worker, r.Generation}, nil
	case kindHung:
		return WorkerHung{r.Worker, r.Generation, r.What}, nil
	case kindMoved:
		return WorkerMoved{r.Worker, r.Generation, time.Duration(r.Age)}, nil
	case kindTrains:
		return WorkerTrains{r.Worker, r.Generation}, nil
	case kindJammed:
		return WorldJammed{r.Generation, r.What, time.Duration(r.Age)}, nil
	case kindUnjammed:
		return WorldStirred{r.Generation}, nil
	case kindBegan:
		return WorldTrains{r.Generation}, nil
	case kindStuck:
		return WorldStuck{r.Generation, r.What}, nil
	case kindDying:
		return WorkerDying{r.Worker, r.What, syscall.Signal(r.Signal)}, nil
	case kindDeadline:
		return DeadlinePassed{}, nil
	case kindCommanded:
		if r.Command == nil {
			return nil, errors.New("a command record without a command")
		}
		return Commanded{*r.Command}, r.Command.Check()
	case kindAudited:
		if r.Audit == nil {
			return nil, errors.New("an audit record without a record")
		}
		return Audited{*r.Audit}, nil
	case kindTasks:
		if r.Tasks == nil {
			return nil, errors.New("a record of tasks without an event")
		}
		return TasksTold{*r.Tasks}, nil
	case kindResumed:
		return Resumed{}, nil
	}
	return nil, fmt.Errorf("an event of the unknown kind %q: %w", r.Kind, errUnknown)
}

// Replay rebuilds a machine from a journal, record by record. The zero Replay is ready to use.
type Replay struct {
	// Job is the journal's first record; nil: not read yet.
	Job *JobRecord
	// Machine is the machine after the records so far.
	Machine *Machine
	// Recent are the last events.
	Recent Recent
	// Marked, if not nil, is called with the mark of the snapshot; Told, if not nil, with each
	// event after it.
	Marked func(json.RawMessage)
	Told   func(job.Event)

	fed    bool     // a Record has been processed
	ids    []string // names left for the current step
	lacked bool     // the machine needed more names than the record has
}

// errDiverged: the machine reacts to a record differently from the machine that wrote it.
var errDiverged = errors.New("this version of hvdrun would have decided otherwise: resume the job with the version that began it")

// errUnknown: a later version of hvdrun has written a record.
var errUnknown = errors.New("this version of hvdrun is too old for it: resume the job with the version that its driver had")

// Next processes the next record.
func (p *Replay) Next(payload []byte) error {
	if p.Job == nil {
		return p.begin(payload)
	}
	var r Record
	if err := decode(payload, &r); err != nil {
		return err
	}
	var err error
	if r.Kind == kindSnapshot {
		err = p.restore(r.Snapshot)
	} else {
		err = p.step(&r)
	}
	p.fed = true
	if err != nil {
		return fmt.Errorf("driver: the journal: %w", err)
	}
	return nil
}

func (p *Replay) step(r *Record) error {
	in, err := r.input()
	if err != nil {
		return err
	}
	p.ids = r.IDs
	m, now := p.Machine, time.Unix(0, r.Time).UTC()
	m.out = nil
	m.note(now, in)
	if !r.More { // a driver that dies before it has written the rest has performed no action of the step
		if len(r.IDs) > 0 {
			m.noted = anyEffect
		}
		m.settle(now)
	}
	for _, a := range m.out {
		if e, ok := a.(EmitEvent); ok {
			p.Recent.Add(e.Event)
			if p.Told != nil {
				p.Told(e.Event)
			}
		}
	}
	if p.lacked || len(p.ids) > 0 {
		return errDiverged
	}
	return nil
}

func (p *Replay) restore(s *saved) error {
	if p.fed || s == nil {
		return errors.New("a snapshot that is not valid")
	}
	for _, e := range s.Recent {
		p.Recent.Add(e)
	}
	if p.Marked != nil && s.Mark != nil {
		p.Marked(s.Mark)
	}
	if err := p.Machine.load(s.Machine); err != nil {
		return fmt.Errorf("its snapshot: %w", err)
	}
	return nil
}

func (p *Replay) begin(payload []byte) error {
	var first JobRecord
	var version struct{ Version int }
	if err := json.Unmarshal(payload, &version); err != nil || version.Version != JournalVersion {
		return fmt.Errorf("driver: the journal is of version %d; this program knows version %d", version.Version, JournalVersion)
	}
	if err := decode(payload, &first); err != nil {
		return err
	}
	if _, err := first.Size.WithDefaults(); err != nil {
		return fmt.Errorf("driver: the journal: %w", err)
	}
	if _, err := first.Blame.WithDefaults(); err != nil {
		return fmt.Errorf("driver: the journal: %w", err)
	}
	p.Job = &first
	p.Machine = New(Config{Size: first.Size, Blame: first.Blame, Timeouts: first.Timeouts}, func(plan.SlotID) string {
		if len(p.ids) == 0 {
			p.lacked = true
			return ""
		}
		id := p.ids[0]
		p.ids = p.ids[1:]
		return id
	})
	if first.Begun != 0 {
		p.Machine.Begin(time.Unix(0, first.Begun).UTC())
	}
	return nil
}

// decode reads a record and refuses unknown fields.
func decode(payload []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(payload))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	switch {
	case err == nil:
		return nil
	case strings.HasPrefix(err.Error(), "json: unknown field"): // it has no type of its own
		return fmt.Errorf("driver: the journal: %w: %w", err, errUnknown)
	}
	return fmt.Errorf("driver: the journal: %w", err)
}

// Records returns a compacted journal: the first record and a snapshot of the machine, the last
// events and the driver's mark.
func (m *Machine) Records(first JobRecord, recent Recent, mark json.RawMessage) ([][]byte, error) {
	s := &saved{Machine: m.save(), Mark: mark}
	var err error
	if s.Recent, err = recent.Texts(); err != nil {
		return nil, err
	}
	records := make([][]byte, 2)
	for i, r := range []any{first, Record{Time: m.last.UnixNano(), Kind: kindSnapshot, Snapshot: s}} {
		if records[i], err = json.Marshal(r); err != nil {
			return nil, err
		}
	}
	return records, nil
}
