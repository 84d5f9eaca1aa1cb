package collective_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
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
	enter(t, e, 1, dataKey)
	return e
}

// enter connects an endpoint alone in a generation.
func enter(t *testing.T, e *collective.Endpoint, generation uint64, key identity.DataKey) {
	t.Helper()
	if _, err := e.Connect(t.Context(), collective.Peers{Key: key, Generation: generation, Addrs: [][]string{nil}}); err != nil {
		t.Fatal(err)
	}
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

// TestVisit: workers of a job can visit each other without a world. Closing the visited endpoint
// ends its visits.
func TestVisit(t *testing.T) {
	for _, encrypt := range []bool{false, true} {
		host, guest := visitable(t, encrypt, 0, echo), visitable(t, encrypt, 1, nil)
		conn, err := guest.Visit(t.Context(), 1, dataKey.ForVisits(), host.Addrs())
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

// TestVisitRefused: strangers are refused, and visits to an endpoint that accepts none, or has too
// many.
func TestVisitRefused(t *testing.T) {
	t.Parallel() // a stranger gets no answer, and retries for seconds
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
	if conn, err := stranger.Visit(t.Context(), 1, dataKey.ForVisits(), host.Addrs()); err == nil {
		conn.Close()
		t.Error("a stranger was let in")
	}
	var refused *identity.RefusedError
	if _, err := host.Visit(t.Context(), 1, dataKey.ForVisits(), shy.Addrs()); !errors.As(err, &refused) {
		t.Errorf("a visit to one that takes none: %v", err)
	}
	for {
		conn, err := shy.Visit(t.Context(), 1, dataKey.ForVisits(), host.Addrs())
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
	if _, err := shy.Visit(ctx, 1, dataKey.ForVisits(), host.Addrs()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestOldKeys: the credentials and the keys of generations that a removed worker still has open no
// rank's connection and no visit in a later generation.
func TestOldKeys(t *testing.T) {
	for _, encrypt := range []bool{false, true} {
		t.Run(fmt.Sprint("encrypted ", encrypt), func(t *testing.T) {
			t.Parallel() // a caller without the key gets no answer, and retries for seconds
			tryOldKeys(t, encrypt)
		})
	}
}

func tryOldKeys(t *testing.T, encrypt bool) {
	host, removed := visitable(t, encrypt, 0, echo), visitable(t, encrypt, 1, nil)
	enter(t, host, 9, identity.NewDataKey())
	old := credentials(t, 1)
	for _, test := range []struct {
		what string
		key  identity.DataKey
		identity.Hello
	}{
		{"a rank", dataKey, identity.Hello{Generation: 9, From: 1}},
		{"a rank of its own generation", dataKey, identity.Hello{Generation: 1, From: 1}},
		{"a rank, with the key of visits", dataKey.ForVisits(), identity.Hello{Generation: 9, From: 1}},
		{"a rank, without a key", identity.DataKey{}, identity.Hello{Generation: 9, From: 1}},
	} {
		conn, err := net.Dial("tcp", host.Addrs()[0])
		if err != nil {
			t.Fatal(err)
		}
		var way net.Conn = conn
		if encrypt {
			way = tls.Client(conn, old.ClientTLS(identity.Subject{Role: identity.Worker}))
		}
		if err := old.ProveDial(way, test.key, test.Hello); err == nil {
			t.Errorf("%s is let in", test.what)
		}
		conn.Close()
	}
	for _, generation := range []uint64{1, 9} {
		if conn, err := removed.Visit(t.Context(), generation, dataKey.ForVisits(), host.Addrs()); err == nil {
			conn.Close()
			t.Errorf("a visit in generation %d is let in", generation)
		}
	}
}

// TestVisitIsHeld: a visit to a member that has not entered the generation yet waits for it.
func TestVisitIsHeld(t *testing.T) {
	host, guest := visitable(t, false, 0, echo), visitable(t, false, 1, nil)
	key, ended := identity.NewDataKey(), make(chan error, 1)
	go func() {
		conn, err := guest.Visit(t.Context(), 2, key.ForVisits(), host.Addrs())
		if err == nil {
			err = errors.Join(said(conn, "hello"), conn.Close())
		}
		ended <- err
	}()
	enter(t, host, 2, key)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
