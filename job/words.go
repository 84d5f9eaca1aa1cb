package job

import (
	"fmt"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/audit"
)

// Kind classifies an event, a reset or a part of the job's time. It determines the colour on pages
// and terminals.
type Kind string

// The kinds.
const (
	KindStart    Kind = "start"    // workers start, the first world
	KindFailure  Kind = "failure"  // a worker failed
	KindStall    Kind = "stall"    // a worker held up the others
	KindExcluded Kind = "excluded" // a person, or failures, keep a slot or host out
	KindDrained  Kind = "drained"  // workers leave at a step boundary
	KindScaled   Kind = "scaled"   // a person changed the bounds
	KindGrown    Kind = "grown"    // slots were added
	KindShrunk   Kind = "shrunk"   // slots were removed
	KindChanged  Kind = "changed"  // slots were added and removed
	KindDriver   Kind = "driver"   // another driver has taken over
	KindAsked    Kind = "asked"    // a command, or a refusal of one
	KindEnded    Kind = "ended"    // the job has ended
	KindOther    Kind = "other"
)

// Words returns the kind of the event and a text of what happened.
func (e Entry) Words() (Kind, string) {
	if say, known := words[e.Name]; known {
		return say(e)
	}
	return KindOther, e.Place()
}

// words returns the kind and the text of an event, by the event's name.
var words = map[EventName]func(e Entry) (Kind, string){
	HostsFound:      func(e Entry) (Kind, string) { return KindOther, "hosts: " + e.hosts() },
	DiscoveryFailed: func(e Entry) (Kind, string) { return KindFailure, "discovery failed: " + e.Error },
	WorkerStarted: func(e Entry) (Kind, string) {
		return KindStart, fmt.Sprintf("worker started on %s, pid %d", e.Place(), e.PID)
	},
	WorkerReady: func(e Entry) (Kind, string) { return KindStart, fmt.Sprintf("worker on %s waits to join", e.Place()) },
	Draining:    func(e Entry) (Kind, string) { return KindDrained, e.Member() + " was asked to leave by its host" },
	DrainAsked:  func(e Entry) (Kind, string) { return KindDrained, "drain of " + e.Place() },
	WorldPublished: func(e Entry) (Kind, string) {
		return KindStart, fmt.Sprintf("generation %d published, %s", e.Generation, plural(e.Size, "worker"))
	},
	FirstCommit: func(e Entry) (Kind, string) {
		return KindStart, fmt.Sprintf("generation %d trains, commit %d", e.Generation, e.Commits)
	},
	Backend: func(e Entry) (Kind, string) {
		return KindOther, fmt.Sprintf("generation %d computes on GPUs by %s", e.Generation, e.Backend)
	},
	Stalled: func(e Entry) (Kind, string) { return KindStall, e.stalled() },
	Located: func(e Entry) (Kind, string) { return KindStall, fmt.Sprintf("%s is at %s", e.Member(), e.Where) },
	CommitMissing: func(e Entry) (Kind, string) {
		return KindStall, fmt.Sprintf("%s has not left at a commit, %.1fs after it was told of hosts: %s", e.Member(), e.Seconds, e.Change)
	},
	StallEnded: func(e Entry) (Kind, string) {
		return KindStall, fmt.Sprintf("%s goes on, after %.1fs", e.Member(), e.Seconds)
	},
	HostsUpdated: func(e Entry) (Kind, string) {
		return changeKind(e.Change), "the workers are told of hosts: " + e.Change
	},
	WorkerDying: func(e Entry) (Kind, string) { return KindFailure, fmt.Sprintf("%s is lost: %s", e.Member(), e.What) },
	WorkerExited: func(e Entry) (Kind, string) {
		if e.Cause == "failed" {
			return KindFailure, fmt.Sprintf("%s failed: %s", e.Member(), e.Exit())
		}
		return KindOther, fmt.Sprintf("%s has ended: %s, %s", e.Member(), e.Cause, e.Exit())
	},
	Excluded: func(e Entry) (Kind, string) {
		if e.Until != nil {
			return KindExcluded, fmt.Sprintf("%s is excluded for %v", e.Place(), e.Until.Sub(e.Time).Round(time.Second))
		}
		return KindExcluded, e.Place() + " is excluded"
	},
	Returned: func(e Entry) (Kind, string) { return KindGrown, e.Place() + " may be used again" },
	Reset:    func(e Entry) (Kind, string) { return KindOther, fmt.Sprintf("reset %d", e.Count) },
	Scaled:   func(e Entry) (Kind, string) { return KindScaled, "workers allowed: " + bounds(e.MinNP, e.MaxNP) },
	Resumed:  func(e Entry) (Kind, string) { return KindDriver, "another driver has taken over" },
	JobDone: func(e Entry) (Kind, string) {
		switch {
		case e.Status == 0:
			return KindEnded, "the job is done"
		case e.Status > 128:
			return KindEnded, fmt.Sprintf("the job was stopped, status %d: %s", e.Status, strings.TrimPrefix(strings.TrimPrefix(e.Message, "stopped by signal: "), "stopped "))
		}
		return KindEnded, fmt.Sprintf("the job has failed, status %d: %s", e.Status, e.Message)
	},
	Audit: func(e Entry) (Kind, string) { return KindAsked, e.asked() },
	TaskWorkerJoined: func(e Entry) (Kind, string) {
		return KindStart, fmt.Sprintf("%s on %s runs tasks", e.Worker, e.Place())
	},
	TaskWorkerLeft: func(e Entry) (Kind, string) {
		if e.Lost {
			return KindFailure, fmt.Sprintf("%s on %s is lost to tasks", e.Worker, e.Place())
		}
		return KindOther, fmt.Sprintf("%s on %s runs no more tasks", e.Worker, e.Place())
	},
	TaskWorkerStuck: func(e Entry) (Kind, string) {
		return KindFailure, fmt.Sprintf("%s on %s is ended and started again: a task of %s, %s", e.Worker, e.Place(), e.Function, e.Text)
	},
	TaskFailed: func(e Entry) (Kind, string) {
		return KindFailure, fmt.Sprintf("a task of %s failed (%s): %s", e.Function, e.Reason, e.Text)
	},
}

