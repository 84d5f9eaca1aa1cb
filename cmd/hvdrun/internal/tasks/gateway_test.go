package tasks

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

var triple = tasks.Register[int]("gateway.triple/v1", func(_ context.Context, n int) (int, error) { return 3 * n, nil })

func TestGateway(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	authority, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), scheduler.SocketName)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	s := scheduler.New(scheduler.Config{Run: "run", Log: log})
	defer s.Close()
	running.Go(func() { _ = s.ServeLocal(ctx, socket, nil) })
	to := func(ctx context.Context) (net.Conn, error) { return wire.DialLocal(ctx, socket) }
	running.Go(func() {
		if err := tasks.Serve(ctx, tasks.ServeConfig{Dial: to, Log: log, Grace: time.Millisecond}); err != nil {
			t.Error(err)
		}
	})
	ln, err := identity.TaskGateway.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{ln: ln, authority: authority, to: to, log: log}
	running.Go(func() { g.serve(ctx) })
	addr := ln.Addr().String()

	invite := func(a *identity.Authority, life time.Duration) string {
		creds, err := a.IssueFor(identity.Subject{Role: identity.Client}, time.Now(), life)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "invitation")
		gone := "127.0.0.1:1" // nothing listens at the first address
		if err := identity.WriteInvitation(path, identity.Invitation{Addresses: []string{gone, addr}, Credentials: creds.Encode()}); err != nil {
			t.Fatal(err)
		}
		return path
	}
	t.Setenv(plan.EnvTasks, invite(authority, time.Hour))
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{Log: log})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := triple.Call(ctx, pool, 5); n != 15 || err != nil {
		t.Errorf("a task of another machine: %d, %v", n, err)
	}
	if err := pool.Close(); err != nil {
		t.Error(err)
	}

	other, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"of another job": invite(other, time.Hour), "too old": invite(authority, -time.Minute)} {
		t.Setenv(plan.EnvTasks, path)
		began := time.Now()
		if pool, err := tasks.Connect(ctx, tasks.ConnectConfig{Log: log}); err == nil {
			pool.Close()
			t.Errorf("an invitation %s is taken", name)
		} else if time.Since(began) > 30*time.Second {
			t.Errorf("an invitation %s: the client waits for %v: %v", name, time.Since(began), err)
		}
	}

	// The gateway refuses workers of the job and connections without a certificate.
	worker, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "a", Incarnation: "i"})
	if err != nil {
		t.Fatal(err)
	}
	asWorker := worker.ClientTLS(identity.Subject{Role: identity.Driver})
	asWorker.NextProtos = []string{line.TasksProtocol}
	for name, cfg := range map[string]*tls.Config{
		"a worker":  asWorker,
		"a browser": {InsecureSkipVerify: true, NextProtos: []string{line.TasksProtocol}}, //nolint:gosec // a stranger's
	} {
		conn, err := tls.Dial("tcp", addr, cfg)
		if err != nil {
			continue
		}
		_, err = conn.Read(make([]byte, 1))
		if err == nil || !strings.Contains(err.Error(), "remote error") {
			t.Errorf("%s: %v", name, err)
		}
		conn.Close()
	}
}

// TestGatewayFlags: the commands report at once what is wrong with their flags.
func TestGatewayFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"--listen is missing":                 {"--invitation", "f"},
		"--listen: name the address":          {"--listen", ":7", "--invitation", "f"},
		"--listen: name the address by which": {"--listen", "0.0.0.0:7", "--invitation", "f"},
		"--listen: address x":                 {"--listen", "x", "--invitation", "f"},
		"--invitation is missing":             {"--listen", "127.0.0.1:7"},
		"--valid -1s":                         {"--listen", "127.0.0.1:7", "--invitation", "f", "--valid", "-1s"},
	} {
		cmd := gatewayCommand((&cli.Program{}))
		cmd.SetArgs(args)
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
