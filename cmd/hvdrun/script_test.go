package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"hvdrun": main, "toil": toil})
}

// The scripts in testdata/script run the command as people do.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// A program under the race detector would otherwise wait a second before each exit 0.
			env.Setenv("GORACE", os.Getenv("GORACE")+" atexit_sleep_ms=10")
			// An address that another copy of these tests, beside this one, does not use.
			env.Setenv("XDG_STATE_HOME", filepath.Join(env.WorkDir, ".state"))
			run := filepath.Join(env.WorkDir, ".run")
			env.Setenv("XDG_RUNTIME_DIR", run)
			env.Setenv("LOOPBACK", fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(255), 1+rand.IntN(254)))
			return os.Mkdir(run, 0o700)
		},
		Condition: func(name string) (bool, error) {
			if name != "root" { // who may give files to other users
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
