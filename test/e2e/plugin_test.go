package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// outside copies examples/discovery-plugin to dir, as another team would do, with only a replace
// directive for this module.
func outside(t *testing.T, dir string) {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "examples", "discovery-plugin"))); err != nil {
		t.Fatal(err)
	}
	golang(t, dir, "mod", "edit", "-replace", "github.com/hvdrun/hvdrun="+root)
}

func golang(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// inventory is the plugin, built outside this module once for all tests.
var inventory struct {
	sync.Mutex
	program string
}

// buildOutside builds the plugin outside this module and returns a copy that no other test runs.
func buildOutside(t *testing.T) (program string) {
	t.Helper()
	inventory.Lock()
	defer inventory.Unlock()
	if inventory.program == "" {
		dir := filepath.Join(filepath.Dir(binaries.Hvdrun), "outside")
		outside(t, dir)
		golang(t, dir, "build", "-ldflags=-w", "-o", "inventory", ".")
		inventory.program = filepath.Join(dir, "inventory")
	}
	program = filepath.Join(t.TempDir(), "inventory")
	if err := os.Link(inventory.program, program); err != nil {
		t.Fatal(err)
	}
	return program
}

// TestModuleOutside: the example passes its own tests outside this module.
func TestModuleOutside(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	outside(t, dir)
	golang(t, dir, "test", "-vet=all", "-ldflags=-w", ".")
}

// list atomically writes the plugin's list of machines, in the format of on.
func list(t *testing.T, path string, hosts ...any) {
	t.Helper()
	var machines []string
	for i := 0; i < len(hosts); i += 2 {
		machines = append(machines, fmt.Sprintf(`{"name": "%v", "gpus": %v, "state": "up"}`, hosts[i], hosts[i+1]))
	}
	if err := os.WriteFile(path+".new", []byte("["+strings.Join(machines, ",")+"]"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// TestPluginKilled: an external plugin is killed during a job; this only causes a line in the log.
// The plugin's next process pushes a host before the next poll.
func TestPluginKilled(t *testing.T) {
	t.Parallel()
	program := buildOutside(t)
	machines := filepath.Join(t.TempDir(), "machines.json")
	list(t, machines, hostA, 2)
	r := start(t, Job{
		Flags: flags("-np", "2", "--min-np", "1", "--discovery-plugin", program,
			"--discovery-config", "inventory="+machines, "--discovery-config", "every=1ms"),
		Trainer: []string{"-steps", "15", "-gate", "5=killed", "-hold", "10"},
	})
	reach := func(step int) {
		t.Helper()
		if err := r.AwaitLines(t.Context(), func(lines []steplog.Line) bool {
			return len(lines) > 0 && lines[len(lines)-1].Step >= step
		}); err != nil {
			t.Fatal(err)
		}
	}
	reach(5)
	killed := 0
	for _, pid := range follow.Processes(program) {
		if strings.HasPrefix(follow.CommandLine(pid), program) { // the command line of hvdrun contains the program too
			killed++
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	if killed != 1 {
		t.Fatalf("%d processes of the plugin", killed)
	}
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "discovery_failed") > 0 }); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.Dir, "killed"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	reach(10)
	list(t, machines, hostA, 2, hostB, 1)
	res := finish(t, r, 0, 15)
	if err := steplog.CheckWorlds(res.Lines, []steplog.World{
		{From: 1, To: 10, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 11, To: 15, Generation: 2, Size: 3, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
	if n := follow.Count(res.Events, "discovery_failed"); n != 1 {
		t.Errorf("%d failures of the discovery", n)
	}
	says(t, res, "was killed by signal 9 (killed)")
	if left := follow.Processes(program); len(left) > 0 {
		t.Errorf("the plugin is left: %v", left)
	}
}

// TestPush: all workers learn of a pushed change long before the next poll. The test logs the time
// from the change of the plugin's file until every worker's Commit has returned the change,
// including a step of 1 ms.
func TestPush(t *testing.T) {
	t.Parallel()
	const poll = 10 * time.Minute
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	program := buildOutside(t)
	machines := filepath.Join(t.TempDir(), "machines.json")
	list(t, machines, hostA, 2, hostB, 2)
	r := start(t, Job{
		Flags: []string{"-np", "4", "--min-np", "1", "--discovery-plugin", program, "--discovery-interval", poll.String(),
			"--discovery-config", "inventory=" + machines, "--discovery-config", "every=1ms"},
		Trainer: []string{"-steps", "1000000", "-step-time", "10ms", "-log-all"},
	})
	// of returns the lines of a generation that satisfy the condition, or nil if there are fewer
	// than size.
	of := func(lines []steplog.Line, generation uint64, size int, is func(steplog.Line) bool) (found []steplog.Line) {
		for _, l := range lines {
			if l.Generation == generation && is(l) {
				found = append(found, l)
			}
		}
		if len(found) < size {
			return nil
		}
		return found
	}
	entered := func(l steplog.Line) bool { return l.Event == steplog.Enter }
	updated := func(l steplog.Line) bool { return l.Outcome == steplog.Updated }
	var took []time.Duration
	generation := uint64(0) // of the newest world that was waited for
	// next waits for a newer world of size workers. Slots whose old workers end slowly can enter a
	// later world than others.
	next := func(size int) uint64 {
		t.Helper()
		if err := r.AwaitLines(t.Context(), func(lines []steplog.Line) bool {
			for _, l := range lines {
				if l.Generation > generation && l.Event == steplog.Enter && l.Size == size && of(lines, l.Generation, size, entered) != nil {
					generation = l.Generation
					return true
				}
			}
			return false
		}); err != nil {
			t.Fatal(err)
		}
		return generation
	}
	for range rounds {
		generation := next(4)
		await := func(generation uint64, size int, is func(steplog.Line) bool) (found []steplog.Line) {
			t.Helper()
			if err := r.AwaitLines(t.Context(), func(lines []steplog.Line) bool {
				found = of(lines, generation, size, is)
				return found != nil
			}); err != nil {
				t.Fatal(err)
			}
			return found
		}
		from := time.Now().UnixNano()
		list(t, machines, hostA, 2)
		var last int64
		for _, l := range await(generation, 4, updated) {
			last = max(last, l.Time)
		}
		took = append(took, time.Duration(last-from))
		next(2)
		list(t, machines, hostA, 2, hostB, 2)
	}
	r.Kill()
	if _, err := r.Wait(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(took)
	t.Logf("from the change to all of 4 workers: median %v of %v", took[rounds/2], took)
	if took[rounds-1] >= poll {
		t.Error("it took as long as a poll")
	}
}
