package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/hvdrun/hvdrun/internal/agent"
)

// Agent collects the metrics of an agent.
type Agent struct {
	// Read returns the agent's numbers; false: it does not run.
	Read func() (agent.Measures, bool)
	// Version is the version of hvdrun.
	Version string
}

// Describe sends the descriptions of all metrics of an agent.
func (a *Agent) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range list {
		if m.Of == agentSection {
			ch <- m.desc
		}
	}
}

// Collect sends the current metrics.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	m, runs := a.Read()
	if !runs {
		return
	}
	s := sink(ch)
	s.put(agentInfo, 1, m.Host, a.Version)
	s.put(agentSlots, float64(m.Taken), "taken")
	s.put(agentSlots, float64(m.Bad), "bad")
	s.put(agentSlots, float64(max(0, m.Slots-m.Taken-m.Bad)), "free")
	s.put(agentDrivers, float64(m.Connected), "connected")
	s.put(agentDrivers, float64(m.Away), "away")
	s.put(agentDraining, truth(m.Draining))
	s.put(agentMembers, float64(m.Members))
	s.put(agentStarts, float64(m.Starts))
	s.put(agentEnds, float64(m.Ends))
	s.put(agentUndelivered, float64(m.Undelivered))
}
