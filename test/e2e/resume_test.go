package e2e

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Jobs whose driver is killed and resumed.

// awaitStep blocks until the workers have completed a step.
func awaitStep(t *testing.T, r *Running, step int) {
	t.Helper()
	err := r.AwaitLines(t.Context(), func(lines []steplog.Line) bool {
		return slices.ContainsFunc(lines, func(l steplog.Line) bool { return l.Step >= step })
	})
	if err != nil {
		t.Fatal(err)
	}
}

// resume starts a new driver for a job whose driver was killed.
func resume(t *testing.T, r *Running) *Running {
	t.Helper()
	next, err := r.Resume("")
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// TestResume: the workers continue without a driver and do not notice the next one: the job has one
// world from the first step to the last, and one line per event.
func TestResume(t *testing.T) {
	t.Parallel()
	const steps = 100
	r := start(t, Job{
		Flags: []string{"-np", "4", "--min-np", "1", "-H", on(hostA, 2) + "," + on(hostB, 2), "--orphan-timeout", "10m"},
		Trainer: []string{"-steps", strconv.Itoa(steps), "-step-time", "1ms", "-log-all",
			"-gate", "20=without.1", "-gate", "40=without.2", "-gate", "60=without.3", "-gate", "80=resumed"},
	})
	for n := 1; n <= 3; n++ {
		awaitStep(t, r, n*20)
		r.KillDriver()
		mark(t, r, fmt.Sprint("without.", n))
		awaitGrowth(t, r, n*20+20)
		r = resume(t, r)
		if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "resumed") == n }); err != nil {
			t.Fatal(err)
		}
	}
	mark(t, r, "resumed")
	res := finish(t, r, 0, steps)
	if worlds := follow.Count(res.Events, "world_published"); worlds != 1 || follow.Count(res.Events, "reset") != 0 {
		t.Errorf("%d worlds and %d resets, want one world", worlds, follow.Count(res.Events, "reset"))
	}
	for name, want := range map[job.EventName]int{"worker_started": 4, "worker_ready": 4, "worker_exited": 4, "first_commit": 1, "job_done": 1} {
		if n := follow.Count(res.Events, name); n != want {
			t.Errorf("%d events %s, want %d", n, name, want)
		}
	}
	for rank := range 4 {
		if n := strings.Count(res.Output, fmt.Sprintf("[%d]<stdout>:rank=%d size=4 step=%d ", rank, rank, steps)); n != 1 {
			t.Errorf("rank %d is said to have ended %d times", rank, n)
		}
	}
}

// mark creates a file in the job's directory.
func mark(t *testing.T, r *Running, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(r.Dir, name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// awaitGrowth blocks until training has reached a step, with or without a driver.
func awaitGrowth(t *testing.T, r *Running, step int) {
	t.Helper()
	last := 0
	follower := steplog.Follow[steplog.Line](r.StepLogPath())
	if !follow.Await(t, func() bool {
		lines, err := follower.Next()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lines {
			last = max(last, l.Step)
		}
		return last >= step
	}) {
		t.Fatalf("training has not come to step %d, but %d", step, last)
	}
}

// TestResumeFindsDeaths: a worker dies while the job has no driver; the next driver detects it and
// replaces the worker.
func TestResumeFindsDeaths(t *testing.T) {
	t.Parallel()
	const steps = 40
	r := start(t, Job{
		Flags: []string{"-np", "3", "--min-np", "1", "-H", on(hostA, 2) + "," + on(hostB, 1), "--orphan-timeout", "10m",
			"--blacklist-cooldown-range", "0.1,0.1"},
		Trainer: []string{"-steps", strconv.Itoa(steps), "-step-time", "1ms", "-gate", "20=replaced"},
	})
	awaitStep(t, r, 20)
	victim := pidAt(t, r, hostB)
	r.KillDriver()
	if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r = resume(t, r)
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "worker_started") == 4 }); err != nil {
		t.Error(err)
	}
	mark(t, r, "replaced")
	res := finish(t, r, 0, steps)
	for _, e := range res.Events {
		if e.Name == "worker_exited" && (e.Cause == "failed") != (e.PID == victim) {
			t.Errorf("%+v", e)
		}
	}
	if n := follow.Count(res.Events, "worker_started"); n != 4 {
		t.Errorf("%d workers were started, want 4", n)
	}
}

