package job

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/audit"
)

// Event is an event of a job, as in its events file. It marshals to one JSON object.
type Event struct {
	Time time.Time
	Name EventName
	// Fields are the event's own fields, in the order in which they are written.
	Fields []Field
}

// Field is a key and a value that encoding/json can write.
type Field struct {
	Key   string
	Value any
}

// FieldOf returns the value of an event's field of type T, or the zero T if the event has no such
// field.
func FieldOf[T any](e Event, key string) (v T) {
	if i := slices.IndexFunc(e.Fields, func(f Field) bool { return f.Key == key }); i >= 0 {
		v, _ = e.Fields[i].Value.(T)
	}
	return v
}

// EventName is the value of "event" in the events file.
type EventName string

// The events of a job's events file, with their fields.
const (
	HostsFound      EventName = "hosts_found"      // hosts
	DiscoveryFailed EventName = "discovery_failed" // error
	WorkerStarted   EventName = "worker_started"   // host, slot, pid
	WorkerReady     EventName = "worker_ready"     // host, slot
	// Draining has host, slot, pid, rank: a worker was asked to leave by the operator of its host.
	Draining EventName = "draining"
	// DrainAsked has host, slot or null: a person asked for a drain.
	DrainAsked EventName = "drain_asked"
	// WorldPublished has generation, size, root, cause (a Cause), slots.
	WorldPublished EventName = "world_published"
	// FirstCommit has generation, commits, cause, seconds: the first commit of a world, and its
	// delay since the previous world was left, or since the job began.
	FirstCommit  EventName = "first_commit"
	HostsUpdated EventName = "hosts_updated" // seq, change: the notification to the workers
	// Backend has generation, backend (nccl, ipc, ipc+hosts, staging), size: how the GPUs of a
	// world compute together, once for each backend.
	Backend EventName = "backend"
	// WorkerDying has host, slot, pid, rank, signal or null, what: the worker is lost, but its
	// process still dumps its core, or the kernel frees its memory or its GPU. WorkerExited
	// follows.
	WorkerDying EventName = "worker_dying"
	// WorkerExited has host, slot, pid, rank, code, signal, cause (failed, done, left, stopped).
	// Where they are known, it has error: the report of the program about its own error, or the
	// line of its stderr that says why it fails, such as the last one of a traceback with the
	// program's line; why: other reasons, such as a lack of memory; tasks: the functions that the
	// worker ran for tasks, if those are to blame.
	WorkerExited EventName = "worker_exited"
	Excluded     EventName = "excluded" // host, slot or null, until (null: for ever)
	Returned     EventName = "returned" // host, slot or null
	Reset        EventName = "reset"    // count
	// Stalled has host, slot, pid, rank, generation, what the worker does; host is null if no
	// worker is missing.
	Stalled    EventName = "stalled"
	StallEnded EventName = "stall_ended" // host, slot, pid, rank, generation, seconds
	// Located has host, slot, pid, rank, generation, what, where: the frames of user code in which
	// a worker holds up the others.
	Located EventName = "located"
	// CommitMissing has host, slot, pid, rank, generation, change, seconds: time since the worker
	// was notified of changed hosts. It still trains: it does not commit, or ignores the error.
	CommitMissing EventName = "commit_missing"
	Scaled        EventName = "scaled"  // min_np, max_np (null: no bound), by a person
	Resumed       EventName = "resumed" // another driver has taken over from one that died
	// JobDone has status, message, goodput; commits, if there are any; checkpoint: the commit of
	// the last checkpoint, if one was written.
	JobDone EventName = "job_done"
	// Audit has who, what, outcome; where they apply how, run, host, slot, dir, program, as, pid,
	// dropped.
	Audit EventName = audit.Name

	// Of events of tasks, at most 100 are written at once, and 10 a second; the field dropped
	// counts the others.

	TaskWorkerJoined EventName = "task_worker_joined" // worker, host, offers: it runs tasks
	TaskWorkerLeft   EventName = "task_worker_left"   // worker, host, lost
	// TaskWorkerStuck has worker, host, function, n, text: a task does not end, so the worker is
	// restarted.
	TaskWorkerStuck EventName = "task_worker_stuck"
	// TaskFailed has function, client, n, reason (poison, worker lost, function, time limit,
	// dependency, value lost, worker gone), text: the task is not retried.
	TaskFailed EventName = "task_failed"
)

