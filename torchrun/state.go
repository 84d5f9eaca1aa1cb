package torchrun

import (
	"errors"
	"math"
)

// State is the combined state of an agent's workers.
type State string

// The states.
const (
	Init      State = "INIT"
	Healthy   State = "HEALTHY"
	Unhealthy State = "UNHEALTHY"
	Stopped   State = "STOPPED"
	Succeeded State = "SUCCEEDED"
	Failed    State = "FAILED"
	Unknown   State = "UNKNOWN"
)

// action is what the agent does next.
type action string

const (
	goOn    action = "go on"
	restart action = "restart"
	finish  action = "finish" // all workers have succeeded
	giveUp  action = "give up"
)

// errUnknown is returned if the observations of the workers are inconsistent.
var errUnknown = errors.New("torchrun: the state of the workers is not known")

// machine decides what the agent does next. It is pure.
type machine struct {
	state State
	// max is the largest number of restarts because of failures, and left the number that is left,
	// for the job as a whole.
	max, left int
}

func newMachine(max int) machine { return machine{state: Init, max: max, left: max} }

// begin sets the number of restarts before a round that failures, on any node, have caused.
func (m *machine) begin(restarts int) { m.left = max(0, m.max-restarts) }

// see decides on the next action. seen is the observed state of the workers; changed means that
// nodes wait to join or a node is gone.
func (m *machine) see(seen State, changed bool) (action, error) {
	m.state = seen
	switch seen {
	case Succeeded:
		return finish, nil
	case Failed, Unhealthy:
		if m.left == 0 {
			m.state = Failed
			return giveUp, nil
		}
		m.left-- // until the next round reports the number
		return restart, nil
	case Healthy:
		if changed {
			return restart, nil // the nodes that were present are not to blame
		}
		return goOn, nil
	}
	return giveUp, errUnknown
}

// flakiness returns which share of the permitted restarts was used, in percent; 100 for a failure.
func (m *machine) flakiness() int {
	if m.state == Failed {
		return 100
	}
	return int(math.Floor(100 - 100*float64(m.left+1)/float64(m.max+1)))
}
