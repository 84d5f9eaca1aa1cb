package job

import (
	"encoding/json"
	"math"
	"time"
)

// State is the state of a job.
type State string

// The states of a job.
const (
	Waiting   State = "waiting"   // for enough slots
	Starting  State = "starting"  // for the workers of the first world to join
	Running   State = "running"   // a world trains
	Resetting State = "resetting" // between two worlds
	Finishing State = "finishing" // training is done; workers exit
	Stopping  State = "stopping"  // workers are being stopped, then the job ends
	Done      State = "done"
	Failed    State = "failed"
)

// Ended reports whether the job is over, with success or without.
func (s State) Ended() bool { return s == Done || s == Failed }

// Status is the status of a job. Its JSON names are stable.
type Status struct {
	Job  string    `json:"job"`
	Time time.Time `json:"time"`
	// Driver is the driver's process id; 0: no driver runs.
	Driver int `json:"driver_pid"`
	// State is the job's state since Since. Without a driver it is the state after the last
	// recorded event, at Last.
	State State     `json:"state"`
	Since time.Time `json:"since"`
	Begun time.Time `json:"begun"`
	Last  time.Time `json:"last_event"`
	// Message is the reason why the job ends or has ended. It is empty if the job succeeded, unless
	// its workers never joined a world.
	Message string `json:"message,omitempty"`
	// Stopped: a person or a signal ended the job, whose state is Failed.
	Stopped bool `json:"stopped,omitempty"`
	// Journal is the error that keeps the driver from writing its journal; empty: none.
	Journal string `json:"journal,omitempty"`
	// Generation is the generation of the current world, 0 before the first; Size is its number of
	// workers.
	Generation uint64 `json:"generation"`
	Size       int    `json:"size"`
	// NP is the number of slots needed for the first start; MinNP and MaxNP bound the size. A MaxNP
	// of 0 means no bound.
	NP      int  `json:"np"`
	MinNP   int  `json:"min_np"`
	MaxNP   int  `json:"max_np"`
	Elastic bool `json:"elastic"`
	Resets  int  `json:"resets"`
	// Goodput reports what the job's time was spent on.
	Goodput Goodput `json:"goodput"`
	// Hosts are the listed hosts, oldest first, then other hosts that still have workers.
	Hosts []Host `json:"hosts"`
	Waits []Wait `json:"waits"`
	// Tasks describes the tasks that run on the job's workers, one line each.
	Tasks []string `json:"tasks,omitempty"`
	// Events are the last events, oldest first, as in the events file.
	Events []json.RawMessage `json:"events"`
}

// Host is a host of a Status.
type Host struct {
	Host string `json:"host"`
	// Listed reports whether discovery lists the host, Draining whether discovery wants its workers
	// to leave.
	Listed   bool `json:"listed"`
	Draining bool `json:"draining"`
	// Slots are the listed slots and others that still have workers.
	Slots []Slot `json:"slots"`
}

// SlotState is the state of a slot.
type SlotState string

// The states of slots; the first five are those of the slot's worker.
const (
	SlotStarting SlotState = "starting" // has not joined yet
	SlotReady    SlotState = "ready"    // has joined and waits for a world
	SlotTraining SlotState = "training" // in the current world
	SlotLeaving  SlotState = "leaving"  // was dismissed and ends by itself
	SlotStopping SlotState = "stopping" // is being stopped
	SlotFree     SlotState = "free"     // no worker; one may start
	SlotExcluded SlotState = "excluded" // no worker may start, after failures or for a time set by an operator
	SlotDrained  SlotState = "drained"  // no worker may start: the host or slot is drained
	SlotHeld     SlotState = "held"     // no worker may start until an operator readmits it
)

