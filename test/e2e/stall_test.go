package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Workers hang.

const warning = time.Second

// stalling returns the flags of jobs whose workers hang and whose hosts do not change. A hung
// worker is stopped after eight times the warning.
func stalling(more ...string) []string {
	return flags(append([]string{"--discovery-interval", "1s", "--stall-warning", "1s", "--stall-timeout", "8s", "--drain-timeout", "1s", "--join-timeout", "20s"}, more...)...)
}

// TestHung: a worker that falls behind the others is reported in time, then stopped and replaced.
// The others continue from the last commit before its process has ended.
func TestHung(t *testing.T) {
	for name, test := range map[string]struct {
		hosts string
		exit  string // of localhost:1 or 127.0.0.1:0
		more  []string
		does  string
	}{
		"stopped on the same host":  {hosts: on(hostA, 3), exit: "localhost:1@step=5:stop", does: "silent for "},
		"stopped and deaf":          {hosts: on(hostA, 2, hostB, 1), exit: "127.0.0.1:0@step=5:stop", more: []string{"-stubborn"}, does: "silent for "},
		"hangs":                     {hosts: on(hostA, 2, hostB, 1), exit: "127.0.0.1:0@step=5:hang", does: "training, after AllReduce (operation "},
		"stopped in the first sync": {hosts: on(hostA, 2, hostB, 1), exit: "127.0.0.1:0@sync=1:stop", does: "silent f"},
		"hangs in a save":           {hosts: on(hostA, 2, hostB, 1), exit: "127.0.0.1:0@save=5:hang", does: "saving its state, after AllReduce (operation "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			where, _, _ := strings.Cut(test.exit, "@")
			// A hung process gets a very long time to end: the others must not wait for it.
			hangs, more := strings.Contains(test.exit, ":hang"), []string(nil)
			if hangs {
				more = []string{"--drain-timeout", "10m"}
			}
			r := start(t, Job{
				Flags:   append(stalling("-np", "3", "--min-np", "2"), more...),
				Stages:  []Stage{{Hosts: test.hosts}},
				Trainer: append([]string{"-steps", "12", "-step-time", "50ms", "-exit", test.exit}, test.more...),
			})
			if hangs {
				first := world(t, r, 0, 3)
				world(t, r, first.Generation, 2)
				for _, s := range first.Slots {
					if fmt.Sprintf("%s:%d", s.Host, s.Slot) == where {
						_ = syscall.Kill(s.PID, syscall.SIGKILL)
					}
				}
			}
			res := finish(t, r, 0, 12)
			goesOnWithout(t, res, 12)
			named := stalls(res, where)
			ends := exits(res, where)
			if len(named) == 0 { // on a busy machine others can be slow too
				t.Fatalf("nothing names %s", where)
			}
			inTime(t, r, named[0])
			if len(ends) != 1 || ends[0].Cause != "failed" {
				t.Fatalf("%s ended by %+v, want one failure", where, ends)
			}
			says(t, res, "("+where+", pid ")
			says(t, res, "holds up the job: ")
			says(t, res, " held up the job: ")
			says(t, res, test.does)
		})
	}
}

// TestHungIsReplaced: the slot stays out as after any failure, until it may be used again.
func TestHungIsReplaced(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   stalling("-np", "3", "--min-np", "2"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 1)}},
		Trainer: []string{"-steps", "30", "-step-time", "20ms", "-hold", "25", "-exit", "127.0.0.1:0@step=5:stop"},
	})
	awaitStep(t, r, 25)
	order(t, r, "may be used again", "readmit", hostB+":0")
	res := finish(t, r, 0, 30)
	goesOnWithout(t, res, 25)
	if last := res.Lines[len(res.Lines)-1]; last.Event != steplog.End || last.Size != 3 || last.Generation != 3 {
		t.Errorf("the last line is of %d workers in generation %d, want 3 and 3", last.Size, last.Generation)
	}
}

// goesOnWithout checks that the second world, of two workers, continues where the first one, of
// three, ended, and trains up to step to. If a stopped worker is continued while the driver ends
// it, it can complete a step, alone or with rank 1, which rank 0 then receives instead of recording
// it.
func goesOnWithout(t *testing.T, res Result, to int) {
	t.Helper()
	last, next := 0, 0
	for _, l := range res.Lines {
		switch {
		case l.Event != steplog.Step || l.Rank != 0:
		case l.Generation == 1:
			last = max(last, l.Step)
		case l.Generation == 2 && next == 0:
			next = l.Step
		}
	}
	if next > last+2 {
		t.Errorf("rank 0 has recorded step %d in the first world, and then step %d in the second", last, next)
	}
	worlds := []steplog.World{{From: next, To: to, Generation: 2, Size: 2, Zero: "localhost:0", First: 0}}
	if last > 0 {
		worlds = append([]steplog.World{{From: 1, To: last, Generation: 1, Size: 3, Zero: "localhost:0", First: 0}}, worlds...)
	}
	lines := slices.DeleteFunc(slices.Clone(res.Lines), func(l steplog.Line) bool { return l.Generation > 2 })
	if err := steplog.CheckWorlds(lines, worlds); err != nil {
		t.Error(err)
	}
}

