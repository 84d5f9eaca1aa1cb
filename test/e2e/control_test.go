package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Commands to running jobs, and their answers.

// statusOf returns the output of `hvdrun status --json` for the job.
func statusOf(t *testing.T, r *Running, args ...string) job.Status {
	t.Helper()
	out, err := hvdrun(r, append([]string{"status", "--json"}, args...)...)
	var s job.Status
	if err := errors.Join(err, json.Unmarshal([]byte(out), &s)); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return s
}

// slots formats the slots of a status: "host:slot state", and the rank if there is one.
func slots(s job.Status) string {
	var words []string
	for _, h := range s.Hosts {
		for _, slot := range h.Slots {
			word := fmt.Sprintf("%s:%d %s", h.Host, slot.Slot, slot.State)
			if slot.Rank != nil {
				word += fmt.Sprintf(" %d", *slot.Rank)
			}
			words = append(words, word)
		}
	}
	return strings.Join(words, ", ")
}

// awaitSlots blocks until the job's slots are as wanted: the process of a worker that has left a
// world can take a moment to end.
func awaitSlots(t *testing.T, r *Running, want string, args ...string) job.Status {
	t.Helper()
	var s job.Status
	if !follow.Await(t, func() bool {
		s = statusOf(t, r, args...)
		return slots(s) == want
	}) {
		t.Fatalf("the slots are %s; want %s", slots(s), want)
	}
	return s
}

// order runs a command whose output must contain the words.
func order(t *testing.T, r *Running, words string, args ...string) {
	t.Helper()
	out, err := hvdrun(r, args...)
	if err != nil || !strings.Contains(out, words) {
		t.Errorf("%v: %v, %s; want %q", args, err, out, words)
	}
}

// readmit waits until n exclusions have been recorded, and readmits a slot or host. The slot of a
// worker that leaves is excluded when its process ends, which can be after the next world.
func readmit(t *testing.T, r *Running, n int, place string) {
	t.Helper()
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "excluded") >= n }); err != nil {
		t.Fatal(err)
	}
	order(t, r, "may be used again", "readmit", place)
}

// refused runs a command that must fail with the status and an output that contains the words.
func refused(t *testing.T, r *Running, status int, words string, args ...string) {
	t.Helper()
	out, err := hvdrun(r, args...)
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != status || !strings.Contains(out, words) {
		t.Errorf("%v: %v, %s; want status %d and %q", args, err, out, status, words)
	}
}

// awaitWorld blocks until a world of size workers with a generation above after has committed, and
// returns its generation.
func awaitWorld(t *testing.T, r *Running, after uint64, size int) (generation uint64) {
	t.Helper()
	err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		sizes := map[uint64]int{}
		for _, e := range events {
			switch e.Name {
			case "world_published":
				sizes[e.Generation] = e.Size
			case "first_commit":
				if e.Generation > after && sizes[e.Generation] == size {
					generation = e.Generation
				}
			}
		}
		return generation != 0
	})
	if err != nil {
		t.Fatalf("a world of %d after generation %d: %v", size, after, err)
	}
	return generation
}

// controlled starts a long job of two workers on each of two hosts.
func controlled(t *testing.T, more ...string) *Running {
	t.Helper()
	r := start(t, Job{
		Flags:   flags(append(more, "-np", "4", "--min-np", "1", "-H", on(hostA, 2)+","+on(hostB, 2), "--orphan-timeout", "60s")...),
		Trainer: []string{"-steps", strconv.Itoa(controlledSteps), "-step-time", "10ms"},
	})
	awaitWorld(t, r, 0, 4)
	return r
}

const controlledSteps = 60_000

// end stops the job and checks that no step was lost or repeated.
func end(t *testing.T, r *Running) Result {
	t.Helper()
	order(t, r, "being stopped", "stop")
	return finish(t, r, 128+15, controlledSteps)
}

