package torchrun

import (
	"errors"
	"math"
)

// State is the common state of an agent's workers.
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
	finish  action = "finish" // all have succeeded
	giveUp  action = "give up"
)

// errUnknown is returned where what is seen of the workers makes no sense.
var errUnknown = errors.New("torchrun: the state of the workers is not known")

// machine decides. It is pure.
type machine struct {
	state State
	// max is how many restarts there may be because of failures, and left how many are left, of the
	// job as a whole.
	max, left int
}

func newMachine(max int) machine { return machine{state: Init, max: max, left: max} }

// begin takes how many restarts there were before a round, because of failures on any node.
func (m *machine) begin(restarts int) { m.left = max(0, m.max-restarts) }

// see takes what is seen of the workers, and whether the nodes have changed: some wait to join, or
// one has gone.
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
		m.left-- // until the next round tells
		return restart, nil
	case Healthy:
		if changed {
			return restart, nil // which the nodes that were there are not to blame for
		}
		return goOn, nil
	}
	return giveUp, errUnknown
}

// flakiness returns how much of the restarts was needed, in percent; 100 for a failure.
func (m *machine) flakiness() int {
	if m.state == Failed {
		return 100
	}
	return int(math.Floor(100 - 100*float64(m.left+1)/float64(m.max+1)))
}
