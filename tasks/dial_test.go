package tasks

import (
	"context"
	"crypto/tls"
	"net"
	"testing"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
)

// secured is a listener that completes handshakes as the driver of an authority's job does, and
// counts them.
type secured struct {
	ln   net.Listener
	came chan struct{}
}

func newSecured(t *testing.T, a *identity.Authority) *secured {
	t.Helper()
	creds, err := a.Issue(identity.Subject{Role: identity.Driver})
	if err != nil {
		t.Fatal(err)
	}
	cfg := creds.ServerTLS(identity.Worker)
	cfg.NextProtos = []string{wire.TasksProtocol}
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &secured{ln: tls.NewListener(inner, cfg), came: make(chan struct{}, 10)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := s.ln.Accept()
			if err != nil {
				return
			}
			if conn.(*tls.Conn).HandshakeContext(context.Background()) == nil {
				s.came <- struct{}{}
			}
			conn.Close()
		}
	}()
	t.Cleanup(func() { s.ln.Close(); <-done })
	return s
}

// A worker goes to a driver of its machine at once, and through the agent where that is not its
// driver, or not there any more.
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
	agent, driver, stranger := newSecured(t, ours), newSecured(t, ours), newSecured(t, foreign)
	gone := newSecured(t, ours)
	gone.ln.Close()
	for _, c := range []struct {
		direct *secured
		want   *secured
	}{{driver, driver}, {gone, agent}, {stranger, agent}, {nil, agent}} {
		w := plan.Worker{DriverAddr: agent.ln.Addr().String()}
		if c.direct != nil {
			w.DriverDirect = c.direct.ln.Addr().String()
		}
		conn, err := dialOwn(w, creds)(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		<-c.want.came
		conn.Close()
		for _, other := range []*secured{agent, driver, stranger} {
			if len(other.came) > 0 {
				t.Errorf("a connection came to %v too", other.ln.Addr())
			}
		}
	}
}
