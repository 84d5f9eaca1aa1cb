package torchrun

// State is the combined state of an agent's workers.
type State string

// The states.
const (
	Init      State = "INIT"
	Healthy   State = "HEALTHY"
	Stopped   State = "STOPPED"
	Succeeded State = "SUCCEEDED"
	Failed    State = "FAILED"
)

// action is what the agent does next.
type action string

const (
	goOn    action = "go on"
	restart action = "restart"
	finish  action = "finish" // all workers have succeeded
	giveUp  action = "give up"
)

// machine decides what the agent does next. It is pure.
type machine struct {
	state State
	// max is the largest number of restarts because of failures, and left how many of them remain,
	// for the job as a whole.
	max, left int
}

func newMachine(max int) machine { return machine{state: Init, max: max, left: max} }

// begin sets the number of restarts that failures on any node have caused before a round.
func (m *machine) begin(restarts int) { m.left = max(0, m.max-restarts) }

// see decides on the next action. seen is the observed state of the workers: Healthy, Succeeded or
// Failed. changed means that nodes wait to join or a node is gone.
func (m *machine) see(seen State, changed bool) action {
	m.state = seen
	switch {
	case seen == Succeeded:
		return finish
	case seen == Failed && m.left == 0:
		return giveUp
	case seen == Failed:
		m.left-- // until the next round reports the number
		return restart
	case changed:
		return restart // the nodes that were present are not to blame
	}
	return goOn
}
