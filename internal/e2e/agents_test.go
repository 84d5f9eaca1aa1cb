package e2e

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// parent returns a process's.
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

// TestAgentLost: an agent that is killed, or hangs, costs its host's workers and nobody else. Another takes its place, and
// nothing is left of the one before.
func TestAgentLost(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "hangs": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, Job{
				Flags: append(flags("-np", "4", "--min-np", "2", "--agent-timeout", "2s", "--drain-timeout", "5"),
					"--blacklist-cooldown-range", "0.1,0.1"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
				Trainee: []string{"-steps", "100000", "-step-time", "2ms"},
				Limit:   90 * time.Second,
			})
			await := func(generation uint64, size int) (world Event) {
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
					res, _ := r.Wait()
					t.Fatalf("%v\n%s", err, res.Story())
				}
				return world
			}
			first := await(0, 4)
			agent := parent(t, first.Slots[3].PID)
			if other := parent(t, first.Slots[2].PID); other != agent || parent(t, first.Slots[0].PID) == agent {
				t.Fatalf("the parents of the workers are %d and %d", agent, other)
			}
			if err := syscall.Kill(agent, signal); err != nil {
				t.Fatal(err)
			}
			few := await(first.Generation, 2)
			again := await(few.Generation, 4)
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
		})
	}
}
