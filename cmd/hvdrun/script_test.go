package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) {
	testscript.Main(sandbox.Tests{M: m}, map[string]func(){"hvdrun": main, "silent": silent})
}

// silent is a program that listens at the given addresses, paths of unix sockets or host:port, and
// never answers. It prints a line when it listens, and writes one to the pipe up for each
// connection on which something arrives.
func silent() {
	for _, at := range os.Args[1:] {
		network := "unix"
		if strings.Contains(at, ":") {
			network = "tcp"
		}
		ln, err := net.Listen(network, at)
		if err != nil {
			panic(err)
		}
		go func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					panic(err)
				}
				go func() {
					if n, _ := conn.Read(make([]byte, 1)); n > 0 {
						if err := os.WriteFile("up", []byte("asked\n"), 0); err != nil {
							panic(err)
						}
					}
					_, _ = io.Copy(io.Discard, conn)
				}()
			}
		}()
	}
	fmt.Println("listening")
	select {}
}

// TestScripts runs the scripts in testdata/script, which use the command as people do.
func TestScripts(t *testing.T) {
	network, err := sandbox.Net()
	if err != nil {
		t.Fatal(err)
	}
	var hosts atomic.Uint32
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// Without this, a program under the race detector waits a second before each exit with
			// status 0.
			env.Setenv("GORACE", os.Getenv("GORACE")+" atexit_sleep_ms=10")
			env.Setenv("OMP_NUM_THREADS", "1") // otherwise jobs say that they set it
			env.Setenv("XDG_STATE_HOME", filepath.Join(env.WorkDir, ".state"))
			run := filepath.Join(env.WorkDir, ".run")
			env.Setenv("XDG_RUNTIME_DIR", run)
			env.Setenv("LOOPBACK", fmt.Sprint(network, hosts.Add(1)))
			return os.Mkdir(run, 0o700)
		},
		Condition: func(name string) (bool, error) {
			if name != "root" { // root can give files to other users
				return false, fmt.Errorf("unknown condition %s", name)
			}
			return os.Geteuid() == 0, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"status": exitStatus},
	})
}

// exitStatus is "status N command args…": the command exits with N.
func exitStatus(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: status N command args…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}