// TestResumeFindsDeadAgent: an agent dies with its workers while the job has no driver. The next
// driver detects it soon and starts another agent.
func TestResumeFindsDeadAgent(t *testing.T) {
	t.Parallel()
	const steps = 40
	r := start(t, Job{
		Flags: []string{"-np", "4", "--min-np", "1", "-H", on(hostA, 2) + "," + on(hostB, 2), "--orphan-timeout", "10m",
			"--agent-timeout", "10m", "--blacklist-cooldown-range", "0.1,0.1"},
		Trainer: []string{"-steps", strconv.Itoa(steps), "-step-time", "1ms", "-gate", "20=replaced"},
	})
	awaitStep(t, r, 20)
	r.KillDriver()
	killed := false
	for _, pid := range follow.Processes(r.Tag) {
		if strings.HasSuffix(follow.CommandLine(pid), " agent --job") && !killed {
			killed = syscall.Kill(pid, syscall.SIGKILL) == nil
		}
	}
	if !killed {
		t.Fatal("there is no agent")
	}
	r = resume(t, r)
	// Nothing must wait for the agent timeout, which is longer than the test's.
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		return follow.Count(events, "worker_exited") >= 2 && follow.Count(events, "worker_started") >= 6
	}); err != nil {
		t.Errorf("two workers were lost, and not found to be: %v", err)
	}
	mark(t, r, "replaced")
	res := finish(t, r, 0, steps)
	lost := 0
	for _, e := range res.Events {
		if e.Name == "worker_exited" && e.Cause == "failed" {
			lost++
		}
	}
	if lost != 2 {
		t.Errorf("%d workers failed, want 2", lost)
	}
}

// TestJobFolder: the secrets of a job are in files that only its owner can read and that are
// removed when the job has ended. They are not in the job's folder, which can be in a home
// directory that other machines see.
func TestJobFolder(t *testing.T) {
	t.Parallel()
	r := controlled(t)
	_, secret, _ := strings.Cut(r.Tag, "=") // as good as any other secret in the environment
	folder, err := r.Folder()
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(folder); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("%s has mode %v, %v", folder, fi.Mode(), err)
	}
	look := func(dir string, want bool) {
		t.Helper()
		found := false
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			if fi, err := d.Info(); err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("%s has mode %v, %v", path, fi.Mode(), err)
			}
			if d.Type() == os.ModeSocket {
				return nil
			}
			b, err := os.ReadFile(path)
			found = found || strings.Contains(string(b), secret) || filepath.Base(path) == "authority"
			return err
		})
		if err != nil || found != want {
			t.Errorf("secrets in %s: %v, want %v; %v", dir, found, want, err)
		}
	}
	look(r.StateDir(), false)
	look(r.RuntimeDir(), true)
	for _, pid := range r.Processes() {
		if line := follow.CommandLine(pid); strings.Contains(line, secret) || regexp.MustCompile(`[A-Za-z0-9_-]{100}`).MatchString(line) {
			t.Errorf("a secret is among the arguments of %d: %s", pid, line)
		}
	}
	if out, err := hvdrun(r, "resume", folder); err == nil || !strings.Contains(out, "its own is running") {
		t.Errorf("resume of a job that runs: %v, %s", err, out)
	}
	if out, err := hvdrun(r, "jobs"); err != nil || !strings.Contains(out, filepath.Base(folder)+"  running") {
		t.Errorf("jobs: %v, %s", err, out)
	}
	if err := syscall.Kill(r.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	finish(t, r, 128+15, controlledSteps)
	look(r.StateDir(), false)
	look(r.RuntimeDir(), false)
	if out, err := hvdrun(r, "resume", filepath.Base(folder)[:6]); err == nil || !strings.Contains(out, "the job has ended") {
		t.Errorf("resume of a job that has ended: %v, %s", err, out)
	}
	if out, err := hvdrun(r, "jobs", "--json"); err != nil || !strings.Contains(out, `"state": "stopped"`) {
		t.Errorf("jobs: %v, %s", err, out)
	}
}

// TestResumeWithoutKey: another driver can continue with what a dead driver left, but not with a
// copy of the job's folder, nor with the folder once the key is gone.
func TestResumeWithoutKey(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   []string{"-np", "2", "--min-np", "1", "-H", on(hostA, 2), "--orphan-timeout", "10m"},
		Trainer: []string{"-steps", "20", "-step-time", "1ms", "-log-all", "-gate", "10=resumed"},
	})
	awaitStep(t, r, 10)
	r.KillDriver()
	folder, err := r.Folder()
	if err != nil {
		t.Fatal(err)
	}
	run := filepath.Join(r.RuntimeDir(), "hvdrun")
	if err := os.Rename(run, run+".stolen"); err != nil {
		t.Fatal(err)
	}
	if out, err := hvdrun(r, "resume", folder); err == nil || !strings.Contains(out, "cannot be resumed: its key in "+run) {
		t.Errorf("resume without the key: %v, %s", err, out)
	}
	if out, err := hvdrun(r, "jobs"); err != nil || !strings.Contains(out, filepath.Base(folder)+"  failed") {
		t.Errorf("jobs: %v, %s", err, out)
	}
	if err := os.Rename(run+".stolen", run); err != nil {
		t.Fatal(err)
	}
	r = resume(t, r)
	mark(t, r, "resumed")
	finish(t, r, 0, 20)
}

// hvdrun runs a subcommand of hvdrun for the job and returns its output.
func hvdrun(r *Running, args ...string) (string, error) {
	out, err := r.Subcommand(context.Background(), args...).CombinedOutput()
	return string(out), err
}