// TestDrain: a slot and then a host are drained and readmitted: no worker and no operation fails,
// and the others continue.
func TestDrain(t *testing.T) {
	t.Parallel()
	r := controlled(t)
	s := statusOf(t, r)
	if got, want := slots(s), "localhost:0 training 0, localhost:1 training 1, 127.0.0.1:0 training 2, 127.0.0.1:1 training 3"; got != want || s.Driver != r.PID {
		t.Errorf("driver %d, %s; want %d, %s", s.Driver, got, r.PID, want)
	}
	if !follow.Await(t, func() bool {
		s = statusOf(t, r)
		return !slices.ContainsFunc(s.Hosts, func(h job.Host) bool {
			return slices.ContainsFunc(h.Slots, func(slot job.Slot) bool { return slot.Usage == nil })
		})
	}) {
		t.Errorf("the status does not have the memory of each worker: %+v", s.Hosts)
	}
	order(t, r, "its worker leaves", "drain", s.Job[:7], hostB+":0")
	g := awaitWorld(t, r, 1, 3)
	order(t, r, "drained already", "drain", hostB+":0")
	order(t, r, "its 2 workers leave", "drain", s.Job, hostA)
	g = awaitWorld(t, r, g, 1)
	awaitSlots(t, r, "localhost:0 drained, localhost:1 drained, 127.0.0.1:0 drained, 127.0.0.1:1 training 0")
	refused(t, r, 1, "at least (--min-np)", "drain", hostB)
	refused(t, r, 1, "host nowhere is unknown; the hosts are localhost 127.0.0.1", "drain", "nowhere")
	refused(t, r, 1, "has no slot 2; its slots are 0 to 1", "drain", hostA+":2")
	refused(t, r, 2, "neither HOST nor HOST:SLOT", "drain", "a:b")
	refused(t, r, 2, "there is no job x", "drain", "x", hostB)
	order(t, r, "may be used again", "readmit", hostB+":0")
	order(t, r, "may be used again", "readmit", hostA)
	awaitWorld(t, r, g, 4)
	awaitSlots(t, r, "127.0.0.1:0 training 0, 127.0.0.1:1 training 1, localhost:0 training 2, localhost:1 training 3")
	res := end(t, r)
	left := 0
	for _, e := range res.Events {
		switch {
		case e.Name == "worker_exited" && e.Cause == "left" && e.Code == 0:
			left++
		case e.Name == "worker_exited" && e.Cause == "failed", e.Name == "excluded":
			t.Errorf("%s", e)
		}
	}
	for _, l := range res.Lines {
		if l.Outcome == steplog.Aborted {
			t.Errorf("an operation of step %d failed", l.Step)
		}
	}
	if left != 3 {
		t.Errorf("%d workers left in good order, want 3", left)
	}
}

// TestExclude: the worker of an excluded slot is stopped at once, and the slot returns by itself;
// an excluded host returns when it is readmitted.
func TestExclude(t *testing.T) {
	t.Parallel()
	r := controlled(t)
	order(t, r, "for 1h0m0s; workers that are stopped: 1", "exclude", hostA+":1", "--for", "1h")
	g := awaitWorld(t, r, 1, 3)
	if s := statusOf(t, r).Hosts[0].Slots[1]; s.Out != job.SlotExcluded || s.Until == nil {
		t.Errorf("%+v", s)
	}
	order(t, r, "for 1.5s", "exclude", hostA+":1", "--for", "1.5")
	g = awaitWorld(t, r, g, 4)
	var out time.Time
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		for _, e := range events {
			switch {
			case e.Place() != hostA+":1":
			case e.Name == "excluded":
				out = e.Time
			case e.Name == "worker_started" && !out.IsZero():
				if rest := e.Time.Sub(out); rest < 1500*time.Millisecond {
					t.Errorf("the slot was out for %v, want 1.5 s", rest)
				}
				return true
			}
		}
		return false
	}); err != nil {
		t.Error(err)
	}
	order(t, r, "until it is readmitted; workers that are stopped: 2", "exclude", hostB)
	g = awaitWorld(t, r, g, 2)
	refused(t, r, 1, "would be lost with host localhost", "exclude", hostA)
	order(t, r, "may be used again", "readmit", hostB)
	awaitWorld(t, r, g, 4)
	res := end(t, r)
	for _, e := range res.Events {
		if e.Name == "worker_exited" && e.Cause != "stopped" {
			t.Errorf("%s", e)
		}
	}
}

