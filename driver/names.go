package driver

import (
	"errors"

	"github.com/hvdrun/hvdrun/driver/job"
)

// The values of a job, exported for programs that embed the driver. Those of commands and of the
// status are in driver/control/names.go.
type (
	Size          = job.Size
	FailurePolicy = job.FailurePolicy
	Blame         = job.Blame
	Timeouts      = job.Timeouts
	Event         = job.Event
	TaskEvent     = job.TaskEvent
	Field         = job.Field
	EventName     = job.EventName
	PublishedSlot = job.PublishedSlot
	FoundHost     = job.FoundHost
	StopSignal    = job.StopSignal
	WorkerError   = job.WorkerError
	Exit          = job.Exit
)

// The failure policies: see [job.FailurePolicy].
const (
	BlameSlot = job.BlameSlot
	BlameHost = job.BlameHost
)

// The events of a job's events file.
const (
	HostsFound       = job.HostsFound
	DiscoveryFailed  = job.DiscoveryFailed
	WorkerStarted    = job.WorkerStarted
	WorkerReady      = job.WorkerReady
	Draining         = job.Draining
	WorldPublished   = job.WorldPublished
	HostsUpdated     = job.HostsUpdated
	FirstCommit      = job.FirstCommit
	Backend          = job.Backend
	WorkerDying      = job.WorkerDying
	WorkerExited     = job.WorkerExited
	Excluded         = job.Excluded
	Returned         = job.Returned
	Reset            = job.Reset
	DrainAsked       = job.DrainAsked
	TaskWorkerJoined = job.TaskWorkerJoined
	TaskWorkerLeft   = job.TaskWorkerLeft
	TaskFailed       = job.TaskFailed
	TaskWorkerStuck  = job.TaskWorkerStuck
	Stalled          = job.Stalled
	StallEnded       = job.StallEnded
	Scaled           = job.Scaled
	Resumed          = job.Resumed
	JobDone          = job.JobDone
)

// Errors that Run returns, wrapped with their causes.
var (
	ErrNotEnoughSlots = job.ErrNotEnoughSlots
	ErrResetLimit     = job.ErrResetLimit
	ErrStateLost      = job.ErrStateLost
	ErrDiscovery      = job.ErrDiscovery
	ErrCheckpoint     = job.ErrCheckpoint
	// ErrFinished is returned by Resume if the job has ended.
	ErrFinished = errors.New("driver: the job has ended")
)

// Status returns the exit status for an error of Run: 0 for nil, 128+n for StopSignal n, 1 for an
// error without its own status.
func Status(err error) int { return job.ExitStatus(err) }
