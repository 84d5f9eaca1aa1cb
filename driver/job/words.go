package job

import (
	"fmt"
	"strings"
	"time"
)

// Kind says what an event, a reset or a part of the job's time is about: its colour on pages and
// terminals.
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

// Words returns what kind of event it is, and what happened in words.
func (e Entry) Words() (Kind, string) {
	switch e.Name {
	case HostsFound:
		return KindOther, "hosts: " + e.hosts()
	case DiscoveryFailed:
		return KindFailure, "discovery failed: " + e.Error
	case WorkerStarted:
		return KindStart, fmt.Sprintf("worker started on %s, pid %d", e.Place(), e.PID)
	case WorkerReady:
		return KindStart, fmt.Sprintf("worker on %s waits to join", e.Place())
	case Draining:
		return KindDrained, e.Member() + " was asked to leave by its host"
	case DrainAsked:
		return KindDrained, "drain of " + e.Place()
	case WorldPublished:
		return KindStart, fmt.Sprintf("generation %d published, %s", e.Generation, plural(e.Size, "worker"))
	case FirstCommit:
		return KindStart, fmt.Sprintf("generation %d trains, commit %d", e.Generation, e.Commits)
	case Backend:
		return KindOther, fmt.Sprintf("generation %d computes on GPUs by %s", e.Generation, e.Backend)
	case Stalled:
		return KindStall, e.stalled()
	case Located:
		return KindStall, fmt.Sprintf("%s is at %s", e.Member(), e.Where)
	case CommitMissing:
		return KindStall, fmt.Sprintf("%s has not left at a commit, %.1fs after it was told of hosts: %s", e.Member(), e.Seconds, e.Change)
	case StallEnded:
		return KindStall, fmt.Sprintf("%s goes on, after %.1fs", e.Member(), e.Seconds)
	}
	return e.words2()
}

func (e Entry) words2() (Kind, string) {
	switch e.Name {
	case HostsUpdated:
		return ChangeKind(e.Change), "the workers are told of hosts: " + e.Change
	case WorkerDying:
		return KindFailure, fmt.Sprintf("%s is lost: %s", e.Member(), e.What)
	case WorkerExited:
		if e.Cause == "failed" {
			return KindFailure, fmt.Sprintf("%s failed: %s", e.Member(), e.Exit())
		}
		return KindOther, fmt.Sprintf("%s has ended: %s, %s", e.Member(), e.Cause, e.Exit())
	case Excluded:
		if e.Until != nil {
			return KindExcluded, fmt.Sprintf("%s is excluded for %v", e.Place(), e.Until.Sub(e.Time).Round(time.Second))
		}
		return KindExcluded, e.Place() + " is excluded"
	case Returned:
		return KindGrown, e.Place() + " may be used again"
	case Reset:
		return KindOther, fmt.Sprintf("reset %d", e.Count)
	case Scaled:
		return KindScaled, "workers allowed: " + bounds(e.MinNP, e.MaxNP)
	case Resumed:
		return KindDriver, "another driver has taken over"
	case JobDone:
		switch {
		case e.Status == 0:
			return KindEnded, "the job is done"
		case e.Status > 128:
			return KindEnded, fmt.Sprintf("the job was stopped, status %d: %s", e.Status, strings.TrimPrefix(e.Message, "stopped by signal: "))
		}
		return KindEnded, fmt.Sprintf("the job has failed, status %d: %s", e.Status, e.Message)
	case Audit:
		return KindAsked, e.asked()
	case TaskWorkerJoined:
		return KindStart, fmt.Sprintf("%s on %s runs tasks", e.Worker, e.Place())
	case TaskWorkerLeft:
		if e.Lost {
			return KindFailure, fmt.Sprintf("%s on %s is lost to tasks", e.Worker, e.Place())
		}
		return KindOther, fmt.Sprintf("%s on %s runs no more tasks", e.Worker, e.Place())
	case TaskWorkerStuck:
		return KindFailure, fmt.Sprintf("%s on %s is ended and started again: a task of %s, %s", e.Worker, e.Place(), e.Function, e.Text)
	case TaskFailed:
		return KindFailure, fmt.Sprintf("a task of %s failed (%s): %s", e.Function, e.Reason, e.Text)
	}
	return KindOther, e.Place()
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

// hosts lists the hosts of an event, or the first of them where there are many.
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

// ChangeKind returns the kind of a HostsUpdated event of that change.
func ChangeKind(change string) Kind {
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

// bounds says how many workers are allowed.
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