// TestScale: fewer workers, then more.
func TestScale(t *testing.T) {
	t.Parallel()
	r := controlled(t)
	order(t, r, "1 to 2 workers, before 1 or more", "scale", "--max-np", "2")
	g := awaitWorld(t, r, 1, 2)
	awaitSlots(t, r, "localhost:0 training 0, localhost:1 training 1, 127.0.0.1:0 free, 127.0.0.1:1 free")
	order(t, r, "1 to 3 workers", "scale", "-max-np=3")
	g = awaitWorld(t, r, g, 3)
	order(t, r, "2 or more workers", "scale", "--max-np", "none", "--min-np", "2")
	awaitWorld(t, r, g, 4)
	refused(t, r, 1, "the minimum number of workers (2) would exceed the maximum (1)", "scale", "--max-np", "1")
	refused(t, r, 2, "scale needs", "scale")
	refused(t, r, 2, `--min-np: "0" is less than 1`, "scale", "--min-np", "0")
	end(t, r)
}

// TestControlOfAnotherDriver: commands to a driver remain in effect under the next one. Between the
// two drivers, commands fail, and the status is the last recorded one. The name of the job's
// directory is long.
func TestControlOfAnotherDriver(t *testing.T) {
	t.Parallel()
	long := filepath.Join(t.TempDir(), strings.Repeat("long-", 20), strings.Repeat("name-", 20))
	r := controlled(t, "--job-dir", long)
	order(t, r, "its worker leaves", "drain", long, hostB+":1")
	g := awaitWorld(t, r, 1, 3)
	order(t, r, "1 to 3 workers", "scale", long, "--max-np", "3")
	r.KillDriver()
	if fi, err := os.Stat(filepath.Join(long, control.SocketName)); err != nil || fi.Mode().Type() != os.ModeSocket {
		t.Errorf("the socket of the dead driver: %v, %v", fi, err)
	}
	s := statusOf(t, r, long)
	if s.Driver != 0 || s.State != job.Running || s.MaxNP != 3 || s.Size != 3 || s.Generation != g || len(s.Events) < 12 {
		t.Errorf("%+v", s)
	}
	out, err := hvdrun(r, "status", long)
	if err != nil || !strings.Contains(out, "has no driver; it was running at") || !strings.Contains(out, "hvdrun resume "+s.Job) {
		t.Errorf("%v: %s", err, out)
	}
	refused(t, r, 1, "has no driver: hvdrun resume "+s.Job, "readmit", long, hostB)
	next, err := r.Resume(long)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "resumed") == 1 }); err != nil {
		t.Fatal(err)
	}
	s = awaitSlots(t, next, "localhost:0 training 0, localhost:1 training 1, 127.0.0.1:0 training 2, 127.0.0.1:1 drained", long)
	if s.Driver != next.PID || s.MaxNP != 3 || len(s.Events) < 12 {
		t.Errorf("%+v", s)
	}
	order(t, next, "may be used again", "readmit", long, hostB)
	order(t, next, ": 4 workers, before 1 to 3 workers", "scale", long, "--max-np", "4", "--min-np", "4")
	awaitWorld(t, next, g, 4)
	order(t, next, "being stopped", "stop", long)
	finish(t, next, 128+15, controlledSteps)
	if s := statusOf(t, next, long); s.State != job.Failed || s.Driver != 0 || !strings.HasPrefix(s.Message, "stopped by command (hvdrun stop), uid ") {
		t.Errorf("%+v", s)
	}
	refused(t, next, 1, "job "+s.Job+" has ended", "stop", long)
}