func (e Entry) stalled() string {
	if e.Host == "" {
		return "the workers do not go on: " + e.What
	}
	return fmt.Sprintf("%s holds up the others: %s", e.Member(), e.What)
}

func (e Entry) asked() string {
	text := e.What
	if e.How != "" {
		text += " (" + e.How + ")"
	}
	if e.Host != "" {
		text += " " + e.Place()
	}
	return text + ": " + e.Outcome
}

// hosts lists the hosts of an event, or the first few if there are many.
func (e Entry) hosts() string {
	const most = 8
	if len(e.Hosts) == 0 {
		return "none"
	}
	var words []string
	for i, h := range e.Hosts {
		if i == most {
			words = append(words, fmt.Sprintf("and %d others", len(e.Hosts)-most))
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

// changeKind returns the kind of a HostsUpdated event with the given change.
func changeKind(change string) Kind {
	switch change {
	case "added":
		return KindGrown
	case "removed":
		return KindShrunk
	case "mixed":
		return KindChanged
	}
	return KindOther
}

// bounds describes how many workers are allowed.
func bounds(least, most *int) string {
	switch {
	case least == nil && most == nil:
		return "any number"
	case least == nil:
		return fmt.Sprintf("at most %d", *most)
	case most == nil || *most == 0:
		return fmt.Sprintf("%d or more", *least)
	case *least == *most:
		return fmt.Sprint(*least)
	}
	return fmt.Sprintf("%d to %d", *least, *most)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// RecordsStart reports whether the event is the audit record of a worker's successful start, which
// a WorkerStarted event reports too.
func (e Entry) RecordsStart() bool {
	return e.Name == Audit && e.What == "start" && e.Outcome == audit.Done
}

// Round rounds a duration for people.
func Round(d time.Duration) time.Duration {
	if d < 10*time.Second {
		return d.Round(100 * time.Millisecond)
	}
	return d.Round(time.Second)
}
