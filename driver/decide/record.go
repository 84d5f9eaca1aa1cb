package decide

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// JournalVersion is the version of a journal's records and of the machine's reaction to them. A
// journal of another version is refused. It changes if the meaning of a record that earlier
// versions wrote changes, or if such a record can no longer be read. It does not change for a new
// kind of record, or for a new field that earlier records lack: a program that does not know these
// refuses the journal with errUnknown when it reaches one.
const JournalVersion = 8

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
	IDs  []string `json:"ids,omitempty"`
	More bool     `json:"more,omitempty"` // the next record holds another input of the same step

	Snapshot *saved `json:"snapshot,omitempty"`

	// One of the following is set.
	Hosts       *HostsFound     `json:"hosts,omitempty"`
	Failed      *SourceFailed   `json:"discovery_failed_first,omitempty"`
	Stale       *SourceStale    `json:"discovery_failed,omitempty"`
	Forked      *WorkerForked   `json:"forked,omitempty"`
	Joined      *WorkerJoined   `json:"joined,omitempty"`
	Report      *WorkerReported `json:"report,omitempty"`
	Backend     *BackendTold    `json:"backend,omitempty"`
	Ended       *WorkerEnded    `json:"ended,omitempty"`
	Failing     *WorkerFailing  `json:"failing,omitempty"`
	Writes      *WorkerWrites   `json:"writes,omitempty"`
	Interrupted *Interrupted    `json:"interrupted,omitempty"`
	Stalled     *WorkerStalled  `json:"stalled,omitempty"`
	Located     *WorkerLocated  `json:"located,omitempty"`
	StallEnded  *WorkerStirred  `json:"stall_ended,omitempty"`
	Hung        *WorkerHung     `json:"hung,omitempty"`
	Moved       *WorkerMoved    `json:"moved,omitempty"`
	Trains      *WorkerTrains   `json:"trains,omitempty"`
	Jammed      *WorldJammed    `json:"jammed,omitempty"`
	Stuck       *WorldStuck     `json:"stuck,omitempty"`
	JamEnded    *WorldStirred   `json:"jam_ended,omitempty"`
	WorldTrains *WorldTrains    `json:"world_trains,omitempty"`
	Dying       *WorkerDying    `json:"dying,omitempty"`
	Deadline    *DeadlinePassed `json:"deadline,omitempty"`
	Commanded   *Commanded      `json:"commanded,omitempty"`
	Audited     *Audited        `json:"audited,omitempty"`
	Tasks       *TasksTold      `json:"tasks,omitempty"`
	Resumed     *Resumed        `json:"resumed,omitempty"`
}

// inputFields has the index of the field of Record for each type of input.
var inputFields = func() map[reflect.Type]int {
	of, all := reflect.TypeFor[Record](), map[reflect.Type]int{}
	first, _ := of.FieldByName("Hosts")
	for i := first.Index[0]; i < of.NumField(); i++ {
		all[of.Field(i).Type.Elem()] = i
	}
	return all
}()

// saved is the job between two steps: the machine, and the driver's state that a journal restores.
type saved struct {
	Machine snapshot          `json:"machine"`
	Recent  []json.RawMessage `json:"recent,omitempty"`
	Mark    json.RawMessage   `json:"mark,omitempty"` // the driver's Config.Mark
}

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
	field, known := inputFields[reflect.TypeOf(in)]
	if !known {
		panic(fmt.Sprintf("driver: unknown input %T", in))
	}
	r := Record{Time: now.UnixNano(), IDs: ids}
	content := reflect.New(reflect.TypeOf(in))
	content.Elem().Set(reflect.ValueOf(in))
	reflect.ValueOf(&r).Elem().Field(field).Set(content)
	return r
}

// input returns the input that NewRecord was given. Errors in it are reduced to their text and the
// data from which the exit status follows.
func (r *Record) input() (in Input, err error) {
	fields := reflect.ValueOf(r).Elem()
	for i := range fields.NumField() {
		f := fields.Field(i)
		switch {
		case f.Kind() != reflect.Pointer || f.IsNil():
		case in != nil:
			return nil, errors.New("a record has two inputs")
		default:
			in = f.Elem().Interface()
		}
	}
	if in == nil {
		return nil, errors.New("a record has no input")
	}
	if c, is := in.(interface{ Check() error }); is {
		err = c.Check()
	}
	return in, err
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
	err := decode(payload, &r)
	switch {
	case err != nil:
	case r.Snapshot != nil:
		err = p.restore(r.Snapshot)
	default:
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
	if p.fed {
		return errors.New("a snapshot is not the first record")
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
		return fmt.Errorf("driver: the journal: %w", err)
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
	case strings.HasPrefix(err.Error(), "json: unknown field"): // the package has no type for this error
		return fmt.Errorf("%w: %w", err, errUnknown)
	}
	return err
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
	for i, r := range []any{first, Record{Time: m.Stepped.UnixNano(), Snapshot: s}} {
		if records[i], err = json.Marshal(r); err != nil {
			return nil, err
		}
	}
	return records, nil
}
