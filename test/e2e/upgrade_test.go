package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/follow"
)

// earlier is the version from which jobs are taken over if the repository has no tags.
const earlier = "82c066d04d5d"

// earlierHvdrun builds hvdrun of the last tag before this commit. It skips the test if the
// repository does not have its sources.
func earlierHvdrun(t *testing.T) string {
	t.Helper()
	git := func(args ...string) (string, error) {
		out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", "../.."}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	version, err := git("describe", "--tags", "--abbrev=0", "HEAD^")
	if err != nil {
		version = earlier
	}
	if _, err := git("cat-file", "-e", version+"^{commit}"); err != nil {
		t.Skipf("this is no clone with the history: it does not have %s", version)
	}
	dir := t.TempDir()
	sources := filepath.Join(dir, "sources")
	if err := os.Mkdir(sources, 0o700); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "sources.tar")
	if _, err := git("archive", "-o", archive, version); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "tar", "-xf", archive, "-C", sources).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program := filepath.Join(dir, "hvdrun")
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", program, "./cmd/hvdrun")
	build.Dir = sources
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// TestUpgrade: this version continues a job that an earlier version began. It reads the job's
// journal and folder, attaches to the agents, which still run the earlier version, and starts a
// worker through one of them when one dies.
func TestUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds another version of hvdrun")
	}
	t.Parallel()
	const steps = 80
	old := binaries
	old.Hvdrun = earlierHvdrun(t)
	r := old.Test(t, Job{
		Flags: []string{"-np", "4", "--min-np", "1", "-H", on(hostA, 2) + "," + on(hostB, 2), "--orphan-timeout", "10m",
			"--discovery-interval", "50ms", "--blacklist-cooldown-range", "0.1,0.1"},
		Trainer: []string{"-steps", strconv.Itoa(steps), "-step-time", "1ms", "-gate", "20=without", "-gate", "40=resumed", "-gate", "60=replaced"},
	})
	awaitStep(t, r, 20)
	r.KillDriver()
	mark(t, r, "without")
	awaitGrowth(t, r, 40)
	folder, err := r.Folder()
	if err != nil {
		t.Fatal(err)
	}
	next, err := r.ResumeAs(r.Job, binaries, folder)
	if err != nil {
		t.Fatal(err)
	}
	await := func(what job.EventName, n int) {
		t.Helper()
		err := next.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, what) == n })
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	await("resumed", 1)
	pids := next.Processes()
	i := slices.IndexFunc(pids, func(pid int) bool { return strings.HasPrefix(follow.CommandLine(pid), binaries.Trainer) })
	if i < 0 {
		t.Fatal("no worker runs")
	}
	if err := syscall.Kill(pids[i], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await("worker_started", 5)
	mark(t, next, "resumed")
	mark(t, next, "replaced")
	finish(t, next, 0, steps)
}
