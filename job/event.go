package job

import (
	"encoding/json"
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

// EventName is the value of "event" in the events file.
type EventName string

// The events of a job's events file, with their fields.
const (
	HostsFound       EventName = "hosts_found"        // hosts
	DiscoveryFailed  EventName = "discovery_failed"   // error
	WorkerStarted    EventName = "worker_started"     // host, slot, pid
	WorkerReady      EventName = "worker_ready"       // host, slot
	Draining         EventName = "draining"           // host, slot, pid, rank: a worker was asked to leave by the operator of its host
	WorldPublished   EventName = "world_published"    // generation, size, root, cause (a Cause), slots
	HostsUpdated     EventName = "hosts_updated"      // seq, change
	FirstCommit      EventName = "first_commit"       // generation, commits, cause, seconds: the first commit of a world, and its delay since the previous world was left
	Backend          EventName = "backend"            // generation, backend (nccl, ipc, ipc+hosts, staging), size: how the GPUs of a world compute together, once for each backend
	WorkerDying      EventName = "worker_dying"       // host, slot, pid, rank, signal or null, what: the worker is lost, but its process still exists
	WorkerExited     EventName = "worker_exited"      // host, slot, pid, rank, code, signal, cause; tasks where those are to blame
	Excluded         EventName = "excluded"           // host, slot or null, until (null: for ever)
	Returned         EventName = "returned"           // host, slot or null
	Reset            EventName = "reset"              // count
	DrainAsked       EventName = "drain_asked"        // host, slot or null: by a person
	Stalled          EventName = "stalled"            // host, slot, pid, rank, generation, what; host null: no worker is missing
	Located          EventName = "located"            // host, slot, pid, rank, generation, what, where: the user's frames in which a worker that holds up others is
	StallEnded       EventName = "stall_ended"        // host, slot, pid, rank, generation, seconds
	CommitMissing    EventName = "commit_missing"     // host, slot, pid, rank, generation, change, seconds: time since it was notified of changed hosts; it still trains
	Scaled           EventName = "scaled"             // min_np, max_np (null: no bound), by a person
	Resumed          EventName = "resumed"            // another driver has taken over from one that died
	JobDone          EventName = "job_done"           // status, message, goodput; where there are any, commits, and checkpoint: the commit of the newest last checkpoint
	TaskWorkerJoined EventName = "task_worker_joined" // worker, host, offers: it runs tasks; dropped, if events of tasks were too many
	TaskWorkerLeft   EventName = "task_worker_left"   // worker, host, lost
	TaskFailed       EventName = "task_failed"        // function, client, n, reason, text: it is not retried
	TaskWorkerStuck  EventName = "task_worker_stuck"  // worker, host, function, n, text: the worker is restarted because a task does not end
	Audit            EventName = audit.Name           // who, what, and as they apply how, run, host, slot, dir, program, as, pid; outcome, dropped
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
