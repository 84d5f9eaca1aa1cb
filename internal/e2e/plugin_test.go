package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/trainee/diary"
)

// buildOutside builds examples/discovery-plugin where another team would have it: in a folder of its own, with nothing but
// a replace that says where this module is.
func buildOutside(t *testing.T) (program string) {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "examples", "discovery-plugin"))); err != nil {
		t.Fatal(err)
	}
	program = filepath.Join(dir, "inventory")
	for _, args := range [][]string{
		{"mod", "edit", "-replace", "github.com/hvdrun/hvdrun=" + root}, {"vet", "."}, {"build", "-o", program, "."},
	} {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return program
}

// TestPluginKilled: a plugin from outside is killed in mid-job, which costs a line in the log. Its next process pushes a
// host, without a poll to wait for.
func TestPluginKilled(t *testing.T) {
	t.Parallel()
	program := buildOutside(t)
	machines := filepath.Join(t.TempDir(), "machines.json")
	list := func(text string) {
		t.Helper()
		if err := os.WriteFile(machines+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(machines+".new", machines); err != nil {
			t.Fatal(err)
		}
	}
	list(`[{"name": "localhost", "gpus": 2, "state": "up"}]`)
	r := start(t, Job{
		Flags: flags("-np", "2", "--min-np", "1", "--discovery-plugin", program,
			"--discovery-config", "inventory="+machines, "--discovery-config", "every=1ms"),
		Trainee: []string{"-steps", "15", "-gate", "5=killed", "-hold", "10"},
		Limit:   time.Minute,
	})
	reach := func(step int) {
		t.Helper()
		if err := r.AwaitLines(t.Context(), func(lines []diary.Line) bool {
			return len(lines) > 0 && lines[len(lines)-1].Step >= step
		}); err != nil {
			t.Fatal(err)
		}
	}
	reach(5)
	killed := 0
	for _, pid := range Processes(program) {
		if strings.HasPrefix(commandLine(pid), program) { // hvdrun has it among its arguments
			killed++
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	if killed != 1 {
		t.Fatalf("%d processes of the plugin", killed)
	}
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return Count(events, "discovery_failed") > 0 }); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.Dir, "killed"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	reach(10)
	list(fmt.Sprintf(`[{"name": "localhost", "gpus": 2, "state": "up"}, {"name": "%s", "gpus": 1, "state": "up"}]`, hostB))
	res := finish(t, r, 0, 15)
	if err := diary.CheckWorlds(res.Lines, []diary.World{
		{From: 1, To: 10, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 11, To: 15, Generation: 2, Size: 3, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
	if n := Count(res.Events, "discovery_failed"); n != 1 {
		t.Errorf("%d failures of the discovery", n)
	}
	says(t, res, "was killed by signal 9 (killed)")
	if left := Processes(program); len(left) > 0 {
		t.Errorf("the plugin is left: %v", left)
	}
}

// TestPluginDiesWithDriver: a driver that is killed leaves no plugin.
func TestPluginDiesWithDriver(t *testing.T) {
	t.Parallel()
	program := buildOutside(t)
	machines := filepath.Join(t.TempDir(), "machines.json")
	if err := os.WriteFile(machines, []byte(`[{"name": "localhost", "gpus": 1, "state": "up"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, Job{
		Flags:   flags("-np", "1", "--discovery-plugin", program, "--discovery-config", "inventory="+machines),
		Command: []string{"sleep", "600"},
		Limit:   time.Minute,
	})
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return Count(events, "worker_started") > 0 }); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Wait(); err != nil {
		t.Fatal(err)
	}
	if left := r.AwaitGone(20 * time.Second); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
