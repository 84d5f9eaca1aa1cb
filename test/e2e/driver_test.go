package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Jobs that are not elastic, and the end of drivers.

// TestInterrupted: a job ends after Ctrl-C in a terminal, which signals hvdrun's whole process
// group, and after a signal to hvdrun only. What its workers have started ends too.
func TestInterrupted(t *testing.T) {
	for name, test := range map[string]struct {
		signal syscall.Signal
		group  bool
	}{
		"Ctrl-C":  {syscall.SIGINT, true},
		"SIGTERM": {syscall.SIGTERM, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, Job{
				Flags:   flags("-np", "4", "--min-np", "1", "--drain-timeout", "2s"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
				Trainer: []string{"-steps", "20000", "-step-time", "10ms", "-orphan"},
			})
			awaitStep(t, r, 10)
			// They are hvdrun, its guard, four workers and their four children, and sometimes the
			// discovery script.
			if n := len(r.Processes()); n < 10 {
				t.Errorf("%d processes are there of the job, want at least 10", n)
			}
			to := r.PID
			if test.group {
				to = -to
			}
			if err := syscall.Kill(to, test.signal); err != nil {
				t.Fatal(err)
			}
			res := finish(t, r, 128+int(test.signal), 20000)
			for _, e := range res.Events {
				if e.Name == "worker_exited" && e.Cause != "stopped" {
					t.Errorf("%s:%d ended by %+v, want it stopped", e.Host, *e.Slot, e)
				}
			}
		})
	}
}

// TestStoppedDriver: if the driver is stopped by a signal, commands do not wait for it: they name
// it and say what to do.
func TestStoppedDriver(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "job")
	driver, log := background(t, "-np", "1", "--job-dir", dir, "sh", "-c", "echo begun; exec sleep 1000000")
	if !follow.Await(t, func() bool { return strings.Contains(follow.Tail(log, 1<<12), "begun") }) {
		t.Fatalf("no job: %s", follow.Tail(log, 1<<12))
	}
	if err := sandbox.Suspend(driver.Process.Pid); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("kill -CONT %d", driver.Process.Pid)
	for _, args := range [][]string{{"status"}, {"stop"}, {"stop", "--now"}, {"scale", "--min-np", "1"}, {"stacks"}, {"resume"}} {
		out, err := exec.Command(binaries.Hvdrun, append(args, dir)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v: %v: %s; want %q", args, err, out, want)
		}
	}
	if err := driver.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := driver.Process.Signal(syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	if err := driver.Wait(); driver.ProcessState.ExitCode() != 128+int(syscall.SIGQUIT) {
		t.Errorf("it ended with %v", err)
	}
}

// TestOutputFiles: when another worker gets a rank, the rank's files are continued.
func TestOutputFiles(t *testing.T) {
	dir := t.TempDir()
	run(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1", "--output-filename", dir),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-exit", "localhost:0@step=5:leave"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 1, Zero: "127.0.0.1:0", First: 1},
	})
	b, err := os.ReadFile(dir + "/rank.0/stdout")
	if err != nil {
		t.Fatal(err)
	}
	chain := uint64(0)
	for s := 1; s <= 10; s++ {
		chain = steplog.Chain(chain, s)
	}
	want := fmt.Sprintf("[0]<stdout>:leaving: as scheduled\n[0]<stdout>:rank=0 size=1 step=10 chain=%s weights=%s\n",
		steplog.FormatChain(chain), steplog.Digest(steplog.Weights(10, steplog.Size)))
	if string(b) != want {
		t.Errorf("rank.0/stdout holds %q, want %q", b, want)
	}
}
