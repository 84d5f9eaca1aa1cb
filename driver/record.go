package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// recordVersion is that of what a job's journal holds: the fields below, and what the machine makes of them. A journal of
// another version is refused.
const recordVersion = 4

// jobRecord is the first record of a job's journal: what the machine was made with, and what a driver that takes over must
// have in common with the one before it.
type jobRecord struct {
	Version    int      `json:"version"`
	Begun      int64    `json:"begun"` // nanoseconds since 1970
	Size       Size     `json:"size"`
	Blame      Blame    `json:"blame"`
	Timeouts   Timeouts `json:"timeouts"`
	Listen     string   `json:"listen"` // address and port of the rendezvous
	MasterPort int      `json:"master_port"`
}

// record is each further one: an event, when the machine was stepped with it, and the names that it
// gave to the workers it started then. The first of them may be a snapshot instead, which stands
// for all that were before it.
type record struct {
	Time int64    `json:"t"` // nanoseconds since 1970
	Kind string   `json:"event"`
	IDs  []string `json:"ids,omitempty"`

	Hosts      []plan.Host         `json:"hosts,omitempty"`
	Error      string              `json:"error,omitempty"`
	Age        int64               `json:"age,omitempty"` // nanoseconds
	Worker     string              `json:"worker,omitempty"`
	PID        int                 `json:"pid,omitempty"`
	Join       *rendezvous.Joining `json:"join,omitempty"`
	Report     rendezvous.Report   `json:"report,omitempty"`
	Generation uint64              `json:"generation,omitempty"`
	Commits    uint64              `json:"commits,omitempty"`
	Code       int                 `json:"code,omitempty"`
	Signal     int                 `json:"signal,omitempty"` // that has ended a worker, or the job
	Evicted    bool                `json:"evicted,omitempty"`
	Unkillable bool                `json:"unkillable,omitempty"`
	Command    *control.Command    `json:"command,omitempty"`
	What       string              `json:"what,omitempty"`
	Snapshot   *saved              `json:"snapshot,omitempty"`
}

// saved is the job between two steps: the machine, and what else is made of a journal.
type saved struct {
	Machine snapshot          `json:"machine"`
	Recent  []json.RawMessage `json:"recent,omitempty"`
	Mark    json.RawMessage   `json:"mark,omitempty"` // Config.Mark
}

// The kinds of records.
const (
	kindHosts       = "hosts"
	kindFailed      = "discovery_failed_first"
	kindStale       = "discovery_failed"
	kindForked      = "forked"
	kindJoined      = "joined"
	kindReport      = "report"
	kindEnded       = "ended"
	kindWrites      = "writes"
	kindInterrupted = "interrupted"
	kindStalled     = "stalled"
	kindStirred     = "stall_ended"
	kindHung        = "hung"
	kindMoved       = "moved"
	kindJammed      = "jammed"
	kindStuck       = "stuck"
	kindDying       = "dying"
	kindDeadline    = "deadline"
	kindCommanded   = "commanded"
	kindResumed     = "resumed"
	kindSnapshot    = "snapshot"
)

// newRecord returns what is written of an event. Of errors it keeps the text.
func newRecord(now time.Time, ev event, ids []string) record {
	r := record{Time: now.UnixNano(), IDs: ids}
	switch e := ev.(type) {
	case hostsFound:
		r.Kind, r.Hosts = kindHosts, e.hosts
	case sourceFailed:
		r.Kind, r.Error = kindFailed, e.err.Error()
	case sourceStale:
		r.Kind, r.Error, r.Age = kindStale, e.err.Error(), int64(e.age)
	case workerForked:
		r.Kind, r.Worker, r.PID = kindForked, e.id, e.pid
	case workerJoined:
		r.Kind, r.Worker, r.Join = kindJoined, e.id, &e.join
	case workerReport:
		r.Kind, r.Worker, r.Report, r.Generation, r.Commits = kindReport, e.id, e.report, e.generation, e.commits
	case workerWrites:
		r.Kind, r.Worker = kindWrites, e.id
	case workerEnded:
		r.Kind, r.Worker, r.Code, r.Signal = kindEnded, e.id, e.exit.Code, int(e.exit.Signal)
		r.Evicted, r.Unkillable = e.exit.Evicted, e.exit.Unkillable
		if e.exit.Err != nil {
			r.Error = e.exit.Err.Error()
		}
	case interrupted:
		r.Kind, r.Error = kindInterrupted, e.cause.Error()
		var stopped StopSignal
		if errors.As(e.cause, &stopped) {
			r.Signal = int(stopped.Signal)
		}
	case workerStalled:
		r.Kind, r.Worker, r.Generation, r.What = kindStalled, e.id, e.generation, e.what
	case workerStirred:
		r.Kind, r.Worker, r.Generation = kindStirred, e.id, e.generation
	case workerHung:
		r.Kind, r.Worker, r.Generation, r.What = kindHung, e.id, e.generation, e.what
	case workerMoved:
		r.Kind, r.Worker, r.Generation, r.Age = kindMoved, e.id, e.generation, int64(e.ago)
	case worldJammed:
		r.Kind, r.Generation, r.What = kindJammed, e.generation, e.what
	case worldStuck:
		r.Kind, r.Generation, r.What = kindStuck, e.generation, e.what
	case workerDying:
		r.Kind, r.Worker, r.What = kindDying, e.id, e.what
	case deadlinePassed:
		r.Kind = kindDeadline
	case commanded:
		r.Kind, r.Command = kindCommanded, &e.Command
	case resumed:
		r.Kind = kindResumed
	default:
		panic(fmt.Sprintf("driver: unknown event %T", ev))
	}
	return r
}

