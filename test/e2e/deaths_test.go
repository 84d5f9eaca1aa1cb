package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Workers die.

func TestOneLostExcludesItsSlot(t *testing.T) {
	for name, test := range map[string]struct {
		lost, how string
		after     steplog.World
	}{
		"error":  {"127.0.0.1:0", "fail", steplog.World{Zero: "localhost:0", First: 0}},
		"rank 0": {"localhost:0", "kill", steplog.World{Zero: "localhost:1", First: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			test.after.From, test.after.To, test.after.Generation, test.after.Size = 6, 10, 2, 3
			res := run(t, Job{
				Flags:   flags("-np", "4", "--min-np", "2"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
				Trainer: []string{"-exit", test.lost + "@step=5:" + test.how},
			}, []steplog.World{
				{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
				test.after,
			})
			if e := exits(res, test.lost); len(e) != 1 || e[0].Cause != "failed" {
				t.Errorf("%s ended by %+v, want one failure", test.lost, e)
			}
		})
	}
}

func TestOneOfEachHostLost(t *testing.T) {
	run(t, Job{
		Flags:   flags("-np", "4", "--min-np", "2"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainer: []string{"-exit", "localhost:0@step=5:kill", "-exit", "127.0.0.1:0@step=5:kill"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 2, Zero: "localhost:1", First: 1},
	})
}

func TestOneOfEachHostLostExcludesAllHosts(t *testing.T) {
	t.Parallel()
	finish(t, startTold(t, Job{
		Flags:  flags("-np", "4", "--min-np", "2", "--failure-policy", "host"),
		Stages: []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainer: []string{"-steps", "10", "-step-time", "5ms",
			"-exit", "localhost:0@step=5:kill", "-exit", "127.0.0.1:0@step=5:kill"},
	}), 5, 10)
}

// startTold starts a job whose workers pass step 4 only after the driver has received the first
// commit, so that the driver can distinguish a loss of state from a failure before any progress.
func startTold(t *testing.T, j Job) *Running {
	t.Helper()
	const gate = "told"
	j.Trainer = append(j.Trainer, "-gate", "4="+gate)
	r := start(t, j)
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool { return follow.Count(events, "first_commit") > 0 }); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.Dir, gate), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestAllLost(t *testing.T) {
	t.Parallel()
	res := finish(t, startTold(t, Job{
		Flags:  flags("-np", "2", "--min-np", "1"),
		Stages: []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "10", "-step-time", "10ms", "-exit", "localhost:0@step=5:kill",
			"-exit", "127.0.0.1:0@step=5:exit7"},
	}), 5, 10)
	if err := steplog.CheckWorlds(res.Lines, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
	says(t, res, "state lost")
}

func TestTooFewSlotsAfterADeath(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "2", "--elastic-timeout", "300ms"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "10", "-exit", "127.0.0.1:0@step=5:kill"},
	}), 3, 10)
	if err := steplog.CheckWorlds(res.Lines, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
}

// TestCooldownAndReturn: the slot stays out for the documented time, and twice as long the second
// time.
func TestCooldownAndReturn(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:  flags("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "0.2,100"),
		Stages: []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "25", "-gate", "14=back.1", "-gate", "20=back.2",
			"-exit", "127.0.0.1:0@step=5:kill", "-exit", "127.0.0.1:0@step=15:kill"},
	})
	for n := 1; n <= 2; n++ { // the slot can be back before the other worker is in a world of its own
		awaitPublished(t, r, hostB, n+1)
		mark(t, r, fmt.Sprint("back.", n))
	}
	res := finish(t, r, 0, 25)
	if e := exits(res, hostB+":0"); len(e) != 3 || e[2].Cause != "done" {
		t.Errorf("the workers of the slot ended by %+v", e)
	}
	var rests []time.Duration
	var since time.Time
	for _, e := range res.Events {
		switch e.Name {
		case "excluded":
			since = e.Time
		case "returned":
			rests = append(rests, e.Time.Sub(since))
		}
	}
	if len(rests) != 2 || rests[0] < 200*time.Millisecond || rests[1] < 400*time.Millisecond {
		t.Errorf("the slot rested for %v, want 200ms and 400ms", rests)
	}
}

// awaitPublished blocks until n different workers of a host have been in a published world.
func awaitPublished(t *testing.T, r *Running, host string, n int) {
	t.Helper()
	if err := r.AwaitEvents(t.Context(), func(events []Event) bool {
		pids := map[int]bool{}
		for _, e := range events {
			for _, s := range e.Slots {
				if s.Host == host {
					pids[s.PID] = true
				}
			}
		}
		return len(pids) == n
	}); err != nil {
		t.Fatal(err)
	}
}

// TestRankZeroReturnsYoungest: a host that was completely excluded loses its age.
func TestRankZeroReturnsYoungest(t *testing.T) {
	t.Parallel()
	r := start(t, Job{
		Flags:   flags("-np", "4", "--min-np", "2", "--failure-policy", "host"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainer: []string{"-steps", "15", "-hold", "10", "-exit", "localhost:0@step=5:kill"},
	})
	awaitStep(t, r, 10)
	order(t, r, "may be used again", "readmit", hostA)
	res := finish(t, r, 0, 15)
	if err := steplog.CheckWorlds(res.Lines, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 2, Zero: "127.0.0.1:0", First: 2},
		{From: 11, To: 15, Generation: 3, Size: 4, Zero: "127.0.0.1:0", First: 2},
	}); err != nil {
		t.Error(err)
	}
}

