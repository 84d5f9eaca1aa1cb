package rendezvous

import (
	"context"
	"crypto/tls"
	"math/rand/v2"
	"net"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// mostStores is the largest number of connections of one worker to the store.
const mostStores = 64

// stores are the connections to the store. They are guarded by the server's lock.
type stores struct {
	number uint64                       // names the store: another driver has another
	of     map[string]map[net.Conn]bool // by incarnation
}

func newStores() stores {
	return stores{number: 1 + rand.Uint64N(1<<53), of: make(map[string]map[net.Conn]bool)}
}

// expel closes the connections of a worker; the lock is held.
func (s *stores) expel(incarnation string) {
	for conn := range s.of[incarnation] {
		if secured, is := conn.(interface{ NetConn() net.Conn }); is {
			conn = secured.NetConn() // TLS would say goodbye, which may block
		}
		_ = conn.Close() // its handler returns
	}
}

// store serves the connection of a worker that belongs to the job to the store.
func (s *Server) store(ctx context.Context, conn net.Conn, peer tls.ConnectionState) {
	defer conn.Close()
	from, err := identity.SubjectOf(peer)
	if err == nil {
		from, err = s.belongs(from)
	}
	if err != nil || !s.enterStore(from.Incarnation, conn) {
		s.cfg.Log.Debugf("rendezvous: a connection to the store is refused to %v: %v", from, err)
		return
	}
	defer s.leaveStore(from.Incarnation, conn)
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := s.cfg.Store(conn); err != nil && ctx.Err() == nil {
		s.cfg.Log.Debugf("rendezvous: the store of %v: %v", from, err)
	}
}

func (s *Server) enterStore(incarnation string, conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := s.stores.of[incarnation]
	if _, ok := s.admitted[incarnation]; !ok || len(of) >= mostStores {
		return false
	}
	if of == nil {
		of = make(map[net.Conn]bool)
		s.stores.of[incarnation] = of
	}
	of[conn] = true
	return true
}

func (s *Server) leaveStore(incarnation string, conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.stores.of[incarnation], conn)
	if len(s.stores.of[incarnation]) == 0 {
		delete(s.stores.of, incarnation)
	}
}