// TestHungEndsTheJob: a job that is not elastic cannot continue without the worker.
func TestHungEndsTheJob(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:   []string{"-np", "2", "-H", on(hostA, 2), "--stall-warning", "1s", "--stall-timeout", "8s", "--drain-timeout", "1s"},
		Trainer: []string{"-steps", "10", "-step-time", "50ms", "-exit", "localhost:1@step=5:stop"},
	}), 1, 10)
	says(t, res, "host localhost slot 1 rank 1 held up the job: silent for ")
}

// TestStallEnds: a worker that is suspended from outside for a while continues, without further
// consequences.
func TestStallEnds(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   flags("-np", "3", "--min-np", "1", "--stall-warning", "1s", "--stall-timeout", "0"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 1)}},
		Trainer: []string{"-steps", "60", "-step-time", "2ms", "-gate", "20=stalled.1", "-gate", "40=stalled.2"},
	})
	awaitStep(t, r, 20)
	pid := pidAt(t, r, hostB)
	told := func(name job.EventName, n int) error { // on a busy machine others can be slow too
		return r.AwaitEvents(t.Context(), func(events []Event) bool {
			return follow.Count(slices.DeleteFunc(slices.Clone(events), func(e Event) bool { return e.PID != pid }), name) >= n
		})
	}
	for n := 1; n <= 2; n++ {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if err := told("stalled", n); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if err := told("stall_ended", n); err != nil {
			t.Fatal(err)
		}
		mark(t, r, fmt.Sprint("stalled.", n))
		awaitGrowth(t, r, 20+20*n)
	}
	res := finish(t, r, 0, 60)
	if n := follow.Count(res.Events, "world_published"); n != 1 {
		t.Errorf("%d worlds, want 1", n)
	}
	says(t, res, " continues, ")
}

// TestHungWhileDriverDies: a worker is suspended and hvdrun is killed. The next driver detects that
// the worker hangs, although it never receives a message from it.
func TestHungWhileDriverDies(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags: []string{"-np", "3", "--min-np", "2", "-H", on(hostA, 2) + "," + on(hostB, 1), "--orphan-timeout", "60s",
			"--stall-warning", "1s", "--stall-timeout", "8s", "--drain-timeout", "1s", "--blacklist-cooldown-range", "100,100"},
		Trainer: []string{"-steps", "100", "-step-time", "2ms", "-gate", "50=stopped"},
	})
	awaitStep(t, r, 50)
	if err := syscall.Kill(pidAt(t, r, hostB), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	mark(t, r, "stopped")
	r.KillDriver()
	r = resume(t, r)
	res := finish(t, r, 0, 100)
	if e := exits(res, hostB+":0"); len(e) != 1 || e[0].Cause != "failed" {
		t.Errorf("%+v", e)
	}
	if len(stalls(res, hostB+":0")) == 0 {
		t.Error("it was not named")
	}
}

// pidAt waits for the worker of a host and returns its PID.
func pidAt(t *testing.T, r *Running, host string) (pid int) {
	t.Helper()
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		for _, e := range events {
			if e.Name == "worker_started" && e.Host == host {
				pid = e.PID
			}
		}
		return pid != 0
	}); err != nil {
		t.Fatal(err)
	}
	return pid
}

// stalls returns the stall events of the worker in a slot.
func stalls(res Result, where string) []Event {
	return slices.DeleteFunc(slices.Clone(res.Events), func(e Event) bool { return e.Name != "stalled" || e.Place() != where })
}

// waitedFor matches how long a worker had waited, by its own clock, in a message that reports the
// awaited worker.
var waitedFor = regexp.MustCompile(` for it in .* for ([0-9][^ ;]*)`)

// inTime checks that the first fault of the job was not reported before somebody had waited for the
// time of the warning. How late it was depends on the machine's load and is only logged.
func inTime(t *testing.T, r *Running, named Event) {
	t.Helper()
	fault, err := os.Stat(filepath.Join(r.Dir, "fault.0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("named %v after the fault", named.Time.Sub(fault.ModTime()))
	m := waitedFor.FindStringSubmatch(named.What)
	if m == nil {
		t.Fatalf("nobody waits: %q", named.What)
	}
	if waited, err := time.ParseDuration(m[1]); err != nil || waited < warning {
		t.Errorf("named when somebody had waited for %v: %q, %v", waited, named.What, err)
	}
}