// event returns what newRecord was given.
func (r *record) event() (event, error) {
	switch r.Kind {
	case kindHosts:
		return hostsFound{r.Hosts}, plan.CheckHosts(r.Hosts)
	case kindFailed:
		return sourceFailed{errors.New(r.Error)}, nil
	case kindStale:
		return sourceStale{errors.New(r.Error), time.Duration(r.Age)}, nil
	case kindForked:
		return workerForked{r.Worker, r.PID}, nil
	case kindJoined:
		if r.Join == nil {
			return nil, errors.New("a join that says nothing")
		}
		return workerJoined{r.Worker, *r.Join}, nil
	case kindReport:
		return workerReport{r.Worker, r.Report, r.Generation, r.Commits}, nil
	case kindWrites:
		return workerWrites{r.Worker}, nil
	case kindEnded:
		exit := Exit{Code: r.Code, Signal: syscall.Signal(r.Signal), Evicted: r.Evicted, Unkillable: r.Unkillable}
		if r.Error != "" {
			exit.Err = errors.New(r.Error)
		}
		return workerEnded{r.Worker, exit}, nil
	case kindInterrupted:
		if r.Signal != 0 {
			return interrupted{StopSignal{syscall.Signal(r.Signal)}}, nil
		}
		return interrupted{errors.New(r.Error)}, nil
	case kindStalled:
		return workerStalled{r.Worker, r.Generation, r.What}, nil
	case kindStirred:
		return workerStirred{r.Worker, r.Generation}, nil
	case kindHung:
		return workerHung{r.Worker, r.Generation, r.What}, nil
	case kindMoved:
		return workerMoved{r.Worker, r.Generation, time.Duration(r.Age)}, nil
	case kindJammed:
		return worldJammed{r.Generation, r.What}, nil
	case kindStuck:
		return worldStuck{r.Generation, r.What}, nil
	case kindDying:
		return workerDying{r.Worker, r.What}, nil
	case kindDeadline:
		return deadlinePassed{}, nil
	case kindCommanded:
		if r.Command == nil {
			return nil, errors.New("a command that asks for nothing")
		}
		return commanded{*r.Command}, r.Command.Check()
	case kindResumed:
		return resumed{}, nil
	}
	return nil, fmt.Errorf("an event of the unknown kind %q", r.Kind)
}

// replay makes a machine and feeds it what a journal holds, record by record.
type replay struct {
	job    *jobRecord // nil: not read yet
	m      *machine
	recent recent
	fed    bool     // the machine has been fed something
	ids    []string // that are still to be given
	lacked bool     // the machine asked for more than were written down
	// marked and told, if not nil, are given the mark of the snapshot, if there is one, and each
	// event after it.
	marked func(json.RawMessage)
	told   func(Event)
}

// errDiverged: the machine does not do with the events what the machine that wrote them did.
var errDiverged = errors.New("this version of hvdrun would have decided otherwise: resume the job with the version that began it")

// next takes the next record.
func (p *replay) next(payload []byte) error {
	if p.job == nil {
		return p.begin(payload)
	}
	var r record
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

func (p *replay) step(r *record) error {
	ev, err := r.event()
	if err != nil {
		return err
	}
	p.ids = r.IDs
	for _, a := range p.m.step(time.Unix(0, r.Time).UTC(), ev) {
		if e, ok := a.(emitEvent); ok {
			p.recent.add(e.event)
			if p.told != nil {
				p.told(e.event)
			}
		}
	}
	if p.lacked || len(p.ids) > 0 {
		return errDiverged
	}
	return nil
}

func (p *replay) restore(s *saved) error {
	if p.fed || s == nil {
		return errors.New("a snapshot that makes no sense")
	}
	for _, e := range s.Recent {
		p.recent.add(e)
	}
	if p.marked != nil && s.Mark != nil {
		p.marked(s.Mark)
	}
	if err := p.m.load(s.Machine); err != nil {
		return fmt.Errorf("its snapshot: %w", err)
	}
	return nil
}

func (p *replay) begin(payload []byte) error {
	var job jobRecord
	var version struct{ Version int }
	if err := json.Unmarshal(payload, &version); err != nil || version.Version != recordVersion {
		return fmt.Errorf("driver: the journal is of version %d; this program knows version %d", version.Version, recordVersion)
	}
	if err := decode(payload, &job); err != nil {
		return err
	}
	if _, err := job.Size.withDefaults(); err != nil {
		return fmt.Errorf("driver: the journal: %w", err)
	}
	if _, err := job.Blame.withDefaults(); err != nil {
		return fmt.Errorf("driver: the journal: %w", err)
	}
	p.job = &job
	p.m = newMachine(Config{Size: job.Size, Blame: job.Blame, Timeouts: job.Timeouts}, func(plan.SlotID) string {
		if len(p.ids) == 0 {
			p.lacked = true
			return ""
		}
		id := p.ids[0]
		p.ids = p.ids[1:]
		return id
	})
	return nil
}

// decode reads a record that must hold what v has, and nothing else.
func decode(payload []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(payload))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("driver: the journal: %w", err)
	}
	return nil
}
