package collective_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// echo answers a visit until it ends.
func echo(conn net.Conn) { _, _ = io.Copy(conn, conn) }

func visitable(t *testing.T, encrypt bool, rank int, visited func(net.Conn)) *collective.Endpoint {
	t.Helper()
	e, err := collective.Listen(collective.Config{Credentials: credentials(t, rank), ListenAddr: "127.0.0.1:0", Encrypt: encrypt, Visited: visited})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func said(conn net.Conn, text string) error {
	if _, err := conn.Write([]byte(text)); err != nil {
		return err
	}
	b := make([]byte, len(text))
	if _, err := io.ReadFull(conn, b); err != nil {
		return err
	}
	if string(b) != text {
		return errors.New("another text came back")
	}
	return nil
}

// TestVisit: workers of one job reach each other without a world, and the end of the one that is
// visited ends visits.
func TestVisit(t *testing.T) {
	for _, encrypt := range []bool{false, true} {
		host, guest := visitable(t, encrypt, 0, echo), visitable(t, encrypt, 1, nil)
		conn, err := guest.Visit(t.Context(), host.Addrs())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := said(conn, "hello"); err != nil {
			t.Error(err)
		}
		if err := host.Close(); err != nil {
			t.Error(err)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("the visit goes on without its host")
		}
	}
}

// TestVisitRefused: strangers are refused, and so is a visit to an endpoint that takes none, or has
// enough of them.
func TestVisitRefused(t *testing.T) {
	host, shy := visitable(t, false, 0, echo), visitable(t, false, 1, nil)
	authority, err := identity.NewAuthority("another")
	if err != nil {
		t.Fatal(err)
	}
	c, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "a", Incarnation: "x"})
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := collective.Listen(collective.Config{Credentials: c, ListenAddr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	if conn, err := stranger.Visit(t.Context(), host.Addrs()); err == nil {
		conn.Close()
		t.Error("a stranger was let in")
	}
	var refused *identity.RefusedError
	if _, err := host.Visit(t.Context(), shy.Addrs()); !errors.As(err, &refused) {
		t.Errorf("a visit to one that takes none: %v", err)
	}
	for {
		conn, err := shy.Visit(t.Context(), host.Addrs())
		if err != nil {
			if !errors.As(err, &refused) {
				t.Error(err)
			}
			break
		}
		defer conn.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := shy.Visit(ctx, host.Addrs()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
