package agent

import (
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestFloodOfForwarder: processes of the host that connect and say nothing, or no more than a
// hello, take no more descriptors than there may be, and a worker that is proven stays connected.
func TestFloodOfForwarder(t *testing.T) {
	authority, err := identity.NewAuthority("flood")
	if err != nil {
		t.Fatal(err)
	}
	issue := func(s identity.Subject) *identity.Credentials {
		s.RunID = "flood"
		c, err := authority.Issue(s)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	ln, err := identity.Rendezvous.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := rendezvous.NewServer(rendezvous.ServerConfig{Credentials: issue(identity.Subject{Role: identity.Driver}), Log: quiet()})
	server.Admit(identity.Subject{Incarnation: "i"})
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(t.Context(), ln) })
	defer serving.Wait()
	defer ln.Close()

	log, _ := test.NewNullLogger()
	f, err := newForwarder(netip.MustParseAddr("127.0.0.1"), log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	f.aim(netip.MustParseAddrPort(ln.Addr().String()))
	worker := issue(identity.Subject{Role: identity.Worker, Host: "a", Incarnation: "i"})
	conn, err := wire.NewClient(f.addr(), worker.ClientTLS(identity.Subject{Role: identity.Driver}), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	look := func() {
		t.Helper()
		if _, err := rendezvouspb.NewRendezvousClient(conn).Look(t.Context(), &rendezvouspb.LookRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	look()
	look() // the driver has spoken since the worker's proof
	if n := f.ln.Unproven(); n != 0 {
		t.Fatalf("%d connections are unproven, and the only one is the worker's", n)
	}
	hello := clientHello(t, worker)
	strangers := []net.Conn{}
	for i := range 2*identity.Forward.Unproven + 100 {
		c, err := net.Dial("tcp", f.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i%2 == 0 {
			c.Write(hello)
		}
		strangers = append(strangers, c)
		if n := f.ln.Unproven(); n > identity.Forward.Unproven {
			t.Fatalf("%d connections are unproven", n)
		}
	}
	for _, c := range strangers[:100] {
		c.SetReadDeadline(sandbox.Limit())
		if _, err := io.Copy(io.Discard, c); isTimeout(err) {
			t.Fatal("a stranger that came first stays")
		}
	}
	look()
}

// clientHello returns what a client says first.
func clientHello(t *testing.T, c *identity.Credentials) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer far.Close()
	var done sync.WaitGroup
	done.Go(func() { tls.Client(near, c.ClientTLS(identity.Subject{Role: identity.Driver})).Handshake() })
	defer done.Wait()
	defer near.Close()
	b := make([]byte, 64<<10)
	n, err := far.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}
