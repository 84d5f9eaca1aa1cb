package dashboard

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
)

// Kind says what an event, a reset or a part of the job's time is about; it is the colour on the
// page.
type Kind string

// The kinds.
const (
	Start    Kind = "start"    // workers start, the first world
	Failure  Kind = "failure"  // a worker failed
	Stall    Kind = "stall"    // a worker held up the others
	Excluded Kind = "excluded" // a person, or failures, keep a slot or host out
	Drained  Kind = "drained"  // workers leave at a step boundary
	Scaled   Kind = "scaled"   // a person changed the bounds
	Grown    Kind = "grown"    // slots were added
	Shrunk   Kind = "shrunk"   // slots were removed
	Changed  Kind = "changed"  // slots were added and removed
	Driver   Kind = "driver"   // another driver has taken over
	Asked    Kind = "asked"    // a command, or a refusal of one
	Ended    Kind = "ended"    // the job has ended
	Other    Kind = "other"
)

// Event is an event as the page shows it.
type Event struct {
	// Seq grows by one with each event of a feed.
	Seq  int       `json:"seq"`
	Time time.Time `json:"time"`
	Name string    `json:"name"`
	Kind Kind      `json:"kind"`
	// Text says in words what happened.
	Text string `json:"text"`
}

// fact is a line of an events file, with the fields that the page uses.
type fact struct {
	Time       time.Time     `json:"time"`
	Name       job.EventName `json:"event"`
	Generation uint64        `json:"generation"`
	Size       int           `json:"size"`
	Commits    uint64        `json:"commits"`
	Host       *string       `json:"host"`
	Slot       *int          `json:"slot"`
	PID        int           `json:"pid"`
	Rank       *int          `json:"rank"`
	Code       *int          `json:"code"`
	Signal     *int          `json:"signal"`
	Cause      string        `json:"cause"`
	Change     string        `json:"change"`
	Until      *time.Time    `json:"until"`
	Count      int           `json:"count"`
	Status     int           `json:"status"`
	Message    string        `json:"message"`
	What       string        `json:"what"`
	How        string        `json:"how"`
	Outcome    string        `json:"outcome"`
	Error      string        `json:"error"`
	Backend    string        `json:"backend"`
	Where      string        `json:"where"`
	Worker     string        `json:"worker"`
	Lost       bool          `json:"lost"`
	Function   string        `json:"function"`
	Reason     string        `json:"reason"`
	Text       string        `json:"text"`
	Seconds    float64       `json:"seconds"`
	MinNP      *int          `json:"min_np"`
	MaxNP      *int          `json:"max_np"`
	Hosts      []struct {
		Host     string `json:"host"`
		Slots    int    `json:"slots"`
		Draining bool   `json:"draining"`
	} `json:"hosts"`
}

// maxText bounds the text of an event, in bytes.
const maxText = 600

// parseFact reads a line of an events file.
func parseFact(line []byte) (fact, error) {
	var f fact
	if err := json.Unmarshal(line, &f); err != nil {
		return f, fmt.Errorf("dashboard: an event: %w", err)
	}
	if f.Name == "" || f.Time.IsZero() {
		return f, fmt.Errorf("dashboard: an event without a name or a time")
	}
	return f, nil
}

// place is the host, or the host and its slot.
func (f *fact) place() string {
	switch {
	case f.Host == nil:
		return "nobody"
	case f.Slot == nil:
		return *f.Host
	}
	return fmt.Sprintf("%s:%d", *f.Host, *f.Slot)
}

// worker names the worker: its rank, if it has one, and its place.
func (f *fact) worker() string {
	if f.Rank != nil && *f.Rank >= 0 {
		return fmt.Sprintf("rank %d on %s", *f.Rank, f.place())
	}
	return "the worker on " + f.place()
}

// exit says how a worker's process ended.
func (f *fact) exit() string {
	switch {
	case f.Signal != nil && *f.Signal != 0:
		return fmt.Sprintf("killed by signal %d", *f.Signal)
	case f.Code != nil:
		return fmt.Sprintf("exit status %d", *f.Code)
	}
	return "no exit status"
}

// event returns the fact in words.
func (f *fact) event() Event {
	kind, text := f.words()
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "…"
	}
	return Event{Time: f.Time, Name: string(f.Name), Kind: kind, Text: text}
}

