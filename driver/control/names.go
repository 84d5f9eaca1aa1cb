package control

import "github.com/hvdrun/hvdrun/driver/job"

// The types of requests and answers. They are defined in [job], which the pure package decide may
// import; driver/names.go has the other values of a job.
type (
	Verb         = job.Verb
	Command      = job.Command
	RefusedError = job.RefusedError
	State        = job.State
	Status       = job.Status
	Host         = job.Host
	SlotState    = job.SlotState
	Slot         = job.Slot
	Straggler    = job.Straggler
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
