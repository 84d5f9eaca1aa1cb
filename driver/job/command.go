package job

import (
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// Verb is what a Command asks for.
type Verb string

// The verbs.
const (
	Stop    Verb = "stop"    // end the job, with grace or Now
	Drain   Verb = "drain"   // workers leave at a step boundary, and none comes until Readmit, or until the host was off the list
	Scale   Verb = "scale"   // other bounds of the number of workers
	Exclude Verb = "exclude" // workers are stopped at once, and none comes For so long, or until Readmit
	Readmit Verb = "readmit" // drained and excluded slots may have workers again, those that failed too
)

// Command is what a person asks of a job.
type Command struct {
	Verb Verb `json:"verb"`
	// Host is the host that Drain, Exclude and Readmit are about; Slot the index of its slot, nil
	// for all of it.
	Host string `json:"host,omitempty"`
	Slot *int   `json:"slot,omitempty"`
	// For is how long Exclude lasts; 0: until Readmit.
	For time.Duration `json:"for,omitempty"`
	// MinNP and MaxNP are what Scale changes; nil: nothing. A MaxNP of 0 is no bound.
	MinNP *int `json:"min_np,omitempty"`
	MaxNP *int `json:"max_np,omitempty"`
	// Now is a Stop without grace.
	Now bool `json:"now,omitempty"`
}

// Check says what is wrong with a command, whatever the job.
func (c Command) Check() error {
	switch c.Verb {
	case Stop:
		return nil
	case Scale:
		switch {
		case c.MinNP == nil && c.MaxNP == nil:
			return fmt.Errorf("control: scale to what?")
		case c.MinNP != nil && *c.MinNP < 1:
			return fmt.Errorf("control: at least one worker is needed to go on, not %d", *c.MinNP)
		case c.MaxNP != nil && *c.MaxNP < 0:
			return fmt.Errorf("control: %d workers cannot be the most", *c.MaxNP)
		}
		return nil
	case Drain, Exclude, Readmit:
		switch {
		case c.Host == "":
			return fmt.Errorf("control: %s which host?", c.Verb)
		case c.Slot != nil && (*c.Slot < 0 || *c.Slot >= plan.MaxSlots):
			return fmt.Errorf("control: no host has a slot %d", *c.Slot)
		case c.For < 0:
			return fmt.Errorf("control: %v is no time to exclude for", c.For)
		}
		return nil
	}
	return fmt.Errorf("control: there is no command %q", c.Verb)
}

// RefusedError says, for a person, why a command was not carried out.
type RefusedError struct{ Reason string }

// Error is the reason.
func (e *RefusedError) Error() string { return e.Reason }
