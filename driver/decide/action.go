package decide

import (
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Action is something that is to be done: one of the types of this file. The slices of an action
// belong to the machine.
type Action any

// What is to be done with processes.
type (
	// StartWorker starts a worker.
	StartWorker struct {
		ID     string
		Slot   plan.Slot
		Trial  TrialWorld
		Resets int
		// Again: a driver before this one has started the worker, or was about to. Forked: it has.
		Again, Forked bool
	}
	// TrialWorld is how a worker that starts sees the world that there would be if all wanted slots
	// were filled. It does not hold the slots: those of a thousand workers would be a million.
	TrialWorld struct {
		Size                 int
		GroupRank, GroupSize int    // of the worker's host, as plan.World.Group has them
		First                string // the host of rank 0
	}
	// StopWorker ends a worker, first by SIGTERM.
	StopWorker struct{ ID string }
	// GiveTime lets the grace of a worker that is being stopped begin anew.
	GiveTime struct{ ID string }
	// ForgetWorker: the process of the worker could not be ended, and nobody waits for it any more.
	ForgetWorker struct{ ID string }
	// FinishJob ends the job, nil where it is done. It is the last action.
	FinishJob struct{ Err error }
)

// What workers are to be told.
type (
	// PublishWorld answers the joins of the members, given by rank.
	PublishWorld struct {
		World   plan.World
		Members []*Worker
		Root    int
		Seq     uint64
	}
	// DismissWorker answers the join of a worker that has no place.
	DismissWorker struct {
		ID  string
		Why Dismissal
	}
	// NotifyWorkers tells members of a world that the hosts have changed.
	NotifyWorkers struct {
		Seq        uint64
		Change     plan.Change
		Generation uint64
		Members    []*Worker
	}
	// TellLoss tells members of a world which of its ranks are dead. Where there is none, the world
	// is given up.
	TellLoss struct {
		Generation uint64
		Ranks      []int
		Members    []*Worker
	}
)

// What people are to be told.
type (
	// EmitEvent goes to the job's events.
	EmitEvent struct{ Event job.Event }
	// LogLine goes to the log.
	LogLine struct {
		Level Level
		Text  string
	}
	// Remind logs who is late, with what is known of each.
	Remind struct {
		Late  []*Worker
		To    string        // what they are to do
		Limit string        // the flag that bounds it; empty: nothing does
		Left  time.Duration // until then
	}
	// Answer goes to the person who has given the command of this step.
	Answer struct {
		Done    string
		Refused error // nil: it was done
	}
)

// Level is that of a line in the log.
type Level uint8

// The levels.
const (
	Debug Level = iota
	Info
	Warn
)

// Dismissal is why a worker has no place.
type Dismissal uint8

// The dismissals.
const (
	DismissRemoved  Dismissal = iota // its slot is not wanted, or it is being stopped
	DismissLast                      // as DismissRemoved, and it is to write the job's last checkpoint
	DismissFinished                  // training is done
)

// String says it in words.
func (d Dismissal) String() string {
	switch d {
	case DismissLast:
		return "this worker has no place in the new world, and writes the job's last checkpoint"
	case DismissFinished:
		return "the job is done"
	}
	return "this worker has no place in the new world"
}
