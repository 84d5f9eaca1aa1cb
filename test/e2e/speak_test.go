package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// Programs in other languages that use the worker protocol over their inherited sockets.

// workerInC builds examples/c/worker.c.
func workerInC(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "worker")
	out, err := exec.Command("gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-o", program, "../../examples/c/worker.c").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// pids returns the processes of a world, by rank.
func pids(e Event) (all []int) {
	for _, s := range e.Slots {
		all = append(all, s.PID)
	}
	return all
}

// TestWorkerInC: one of four workers is killed, a host joins, and a worker is asked to leave. Only
// the dead one and the one that left are started again, and the job completes.
func TestWorkerInC(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   flags("-np", "4", "--min-np", "2", "--max-np", "5"),
		Stages:  []Stage{{Hosts: on(hostA, 4)}, {After: "grow", Hosts: on(hostA, 4, hostB, 1)}},
		Command: []string{workerInC(t), "stop"},
	})
	first := world(t, r, 0, 4)
	if err := syscall.Kill(first.Slots[2].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	three := world(t, r, first.Generation, 3)
	if want := slices.Delete(pids(first), 2, 3); !slices.Equal(pids(three), want) {
		t.Errorf("after the death processes %v, want %v", pids(three), want)
	}
	place := func(s follow.Slot) string { return fmt.Sprintf("%s:%d", s.Host, s.Slot) }
	readmit(t, r, 1, place(first.Slots[2]))
	four := world(t, r, three.Generation, 4)
	mark(t, r, "grow")
	five := world(t, r, four.Generation, 5)
	if !slices.Equal(pids(five)[:4], pids(four)) {
		t.Errorf("after growth processes %v, before %v", pids(five), pids(four))
	}
	ask(t, five.Slots[1].PID)
	less := world(t, r, five.Generation, 4)
	if want := slices.Delete(pids(five), 1, 2); !slices.Equal(pids(less), want) {
		t.Errorf("after one has left processes %v, want %v", pids(less), want)
	}
	readmit(t, r, 2, place(five.Slots[1]))
	world(t, r, less.Generation, 5)
	mark(t, r, "stop")
	res, err := r.Wait()
	if err != nil || res.Status != 0 || len(res.Left) > 0 {
		t.Errorf("status %d, %v, left: %q", res.Status, err, res.Left)
	}
	says(t, res, "the program speaks by its socket: worker.c")
	if n := follow.Count(res.Events, "worker_started"); n != 4+1+1+1 {
		t.Errorf("%d processes were started, want 7", n)
	}
}

// TestWorkerInCResumes: the driver is killed while a worker dies; the next driver takes over the
// other workers.
func TestWorkerInCResumes(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   []string{"-np", "3", "--min-np", "1", "-H", on(hostA, 3), "--orphan-timeout", "10m", "--blacklist-cooldown-range", "100,100"},
		Command: []string{workerInC(t), "stop"},
	})
	first := world(t, r, 0, 3)
	r.KillDriver()
	if err := syscall.Kill(first.Slots[1].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r = resume(t, r)
	two := world(t, r, first.Generation, 2)
	if want := slices.Delete(pids(first), 1, 2); !slices.Equal(pids(two), want) {
		t.Errorf("after the death processes %v, want %v", pids(two), want)
	}
	readmit(t, r, 1, hostA+":1")
	world(t, r, two.Generation, 3)
	mark(t, r, "stop")
	res, err := r.Wait()
	if err != nil || res.Status != 0 || len(res.Left) > 0 {
		t.Errorf("status %d, %v, left: %q", res.Status, err, res.Left)
	}
}
