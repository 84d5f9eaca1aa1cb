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
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Workers that are asked to leave and jobs that are stopped during training: workers leave at a
// step boundary, and no operation fails.

// world waits until a world of size workers with a generation above after has committed a step, and
// returns its event.
func world(t *testing.T, r *Running, after uint64, size int) (found Event) {
	t.Helper()
	err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		for _, e := range events {
			if e.Name == "world_published" && e.Generation > after && e.Size == size {
				found = e
			}
			if e.Name == "first_commit" && found.Generation > 0 && e.Generation == found.Generation {
				return true
			}
		}
		return false
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// ask sends SIGTERM to processes.
func ask(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		if pid <= 0 {
			t.Fatalf("process %d would be a group of processes", pid)
		}
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			t.Errorf("%d: %v", pid, err)
		}
	}
}

// inOrder checks that no operation failed and that every worker that had started training exited
// with status 0 and one of these causes.
func inOrder(t *testing.T, res Result, causes ...string) {
	t.Helper()
	for _, l := range res.Lines {
		if l.Outcome == steplog.Aborted {
			t.Errorf("an operation failed: %+v", l)
		}
	}
	for _, e := range res.Events {
		if e.Name == "worker_exited" && e.PID != 0 && (e.Code != 0 || e.Signal != 0 || !slices.Contains(causes, e.Cause)) {
			t.Errorf("%s:%d ended by %+v", e.Host, *e.Slot, e)
		}
	}
}

func awaitOutput(t *testing.T, r *Running, enough func(text string) bool) {
	t.Helper()
	if err := r.Until(t.Context(), "output", func() bool {
		text, err := os.ReadFile(r.OutputPath())
		if err != nil {
			t.Fatal(err)
		}
		return enough(string(text))
	}); err != nil {
		t.Fatal(err)
	}
}

// TestWorkerAskedToLeave: one worker, or all workers of a host, get SIGTERM; they leave, their
// slots rest, and new workers replace them.
func TestWorkerAskedToLeave(t *testing.T) {
	for name, ranks := range map[string][]int{"rank 0": {0}, "a host": {0, 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, Job{
				Flags:   flags("-np", "3", "--min-np", "1"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 1)}},
				Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all"},
			})
			first := world(t, r, 0, 3)
			for _, rank := range ranks {
				ask(t, first.Slots[rank].PID)
			}
			few := world(t, r, first.Generation, 3-len(ranks))
			back := hostA + ":0"
			if len(ranks) == 2 {
				back = hostA
			}
			readmit(t, r, len(ranks), back)
			again := world(t, r, few.Generation, 3)
			for _, is := range few.Slots {
				// If a worker joined before its start was reported, the event of the first world
				// lacks its PID.
				stayed := false
				for _, was := range first.Slots {
					same := was.Host == is.Host && was.Slot == is.Slot && (was.PID == is.PID || was.PID == 0)
					stayed = stayed || same && !slices.Contains(ranks, was.Rank)
				}
				if !stayed {
					t.Errorf("%+v was not in the world before", is)
				}
			}
			ask(t, r.PID)
			res := finish(t, r, 143, 100000)
			inOrder(t, res, "left", "stopped")
			if n := follow.Count(res.Events, "excluded"); n != len(ranks) {
				t.Errorf("%d exclusions, want %d", n, len(ranks))
			}
			if n := follow.Count(res.Events, "draining"); n != len(ranks) {
				t.Errorf("%d workers were asked to leave, want %d", n, len(ranks))
			}
			if again.Slots[0].Host != hostA && len(ranks) == 1 {
				t.Errorf("the worlds after that: %+v", again)
			}
		})
	}
}