// TestReturnIsWaitedFor: if too few slots are left, the survivors wait for the end of the cooldown.
func TestReturnIsWaitedFor(t *testing.T) {
	run(t, Job{
		Flags:   flags("-np", "4", "--min-np", "4", "--blacklist-cooldown-range", "0.2,100"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainer: []string{"-exit", "127.0.0.1:1@step=5:kill"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 4, Zero: "localhost:0", First: 0},
	})
}

// TestResetLimit: the first reset is within the limit, the second is not.
func TestResetLimit(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1", "--reset-limit", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 2)}, {Step: 10, Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "15", "-hold", "10", "-exit", "localhost:1@step=5:kill"},
	}), 4, 15)
	says(t, res, "number of resets exceeded limit 1")
	if err := steplog.CheckWorlds(res.Lines, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 1, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
}

// TestDeathInTheMiddle: a worker dies during a sync, a save, a rollback or a reset. The survivors
// have a complete state.
func TestDeathInTheMiddle(t *testing.T) {
	grows := []Stage{{Hosts: on(hostA, 2)}, {Step: 5, Hosts: on(hostA, 2, hostB, 1)}}
	before := steplog.World{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0}
	for name, test := range map[string]struct {
		exit  string
		more  []string
		after steplog.World
	}{
		"newcomer in its first sync": {exit: "127.0.0.1:0@sync=1:kill",
			after: steplog.World{Generation: 3, Size: 2, Zero: "localhost:0", First: 0}},
		"old worker in sync": {exit: "localhost:1@sync=2:kill",
			after: steplog.World{Generation: 3, Size: 2, Zero: "localhost:0", First: 0}},
		"root in sync": {exit: "localhost:0@sync=2:kill",
			after: steplog.World{Generation: 3, Size: 2, Zero: "localhost:1", First: 1}},
		"old worker on the way to the sync": {exit: "localhost:0@reset=1:kill",
			after: steplog.World{Generation: 3, Size: 2, Zero: "localhost:1", First: 1}},
		"two in the same sync": {exit: "localhost:0@sync=2:kill", more: []string{"-exit", "127.0.0.1:0@sync=1:kill"},
			after: steplog.World{Size: 1, Zero: "localhost:1", First: 1}},
		"roll back after another's death": {exit: "127.0.0.1:0@sync=1:kill", more: []string{"-exit", "localhost:0@restore=1:kill"},
			after: steplog.World{Generation: 3, Size: 1, Zero: "localhost:1", First: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			test.after.From, test.after.To = 6, 10
			run(t, Job{
				Flags:   flags("-np", "2", "--min-np", "1"),
				Stages:  grows,
				Trainer: append([]string{"-hold", "5", "-exit", test.exit}, test.more...),
			}, []steplog.World{before, test.after})
		})
	}
}

// TestFailureRollsBackToTheCommit: steps since the last commit are repeated in the next world.
func TestFailureRollsBackToTheCommit(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "15", "-commit-every", "5", "-exit", "localhost:0@step=8:kill"},
	}), 0, 15)
	var before, after []steplog.Line
	for _, l := range res.Lines {
		if l.Generation == 1 {
			before = append(before, l)
		} else {
			after = append(after, l)
		}
	}
	if err := steplog.CheckWorlds(before, []steplog.World{
		{From: 1, To: 8, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
	if err := steplog.CheckWorlds(after, []steplog.World{
		{From: 6, To: 15, Generation: 2, Size: 1, Zero: "127.0.0.1:0", First: 1},
	}); err != nil {
		t.Error(err)
	}
}

// TestDeathInSave: whether the step that is being saved is repeated depends on the progress of the
// ranks, but at the end it is recorded exactly once.
func TestDeathInSave(t *testing.T) {
	for who, after := range map[string]steplog.World{
		"localhost:0": {From: 6, To: 10, Generation: 2, Size: 2, Zero: "localhost:1", First: 1},
		"127.0.0.1:0": {From: 6, To: 10, Generation: 2, Size: 2, Zero: "localhost:0", First: 0},
	} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			res := finish(t, start(t, Job{
				Flags:   flags("-np", "3", "--min-np", "1"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 1)}},
				Trainer: []string{"-steps", "10", "-exit", who + "@save=5:kill"},
			}), 0, 10)
			clear := slices.DeleteFunc(res.Lines, func(l steplog.Line) bool { return l.Step == 5 })
			if err := steplog.CheckWorlds(clear, []steplog.World{
				{From: 1, To: 4, Generation: 1, Size: 3, Zero: "localhost:0", First: 0}, after,
			}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestLastWithStateDiesInSync: the new worker has no state to continue from, and fails instead of
// starting from the beginning.
func TestLastWithStateDiesInSync(t *testing.T) {
	t.Parallel()
	finish(t, start(t, Job{
		Flags:   flags("-np", "1", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 1)}, {Step: 5, Hosts: on(hostA, 1, hostB, 1)}},
		Trainer: []string{"-steps", "10", "-hold", "5", "-exit", "localhost:0@sync=2:kill"},
	}), 5, 10)
}

// TestExitsEarly: a worker that exits with status 0 before the end has failed, and the others
// continue.
func TestExitsEarly(t *testing.T) {
	res := run(t, Job{
		Flags:   flags("-np", "3", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 1)}},
		Trainer: []string{"-exit", "localhost:0@step=5:exit0"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 3, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 2, Zero: "localhost:1", First: 1},
	})
	if e := exits(res, "localhost:0"); len(e) != 1 || e[0].Cause != "failed" || e[0].Code != 0 {
		t.Errorf("localhost:0 ended by %+v, want that it has failed", e)
	}
	says(t, res, "host localhost slot 0 rank 0 exited with status 0 before training was done")
}
