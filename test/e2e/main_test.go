package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Names of this machine that count as separate hosts.
const (
	hostA = "localhost"
	hostB = "127.0.0.1"
	hostC = "127.0.0.2"
	hostD = "127.0.0.3"
)

// Short names for the types of package follow.
type (
	Job     = follow.Job
	Stage   = follow.Stage
	Running = follow.Running
	Result  = follow.Result
	Event   = follow.Event
)

var binaries follow.Programs

// parallel is the number of tests that run at a time. Their jobs mostly wait, so it can exceed the
// number of cores.
const parallel = "4"

func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", parallel); err != nil { // a flag of the command line, parsed later, overrides it
		panic(err)
	}
	os.Exit(sandbox.Run(m, func(dir string) (err error) {
		if network, err = sandbox.Net(); err != nil {
			return err
		}
		binaries, err = follow.Build(context.Background(), dir, buildFlags...)
		return err
	}))
}

// network is the prefix of addresses that no other process uses.
var network string

var lastAddress atomic.Uint32

// address returns a new address with that prefix, for a test that listens on fixed ports.
func address() string { return fmt.Sprint(network, lastAddress.Add(1)%254+1) }

// background starts hvdrun beside the test's job, with its log in a new file. It ends with the
// test.
func background(t *testing.T, args ...string) (cmd *exec.Cmd, log string) {
	t.Helper()
	cmd = exec.Command(binaries.Hvdrun, args...)
	f, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // fails if it has ended
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("hvdrun %s\n%s", args[0], follow.Tail(f.Name(), 2000))
		}
	})
	return cmd, f.Name()
}

// flags returns the flags of all jobs and more: discovery runs often, and failed slots do not
// return unless a test changes that.
func flags(more ...string) []string {
	return append([]string{"--discovery-interval", "50ms", "--blacklist-cooldown-range", "100,100", "--log-level", "debug"}, more...)
}

// on formats hosts for the script: on(hostA, 2, hostB, 1).
func on(hosts ...any) string {
	var words []string
	for i := 0; i < len(hosts); i += 2 {
		words = append(words, fmt.Sprintf("%v:%v", hosts[i], hosts[i+1]))
	}
	return strings.Join(words, " ")
}

// start starts a job, and ends it with the test.
func start(t *testing.T, j Job) *Running {
	t.Helper()
	return binaries.Test(t, j)
}

// finish waits for the job's end and checks what must hold for every job.
func finish(t *testing.T, r *Running, status, steps int) Result {
	t.Helper()
	res, err := r.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if res.Hung {
		t.Fatal("the job has not ended at the limit of the run of tests, and was killed")
	}
	if res.Status != status {
		t.Errorf("exit status %d, want %d", res.Status, status)
	}
	if len(res.Left) > 0 {
		t.Errorf("processes are left: %q", res.Left)
	}
	if err := steplog.Check(res.Lines, steps, steplog.Size); err != nil {
		t.Error(err)
	}
	return res
}

// run runs a job that must succeed. It checks every step recorded by rank 0, the number of resets,
// and that all workers of the last world finish with the same, correct weights.
func run(t *testing.T, j Job, worlds []steplog.World) Result {
	t.Helper()
	t.Parallel()
	last := worlds[len(worlds)-1]
	j.Trainer = append(slices.Clip(j.Trainer), "-steps", fmt.Sprint(last.To))
	res := finish(t, start(t, j), 0, last.To)
	if err := steplog.CheckWorlds(res.Lines, worlds); err != nil {
		t.Error(err)
	}
	if last.Generation != 0 {
		if n := follow.Count(res.Events, "reset"); n != int(last.Generation)-1 {
			t.Errorf("%d resets, want %d", n, last.Generation-1)
		}
	}
	ends := 0
	for _, l := range res.Lines {
		if l.Event == steplog.End {
			ends++
		}
	}
	if ends != last.Size {
		t.Errorf("%d workers came to the end, want %d", ends, last.Size)
	}
	return res
}

// exits returns the events of the workers that ended in a slot, "host:slot".
func exits(res Result, where string) []Event {
	var found []Event
	for _, e := range res.Events {
		if e.Name == "worker_exited" && fmt.Sprintf("%s:%d", e.Host, *e.Slot) == where {
			found = append(found, e)
		}
	}
	return found
}

// says checks that hvdrun's output contains the words.
func says(t *testing.T, res Result, words string) {
	t.Helper()
	if !strings.Contains(res.Output, words) {
		t.Errorf("the output does not say %q", words)
	}
}
