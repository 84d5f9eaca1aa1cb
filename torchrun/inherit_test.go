package torchrun

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestStdin: workers read the agent's standard input.
func TestStdin(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString("hello\n"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	var out bytes.Buffer
	a := shell(t, 1, `read line; echo got "$line"`, func(c *Config) {
		c.Stdin = r
		c.Logs.Stdout = &out
	})
	if err := a.Run(t.Context()); err != nil || out.String() != "got hello\n" {
		t.Errorf("%q, %v", &out, err)
	}
}

// TestSlowFailure: the report has, beside the worker that was first seen to fail, one that had
// written its error file and was slow to exit, but not one without a failure.
func TestSlowFailure(t *testing.T) {
	a := shell(t, 3, `
case $RANK in
0)
	printf '{"message": "the cause", "timestamp": 100}' >$TORCHELASTIC_ERROR_FILE
	touch $PIPE
	sleep 100 ;;
1)
	while [ ! -e $PIPE ]; do sleep 0.01; done
	exit 3 ;;
esac
sleep 100`, func(c *Config) { c.Env = append(c.Env, "PIPE="+t.TempDir()+"/written") })
	var failed *FailedError
	if err := a.Run(t.Context()); !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if len(failed.Failures) != 2 || failed.Root().Rank != 0 || failed.Root().Message != "the cause" {
		t.Errorf("%+v", failed.Failures)
	}
	if report := failed.Report(); !strings.Contains(report, "rank      : 1") || strings.Contains(report, "NO_OTHER_FAILURES") {
		t.Error(report)
	}
}

// TestStoreAddrs: the workers of a job of one node reach their store also at the address that the
// command line names, in each round.
func TestStoreAddrs(t *testing.T) {
	network, err := sandbox.Net()
	if err != nil {
		t.Fatal(err)
	}
	port, err := identity.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	at := net.JoinHostPort(network+"1", strconv.Itoa(port))
	f := &fake{}
	f.life = func(ctx context.Context, s *launch.Spec) error {
		host, _ := lookup(s.Env, "MASTER_ADDR")
		if port, _ := lookup(s.Env, "MASTER_PORT"); net.JoinHostPort(host, port) != at {
			t.Errorf("the worker is told %s:%s", host, port)
		}
		conn, err := net.Dial("tcp", at)
		if err != nil {
			t.Error(err)
			return nil
		}
		c, err := tcpstore.NewClient(conn, false)
		if err == nil {
			defer c.Close()
			_, err = c.Add(ctx, "k", 1)
		}
		if err != nil {
			t.Error(err)
		}
		if count, _ := lookup(s.Env, "TORCHELASTIC_RESTART_COUNT"); count == "0" {
			return &launch.ExitError{Code: 1}
		}
		return nil
	}
	a := newAgent(t, Config{Rendezvous: new(Single), Launcher: f, MaxRestarts: 1, StoreAddrs: []string{at}})
	if err := a.Run(t.Context()); err != nil || len(f.specs) != 2 {
		t.Errorf("%v, %d workers", err, len(f.specs))
	}
}