// Slot is a slot of a Host.
type Slot struct {
	Slot  int       `json:"slot"`
	State SlotState `json:"state"`
	// Out is the reason why no worker may start in the slot: excluded, drained or held; empty: one
	// may. Until is when that ends; nil: not without a command. An earlier worker may still run in
	// the slot.
	Out   SlotState  `json:"out,omitempty"`
	Until *time.Time `json:"until,omitempty"`
	// Rank is the worker's rank in the current world; nil: it is not a member.
	Rank *int `json:"rank"`
	PID  int  `json:"pid"`
	// Commits is the worker's last known number of commits; nil: unknown.
	Commits *uint64 `json:"commits"`
	// Failures is the number of workers that have failed in the slot.
	Failures int `json:"failures"`
	// What describes what the worker is doing or waiting for; empty: unknown.
	What string `json:"what,omitempty"`
	// Where holds the frames of the user's code in which a worker that holds up others was last
	// seen, innermost first. Empty: the worker holds up nobody, or its frames are unknown.
	Where string `json:"where,omitempty"`
	// Straggler is how late the worker comes to operations; nil: unknown.
	Straggler *Straggler `json:"straggler,omitempty"`
	// Usage is what the worker's processes use; nil: unknown.
	Usage *Usage `json:"usage,omitempty"`
	// Figures are the newest numbers that the worker's program has reported, by name.
	Figures []Figure `json:"figures,omitempty"`
}

// Usage is what a worker's process and its descendants use.
type Usage struct {
	// Processors is the number of processors that they kept busy between the last two heartbeats,
	// on average.
	Processors float64 `json:"processors"`
	// Resident is their memory in bytes.
	Resident uint64 `json:"resident_bytes"`
	// Used and Limit, in bytes, are those of the machine or of the worker's control group,
	// whichever has the least memory left. Limit is 0 if it is unknown.
	Used  uint64 `json:"memory_used_bytes"`
	Limit uint64 `json:"memory_limit_bytes"`
}

// Short reports whether less than a tenth of the memory available to the worker is left: the kernel
// kills processes when memory runs out. A nil Usage is not short.
func (u *Usage) Short() bool { return u != nil && u.Limit > 0 && u.Used > u.Limit-u.Limit/10 }

// Figure is a number that a program reports, such as its loss.
type Figure struct {
	Name  string  `json:"name"`  // of 1 to 32 of the characters a-z, A-Z, 0-9, +, -, . and _
	Value float64 `json:"value"` // may be infinite or no number
}

type figureJSON struct {
	Name  string   `json:"name"`
	Value *float64 `json:"value"`
}

// MarshalJSON writes {"name":…,"value":…}, whose value is null if it is infinite or no number.
func (f Figure) MarshalJSON() ([]byte, error) {
	j := figureJSON{Name: f.Name}
	if !math.IsNaN(f.Value) && !math.IsInf(f.Value, 0) {
		j.Value = &f.Value
	}
	return json.Marshal(j)
}

// UnmarshalJSON reads what MarshalJSON writes. A value of null becomes NaN.
func (f *Figure) UnmarshalJSON(text []byte) error {
	var j figureJSON
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	*f = Figure{j.Name, math.NaN()}
	if j.Value != nil {
		f.Value = *j.Value
	}
	return nil
}

// Straggler is the recent delay of a worker at the operations of all ranks, compared with the other
// ranks. Older operations count less: half as much after a minute.
type Straggler struct {
	// Last is the share of operations to which it came last, from 0 to 1. Operations to which all
	// ranks came within a millisecond do not count.
	Last float64 `json:"last"`
	// By is how much later than the median rank it came, in seconds: the mean of all operations,
	// with 0 for those to which it came earlier.
	By float64 `json:"by_seconds"`
	// Operations is the number of operations compared, each counted with its present weight.
	Operations int `json:"operations"`
}

// Late reports whether the worker holds up the others: it comes last to most operations, by a
// millisecond or more on average, and enough operations were compared. A nil Straggler is not late.
func (s *Straggler) Late() bool {
	const mostly, by, few = 0.5, 0.001, 8
	return s != nil && s.Last >= mostly && s.By >= by && s.Operations >= few
}

// Wait is a condition that the driver waits for, with its deadline.
type Wait struct {
	For   string    `json:"for"`
	Until time.Time `json:"until"`
}
