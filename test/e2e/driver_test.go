package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Jobs that are not elastic, and the end of drivers.

func TestCommandThatKnowsNothing(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{Flags: []string{"-np", "2"}, Command: []string{"hostname"}}), 0, 0)
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(res.Output), "\n")
	slices.Sort(lines)
	want := []string{"[0]<stdout>:" + name, "[1]<stdout>:" + name}
	said := slices.DeleteFunc(slices.Clone(lines), func(line string) bool {
		return strings.Contains(line, "none has used hvdrun") || strings.Contains(line, "OMP_NUM_THREADS is not set")
	})
	if !slices.Equal(said, want) || len(lines) != len(want)+2 {
		t.Errorf("got %q, want %q and two remarks", lines, want)
	}
}

func TestFixedHosts(t *testing.T) {
	run(t, Job{
		Flags: []string{"-np", "4", "-H", on(hostA, 2) + "," + on(hostB, 2)},
	}, []steplog.World{
		{From: 1, To: 10, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
	})
}

// TestFailureWithoutElastic: the first failure ends the job and is reported.
func TestFailureWithoutElastic(t *testing.T) {
	for how, says := range map[string]string{
		"exit7": "host localhost slot 1 rank 1 exited with code 7",
		"kill":  "host localhost slot 1 rank 1 was killed by signal 9 (killed)",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			res := finish(t, start(t, Job{
				Flags:   []string{"-np", "3"},
				Trainer: []string{"-exit", "localhost:1@step=5:" + how},
			}), 1, 20)
			for _, words := range []string{"one or more processes exited with non-zero status", says} {
				if !strings.Contains(res.Output, words) {
					t.Errorf("the output does not say %q", words)
				}
			}
		})
	}
}

// endless starts a job that trains for at least 40 s and whose workers start processes that would
// outlive them.
func endless(t *testing.T, more ...string) *Running {
	t.Helper()
	r := start(t, Job{
		Flags:   flags(append(more, "-np", "4", "--min-np", "1", "--drain-timeout", "2s")...),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainer: []string{"-steps", "20000", "-step-time", "10ms", "-orphan"},
	})
	err := r.AwaitLines(t.Context(), func(lines []steplog.Line) bool {
		return len(lines) > 0 && lines[len(lines)-1].Step >= 10
	})
	if err != nil {
		t.Fatal(err)
	}
	// The processes are hvdrun, its guard, four workers and their four children, and sometimes the
	// discovery script.
	if n := len(r.Processes()); n < 10 {
		t.Errorf("%d processes are there of the job, want at least 10", n)
	}
	return r
}

// TestDriverKilled: the workers of a killed driver end after their agents have waited for another
// one.
func TestDriverKilled(t *testing.T) {
	t.Parallel()
	r := endless(t, "--orphan-timeout", "10s")
	if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-r.Ended()
	if left := r.AwaitGone(0); len(left) > 0 {
		t.Errorf("after hvdrun was killed there are still %q", left)
	}
	if _, err := r.Wait(); err != nil {
		t.Error(err)
	}
}

// TestInterrupted: a job ends after Ctrl-C in a terminal, which signals hvdrun's whole process
// group, and after a signal to hvdrun only.
func TestInterrupted(t *testing.T) {
	for name, test := range map[string]struct {
		signal syscall.Signal
		group  bool
	}{
		"Ctrl-C":  {syscall.SIGINT, true},
		"SIGINT":  {syscall.SIGINT, false},
		"SIGTERM": {syscall.SIGTERM, false},
		"SIGQUIT": {syscall.SIGQUIT, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := endless(t)
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
	if err := driver.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if !follow.Await(t, func() bool { _, state, _ := proc.Born(driver.Process.Pid); return state == 'T' }) {
		t.Fatal("it is not stopped")
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
