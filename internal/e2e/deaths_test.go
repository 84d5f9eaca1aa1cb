package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/trainee/diary"
)

// Workers die.

func TestOneLostExcludesItsSlot(t *testing.T) {
	for name, test := range map[string]struct {
		lost, how string
		after     diary.World
	}{
		"killed": {"127.0.0.1:1", "kill", diary.World{Zero: "localhost:0", First: 0}},
		"error":  {"127.0.0.1:0", "fail", diary.World{Zero: "localhost:0", First: 0}},
		"exit":   {"localhost:1", "exit7", diary.World{Zero: "localhost:0", First: 0}},
		"rank 0": {"localhost:0", "kill", diary.World{Zero: "localhost:1", First: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			test.after.From, test.after.To, test.after.Generation, test.after.Size = 6, 10, 2, 3
			res := run(t, Job{
				Flags:   flags("-np", "4", "--min-np", "2"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
				Trainee: []string{"-exit", test.lost + "@step=5:" + test.how},
			}, []diary.World{
				{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
				test.after,
			})
			if e := exits(res, test.lost); len(e) != 1 || e[0].Cause != "failed" {
				t.Errorf("%s ended by %+v, want one failure", test.lost, e)
			}
		})
	}
}

func TestOneLostExcludesItsHost(t *testing.T) {
	for name, test := range map[string]struct {
		lost  string
		after diary.World
	}{
		"younger host": {"127.0.0.1:1", diary.World{Zero: "localhost:0", First: 0}},
		"host of 0":    {"localhost:1", diary.World{Zero: "127.0.0.1:0", First: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			test.after.From, test.after.To, test.after.Generation, test.after.Size = 6, 10, 2, 2
			run(t, Job{
				Flags:   flags("-np", "4", "--min-np", "2", "--failure-policy", "host"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
				Trainee: []string{"-exit", test.lost + "@step=5:kill"},
			}, []diary.World{
				{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
				test.after,
			})
		})
	}
}

func TestOneOfEachHostLost(t *testing.T) {
	for name, test := range map[string]struct {
		slot  string
		after diary.World
	}{
		"first slots":  {"0", diary.World{Zero: "localhost:1", First: 1}},
		"second slots": {"1", diary.World{Zero: "localhost:0", First: 0}},
	} {
		t.Run(name, func(t *testing.T) {
			test.after.From, test.after.To, test.after.Generation, test.after.Size = 6, 10, 2, 2
			run(t, Job{
				Flags:  flags("-np", "4", "--min-np", "2"),
				Stages: []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
				Trainee: []string{"-exit", "localhost:" + test.slot + "@step=5:kill",
					"-exit", "127.0.0.1:" + test.slot + "@step=5:kill"},
			}, []diary.World{
				{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
				test.after,
			})
		})
	}
}

func TestOneOfEachHostLostExcludesAllHosts(t *testing.T) {
	t.Parallel()
	finish(t, start(t, Job{
		Flags:  flags("-np", "4", "--min-np", "2", "--failure-policy", "host"),
		Stages: []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainee: []string{"-steps", "10", "-step-time", "5ms",
			"-exit", "localhost:0@step=5:kill", "-exit", "127.0.0.1:0@step=5:kill"},
	}), 5, 10)
}

func TestAllLost(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:  flags("-np", "2", "--min-np", "1"),
		Stages: []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainee: []string{"-steps", "10", "-step-time", "10ms", "-exit", "localhost:0@step=5:kill",
			"-exit", "127.0.0.1:0@step=5:exit7"},
	}), 5, 10)
	if err := diary.CheckWorlds(res.Lines, []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
	says(t, res, "state lost")
}

func TestAllLostBeforeTheFirstStep(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainee: []string{"-exit", "localhost:0@step=0:exit7", "-exit", "127.0.0.1:0@step=0:exit7"},
	}), 1, 20)
	says(t, res, "one or more processes exited with non-zero status")
	says(t, res, "exited with code 7")
}

func TestScaleDownByDeaths(t *testing.T) {
	run(t, Job{
		Flags:   flags("-np", "3", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1, hostC, 1)}},
		Trainee: []string{"-exit", "localhost:0@step=5:kill", "-exit", "127.0.0.2:0@step=10:kill"},
	}, []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 3, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 2, Zero: "127.0.0.1:0", First: 1},
		{From: 11, To: 15, Generation: 3, Size: 1, Zero: "127.0.0.1:0", First: 1},
	})
}

func TestTooFewSlotsAfterADeath(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "2", "--elastic-timeout", "300ms"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainee: []string{"-steps", "10", "-exit", "127.0.0.1:0@step=5:kill"},
	}), 3, 10)
	if err := diary.CheckWorlds(res.Lines, []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
}

