package agent

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	lineserver "github.com/hvdrun/hvdrun/internal/line/server"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// mostLines is how many lines of a worker the driver may have to acknowledge; after that the
	// worker waits.
	mostLines = 64
	// mostConnections is how many connections of a session may wait for the driver to take them
	// over, and connectPatience how long each.
	mostConnections = 1024
	connectPatience = 20 * time.Second
)

// lines are what the session's workers say, and their connections to the driver. The server's lock
// guards what changes.
type lines struct {
	*lineserver.Server
	door        *lineserver.Door            // nil: none could be opened
	near        netip.Addr                  // where the driver has reached this host
	latest      map[[2]string]*agentpb.Line // to be sent, by worker and kind
	opened      []*agentpb.Opened           // to be sent
	connections map[uint64]*waiting         // that the driver has not taken over
	numbered    uint64                      // the last connection
	lived       context.Context             // ends with the session
	die         context.CancelFunc
}

// newLines makes the lines of a session.
func (s *session) newLines() {
	s.lines = lines{
		latest: make(map[[2]string]*agentpb.Line), connections: make(map[uint64]*waiting),
		Server: lineserver.New(lineserver.Config{Up: s.up, Stream: s.stream, Driver: s.attached, Program: s.srv.program, Log: s.log}),
	}
	s.lived, s.die = context.WithCancel(context.Background())
}

// openDoor opens the door for workers, at the address where the driver has reached this host, with
// the credentials of an agent of the job; the lock is held.
func (s *session) openDoor(near netip.Addr, credentials string) error {
	if near.IsValid() && !s.near.IsValid() {
		s.near = near
	}
	if s.door != nil || credentials == "" || !near.IsValid() {
		return nil
	}
	own, err := identity.Decode(credentials)
	if err == nil {
		s.door, err = lineserver.OpenDoor(s.Server, identity.Network{}, netip.AddrPortFrom(near, 0).String(), own)
	}
	return err
}

// launcherAddr returns the variable by which workers know the door. Without one it has a port at
// which nobody listens.
func (s *session) launcherAddr() string {
	at := netip.AddrPortFrom(s.near, 1).String()
	if s.door != nil {
		at = s.door.Addr()
	}
	return plan.EnvLauncherAddr + "=" + at
}

// attached reports whether a driver is attached.
func (s *session) attached() bool {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	return s.link != nil && !s.link.ends
}

// up passes a line of a worker on, as lineserver.Config has it.
func (s *session) up(incarnation string, text []byte, latest string) {
	l := &agentpb.Line{Incarnation: incarnation, Text: append([]byte(nil), text...)}
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	if latest != "" {
		if s.link != nil {
			s.latest[[2]string{incarnation, latest}] = l
			s.link.poke()
		}
		return
	}
	w := s.workers[incarnation]
	for w != nil && w.lines >= mostLines && s.why == nil {
		if !w.floods {
			w.floods = true
			s.log.Warnf("agent: slot %d: process %d has said more than the driver has taken: it waits", w.id.Index, w.pid)
		}
		s.room.Wait()
	}
	if w != nil && s.why == nil {
		s.emitLine(w, l)
	}
}

// emitLine makes an event of a line; the lock is held.
func (s *session) emitLine(w *worker, l *agentpb.Line) {
	w.lines++
	s.emit(&agentpb.FromAgent{What: &agentpb.FromAgent_Line{Line: l}})
}

// heardLine notes that the driver has a line; the lock is held.
func (s *session) heardLine(l *agentpb.Line) {
	if w := s.workers[l.GetIncarnation()]; w != nil {
		w.lines--
		s.room.Broadcast()
	}
}

// repeat makes events of what workers wait for, for a driver that may not know; the lock is held.
func (s *session) repeat() {
	s.Standing(func(incarnation string, text []byte) {
		if w := s.workers[incarnation]; w != nil {
			s.emitLine(w, &agentpb.Line{Incarnation: incarnation, Text: text})
		}
	})
}

// unnumbered returns the messages to be sent that may be lost; the lock is held.
func (s *session) unnumbered() (all []*agentpb.FromAgent) {
	for key, l := range s.latest {
		delete(s.latest, key)
		all = append(all, &agentpb.FromAgent{What: &agentpb.FromAgent_Line{Line: l}})
	}
	for _, o := range s.opened {
		all = append(all, &agentpb.FromAgent{What: &agentpb.FromAgent_Opened{Opened: o}})
	}
	s.opened = nil
	return all
}

// waiting is a connection of a worker that the driver has not taken over yet.
type waiting struct {
	worker net.Conn
	over   chan struct{} // closed when it has ended
}

// stream has the driver take over a connection of a worker, and returns when it has ended.
func (s *session) stream(incarnation, protocol string, worker net.Conn) {
	defer worker.Close()
	c := &waiting{worker, make(chan struct{})}
	s.srv.mu.Lock()
	if w := s.workers[incarnation]; w == nil || w.over || s.link == nil || s.why != nil || len(s.connections) >= mostConnections {
		s.srv.mu.Unlock()
		return // the worker tries again
	}
	s.numbered++
	id := s.numbered
	s.connections[id] = c
	s.opened = append(s.opened, &agentpb.Opened{Connection: id, Incarnation: incarnation, Protocol: protocol})
	s.link.poke()
	s.srv.mu.Unlock()
	late := time.NewTimer(connectPatience)
	defer late.Stop()
	select {
	case <-c.over:
		return
	case <-late.C:
	case <-s.ending:
	}
	if s.takeConnection(id) == nil { // the driver has it
		<-c.over
	}
}

// takeConnection returns the connection of that number, which waits no more; nil: none waits.
func (s *session) takeConnection(id uint64) *waiting {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	c := s.connections[id]
	delete(s.connections, id)
	return c
}

// connect serves the connection of a driver that takes over one of a worker: it carries bytes both
// ways until one of them ends.
func (srv *server) connect(ctx context.Context, driver net.Conn, peer tls.ConnectionState) {
	defer driver.Close()
	who, err := identity.SubjectOf(peer)
	var number [8]byte
	if err == nil {
		_ = driver.SetDeadline(time.Now().Add(attachTimeout)) // where it fails, so does the read
		_, err = io.ReadFull(driver, number[:])
		_ = driver.SetDeadline(time.Time{})
	}
	srv.mu.Lock()
	s := srv.sessions[who.RunID]
	ok := err == nil && s != nil && s.driver.User == who.User && s.driver.UID == who.UID
	srv.mu.Unlock()
	if !ok {
		return
	}
	c := s.takeConnection(binary.BigEndian.Uint64(number[:]))
	if c == nil {
		return
	}
	defer close(c.over)
	defer context.AfterFunc(ctx, func() { driver.Close() })()
	defer context.AfterFunc(s.lived, func() { driver.Close() })()
	var wg sync.WaitGroup
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // its end is that of the connection
		to.Close()
		from.Close()
	}
	wg.Go(func() { pass(driver, c.worker) })
	wg.Go(func() { pass(c.worker, driver) })
	wg.Wait()
}
