package tasks

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"testing"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/plan"
)

// secured is a listener that completes handshakes as the driver of an authority's job does, and
// passes on the tickets of its peers.
type secured struct {
	ln   net.Listener
	came chan []byte // the tickets that peers have sent
}

func newSecured(t *testing.T, a *identity.Authority) *secured {
	t.Helper()
	creds, err := a.Issue(identity.Subject{Role: identity.Agent, Host: "a"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := creds.ServerTLS(identity.Worker)
	cfg.NextProtos = []string{line.TasksProtocol}
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &secured{ln: tls.NewListener(inner, cfg), came: make(chan []byte, 10)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := s.ln.Accept()
			if err != nil {
				return
			}
			if conn.(*tls.Conn).HandshakeContext(context.Background()) == nil {
				ticket, _ := identity.ReadTicket(conn)
				s.came <- ticket
			}
			conn.Close()
		}
	}()
	t.Cleanup(func() { s.ln.Close(); <-done })
	return s
}

// TestDialOwn: a worker reaches the scheduler through its launcher, and refuses a stranger in the
// launcher's place.
func TestDialOwn(t *testing.T) {
	ours, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	creds, err := ours.Issue(identity.Subject{Role: identity.Worker, Host: "a", Incarnation: "i"})
	if err != nil {
		t.Fatal(err)
	}
	creds = creds.ForWorker()
	launcher, stranger := newSecured(t, ours), newSecured(t, foreign)
	conn, err := dialOwn(plan.Worker{LauncherAddr: launcher.ln.Addr().String()}, creds)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if ticket := <-launcher.came; !bytes.Equal(ticket, identity.TicketOf(creds.Encode())) {
		t.Errorf("the launcher has the ticket %x", ticket)
	}
	conn.Close()
	if conn, err := dialOwn(plan.Worker{LauncherAddr: stranger.ln.Addr().String()}, creds)(t.Context()); err == nil {
		conn.Close()
		t.Error("a stranger is taken for the launcher")
	}
}
