package decide

import (
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Action is an instruction to the driver: one of the types of this file. The machine owns the
// slices in an action.
type Action any

// Actions on processes and on the job.
type (
	// StartWorker starts a worker, or takes over one that a previous driver has started.
	StartWorker struct {
		ID     string
		Slot   plan.Slot
		Trial  TrialWorld
		Resets int `json:",omitempty"`
		// Again: a previous driver has started the worker or was about to. Forked: its process is
		// known to have started.
		Again, Forked bool `json:",omitempty"`
	}
	// TrialWorld describes, to a starting worker, the world that all wanted slots would form. It
	// does not list the slots: a thousand starting workers would need a million of them.
	TrialWorld struct {
		Size      int    `json:"size,omitempty"`
		GroupRank int    `json:"group_rank,omitempty"` // of the worker's host, as plan.World.Group has it
		GroupSize int    `json:"group_size,omitempty"` // as GroupRank
		First     string `json:"first,omitempty"`      // the host of rank 0
	}
	// StopWorker ends a worker: with SIGTERM first, or Now.
	StopWorker struct {
		ID  string
		Now bool
	}
	// LookAt asks for a WorkerDying if a signal is terminating the process of a worker.
	LookAt struct{ ID string }
	// GiveTime restarts the drain timeout of a worker that is being stopped.
	GiveTime struct{ ID string }
	// ForgetWorker drops a worker whose process could not be ended.
	ForgetWorker struct{ ID string }
	// WatchDone asks for a WorkerTrains for each member of the generation that still trains,
	// because a member has reported done.
	WatchDone struct{ Generation uint64 }
	// FinishJob ends the job, with nil if it succeeded. It is the last action.
	FinishJob struct{ Err error }
)

// Messages to workers.
type (
	// PublishWorld answers the joins of the members, which are ordered by rank.
	PublishWorld struct {
		World   plan.World
		Members []*Worker
		Root    int
		Seq     uint64
	}
	// DismissWorker answers the join of a worker that is not in the next world.
	DismissWorker struct {
		ID  string
		Why Dismissal
	}
	// NotifyWorkers notifies members of a world that the hosts have changed.
	NotifyWorkers struct {
		Seq        uint64
		Change     plan.Change
		Generation uint64
		Members    []*Worker
	}
	// TellLoss sends the dead ranks of a world to its members. An empty list gives the world up.
	TellLoss struct {
		Generation uint64
		Ranks      []int
		Members    []*Worker
	}
)

// Output to operators.
type (
	// EmitEvent adds an event to the job's events.
	EmitEvent struct{ Event job.Event }
	// LogLine writes a line to the log.
	LogLine struct {
		Level Level
		Text  string
	}
	// Remind logs the late workers, with what is known about each.
	Remind struct {
		Late  []*Worker
		To    string        // what the late workers have to do
		Limit string        // the flag that bounds the wait; empty: none
		Left  time.Duration // time left until that bound
	}
	// Answer is the reply to the command of this step.
	Answer struct {
		Done    string
		Refused error // why the command was refused; nil: it was carried out
	}
)

// Level is a log level.
type Level uint8

// The levels.
const (
	Debug Level = iota
	Info
	Warn
)

// Dismissal is the reason why a worker is dismissed.
type Dismissal uint8

// The dismissals.
const (
	DismissRemoved  Dismissal = iota // its slot is not wanted, or it is being stopped
	DismissLast                      // as DismissRemoved, and the worker has to write the job's last checkpoint
	DismissFinished                  // training is done
)

// String describes the dismissal.
func (d Dismissal) String() string {
	switch d {
	case DismissLast:
		return "this worker has no place in the new world, and writes the job's last checkpoint"
	case DismissFinished:
		return "the job is done"
	}
	return "this worker has no place in the new world"
}