func (f *fact) words() (Kind, string) {
	switch f.Name {
	case job.HostsFound:
		return Other, "hosts: " + f.hosts()
	case job.DiscoveryFailed:
		return Failure, "discovery failed: " + f.Error
	case job.WorkerStarted:
		return Start, fmt.Sprintf("worker started on %s, pid %d", f.place(), f.PID)
	case job.WorkerReady:
		return Start, fmt.Sprintf("worker on %s waits to join", f.place())
	case job.Draining:
		return Drained, f.worker() + " was asked to leave by its host"
	case job.DrainAsked:
		return Drained, "drain of " + f.place()
	case job.WorldPublished:
		return Start, fmt.Sprintf("generation %d published, %s", f.Generation, plural(f.Size, "worker"))
	case job.FirstCommit:
		return Start, fmt.Sprintf("generation %d trains, commit %d", f.Generation, f.Commits)
	case job.Backend:
		return Other, fmt.Sprintf("generation %d computes on GPUs by %s", f.Generation, f.Backend)
	case job.Stalled:
		return Stall, f.stalled()
	case job.Located:
		return Stall, fmt.Sprintf("%s is at %s", f.worker(), f.Where)
	case job.StallEnded:
		return Stall, fmt.Sprintf("%s goes on, after %.1fs", f.worker(), f.Seconds)
	}
	return f.words2()
}

func (f *fact) words2() (Kind, string) {
	switch f.Name {
	case job.HostsUpdated:
		return changeKind(f.Change), "the workers are told of hosts: " + f.Change
	case job.WorkerDying:
		return Failure, fmt.Sprintf("%s is lost: %s", f.worker(), f.What)
	case job.WorkerExited:
		if f.Cause == "failed" {
			return Failure, fmt.Sprintf("%s failed: %s", f.worker(), f.exit())
		}
		return Other, fmt.Sprintf("%s has ended: %s, %s", f.worker(), f.Cause, f.exit())
	case job.Excluded:
		if f.Until != nil {
			return Excluded, fmt.Sprintf("%s is excluded for %v", f.place(), f.Until.Sub(f.Time).Round(time.Second))
		}
		return Excluded, f.place() + " is excluded"
	case job.Returned:
		return Grown, f.place() + " may be used again"
	case job.Reset:
		return Other, fmt.Sprintf("reset %d", f.Count)
	case job.Scaled:
		return Scaled, "workers allowed: " + bounds(f.MinNP, f.MaxNP)
	case job.Resumed:
		return Driver, "another driver has taken over"
	case job.JobDone:
		if f.Status == 0 {
			return Ended, "the job is done"
		}
		return Ended, fmt.Sprintf("the job has failed, status %d: %s", f.Status, f.Message)
	case job.Audit:
		return Asked, f.asked()
	case job.TaskWorkerJoined:
		return Start, fmt.Sprintf("%s on %s runs tasks", f.Worker, f.place())
	case job.TaskWorkerLeft:
		if f.Lost {
			return Failure, fmt.Sprintf("%s on %s is lost to tasks", f.Worker, f.place())
		}
		return Other, fmt.Sprintf("%s on %s runs no more tasks", f.Worker, f.place())
	case job.TaskFailed:
		return Failure, fmt.Sprintf("a task of %s failed (%s): %s", f.Function, f.Reason, f.Text)
	}
	return Other, f.place()
}

func (f *fact) stalled() string {
	if f.Host == nil {
		return "the workers do not go on: " + f.What
	}
	return fmt.Sprintf("%s holds up the others: %s", f.worker(), f.What)
}

func (f *fact) asked() string {
	text := f.What
	if f.How != "" {
		text += " (" + f.How + ")"
	}
	if f.Host != nil {
		text += " " + f.place()
	}
	return text + ": " + f.Outcome
}

// hosts lists the hosts of a fact, or the first of them where there are many.
func (f *fact) hosts() string {
	const most = 8
	if len(f.Hosts) == 0 {
		return "none"
	}
	var words []string
	for i, h := range f.Hosts {
		if i == most {
			words = append(words, fmt.Sprintf("and %d others", len(f.Hosts)-most))
			break
		}
		word := fmt.Sprintf("%s:%d", h.Host, h.Slots)
		if h.Draining {
			word += " (draining)"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

func changeKind(change string) Kind {
	switch change {
	case "added":
		return Grown
	case "removed":
		return Shrunk
	case "mixed":
		return Changed
	}
	return Other
}

// bounds says how many workers are allowed.
func bounds(least, most *int) string {
	switch {
	case least == nil && most == nil:
		return "any number"
	case least == nil:
		return fmt.Sprintf("at most %d", *most)
	case most == nil || *most == 0:
		return fmt.Sprintf("%d or more", *least)
	}
	return fmt.Sprintf("%d to %d", *least, *most)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
