package job

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/plan"
)

// Verb is the kind of a Command.
type Verb string

// The verbs.
const (
	Stop    Verb = "stop"    // end the job, gracefully or at once (Now)
	Drain   Verb = "drain"   // workers leave at a step boundary; none starts until Readmit or until the host was unlisted
	Scale   Verb = "scale"   // change the bounds of the number of workers
	Exclude Verb = "exclude" // workers are stopped at once; none starts for the time For, or until Readmit
	Readmit Verb = "readmit" // end drains and exclusions, including those for failures
)

// Command is an operator's command to a job.
type Command struct {
	Verb Verb `json:"verb"`
	// Host is the host of Drain, Exclude and Readmit; Slot is the index of its slot, or nil for the
	// whole host.
	Host string `json:"host,omitempty"`
	Slot *int   `json:"slot,omitempty"`
	// For is how long Exclude lasts; 0: until Readmit.
	For time.Duration `json:"for,omitempty"`
	// MinNP and MaxNP are the bounds that Scale sets; nil: unchanged. A MaxNP of 0 means no bound.
	MinNP *int `json:"min_np,omitempty"`
	MaxNP *int `json:"max_np,omitempty"`
	// Now makes Stop kill the workers at once.
	Now bool `json:"now,omitempty"`
	// By is who gives the command, as reported by the driver's kernel: a client does not send it. A
	// command of the zero Who is not recorded.
	By audit.Who `json:"by,omitzero"`
}

// Record returns the record of the command and its outcome.
func (c Command) Record(outcome string) audit.Record {
	r := audit.Record{Who: c.By, What: string(c.Verb), Host: c.Host, Slot: c.Slot, Outcome: outcome}
	var how []string
	if c.Now {
		how = append(how, "now")
	}
	if c.For != 0 {
		how = append(how, fmt.Sprintf("for %v", c.For))
	}
	if c.MinNP != nil {
		how = append(how, fmt.Sprintf("at least %d", *c.MinNP))
	}
	if c.MaxNP != nil {
		how = append(how, fmt.Sprintf("at most %d", *c.MaxNP))
	}
	r.How = strings.Join(how, ", ")
	return r
}

// Check validates a command independently of the job.
func (c Command) Check() error {
	switch c.Verb {
	case Stop:
		return nil
	case Scale:
		switch {
		case c.MinNP == nil && c.MaxNP == nil:
			return fmt.Errorf("control: scale needs a minimum or a maximum number of workers")
		case c.MinNP != nil && *c.MinNP < 1:
			return fmt.Errorf("control: the minimum number of workers is %d; it must be at least 1", *c.MinNP)
		case c.MaxNP != nil && *c.MaxNP < 0:
			return fmt.Errorf("control: the maximum number of workers is %d; it must be 0 (no bound) or more", *c.MaxNP)
		}
		for _, n := range []*int{c.MinNP, c.MaxNP} {
			if n != nil && *n > math.MaxInt32 {
				return fmt.Errorf("control: a number of workers is %d; it must be at most %d", *n, math.MaxInt32)
			}
		}
		return nil
	case Drain, Exclude, Readmit:
		switch {
		case c.Host == "":
			return fmt.Errorf("control: %s needs a host", c.Verb)
		case c.Slot != nil && (*c.Slot < 0 || *c.Slot >= plan.MaxSlots):
			return fmt.Errorf("control: slot %d is not a valid index", *c.Slot)
		case c.For < 0:
			return fmt.Errorf("control: %v is not a valid time for an exclusion: it must not be negative", c.For)
		}
		return nil
	}
	return fmt.Errorf("control: the command %q is not known", c.Verb)
}

// RefusedError is the reason why a job refused a command.
type RefusedError struct{ Reason string }

// Error returns the reason.
func (e *RefusedError) Error() string { return e.Reason }