// TestWatch: watch prints one line per event until the job ends, or one JSON object per change.
func TestWatch(t *testing.T) {
	t.Parallel()
	r := controlled(t)
	watch := func(args ...string) (lines func() string, wait func() error) {
		path := filepath.Join(t.TempDir(), "out")
		out, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		cmd := r.Subcommand(t.Context(), append([]string{"status", "--watch"}, args...)...)
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return func() string {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Error(err)
				}
				return string(b)
			}, func() error {
				defer out.Close()
				return cmd.Wait()
			}
	}
	until := func(what string, lines func() string, n int) {
		t.Helper()
		if !follow.Await(t, func() bool { return strings.Count(lines(), what) >= n }) {
			t.Fatalf("%s is not told %d times:\n%s", what, n, lines())
		}
	}
	text, textEnd := watch()
	objects, objectsEnd := watch("--json")
	until("is running since", text, 1)
	until(`"generation":1`, objects, 1)
	order(t, r, "its worker leaves", "drain", hostA+":0")
	awaitWorld(t, r, 1, 3)
	until("drain of localhost:0", text, 1)
	until(`"generation":2`, objects, 1)
	order(t, r, "killed", "stop", "--now")
	res := finish(t, r, 128+15, controlledSteps)
	if err := errors.Join(textEnd(), objectsEnd()); err != nil {
		t.Error(err)
	}
	lines := strings.Split(strings.TrimSpace(text()), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, "has ended: stopped by command (hvdrun stop), uid "+strconv.Itoa(os.Getuid())) {
		t.Errorf("the last line is %q", last)
	}
	told := slices.DeleteFunc(slices.Clone(res.Events), func(e Event) bool { return e.Name == audit.Name }) // watch does not print audit records
	for _, e := range told[max(0, len(told)-5):] {
		if n := strings.Count(text(), e.Time.Local().Format("15:04:05.000")+"  "+string(e.Name)); n < 1 {
			t.Errorf("%s is told %d times:\n%s", e, n, text())
		}
	}
	all := strings.Split(strings.TrimSpace(objects()), "\n")
	var s job.Status
	if err := json.Unmarshal([]byte(all[len(all)-1]), &s); err != nil || s.State != job.Failed {
		t.Errorf("the last object is %+v, %v", s, err)
	}
	if len(all) > 64 { // for some hundred steps; a busy machine can add stall messages
		t.Errorf("%d objects of a job in which little happened", len(all))
	}
}

// TestCommandsOfStrangers: the directory denies access to other users; if it is accessible, the
// socket denies it.
func TestCommandsOfStrangers(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can be somebody else")
	}
	dir, err := os.MkdirTemp("/tmp", "strangers-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := controlled(t, "--job-dir", filepath.Join(dir, "job"))
	program := filepath.Join(dir, "hvdrun")
	// Another process makes the copy: if this process had the file open for writing, children that
	// other tests start at that moment would inherit it, and the file could not be executed.
	if out, err := exec.Command("cp", binaries.Hvdrun, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := errors.Join(os.Chmod(program, 0o755), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	stranger := func() (string, error) {
		cmd := exec.Command(program, "stop", filepath.Join(dir, "job"))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := stranger(); err == nil || !strings.Contains(out, "permission denied") {
		t.Errorf("a stranger: %v, %s", err, out)
	}
	err = filepath.WalkDir(filepath.Join(dir, "job"), func(path string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chmod(path, 0o777))
	})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := stranger(); err == nil || !strings.Contains(out, "no driver answers") {
		t.Errorf("a stranger who was let in: %v, %s", err, out)
	}
	order(t, r, "being stopped", "stop", filepath.Join(dir, "job"))
	finish(t, r, 128+15, controlledSteps)
}
