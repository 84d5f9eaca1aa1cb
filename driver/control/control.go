// Package control is the interface of commands and status between a job's driver and the user's
// programs: a unix socket in the job's directory that only the job's user may open.
package control

import (
	"context"

	"github.com/hvdrun/hvdrun/driver/job"
)

// SocketName is the name of the socket in a job's folder.
const SocketName = "control"

// Handler is implemented by the driver. Its methods are called concurrently and return soon after
// ctx has ended.
type Handler interface {
	// Status returns the JSON of a Status. A *RefusedError means that the job has ended.
	Status(ctx context.Context) ([]byte, error)
	// Command carries out a command that has passed Check and returns a description of what was
	// done. A refusal is a *RefusedError.
	Command(ctx context.Context, c Command) (done string, err error)
}

// The types of requests and answers.
type (
	Verb         = job.Verb
	Command      = job.Command
	RefusedError = job.RefusedError
	State        = job.State
	Status       = job.Status
	Host         = job.Host
	SlotState    = job.SlotState
	Slot         = job.Slot
	Wait         = job.Wait
)

// The verbs.
const (
	Stop    = job.Stop
	Drain   = job.Drain
	Scale   = job.Scale
	Exclude = job.Exclude
	Readmit = job.Readmit
)

// The states of a job.
const (
	Waiting   = job.Waiting
	Starting  = job.Starting
	Running   = job.Running
	Resetting = job.Resetting
	Finishing = job.Finishing
	Stopping  = job.Stopping
	Done      = job.Done
	Failed    = job.Failed
)

// The states of slots.
const (
	SlotStarting = job.SlotStarting
	SlotReady    = job.SlotReady
	SlotTraining = job.SlotTraining
	SlotLeaving  = job.SlotLeaving
	SlotStopping = job.SlotStopping
	SlotFree     = job.SlotFree
	SlotExcluded = job.SlotExcluded
	SlotDrained  = job.SlotDrained
	SlotHeld     = job.SlotHeld
)
