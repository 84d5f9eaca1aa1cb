package launch_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/launch/launchtest"
	"github.com/hvdrun/hvdrun/plan"
)

func TestLocal(t *testing.T) {
	launchtest.Run(t, func(*testing.T) launch.Launcher { return launch.Local{} })
}

func TestExitErrorText(t *testing.T) {
	for want, err := range map[string]*launch.ExitError{
		"exited with code 7":                   {Code: 7},
		"was killed by signal 9 (killed)":      {Code: 137, Signal: syscall.SIGKILL},
		"was killed by signal 15 (terminated)": {Code: 143, Signal: syscall.SIGTERM},
	} {
		if err.Error() != want {
			t.Errorf("got %q, want %q", err.Error(), want)
		}
	}
}

func TestStartErrorText(t *testing.T) {
	dir := t.TempDir()
	noInterpreter := filepath.Join(dir, "script")
	if err := os.WriteFile(noInterpreter, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "data"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		spec *launch.Spec
		want string
	}{
		{&launch.Spec{Command: []string{"no-such"}}, `launch: cannot start "no-such": found neither in PATH nor in its working directory`},
		{&launch.Spec{Command: []string{"/no/such"}}, `launch: cannot start "/no/such": no such file or directory`},
		{&launch.Spec{}, `launch: cannot start "": the command is empty`},
		{&launch.Spec{Command: []string{"data"}, Env: []string{"PATH=" + dir}},
			fmt.Sprintf(`launch: cannot start "data": %s: permission denied`, filepath.Join(dir, "data"))},
		{&launch.Spec{Command: []string{"true"}, Dir: "/no/such"},
			`launch: cannot start "true": the working directory must exist on every host (it is the one in which hvdrun was started, ` +
				"or dir of the job's file): stat /no/such: no such file or directory"},
		{&launch.Spec{Command: []string{noInterpreter}},
			fmt.Sprintf(`launch: cannot start %q: its interpreter /no/such/interpreter is missing: no such file or directory`, noInterpreter)},
		{&launch.Spec{Command: []string{"true", "a\x00b"}}, `launch: cannot start "true": invalid argument`},
	} {
		err := launch.Local{}.Run(t.Context(), test.spec, nil)
		if err == nil || err.Error() != test.want {
			t.Errorf("got  %v\nwant %s", err, test.want)
		}
	}
}

// TestLocalLooksInPathOfWorker: a program is looked up as by the worker's own shell: in the
// worker's PATH, whose relative entries start in the worker's directory.
func TestLocalLooksInPathOfWorker(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "tools"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tools", "prog"), []byte("#!/bin/sh\nexit 9\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/none:" + filepath.Join(dir, "tools"), "tools"} {
		s := &launch.Spec{Command: []string{"prog"}, Dir: dir, Env: []string{"PATH=" + path}}
		err := launch.Local{}.Run(t.Context(), s, nil)
		var exit *launch.ExitError
		if !errors.As(err, &exit) || exit.Code != 9 {
			t.Errorf("PATH=%s: %v", path, err)
		}
	}
}

// TestLocalInheritsNothing: a worker inherits none of the driver's descriptors. If one held the
// guard's pipe, the guard would never run.
func TestLocalInheritsNothing(t *testing.T) {
	guard, err := proc.StartGuard(plan.EnvRunID, "inherit_"+rand.Text())
	if err != nil {
		t.Fatal(err)
	}
	defer guard.Close()
	var out strings.Builder
	err = launch.Local{}.Run(t.Context(), &launch.Spec{
		Command: []string{"/bin/sh", "-c", "echo /proc/$$/fd/*"}, Stdout: &out,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Descriptors that this test itself inherited without close-on-exec are passed on. The shell
	// opens the lowest free one to list the directory.
	given := func(fd int) bool {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		return err == nil && flags&unix.FD_CLOEXEC == 0
	}
	lowest := 3
	for given(lowest) {
		lowest++
	}
	for _, path := range strings.Fields(out.String()) {
		fd, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			t.Fatal(err)
		}
		if fd > lowest && !given(fd) {
			t.Errorf("descriptor %d is inherited", fd)
		}
	}
}

// TestLocalDoesNotWaitForStrangers: a daemon without mark, group or parent keeps the output open
// and writes to it. It cannot be found, but Run returns, and the daemon gets a broken pipe.
func TestLocalDoesNotWaitForStrangers(t *testing.T) {
	pipe, await, gone := launchtest.HeldPipe(t)
	out := new(strings.Builder)
	incarnation := rand.Text()
	ended := make(chan error, 1)
	go func() {
		ended <- launch.Local{}.Run(t.Context(), &launch.Spec{
			Incarnation: incarnation,
			Command: []string{"/bin/sh", "-c", `
				exec 9>"$1"
				trap 'echo bye; exit 7' USR1
				(env -i setsid sh -c 'echo ready >&9; kill -USR1 "$1"; while echo x; do sleep 0.01; done' sh $$ &)
				while :; do sleep 0.01; done`, "sh", pipe},
			Env:    []string{"PATH=" + os.Getenv("PATH"), "HVD_INCARNATION=" + incarnation},
			Stdout: out,
		}, nil)
	}()
	await(1)
	if err := <-ended; err == nil || err.Error() != "exited with code 7" {
		t.Errorf("Run returned %v", err)
	}
	if !strings.Contains(out.String(), "bye\n") {
		t.Errorf("output %q", out.String())
	}
	gone()
}

// BenchmarkLocalExit measures the time from the death of a process, whose child holds the output,
// to the return of Run.
func BenchmarkLocalExit(b *testing.B) {
	var total time.Duration
	for b.Loop() {
		ready := make(writes, 1)
		ended := make(chan time.Time, 1)
		var pid int
		started := make(chan struct{})
		go func() {
			_ = launch.Local{}.Run(context.Background(), &launch.Spec{
				Command: []string{"/bin/sh", "-c", "sleep 1000 & echo ready; wait"}, Stdout: ready,
			}, func(p int) { pid = p; close(started) })
			ended <- time.Now()
		}()
		<-started
		<-ready
		from := time.Now()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			b.Fatal(err)
		}
		total += (<-ended).Sub(from)
	}
	b.ReportMetric(float64(total.Microseconds())/float64(b.N), "µs/exit")
}

type writes chan string

func (w writes) Write(p []byte) (int, error) {
	w <- string(p)
	return len(p), nil
}

// TestLocalTellsWhatIsLeft: Local reports the processes that a program has left behind and this
// process has inherited.
func TestLocalTellsWhatIsLeft(t *testing.T) {
	told := 0
	s := &launch.Spec{
		Incarnation: "left", Command: []string{"sh", "-c", "sleep 600 >/dev/null 2>&1 & exit 0"},
		Env:  []string{"PATH=" + os.Getenv("PATH"), "HVD_INCARNATION=left"},
		Left: func(processes []string) { told += len(processes) },
	}
	if err := (launch.Local{}).Run(t.Context(), s, nil); err != nil || told != 1 {
		t.Errorf("%v, told of %d processes", err, told)
	}
	text := launch.LeftText([]string{"a", "b", "c", "d", "e", "f"})
	if want := "ended with status 0 and left processes behind, which were ended with it: a; b; c; d; and 2 more"; text != want {
		t.Errorf("%q", text)
	}
}
