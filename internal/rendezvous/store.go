package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
)

// mostStores is the maximum number of connections of one worker to the store.
const mostStores = 64

// stores holds the connections to the store. The server's lock guards it.
type stores struct {
	number uint64                // identifies the store; each driver's differs
	of     map[string][]net.Conn // by incarnation
}

func newStores() stores {
	return stores{number: 1 + rand.Uint64N(1<<53), of: make(map[string][]net.Conn)}
}

// expel closes the connections of a worker; the lock is held.
func (s *stores) expel(incarnation string) {
	for _, conn := range s.of[incarnation] {
		_ = conn.Close() // its handler returns then
	}
}

// Stream serves a connection of a worker for a protocol other than lines until it or ctx ends, and
// closes it.
func (s *Server) Stream(ctx context.Context, incarnation, protocol string, conn net.Conn) {
	defer conn.Close()
	s.mu.Lock()
	from, belongs := s.admitted[incarnation]
	s.mu.Unlock()
	err := errors.New("the worker does not belong to the job any more")
	switch {
	case !belongs:
	case protocol == line.TasksProtocol && s.cfg.Tasks != nil:
		err = s.cfg.Tasks.Handle(ctx, conn, from)
	case protocol == line.StoreProtocol && s.cfg.Store != nil:
		err = s.store(ctx, from, conn)
	default:
		err = fmt.Errorf("the protocol %.32q is not known", protocol)
	}
	if err != nil && ctx.Err() == nil {
		s.cfg.Log.Debugf("rendezvous: a connection of %v for %.32q: %v", from, protocol, err)
	}
}

func (s *Server) store(ctx context.Context, from identity.Subject, conn net.Conn) error {
	if !s.enterStore(from.Incarnation, conn) {
		return fmt.Errorf("it has %d others", mostStores)
	}
	defer s.leaveStore(from.Incarnation, conn)
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	return s.cfg.Store(conn)
}

func (s *Server) enterStore(incarnation string, conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := s.stores.of[incarnation]
	if _, ok := s.admitted[incarnation]; !ok || len(of) >= mostStores {
		return false
	}
	s.stores.of[incarnation] = append(of, conn)
	return true
}

func (s *Server) leaveStore(incarnation string, conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := slices.DeleteFunc(s.stores.of[incarnation], func(c net.Conn) bool { return c == conn })
	if s.stores.of[incarnation] = of; len(of) == 0 {
		delete(s.stores.of, incarnation)
	}
}
