package e2e

import (
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// Hosts come and go by discovery.

func TestHostAddedThenOldOneRemoved(t *testing.T) {
	res := run(t, Job{
		Flags: flags("-np", "2", "--min-np", "2", "--max-np", "4"),
		Stages: []Stage{
			{Hosts: on(hostA, 2)},
			{Step: 5, Hosts: on(hostA, 2, hostB, 2)},
			{Step: 10, Hosts: on(hostB, 2)},
		},
		Trainer: []string{"-hold", "5,10"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 4, Zero: "localhost:0", First: 0},
		{From: 11, To: 15, Generation: 3, Size: 2, Zero: "127.0.0.1:0", First: 2},
	})
	for _, where := range []string{"localhost:0", "localhost:1"} {
		e := exits(res, where)
		if len(e) != 1 || e[0].Code != 0 || e[0].Signal != 0 || e[0].Cause != "left" {
			t.Errorf("%s, which was removed, ended by %+v, want exit status 0", where, e)
		}
	}
	says(t, res, "leaving: elastic: this worker has no place in the new world")
}

func TestHostsReplacedOneByOne(t *testing.T) {
	run(t, Job{
		Flags: flags("-np", "2", "--min-np", "2"),
		Stages: []Stage{
			{Hosts: on(hostA, 1, hostB, 1)},
			{Step: 5, Hosts: on(hostB, 1, hostC, 1)},
			{Step: 10, Hosts: on(hostC, 1, hostD, 1)},
			{Step: 15, Hosts: on(hostA, 1, hostD, 1)}, // the script's order differs from the order of age
		},
		Trainer: []string{"-hold", "5,10,15"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 2, Zero: "127.0.0.1:0", First: 1},
		{From: 11, To: 15, Generation: 3, Size: 2, Zero: "127.0.0.2:0", First: 1},
		{From: 16, To: 20, Generation: 4, Size: 2, Zero: "127.0.0.3:0", First: 1},
	})
}

// TestAllHostsReplacedAtOnce: the oldest worker stays until another has the state, although its
// host is no longer listed.
func TestAllHostsReplacedAtOnce(t *testing.T) {
	run(t, Job{
		Flags: flags("-np", "1", "--min-np", "1"),
		Stages: []Stage{
			{Hosts: on(hostA, 1)},
			{Step: 5, Hosts: on(hostB, 1)},
		},
		// The world of both workers is formed first, and ends once it has committed.
		Trainer: []string{"-hold", "5,6"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 1, Zero: "localhost:0", First: 0},
		{From: 6, To: 6, Generation: 2, Size: 2, Zero: "localhost:0", First: 0},
		{From: 7, To: 12, Generation: 3, Size: 1, Zero: "127.0.0.1:0", First: 1},
	})
}

func TestSpareHostsComeAndGoWithoutReset(t *testing.T) {
	res := run(t, Job{
		Flags: flags("-np", "2", "--min-np", "2", "--max-np", "2"),
		Stages: []Stage{
			{Hosts: on(hostA, 2)},
			{Step: 5, Hosts: on(hostA, 2, hostB, 2)},
			{Step: 10, Hosts: on(hostA, 2)},
			{Step: 15, Hosts: on(hostB, 2, hostA, 2, hostC, 4)},
			{Step: 20, Hosts: on(hostA, 3)},
		},
		Trainer: []string{"-gate", "5=polled.1", "-gate", "10=polled.2", "-gate", "15=polled.3", "-gate", "20=polled.4"},
	}, []steplog.World{
		{From: 1, To: 25, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
	})
	if n := follow.Count(res.Events, "hosts_found"); n != 5 {
		t.Errorf("hosts were found %d times, want 5", n)
	}
	if n := follow.Count(res.Events, "hosts_updated"); n != 0 {
		t.Errorf("workers were told %d times of spare hosts", n)
	}
}

// TestScaleDown removes the host of rank 0 first.
func TestScaleDown(t *testing.T) {
	run(t, Job{
		Flags: flags("-np", "3", "--min-np", "1"),
		Stages: []Stage{
			{Hosts: on(hostA, 1, hostB, 2)},
			{Step: 5, Hosts: on(hostB, 2)},
			{Step: 10, Hosts: on(hostB, 1)},
		},
		Trainer: []string{"-hold", "5,10"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 3, Zero: "localhost:0", First: 0},
		{From: 6, To: 10, Generation: 2, Size: 2, Zero: "127.0.0.1:0", First: 1},
		{From: 11, To: 15, Generation: 3, Size: 1, Zero: "127.0.0.1:0", First: 1},
	})
}

// TestGracefulResetKeepsLiveState: a change of hosts takes effect between two commits, and no step
// is repeated.
func TestGracefulResetKeepsLiveState(t *testing.T) {
	res := run(t, Job{
		Flags: flags("-np", "1", "--min-np", "1"),
		Stages: []Stage{
			{Hosts: on(hostA, 1)},
			{Step: 8, Hosts: on(hostA, 1, hostB, 1)},
		},
		Trainer: []string{"-commit-every", "5", "-hold", "8"},
	}, []steplog.World{
		{From: 1, To: 8, Generation: 1, Size: 1, Zero: "localhost:0", First: 0},
		{From: 9, To: 15, Generation: 2, Size: 2, Zero: "localhost:0", First: 0},
	})
	for _, l := range res.Lines {
		if l.Event == steplog.Enter && l.Generation == 2 && l.Step != 8 {
			t.Errorf("generation 2 was entered after step %d, want 8", l.Step)
		}
	}
}

// TestHostGoneAndBackWithinASecond: the host's worker leaves, and its replacement is new and the
// youngest.
func TestHostGoneAndBackWithinASecond(t *testing.T) {
	run(t, Job{
		Flags: flags("-np", "2", "--min-np", "1"),
		Stages: []Stage{
			{Hosts: on(hostA, 1, hostB, 1)},
			{Step: 5, Hosts: on(hostB, 1)},
			{Step: 7, Hosts: on(hostA, 1, hostB, 1)},
		},
		Trainer: []string{"-hold", "5,7"},
	}, []steplog.World{
		{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
		{From: 6, To: 7, Generation: 2, Size: 1, Zero: "127.0.0.1:0", First: 1},
		{From: 8, To: 12, Generation: 3, Size: 2, Zero: "127.0.0.1:0", First: 1},
	})
}

// TestNewcomerThatCannotStart: workers are not notified of a host whose workers never join.
func TestNewcomerThatCannotStart(t *testing.T) {
	res := run(t, Job{
		Flags: flags("-np", "1", "--min-np", "1"),
		Stages: []Stage{
			{Hosts: on(hostA, 1)},
			{Step: 5, Hosts: on(hostA, 1, hostB, 2)},
			{Step: 5, Exits: 2, Hosts: on(hostA, 1)},
		},
		Trainer: []string{"-gate", "10=polled.2",
			"-exit", "127.0.0.1:0@start=0:exit3", "-exit", "127.0.0.1:1@start=0:exit3"},
	}, []steplog.World{
		{From: 1, To: 15, Generation: 1, Size: 1, Zero: "localhost:0", First: 0},
	})
	if n := follow.Count(res.Events, "hosts_updated"); n != 0 {
		t.Errorf("the worker was told %d times of a host that could not be used", n)
	}
	for _, where := range []string{"127.0.0.1:0", "127.0.0.1:1"} {
		if e := exits(res, where); len(e) != 1 || e[0].Code != 3 || e[0].Cause != "failed" {
			t.Errorf("%s ended by %+v, want exit status 3", where, e)
		}
	}
}

// TestLaterDiscoveryFails: the last list remains valid until the next successful one.
func TestLaterDiscoveryFails(t *testing.T) {
	res := run(t, Job{
		Flags: flags("-np", "1", "--min-np", "1"),
		Stages: []Stage{
			{Hosts: on(hostA, 1)},
			{Step: 5, Hosts: "!"},
			{Step: 10, Hosts: on(hostA, 2)},
		},
		Trainer: []string{"-gate", "5=polled.1", "-hold", "10"},
	}, []steplog.World{
		{From: 1, To: 10, Generation: 1, Size: 1, Zero: "localhost:0", First: 0},
		{From: 11, To: 15, Generation: 2, Size: 2, Zero: "localhost:0", First: 0},
	})
	if follow.Count(res.Events, "discovery_failed") == 0 {
		t.Error("no event tells of the failed discovery")
	}
}
