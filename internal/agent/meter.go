package agent

import "sync/atomic"

// Measures are the numbers of an agent at one moment.
type Measures struct {
	Host string
	// Slots is the number of slots of the host, Taken the number of slots with workers, and Bad the
	// number of slots whose devices have failed.
	Slots, Taken, Bad int
	// Connected and Away are the drivers' sessions with and without a connection.
	Connected, Away int
	Draining        bool
	// Members is the number of cluster members that the agent knows, including itself; 0: it is in
	// no cluster.
	Members int
	// Starts counts workers that were given a slot, Ends those that have given it back.
	Starts, Ends uint64
	// Undelivered is the number of events that drivers have not acknowledged.
	Undelivered int
}

// Meter measures an agent while Run runs it. The zero Meter is ready for use, by one Run.
type Meter struct{ agent atomic.Pointer[agent] }

// Read returns the current numbers; false: no agent runs. It may be called at any time.
func (m *Meter) Read() (Measures, bool) {
	a := m.agent.Load()
	if a == nil {
		return Measures{}, false
	}
	measures := a.server.measure()
	if a.member != nil {
		measures.Members = a.member.Members()
	}
	return measures, true
}

func (srv *server) measure() Measures {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	m := Measures{
		Host: srv.host, Slots: srv.slots, Taken: len(srv.taken), Draining: srv.drained != nil, Starts: srv.starts, Ends: srv.starts - uint64(len(srv.taken)),
	}
	for _, i := range srv.bad {
		if srv.taken[i] == nil {
			m.Bad++
		}
	}
	for _, s := range srv.sessions {
		if s.link != nil {
			m.Connected++
		} else {
			m.Away++
		}
		m.Undelivered += len(s.events)
	}
	return m
}
