package e2e

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// parent returns the PID of a process's parent.
func parent(t *testing.T, pid int) int {
	t.Helper()
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	ppid, err := strconv.Atoi(string(fields[1]))
	if err != nil {
		t.Fatal(err)
	}
	return ppid
}

// inTwoHosts starts a job of two workers on each of two hosts. await waits until a world of size
// workers with a generation above the given one has committed, and returns its event.
func inTwoHosts(t *testing.T) (r *Running, await func(generation uint64, size int) Event) {
	t.Helper()
	r = start(t, Job{
		Flags: append(flags("-np", "4", "--min-np", "2", "--agent-timeout", "1s", "--drain-timeout", "10m"),
			"--blacklist-cooldown-range", "0.1,0.1"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainer: []string{"-steps", "100000", "-step-time", "10ms"},
	})
	return r, func(generation uint64, size int) (world Event) {
		t.Helper()
		err := r.AwaitEvents(t.Context(), func(events []Event) bool {
			committed := false
			for _, e := range events {
				if e.Name == "world_published" && e.Generation > generation && e.Size == size {
					world = e
				}
				committed = committed || e.Name == "first_commit" && world.Generation > 0 && e.Generation == world.Generation
			}
			return committed
		})
		if err != nil {
			t.Fatal(err)
		}
		return world
	}
}

// TestAgentLost: if an agent is killed, only its host's workers are lost. Another agent replaces
// it, and no process of the old one remains.
func TestAgentLost(t *testing.T) {
	t.Parallel()
	r, await := inTwoHosts(t)
	first := await(0, 4)
	agent := parent(t, first.Slots[3].PID)
	if other := parent(t, first.Slots[2].PID); other != agent || parent(t, first.Slots[0].PID) == agent {
		t.Fatalf("the parents of the workers are %d and %d", agent, other)
	}
	if err := syscall.Kill(agent, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	again := await(first.Generation, 4)
	for i := range 2 {
		if again.Slots[i].PID != first.Slots[i].PID {
			t.Errorf("rank %d was process %d and is %d", i, first.Slots[i].PID, again.Slots[i].PID)
		}
	}
	if next := parent(t, again.Slots[3].PID); next == agent {
		t.Error("the agent is the same")
	}
	if err := syscall.Kill(r.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	res := finish(t, r, 128+int(syscall.SIGTERM), 100000)
	lost := 0
	for _, where := range []string{hostB + ":0", hostB + ":1"} {
		lost += len(exits(res, where))
	}
	if lost != 4 || len(exits(res, hostA+":0")) != 1 {
		t.Errorf("%d workers of the host have ended", lost)
	}
}

// TestAgentStopped: a local agent that is suspended for longer than --agent-timeout counts as
// alive, and so do its workers. It is continued when they have to end.
func TestAgentStopped(t *testing.T) {
	t.Parallel()
	r, await := inTwoHosts(t)
	first := await(0, 4)
	if err := syscall.Kill(parent(t, first.Slots[3].PID), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	awaitOutput(t, r, func(text string) bool { return strings.Contains(text, "is stopped; its workers continue") })
	if err := syscall.Kill(r.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	res := finish(t, r, 128+int(syscall.SIGTERM), 100000)
	if n := follow.Count(res.Events, "world_published"); n != 1 {
		t.Errorf("%d worlds, want the first alone", n)
	}
	for _, e := range res.Events {
		if e.Name == "worker_exited" && (e.Code != 0 || e.Signal != 0) {
			t.Errorf("%s:%d ended by %+v", e.Host, *e.Slot, e)
		}
	}
}
