package wire

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestClocks: if the clocks of two machines of a cluster differ by more than certificates permit,
// each end reports it, whichever certificate is refused.
func TestClocks(t *testing.T) {
	a, err := identity.NewClusterAuthority(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		server, client time.Duration // how far the clock of the signer is ahead
		says, told     string        // to the client, to the server
	}{
		"the same": {},
		"the server's certificate": {server: 2 * time.Hour,
			says: "the certificate of agent a is not yet valid: the clock of this machine is at least 2h0m0s behind that of the machine which has signed it",
			told: "bad certificate"},
		"the client's certificate": {client: 2 * time.Hour,
			says: "remote error: tls: expired certificate: by the clock of that machine, this one's certificate has ended or is not valid yet",
			told: "the certificate of driver is not yet valid: the clock of this machine is at least 2h0m0s behind"},
		"an old certificate of the client": {client: -3 * time.Hour,
			says: "remote error: tls: expired certificate: by the clock of that machine",
			told: "the certificate of driver ended 1h0m0s ago"},
	} {
		t.Run(name, func(t *testing.T) {
			server, err1 := a.IssueFor(identity.Subject{Role: identity.Agent, Host: "a"}, time.Now().Add(c.server), 2*time.Hour)
			client, err2 := a.IssueFor(identity.Subject{Role: identity.Driver, RunID: "r"}, time.Now().Add(c.client), 2*time.Hour)
			if err1 != nil || err2 != nil {
				t.Fatal(err1, err2)
			}
			ln, err := identity.Drivers.Listen("127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			told := make(chan error, 10)
			ln.OnRefused(func(_ net.Addr, why error) {
				select {
				case told <- why:
				default:
				}
			})
			ctx, cancel := context.WithCancel(t.Context())
			served := make(chan error, 1)
			register := func(r grpc.ServiceRegistrar) { grpc_health_v1.RegisterHealthServer(r, health.NewServer()) }
			go func() { served <- Serve(ctx, MaxMessage, ln, server.ServerTLS(identity.Driver), register) }()
			conn, err := NewClient(ln.Addr().String(), client.ClientTLS(identity.Subject{Role: identity.Agent, Host: "a"}))
			if err != nil {
				t.Fatal(err)
			}
			for limit := sandbox.Limit(); ; {
				_, err = grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
				if (err != nil) == (c.says != "") && strings.Contains(status.Convert(err).Message(), c.says) {
					break
				}
				// A client that writes before it reads the refusal gets a write error instead.
				if err == nil || !strings.Contains(err.Error(), "broken pipe") && !strings.Contains(err.Error(), "reset by peer") || time.Now().After(limit) {
					t.Errorf("the client: %v, want %q", err, c.says)
					break
				}
			}
			if c.told != "" {
				if why := <-told; !strings.Contains(why.Error(), c.told) {
					t.Errorf("the server is told %v, want %q", why, c.told)
				}
			}
			conn.Close()
			cancel()
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
}