// TestLastAskedToLeave: the only worker with the state hands it over before it leaves.
func TestLastAskedToLeave(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   flags("-np", "1", "--min-np", "1", "--max-np", "2"),
		Stages:  []Stage{{Hosts: on(hostA, 1)}, {After: "asked", Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all"},
	})
	first := world(t, r, 0, 1)
	ask(t, first.Slots[0].PID)
	awaitOutput(t, r, func(text string) bool { return strings.Contains(text, "alone has the job's state") })
	if err := os.WriteFile(filepath.Join(r.Dir, "asked"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	both := world(t, r, first.Generation, 2)
	last := world(t, r, both.Generation, 1)
	if last.Slots[0].Host != hostB {
		t.Errorf("rank 0 is at last %+v", last.Slots[0])
	}
	// Between the end of its training and the end of its process, SIGTERM would kill the worker.
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		return slices.ContainsFunc(events, func(e Event) bool {
			return e.Name == "worker_exited" && e.PID == first.Slots[0].PID
		})
	}); err != nil {
		t.Fatal(err)
	}
	ask(t, r.PID)
	res := finish(t, r, 143, 100000)
	inOrder(t, res, "left", "stopped")
	says(t, res, "alone has the job's state: it stays until another has it")
}

// TestAskedTwice: a worker in a long step ends at once when it gets a second SIGTERM, and is not
// blamed.
func TestAskedTwice(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1", "--drain-timeout", "10m"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-commit-every", "1000000"},
	})
	awaitStep(t, r, 5)
	pid := pidAt(t, r, hostB)
	began := time.Now()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for follow.Alive(pid) {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		<-again.C
	}
	if took := time.Since(began); took < 900*time.Millisecond {
		t.Errorf("the second request was obeyed after %v", took)
	}
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "world_published") == 2 }); err != nil {
		t.Fatal(err)
	}
	order(t, r, "killed", "stop", "--now")
	res := finish(t, r, 143, 100000)
	e := exits(res, hostB+":0")
	if len(e) == 0 || e[0].Cause != "left" || e[0].Signal != int(syscall.SIGTERM) {
		t.Errorf("the worker ended by %+v", e)
	}
}

// TestStoppedInAStep: a stopped job completes its current step, whatever the grace, even if its
// driver is killed meanwhile and another one completes the stop.
func TestStoppedInAStep(t *testing.T) {
	for name, killed := range map[string]bool{"by one driver": false, "by two": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, Job{
				Flags:   []string{"-np", "4", "--min-np", "1", "-H", on(hostA, 2) + "," + on(hostB, 2), "--drain-timeout", "10m"},
				Trainer: []string{"-steps", "100000", "-step-time", "400ms", "-log-all", "-signals"},
			})
			world(t, r, 0, 4)
			ask(t, r.PID)
			if killed {
				awaitOutput(t, r, func(text string) bool { return strings.Contains(text, "<stdout>:signal: terminated") })
				r.KillDriver()
				r = resume(t, r)
			}
			res := finish(t, r, 143, 100000)
			inOrder(t, res, "stopped")
			for rank := range 4 { // a killed driver can cause a line twice
				if !strings.Contains(res.Output, fmt.Sprintf("[%d]<stdout>:signal: terminated", rank)) {
					t.Errorf("the program of rank %d was not told of its signal", rank)
				}
			}
		})
	}
}

// TestStoppedTwice: after a second signal the job does not wait for a long step.
func TestStoppedTwice(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   []string{"-np", "2", "--min-np", "1", "-H", on(hostA, 2), "--drain-timeout", "10m"},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-commit-every", "1000000", "-signals"},
	})
	awaitStep(t, r, 5)
	ask(t, r.PID)
	awaitOutput(t, r, func(text string) bool { return strings.Count(text, "<stdout>:signal: terminated") == 2 })
	ask(t, r.PID)
	res := finish(t, r, 143, 100000)
	for _, e := range res.Events {
		if e.Name == "worker_exited" && (e.Cause != "stopped" || e.Signal != int(syscall.SIGKILL)) {
			t.Errorf("%s:%d ended by %+v", e.Host, *e.Slot, e)
		}
	}
}

