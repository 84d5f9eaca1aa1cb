package client

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

// widening records whether workers on other machines take part.
type widening struct {
	mu     sync.Mutex
	widen  func() // nil: the driver has not begun
	wanted bool
}

// Widen implements launch.Widener.
func (a *Agents) Widen(widen func()) {
	a.wide.mu.Lock()
	a.wide.widen = widen
	wanted := a.wide.wanted
	a.wide.mu.Unlock()
	if wanted {
		widen()
	}
}

// widen calls the driver's function on the first worker on another machine, or records that Widen
// has to call it. It fails if the driver listens on a loopback address only.
func (a *Agents) widen() error {
	if a.cfg.Listen.IsValid() && a.cfg.Listen.IsLoopback() {
		return fmt.Errorf("it is not this machine, and cannot reach the workers here: --listen is %v, a loopback address; "+
			"name another, or leave --listen out", a.cfg.Listen)
	}
	a.wide.mu.Lock()
	widen, was := a.wide.widen, a.wide.wanted
	a.wide.wanted = true
	a.wide.mu.Unlock()
	if widen != nil && !was {
		widen()
	}
	return nil
}

// Tell implements launch.Teller.
func (a *Agents) Tell(workers []string, ranks []uint32, text, tail []byte) {
	to := make(map[*session]*agentpb.Tell)
	for i, inc := range workers {
		route, ok := a.routes.Load(inc)
		if !ok {
			continue
		}
		s := route.(*session)
		m := to[s]
		if m == nil {
			m = &agentpb.Tell{Line: text, Tail: tail}
			to[s] = m
		}
		m.Workers = append(m.Workers, inc)
		if i < len(ranks) {
			m.Ranks = append(m.Ranks, ranks[i])
		}
	}
	for s, m := range to {
		s.tell(m)
	}
}

// tell sends a line to workers over the attached stream. Without a stream the line is dropped: the
// next stream begins with what workers wait for.
func (s *session) tell(m *agentpb.Tell) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.carries {
		s.tells = append(s.tells, &agentpb.ToAgent{What: &agentpb.ToAgent_Tell{Tell: m}})
		s.wake.Set()
	}
}

// connectTimeout bounds the connection to an agent for a connection of one of its workers.
const connectTimeout = 10 * time.Second

// connect connects to the agent to take over a connection of a worker, and passes it to
// Spec.Stream; the lock is held.
func (s *session) connect(o *agentpb.Opened) {
	w := s.workers[o.GetIncarnation()]
	if w == nil || w.spec.Stream == nil {
		return
	}
	stream := w.spec.Stream
	s.a.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.a.ctx, connectTimeout)
		defer cancel()
		conn, err := s.credentials.Dial(ctx, identity.Subject{Role: identity.Agent, Host: s.host}, s.addr, wire.ConnectProtocol)
		if err == nil {
			wire.Watch(conn)
			_, err = conn.Write(binary.BigEndian.AppendUint64(nil, o.GetConnection()))
		}
		if err != nil {
			s.log.Debugf("agent: a connection of a worker was not taken over: %v", err)
			return
		}
		defer context.AfterFunc(s.a.ctx, func() { conn.Close() })()
		stream(o.GetProtocol(), conn)
	})
}