// AuditEvent returns the event of a record.
func AuditEvent(at time.Time, r audit.Record) Event {
	r = r.Clean()
	e := Event{Time: at, Name: Audit, Fields: []Field{{"who", r.Who}, {"what", r.What}}}
	for _, f := range []Field{{"how", r.How}, {"run", r.Run}, {"host", r.Host}} {
		if f.Value != "" {
			e.Fields = append(e.Fields, f)
		}
	}
	if r.Slot != nil {
		e.Fields = append(e.Fields, Field{"slot", *r.Slot})
	}
	for _, f := range []Field{{"dir", r.Dir}, {"program", r.Program}, {"as", r.As}} {
		if f.Value != "" {
			e.Fields = append(e.Fields, f)
		}
	}
	if r.PID != 0 {
		e.Fields = append(e.Fields, Field{"pid", r.PID})
	}
	e.Fields = append(e.Fields, Field{"outcome", r.Outcome})
	if r.Dropped != 0 {
		e.Fields = append(e.Fields, Field{"dropped", r.Dropped})
	}
	return e
}

// PublishedSlot is an element of a WorldPublished event's slots.
type PublishedSlot struct {
	Rank int    `json:"rank"`
	Host string `json:"host"`
	Slot int    `json:"slot"`
	PID  int    `json:"pid"`
}

// FoundHost is an element of a HostsFound event's hosts.
type FoundHost struct {
	Host  string `json:"host"`
	Slots int    `json:"slots"`
	// Draining: its workers have to leave at the next step boundary.
	Draining bool `json:"draining,omitempty"`
}

// MarshalJSON encodes the event as one object: time (RFC 3339 with nanoseconds), event, then its
// fields in order.
func (e Event) MarshalJSON() ([]byte, error) {
	b := []byte(`{"time":"` + e.Time.UTC().Format("2006-01-02T15:04:05.000000000Z07:00") + `","event":"` + string(e.Name) + `"`)
	for _, f := range e.Fields {
		v, err := json.Marshal(f.Value)
		if err != nil {
			return nil, err
		}
		b = append(b, `,"`+f.Key+`":`...)
		b = append(b, v...)
	}
	return append(b, '}'), nil
}

// TaskEvent is an event of tasks. Fields that a kind of event does not have are empty.
type TaskEvent struct {
	Name     EventName `json:"name"`
	Worker   string    `json:"worker,omitempty"`
	Host     string    `json:"host,omitempty"`
	Offers   string    `json:"offers,omitempty"`
	Lost     bool      `json:"lost,omitempty"`
	Function string    `json:"function,omitempty"`
	Client   string    `json:"client,omitempty"`
	N        uint64    `json:"n,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	Text     string    `json:"text,omitempty"`
	Dropped  int       `json:"dropped,omitempty"`
	// Incarnation identifies the worker of TaskWorkerStuck.
	Incarnation string `json:"incarnation,omitempty"`
}

// Event returns t as an event of the job at the given time.
func (t TaskEvent) Event(at time.Time) Event {
	e := Event{Time: at, Name: t.Name}
	switch t.Name {
	case TaskWorkerJoined:
		e.Fields = []Field{{"worker", t.Worker}, {"host", t.Host}, {"offers", t.Offers}}
	case TaskWorkerLeft:
		e.Fields = []Field{{"worker", t.Worker}, {"host", t.Host}, {"lost", t.Lost}}
	case TaskWorkerStuck:
		e.Fields = []Field{{"worker", t.Worker}, {"host", t.Host}, {"function", t.Function}, {"n", t.N}, {"text", t.Text}}
	default:
		e.Fields = []Field{{"function", t.Function}, {"client", t.Client}, {"n", t.N}, {"reason", t.Reason}, {"text", t.Text}}
	}
	if t.Dropped > 0 {
		e.Fields = append(e.Fields, Field{"dropped", t.Dropped})
	}
	return e
}