// TestStaticAskedToLeave: a job that is not elastic cannot continue without one of its workers, and
// names that worker.
func TestStaticAskedToLeave(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   []string{"-np", "2"},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all"},
	})
	first := world(t, r, 0, 2)
	ask(t, first.Slots[1].PID)
	res := finish(t, r, 1, 100000)
	inOrder(t, res, "stopped")
	says(t, res, "host localhost slot 1 rank 1 was asked to leave, and the job is not elastic")
}

// TestJobAgentAskedToLeave: on SIGTERM to a job's agent its workers leave, and the next agent
// starts new ones.
func TestJobAgentAskedToLeave(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   append(flags("-np", "4", "--min-np", "1"), "--blacklist-cooldown-range", "0.5,0.5"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all"},
	})
	first := world(t, r, 0, 4)
	agent := parent(t, first.Slots[3].PID)
	ask(t, agent)
	again := world(t, r, first.Generation, 4)
	if next := parent(t, again.Slots[3].PID); next == agent {
		t.Error("the agent is the same")
	}
	ask(t, r.PID)
	res := finish(t, r, 143, 100000)
	inOrder(t, res, "left", "stopped")
}

// TestAgentAskedBeforeTheStart: if workers are not training yet or do not use the library, their
// agent ends them, and they are not blamed.
func TestAgentAskedBeforeTheStart(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   append(flags("-np", "2", "--min-np", "1"), "--blacklist-cooldown-range", "0.3,0.3"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Command: []string{"sh", "-c", "while [ ! -e enough ]; do sleep 0.01; done"},
	})
	pids := make(map[string]int)
	started := func(n int) {
		t.Helper()
		if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
			for _, e := range events {
				if e.Name == "worker_started" {
					pids[e.Host] = e.PID
				}
			}
			return follow.Count(events, "worker_started") >= n
		}); err != nil {
			t.Fatal(err)
		}
	}
	started(2)
	ask(t, parent(t, pids[hostB]))
	started(3)
	ask(t, r.PID)
	res := finish(t, r, 143, 0)
	// An agent that has not ended yet can refuse some workers.
	if e := exits(res, hostB+":0"); len(e) < 2 || e[0].Cause != "left" || e[0].Signal == 0 {
		t.Errorf("the workers ended by %+v", e)
	}
	says(t, res, "has left, it was killed by signal 15")
}

// TestClusterAgentAskedToLeave: on SIGTERM a cluster's agent reports that its host is draining.
func TestClusterAgentAskedToLeave(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	key := filepath.Join(dir, "key")
	if out, err := exec.Command(binaries.Hvdrun, "agent", "--generate-key", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	seed := address() + ":7946"
	agents := make(map[string]*exec.Cmd)
	for _, name := range []string{"a", "b"} {
		args := []string{"agent", "--key-file", key, "--name", name, "--slots", "2", "--join", seed, "--bind"}
		if name == "a" {
			args = append(args, seed)
		} else {
			args = append(args, "127.0.0.1:0")
		}
		agents[name], _ = background(t, args...)
	}
	discover := []string{"discover", "--gossip-join", seed, "--gossip-key-file", key, "--gossip-bind", "127.0.0.1:0"}
	var out []byte
	if !follow.Await(t, func() bool {
		var err error
		out, err = exec.Command(binaries.Hvdrun, discover...).CombinedOutput()
		return err == nil && strings.Count(string(out), "agent") == 2
	}) {
		t.Fatalf("there is no cluster: %s", out)
	}
	r := start(t, Job{
		Flags:   flags("-np", "4", "--min-np", "1", "--gossip-join", seed, "--gossip-key-file", key, "--gossip-bind", "127.0.0.1:0"),
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "-log-all"},
	})
	first := world(t, r, 0, 4)
	ask(t, agents["b"].Process.Pid)
	few := world(t, r, first.Generation, 2)
	for _, s := range few.Slots {
		if s.Host != "a" {
			t.Errorf("%+v is in the world", s)
		}
	}
	if err := agents["b"].Wait(); err != nil {
		t.Errorf("the agent: %v", err)
	}
	ask(t, r.PID)
	res := finish(t, r, 143, 100000)
	inOrder(t, res, "left", "stopped")
}
