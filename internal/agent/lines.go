package agent

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
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
	// mostLines is the maximum number of unacknowledged lines of a worker; then the worker blocks.
	mostLines = 64
	// mostConnections is the maximum number of connections of a session that wait for the driver to
	// take them over, and connectPatience is how long each may wait.
	mostConnections = 1024
	connectPatience = 20 * time.Second
)

// lines holds the lines of a session's workers, and their connections to the driver. The server's
// lock guards the fields that change.
type lines struct {
	*lineserver.Server
	door        *lineserver.Door            // nil: none could be opened
	near        netip.Addr                  // the address at which the driver reached this host
	latest      map[[2]string]*agentpb.Line // to be sent, by worker and kind
	opened      []*agentpb.Opened           // to be sent
	connections map[uint64]*waiting         // those that the driver has not taken over
	numbered    uint64                      // number of the last connection
	lived       context.Context             // ends with the session
	die         context.CancelFunc
}

// newLines initializes the lines of a session.
func (s *session) newLines() {
	s.lines = lines{
		latest: make(map[[2]string]*agentpb.Line), connections: make(map[uint64]*waiting),
		Server: lineserver.New(lineserver.Config{Up: s.up, Stream: s.stream, Driver: s.attached, Program: s.srv.program, Log: s.log}),
	}
	s.lived, s.die = context.WithCancel(context.Background())
}

// openDoor opens the door for workers at the address where the driver reached this host, with the
// credentials of an agent of the job; the lock is held.
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

// launcherAddr returns the environment variable with the door's address. Without a door the address
// has a port at which nobody listens.
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

// up passes on a line of a worker; it implements the function of lineserver.Config. A line with a
// latest key replaces an unsent one with the same key, and is dropped without a stream. Any other
// line becomes an event; up blocks while the worker has mostLines unacknowledged.
func (s *session) up(incarnation string, text []byte, latest string) {
	l := &agentpb.Line{Incarnation: incarnation, Text: append([]byte(nil), text...)}
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	if latest != "" {
		if s.link != nil {
			s.latest[[2]string{incarnation, latest}] = l
			s.link.wake.Set()
		}
		return
	}
	w := s.workers[incarnation]
	for w != nil && w.lines >= mostLines && s.why == nil {
		if !w.floods {
			w.floods = true
			s.log.Warnf("agent: slot %d: process %d has sent more lines than the driver has taken: it waits", w.id.Index, w.pid)
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

// repeat emits the lines whose answers workers wait for, since a new driver may not have them; the
// lock is held.
func (s *session) repeat() {
	s.Standing(func(incarnation string, text []byte) {
		if w := s.workers[incarnation]; w != nil {
			s.emitLine(w, &agentpb.Line{Incarnation: incarnation, Text: text})
		}
	})
}

// unnumbered removes and returns the messages to be sent that are not events, and may be lost; the
// lock is held.
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

// stream offers a connection of a worker to the driver, and returns when the connection has ended,
// or nobody took it over within connectPatience.
func (s *session) stream(incarnation, protocol string, worker net.Conn) {
	defer worker.Close()
	c := &waiting{worker, make(chan struct{})}
	s.srv.mu.Lock()
	if w := s.workers[incarnation]; w == nil || w.over || s.link == nil || s.why != nil || len(s.connections) >= mostConnections {
		s.srv.mu.Unlock()
		return // the worker retries
	}
	s.numbered++
	id := s.numbered
	s.connections[id] = c
	s.opened = append(s.opened, &agentpb.Opened{Connection: id, Incarnation: incarnation, Protocol: protocol})
	s.link.wake.Set()
	s.srv.mu.Unlock()
	late := time.NewTimer(connectPatience)
	defer late.Stop()
	select {
	case <-c.over:
		return
	case <-late.C:
	case <-s.ending:
	}
	if s.takeConnection(id) == nil { // the driver has taken it over
		<-c.over
	}
}

// takeConnection removes and returns the waiting connection with that number, or nil.
func (s *session) takeConnection(id uint64) *waiting {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	c := s.connections[id]
	delete(s.connections, id)
	return c
}

// connect serves a driver's connection that takes over a worker's: it copies bytes in both
// directions until one of the two ends.
func (srv *server) connect(ctx context.Context, driver net.Conn, peer tls.ConnectionState) {
	defer driver.Close()
	who, err := identity.SubjectOf(peer)
	var number [8]byte
	if err == nil {
		_ = driver.SetDeadline(time.Now().Add(attachTimeout)) // if it fails, the read fails too
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
		_, err := io.Copy(to, from)
		var failed *net.OpError
		if to == c.worker && errors.As(err, &failed) && failed.Op == "write" {
			_, _ = io.Copy(io.Discard, from) // the worker has ended: what it has sent still passes
		}
		to.Close()
		from.Close()
	}
	wg.Go(func() { pass(driver, c.worker) })
	wg.Go(func() { pass(c.worker, driver) })
	wg.Wait()
}
