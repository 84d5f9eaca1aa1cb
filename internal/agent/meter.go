package agent

import "sync/atomic"

// Measures are the numbers of an agent at one moment.
type Measures struct {
	Host string
	// Slots is how many slots the host has, Taken how many of them have workers, and Bad how many
	// have devices that have failed.
	Slots, Taken, Bad int
	// Connected and Away are the drivers' sessions with and without a connection.
	Connected, Away int
	Draining        bool
	// Members is how many members of the cluster the agent knows, itself included; 0: it is in
	// none.
	Members int
	// Starts and Ends count workers that have been given a slot, and that have given it back.
	Starts, Ends uint64
	// Undelivered is the number of events that drivers have not acknowledged.
	Undelivered int
}

// Meter measures an agent while Run runs it. The zero Meter is ready for use, by one Run.
type Meter struct{ agent atomic.Pointer[agent] }

// Read returns the numbers of now; false: no agent runs. It may be called at any time.
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
		Host: srv.host, Slots: srv.slots, Taken: len(srv.taken), Draining: srv.drained != nil, Starts: srv.starts, Ends: srv.ends,
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
