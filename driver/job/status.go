package job

import (
	"encoding/json"
	"time"
)

// State is what a job is doing.
type State string

// The states of a job.
const (
	Waiting   State = "waiting"   // for enough slots
	Starting  State = "starting"  // for the workers of the first world to join
	Running   State = "running"   // a world trains
	Resetting State = "resetting" // between two worlds
	Finishing State = "finishing" // training is done, workers come to their end
	Stopping  State = "stopping"  // workers are being stopped, then the job ends
	Done      State = "done"
	Failed    State = "failed"
)

// Status is how a job is doing. Its JSON names stay what they are.
type Status struct {
	Job  string    `json:"job"`
	Time time.Time `json:"time"`
	// Driver is the driver's process id; 0 where there is none.
	Driver int `json:"driver_pid"`
	// State is the job's since Since. Where there is no driver it is that of the last event that
	// was written down, at Last.
	State State     `json:"state"`
	Since time.Time `json:"since"`
	Begun time.Time `json:"begun"`
	Last  time.Time `json:"last_event"`
	// Message says of a job that ends or has ended why; empty: it is done.
	Message string `json:"message,omitempty"`
	// Journal is what keeps the driver from writing its journal; empty: nothing.
	Journal string `json:"journal,omitempty"`
	// Generation is that of the current world, 0 before the first, Size its size.
	Generation uint64 `json:"generation"`
	Size       int    `json:"size"`
	// NP is the number of slots needed for the first start; MinNP and MaxNP bound the size. A MaxNP
	// of 0 is no bound.
	NP      int  `json:"np"`
	MinNP   int  `json:"min_np"`
	MaxNP   int  `json:"max_np"`
	Elastic bool `json:"elastic"`
	Resets  int  `json:"resets"`
	// Hosts are those listed, the oldest first, then those that have workers still or are out.
	Hosts []Host `json:"hosts"`
	Waits []Wait `json:"waits"`
	// Events are the last that happened, as the events file has them, the oldest first.
	Events []json.RawMessage `json:"events"`
}

// Host is a host of a Status.
type Host struct {
	Host string `json:"host"`
	// Listed is whether discovery lists it, Draining whether it says that its workers shall leave.
	Listed   bool `json:"listed"`
	Draining bool `json:"draining"`
	// Slots are those listed, and others where workers are still.
	Slots []Slot `json:"slots"`
}

// SlotState is what there is of a slot.
type SlotState string

// The states of slots. The first ones are those of its worker.
const (
	SlotStarting SlotState = "starting" // has not joined yet
	SlotReady    SlotState = "ready"    // has joined, and waits for a world
	SlotTraining SlotState = "training" // in the current world
	SlotLeaving  SlotState = "leaving"  // has been sent away, and ends by itself
	SlotStopping SlotState = "stopping" // is being ended
	SlotFree     SlotState = "free"     // there is no worker, and may be one
	SlotExcluded SlotState = "excluded" // none may be, for failures, or because a person wants it so for a time
	SlotDrained  SlotState = "drained"  // none may be, because the host or slot is drained
	SlotHeld     SlotState = "held"     // none may be until a person readmits it
)

// Slot is a slot of a Host.
type Slot struct {
	Slot  int       `json:"slot"`
	State SlotState `json:"state"`
	// Out says of a slot that may have no worker why: excluded, drained or held; Until is when that
	// ends, nil: not by itself. A worker may be there that has not gone yet.
	Out   SlotState  `json:"out,omitempty"`
	Until *time.Time `json:"until,omitempty"`
	// Rank is the worker's in the current world, nil where it is in none.
	Rank *int `json:"rank"`
	PID  int  `json:"pid"`
	// Commits is how many the worker was last known to have; nil: nothing is known.
	Commits *uint64 `json:"commits"`
	// Failures is how many workers have failed in the slot.
	Failures int `json:"failures"`
	// What says what the worker is doing or waiting for, in words, as far as is known.
	What string `json:"what,omitempty"`
}

// Wait is something that the driver waits for, with the end of its patience.
type Wait struct {
	For   string    `json:"for"`
	Until time.Time `json:"until"`
}