// TestCooldownAndReturn: the slot rests as long as is documented, twice as long the second time.
func TestCooldownAndReturn(t *testing.T) {
	res := run(t, Job{
		Flags:  flags("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "0.2,100"),
		Stages: []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainee: []string{"-hold", "10,20",
			"-exit", "127.0.0.1:0@step=5:kill", "-exit", "127.0.0.1:0@step=15:kill"},
	}, []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 1, Zero: "localhost:0", First: 0},
		{From: 11, To: 15, Generation: 3, Size: 2, Zero: "localhost:0", First: 0},
		{From: 16, To: 20, Generation: 4, Size: 1, Zero: "localhost:0", First: 0},
		{From: 21, To: 25, Generation: 5, Size: 2, Zero: "localhost:0", First: 0},
	})
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

// TestRankZeroReturnsYoungest: a host that was out as a whole has lost its age.
func TestRankZeroReturnsYoungest(t *testing.T) {
	run(t, Job{
		Flags:   flags("-np", "4", "--min-np", "2", "--failure-policy", "host", "--blacklist-cooldown-range", "0.2,100"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainee: []string{"-hold", "10", "-exit", "localhost:0@step=5:kill"},
	}, []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 2, Zero: "127.0.0.1:0", First: 2},
		{From: 11, To: 15, Generation: 3, Size: 4, Zero: "127.0.0.1:0", First: 2},
	})
}

// TestReturnIsWaitedFor: with too few slots the survivors wait until the cooldown ends.
func TestReturnIsWaitedFor(t *testing.T) {
	run(t, Job{
		Flags:   flags("-np", "4", "--min-np", "4", "--blacklist-cooldown-range", "0.2,100"),
		Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 2)}},
		Trainee: []string{"-exit", "127.0.0.1:1@step=5:kill"},
	}, []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 4, Zero: "localhost:0", First: 0},
	})
}

// TestHostLostAndAddedWithinASecond: its worker dies, discovery drops it at the same time and names
// it again at once.
func TestHostLostAndAddedWithinASecond(t *testing.T) {
	run(t, Job{
		Flags: flags("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "0.2,0.2"),
		Stages: []Stage{
			{Hosts: on(hostA, 1, hostB, 1)},
			{Step: 5, After: "fault.0", Hosts: on(hostB, 1)},
			{Step: 5, Polls: 2, Hosts: on(hostA, 1, hostB, 1)},
		},
		Trainee: []string{"-hold", "7", "-exit", "localhost:0@step=5:kill"},
	}, []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 7, Generation: 2, Size: 1, Zero: "127.0.0.1:0", First: 1},
		{From: 8, To: 12, Generation: 3, Size: 2, Zero: "127.0.0.1:0", First: 1},
	})
}

func TestResetLimit(t *testing.T) {
	job := func(limit string) Job {
		return Job{
			Flags: flags("-np", "2", "--min-np", "1", "--reset-limit", limit),
			Stages: []Stage{
				{Hosts: on(hostA, 2)},
				{Step: 10, Hosts: on(hostA, 1, hostB, 1)},
			},
			Trainee: []string{"-hold", "10", "-exit", "localhost:1@step=5:kill"},
		}
	}
	worlds := []diary.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 1, Zero: "localhost:0", First: 0},
		{From: 11, To: 15, Generation: 3, Size: 2, Zero: "localhost:0", First: 0},
	}
	for limit := range 2 {
		text := string(rune('0' + limit))
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			j := job(text)
			j.Trainee = append(j.Trainee, "-steps", "15")
			res := finish(t, start(t, j), 4, 15)
			says(t, res, "number of resets exceeded limit "+text)
			if err := diary.CheckWorlds(res.Lines, worlds[:limit+1]); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("2", func(t *testing.T) { run(t, job("2"), worlds) })
}

