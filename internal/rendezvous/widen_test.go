package rendezvous

import (
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/internal/line"
)

// joinsAt makes a worker join with an address; canWiden says whether it can also listen on others.
func (j *job) joinsAt(worker, addr string, canWiden bool) {
	j.says(worker, "join", line.Joining{DataAddrs: []string{addr}, CanWiden: canWiden})
}

// TestWiden: once a worker of another machine takes part, workers that listen only on loopback,
// including waiting ones, are asked for other addresses; other workers are not.
func TestWiden(t *testing.T) {
	j := newJob(t)
	j.joinsAt("a", "127.0.0.1:1", true)
	j.joinsAt("far", "10.0.0.9:1", true)
	j.silent("a", "far")
	j.server.Widen()
	j.hears("a", "widen")
	j.silent("far")
	j.joinsAt("a", "10.0.0.1:4", false)
	j.joinsAt("b", "127.0.0.1:2", true)
	j.hears("b", "widen")
	j.joinsAt("b", "10.0.0.1:5", false)
	j.joinsAt("c", "127.0.0.1:3", false) // it cannot listen elsewhere
	j.publish(1, 0, 0, "a", "b", "c")
	for _, worker := range []string{"a", "b", "c"} {
		p := j.place(j.hears(worker, "world"), 0, nil)
		w, err := p.World()
		if err != nil {
			t.Fatal(err)
		}
		addrs := w.DataAddrs()
		if !slices.Equal(addrs[0], []string{"10.0.0.1:4"}) || !slices.Equal(addrs[1], []string{"10.0.0.1:5"}) {
			t.Errorf("%s: the addresses are %v", worker, addrs)
		}
	}
}

// TestWorldWaitsForWideMembers: if a member was asked to listen elsewhere, its world is published
// when it has joined again, with its new addresses. A newer world replaces the one that waits.
func TestWorldWaitsForWideMembers(t *testing.T) {
	j := newJob(t)
	j.server.Widen()
	j.joinsAt("far", "10.0.0.2:1", true)
	j.joinsAt("near", "[::1]:1", true)
	j.hears("near", "widen")
	j.publish(1, 0, 0, "far", "near")
	j.silent("far", "near")
	j.publish(2, 0, 0, "far", "near")
	j.joinsAt("near", "10.0.0.1:1", false)
	if m := j.hears("near", "world"); m.Generation != 2 {
		t.Fatalf("near is told %+v", m)
	}
	p := j.place(j.hears("far", "world"), 0, nil)
	world, err := p.World()
	if err != nil {
		t.Fatal(err)
	}
	if got := world.DataAddrs()[1]; world.Generation != 2 || !slices.Equal(got, []string{"10.0.0.1:1"}) {
		t.Errorf("generation %d, near at %v", world.Generation, got)
	}
}

// TestWideMemberEnds: a worker that has ended is forgotten, but a delayed world is not published
// with the loopback address of a member that has ended.
func TestWideMemberEnds(t *testing.T) {
	j := newJob(t)
	j.server.Widen()
	for _, inc := range []string{"near", "other", "gone"} {
		j.joinsAt(inc, "[::1]:1", true)
		j.hears(inc, "widen")
	}
	j.publish(1, 0, 0, "near", "other")
	j.server.Expel("gone")
	j.server.Expel("other")
	j.joinsAt("near", "10.0.0.1:1", false)
	j.silent("near")
	j.publish(2, 0, 0, "near")
	if m := j.hears("near", "world"); m.Generation != 2 {
		t.Errorf("near is told %+v", m)
	}
	if _, known := j.server.asked["gone"]; known {
		t.Error("a worker that has ended is not forgotten")
	}
}
