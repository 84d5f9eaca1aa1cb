package decide

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// JournalVersion is the version of a journal's records and of the machine's reaction to them. A
// journal of another version is refused. It changes if the meaning of a record that earlier
// versions wrote changes, or if such a record can no longer be read. It does not change for a new
// kind of record, or for a new field that earlier records lack: a program that does not know these
// refuses the journal with errUnknown when it reaches one.
const JournalVersion = 7

// JobRecord is the first record of a job's journal: the machine's configuration, and what a driver
// that takes over must have in common with its predecessor.
type JobRecord struct {
	Version    int          `json:"version"`
	Begun      int64        `json:"begun"` // nanoseconds since 1970
	Size       job.Size     `json:"size"`
	Blame      job.Blame    `json:"blame"`
	Timeouts   job.Timeouts `json:"timeouts"`
	MasterPort int          `json:"master_port"`
}

// Record is any further record: an input, the time of its step, and the names of the workers
// started in that step. The inputs of a step are consecutive records. The first Record may hold a
// snapshot instead, which replaces all records before it.
type Record struct {
	Time int64    `json:"t"` // nanoseconds since 1970
	Kind string   `json:"event"`
	IDs  []string `json:"ids,omitempty"`
	More bool     `json:"more,omitempty"` // the next record holds another input of the same step

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
	Signal     int            `json:"signal,omitempty"` // signal that ended a worker or the job
	Evicted    bool           `json:"evicted,omitempty"`
	TakenBy    string         `json:"taken_by,omitempty"`
	Unkillable bool           `json:"unkillable,omitempty"`
	Lost       bool           `json:"lost,omitempty"`
	Why        string         `json:"why,omitempty"`
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

// kindSnapshot is the kind of a record with a snapshot.
const kindSnapshot = "snapshot"

// form is how the inputs of one type are recorded.
type form struct {
	kind  string
	of    reflect.Type
	write func(*Record, Input)
	read  func(*Record) (Input, error)
}

// formOf returns the form of inputs of type T. write may be nil if the kind identifies the input
// completely.
func formOf[T Input](kind string, write func(*Record, T), read func(*Record) (T, error)) form {
	f := form{kind: kind, of: reflect.TypeFor[T](), write: func(*Record, Input) {}}
	if write != nil {
		f.write = func(r *Record, in Input) { write(r, in.(T)) }
	}
	f.read = func(r *Record) (Input, error) {
		in, err := read(r)
		return in, err
	}
	return f
}

// forms has the form of every input type. Errors are recorded as text.
var forms = []form{
	formOf("hosts",
		func(r *Record, e HostsFound) { r.Hosts = e.Hosts },
		func(r *Record) (HostsFound, error) { return HostsFound{r.Hosts}, plan.CheckHosts(r.Hosts) }),
	formOf("discovery_failed_first",
		func(r *Record, e SourceFailed) { r.Error = e.Err.Error() },
		func(r *Record) (SourceFailed, error) { return SourceFailed{errors.New(r.Error)}, nil }),
	formOf("discovery_failed",
		func(r *Record, e SourceStale) { r.Error, r.Age = e.Err.Error(), int64(e.Age) },
		func(r *Record) (SourceStale, error) {
			return SourceStale{errors.New(r.Error), time.Duration(r.Age)}, nil
		}),
	formOf("forked",
		func(r *Record, e WorkerForked) { r.Worker, r.PID = e.ID, e.PID },
		func(r *Record) (WorkerForked, error) { return WorkerForked{r.Worker, r.PID}, nil }),
	formOf("joined",
		func(r *Record, e WorkerJoined) { r.Worker, r.Join = e.ID, &e.Join },
		func(r *Record) (WorkerJoined, error) {
			if r.Join == nil {
				return WorkerJoined{}, errors.New("a join record has no join")
			}
			return WorkerJoined{r.Worker, *r.Join}, nil
		}),
	formOf("report",
		func(r *Record, e WorkerReported) {
			r.Worker, r.Report, r.Generation, r.Commits = e.ID, e.Report, e.Generation, e.Commits
		},
		func(r *Record) (WorkerReported, error) {
			return WorkerReported{r.Worker, r.Report, r.Generation, r.Commits}, nil
		}),
	formOf("backend",
		func(r *Record, e BackendTold) { r.Worker, r.Generation, r.What = e.ID, e.Generation, e.Backend },
		func(r *Record) (BackendTold, error) { return BackendTold{r.Worker, r.Generation, r.What}, nil }),
	formOf("ended",
		func(r *Record, e WorkerEnded) {
			r.Worker, r.Code, r.Signal = e.ID, e.Exit.Code, int(e.Exit.Signal)
			r.Evicted, r.Unkillable, r.Ran, r.TakenBy = e.Exit.Evicted, e.Exit.Unkillable, e.Ran, e.Exit.TakenBy
			r.Lost, r.What, r.Why = e.Exit.Lost, e.Exit.Said, e.Exit.Why
			if e.Exit.Err != nil {
				r.Error = e.Exit.Err.Error()
			}
		},
		func(r *Record) (WorkerEnded, error) {
			exit := job.Exit{
				Code: r.Code, Signal: syscall.Signal(r.Signal), Evicted: r.Evicted, Unkillable: r.Unkillable,
				TakenBy: r.TakenBy, Lost: r.Lost, Said: r.What, Why: r.Why,
			}
			if r.Error != "" {
				exit.Err = errors.New(r.Error)
			}
			return WorkerEnded{r.Worker, exit, r.Ran}, nil
		}),
	formOf("failing",
		func(r *Record, e WorkerFailing) { r.Worker, r.What = e.ID, e.Said },
		func(r *Record) (WorkerFailing, error) { return WorkerFailing{r.Worker, r.What}, nil }),
	formOf("writes",
		func(r *Record, e WorkerWrites) { r.Worker = e.ID },
		func(r *Record) (WorkerWrites, error) { return WorkerWrites{r.Worker}, nil }),
	formOf("interrupted",
		func(r *Record, e Interrupted) {
			r.Error = e.Cause.Error()
			var stopped job.StopSignal
			if errors.As(e.Cause, &stopped) {
				r.Signal = int(stopped.Signal)
			}
		},
		func(r *Record) (Interrupted, error) {
			if stopped := (job.StopSignal{Signal: syscall.Signal(r.Signal)}); r.Signal != 0 && r.Error != stopped.Error() {
				return Interrupted{&storedError{r.Error, []error{stopped}}}, nil
			} else if r.Signal != 0 {
				return Interrupted{stopped}, nil
			}
			return Interrupted{errors.New(r.Error)}, nil
		}),
	formOf("stalled",
		func(r *Record, e WorkerStalled) {
			r.Worker, r.Generation, r.What, r.Age = e.ID, e.Generation, e.What, int64(e.Long)
		},
		func(r *Record) (WorkerStalled, error) {
			return WorkerStalled{r.Worker, r.Generation, r.What, time.Duration(r.Age)}, nil
		}),
	formOf("located",
		func(r *Record, e WorkerLocated) {
			r.Worker, r.Generation, r.What, r.Where = e.ID, e.Generation, e.What, e.Where
		},
		func(r *Record) (WorkerLocated, error) {
			return WorkerLocated{r.Worker, r.Generation, r.What, r.Where}, nil
		}),
	formOf("stall_ended",
		func(r *Record, e WorkerStirred) { r.Worker, r.Generation = e.ID, e.Generation },
		func(r *Record) (WorkerStirred, error) { return WorkerStirred{r.Worker, r.Generation}, nil }),
	formOf("hung",
		func(r *Record, e WorkerHung) { r.Worker, r.Generation, r.What = e.ID, e.Generation, e.What },
		func(r *Record) (WorkerHung, error) { return WorkerHung{r.Worker, r.Generation, r.What}, nil }),
	formOf("moved",
		func(r *Record, e WorkerMoved) { r.Worker, r.Generation, r.Age = e.ID, e.Generation, int64(e.Ago) },
		func(r *Record) (WorkerMoved, error) {
			return WorkerMoved{r.Worker, r.Generation, time.Duration(r.Age)}, nil
		}),
	formOf("trains",
		func(r *Record, e WorkerTrains) { r.Worker, r.Generation = e.ID, e.Generation },
		func(r *Record) (WorkerTrains, error) { return WorkerTrains{r.Worker, r.Generation}, nil }),
	formOf("jammed",
		func(r *Record, e WorldJammed) { r.Generation, r.What, r.Age = e.Generation, e.What, int64(e.Long) },
		func(r *Record) (WorldJammed, error) {
			return WorldJammed{r.Generation, r.What, time.Duration(r.Age)}, nil
		}),
	formOf("stuck",
		func(r *Record, e WorldStuck) { r.Generation, r.What = e.Generation, e.What },
		func(r *Record) (WorldStuck, error) { return WorldStuck{r.Generation, r.What}, nil }),
	formOf("jam_ended",
		func(r *Record, e WorldStirred) { r.Generation = e.Generation },
		func(r *Record) (WorldStirred, error) { return WorldStirred{r.Generation}, nil }),
	formOf("world_trains",
		func(r *Record, e WorldTrains) { r.Generation = e.Generation },
		func(r *Record) (WorldTrains, error) { return WorldTrains{r.Generation}, nil }),
	formOf("dying",
		func(r *Record, e WorkerDying) { r.Worker, r.What, r.Signal = e.ID, e.What, int(e.Signal) },
		func(r *Record) (WorkerDying, error) {
			return WorkerDying{r.Worker, r.What, syscall.Signal(r.Signal)}, nil
		}),
	formOf("deadline", nil,
		func(r *Record) (DeadlinePassed, error) { return DeadlinePassed{}, nil }),
	formOf("commanded",
		func(r *Record, e Commanded) { r.Command = &e.Command },
		func(r *Record) (Commanded, error) {
			if r.Command == nil {
				return Commanded{}, errors.New("a command record has no command")
			}
			return Commanded{*r.Command}, r.Command.Check()
		}),
	formOf("audited",
		func(r *Record, e Audited) { r.Audit = &e.Record },
		func(r *Record) (Audited, error) {
			if r.Audit == nil {
				return Audited{}, errors.New("an audit record is empty")
			}
			return Audited{*r.Audit}, nil
		}),
	formOf("tasks",
		func(r *Record, e TasksTold) { r.Tasks = &e.TaskEvent },
		func(r *Record) (TasksTold, error) {
			if r.Tasks == nil {
				return TasksTold{}, errors.New("a record of tasks has no event")
			}
			return TasksTold{*r.Tasks}, nil
		}),
	formOf("resumed", nil,
		func(r *Record) (Resumed, error) { return Resumed{}, nil }),
}

var formOfType, formOfKind = func() (map[reflect.Type]form, map[string]form) {
	byType, byKind := map[reflect.Type]form{}, map[string]form{}
	for _, f := range forms {
		byType[f.of], byKind[f.kind] = f, f
	}
	return byType, byKind
}()

// NewRecords returns the records of a step's inputs. ids are the names given to workers in the
// step.
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

// NewRecord returns the record of a step's only input. ids are the names given to workers in the
// step.
func NewRecord(now time.Time, in Input, ids []string) Record {
	f, known := formOfType[reflect.TypeOf(in)]
	if !known {
		panic(fmt.Sprintf("driver: unknown input %T", in))
	}
	r := Record{Time: now.UnixNano(), Kind: f.kind, IDs: ids}
	f.write(&r, in)
	return r
}

// input returns the input that NewRecord was given.
func (r *Record) input() (Input, error) {
	f, known := formOfKind[r.Kind]
	if !known {
		return nil, fmt.Errorf("the kind of an event, %q, is unknown: %w", r.Kind, errUnknown)
	}
	return f.read(r)
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

// errDiverged means that the machine reacts to a record differently from the machine that wrote it.
var errDiverged = errors.New("this version of hvdrun would have decided otherwise: resume the job with the version that began it")

// errUnknown means that a later version of hvdrun has written a record.
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
	if !r.More { // otherwise the driver may have died before it wrote the rest, and has performed no action of the step
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
		return errors.New("the snapshot is not valid")
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
	case strings.HasPrefix(err.Error(), "json: unknown field"): // the error has no type of its own
		return fmt.Errorf("driver: the journal: %w: %w", err, errUnknown)
	}
	return fmt.Errorf("driver: the journal: %w", err)
}

// Records returns a compacted journal: the first record, and a snapshot of the machine, the last
// events and the driver's mark.
func (m *Machine) Records(first JobRecord, recent Recent, mark json.RawMessage) ([][]byte, error) {
	s := &saved{Machine: m.save(), Mark: mark}
	var err error
	if s.Recent, err = recent.Texts(); err != nil {
		return nil, err
	}
	records := make([][]byte, 2)
	for i, r := range []any{first, Record{Time: m.Stepped.UnixNano(), Kind: kindSnapshot, Snapshot: s}} {
		if records[i], err = json.Marshal(r); err != nil {
			return nil, err
		}
	}
	return records, nil
}