// TestDeathInTheMiddle: a worker dies in a sync, a save, a roll back, a reset. Whoever is left has
// a whole state.
func TestDeathInTheMiddle(t *testing.T) {
	grows := []Stage{{Hosts: on(hostA, 2)}, {Step: 5, Hosts: on(hostA, 2, hostB, 1)}}
	before := diary.World{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0}
	for name, test := range map[string]struct {
		exit  string
		more  []string
		after diary.World
	}{
		"newcomer in its first sync": {exit: "127.0.0.1:0@sync=1:kill",
			after: diary.World{Generation: 3, Size: 2, Zero: "localhost:0", First: 0}},
		"old worker in sync": {exit: "localhost:1@sync=2:kill",
			after: diary.World{Generation: 3, Size: 2, Zero: "localhost:0", First: 0}},
		"root in sync": {exit: "localhost:0@sync=2:kill",
			after: diary.World{Generation: 3, Size: 2, Zero: "localhost:1", First: 1}},
		"old worker on the way to the sync": {exit: "localhost:0@reset=1:kill",
			after: diary.World{Generation: 3, Size: 2, Zero: "localhost:1", First: 1}},
		"two in the same sync": {exit: "localhost:0@sync=2:kill", more: []string{"-exit", "127.0.0.1:0@sync=1:kill"},
			after: diary.World{Size: 1, Zero: "localhost:1", First: 1}},
		"roll back after another's death": {exit: "127.0.0.1:0@sync=1:kill", more: []string{"-exit", "localhost:0@restore=1:kill"},
			after: diary.World{Generation: 3, Size: 1, Zero: "localhost:1", First: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			test.after.From, test.after.To = 6, 10
			run(t, Job{
				Flags:   flags("-np", "2", "--min-np", "1"),
				Stages:  grows,
				Trainee: append([]string{"-hold", "5", "-exit", test.exit}, test.more...),
			}, []diary.World{before, test.after})
		})
	}
}

// TestFailureRollsBackToTheCommit: what was done since the last commit is done again, in the world
// that comes.
func TestFailureRollsBackToTheCommit(t *testing.T) {
	t.Parallel()
	res := finish(t, start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 1, hostB, 1)}},
		Trainee: []string{"-steps", "15", "-commit-every", "5", "-exit", "localhost:0@step=8:kill"},
	}), 0, 15)
	var before, after []diary.Line
	for _, l := range res.Lines {
		if l.Generation == 1 {
			before = append(before, l)
		} else {
			after = append(after, l)
		}
	}
	if err := diary.CheckWorlds(before, []diary.World{
		{From: 1, To: 8, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
	}); err != nil {
		t.Error(err)
	}
	if err := diary.CheckWorlds(after, []diary.World{
		{From: 6, To: 15, Generation: 2, Size: 1, Zero: "127.0.0.1:0", First: 1},
	}); err != nil {
		t.Error(err)
	}
}

// TestDeathInSave: whether the step that was being saved is done again depends on who had come how
// far, but it is there once in the end.
func TestDeathInSave(t *testing.T) {
	for who, after := range map[string]diary.World{
		"localhost:0": {From: 6, To: 10, Generation: 2, Size: 2, Zero: "localhost:1", First: 1},
		"127.0.0.1:0": {From: 6, To: 10, Generation: 2, Size: 2, Zero: "localhost:0", First: 0},
	} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			res := finish(t, start(t, Job{
				Flags:   flags("-np", "3", "--min-np", "1"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 1)}},
				Trainee: []string{"-steps", "10", "-exit", who + "@save=5:kill"},
			}), 0, 10)
			clear := slices.DeleteFunc(res.Lines, func(l diary.Line) bool { return l.Step == 5 })
			if err := diary.CheckWorlds(clear, []diary.World{
				{From: 1, To: 4, Generation: 1, Size: 3, Zero: "localhost:0", First: 0}, after,
			}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestLastWithStateDiesInSync: the newcomer has nothing to go on with, and says so rather than
// beginning anew.
func TestLastWithStateDiesInSync(t *testing.T) {
	t.Parallel()
	finish(t, start(t, Job{
		Flags:   flags("-np", "1", "--min-np", "1"),
		Stages:  []Stage{{Hosts: on(hostA, 1)}, {Step: 5, Hosts: on(hostA, 1, hostB, 1)}},
		Trainee: []string{"-steps", "10", "-hold", "5", "-exit", "localhost:0@sync=2:kill"},
	}), 5, 10)
}

// TestDeparture: a worker that exits with 0 before the end does not end the job.
func TestDeparture(t *testing.T) {
	for _, how := range []string{"leave", "exit0"} {
		t.Run(how, func(t *testing.T) {
			res := run(t, Job{
				Flags:   flags("-np", "3", "--min-np", "1"),
				Stages:  []Stage{{Hosts: on(hostA, 2, hostB, 1)}},
				Trainee: []string{"-exit", "localhost:0@step=5:" + how},
			}, []diary.World{
				{From: 1, To: 5, Generation: 1, Size: 3, Zero: "localhost:0", First: 0},
				{From: 6, To: 10, Generation: 2, Size: 2, Zero: "localhost:1", First: 1},
			})
			if e := exits(res, "localhost:0"); len(e) != 1 || e[0].Cause != "left" || e[0].Code != 0 {
				t.Errorf("localhost:0 ended by %+v, want it to have left", e)
			}
		})
	}
}
