package gossip

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// scene is a roster with its own clock.
type scene struct {
	*roster
	now time.Time
}

func newScene() *scene { return &scene{newRoster(), time.Unix(5000, 0)} }

const sceneGrace = time.Second

// joins reports that the agent with this node name, "host~incarnation", is alive.
func (s *scene) joins(node, addr string, start int64) {
	host, incarnation, _ := strings.Cut(node, "~")
	s.here(node, addr, &Meta{Name: host, Slots: 1, Start: time.Unix(start, 0), Incarnation: incarnation})
}

// sees checks the current view: the incarnations of hosts, oldest first.
func (s *scene) sees(t *testing.T, want string) view {
	t.Helper()
	return s.seesIf(t, true, want)
}

func (s *scene) seesIf(t *testing.T, heard bool, want string) view {
	t.Helper()
	v := s.look(s.now, sceneGrace, heard)
	var got []string
	for _, a := range v.agents {
		got = append(got, a.Name+"~"+a.Incarnation)
	}
	if g := strings.Join(got, " "); g != want {
		t.Errorf("sees %q, want %q", g, want)
	}
	return v
}

func (s *scene) pass(d time.Duration) { s.now = s.now.Add(d) }

func TestRosterOrder(t *testing.T) {
	s := newScene()
	s.joins("z~1", "1", 10)
	s.sees(t, "z~1")
	s.joins("c~1", "2", 10)
	s.joins("b~1", "3", 10)
	s.joins("a~1", "4", 20)
	s.here("observer", "5", nil)
	s.sees(t, "z~1 b~1 c~1 a~1") // by start; then by when they were seen first; then by name
	s.joins("y~1", "6", 5)
	s.sees(t, "y~1 z~1 b~1 c~1 a~1")
}

func TestRosterDeath(t *testing.T) {
	s := newScene()
	s.joins("a~1", "1", 1)
	s.joins("b~1", "2", 2)
	s.away(s.now, "a~1")
	v := s.sees(t, "a~1 b~1")
	if want := s.now.Add(sceneGrace); !v.next.Equal(want) {
		t.Errorf("looks next at %v, want %v", v.next, want)
	}
	s.pass(sceneGrace / 2)
	s.joins("a~1", "1", 1) // it contradicts its death
	s.pass(sceneGrace)
	s.sees(t, "a~1 b~1")
	s.away(s.now, "a~1")
	s.pass(sceneGrace)
	if v = s.sees(t, "b~1"); !v.next.IsZero() {
		t.Error("looks again for nothing")
	}
	s.joins("a~1", "1", 1)
	s.sees(t, "a~1 b~1") // a list has omitted it, so it is the youngest now
}

func TestRosterDrainingLeavesAtOnce(t *testing.T) {
	s := newScene()
	s.here("a~1", "1", &Meta{Name: "a", Start: time.Unix(1, 0), Incarnation: "1", Draining: true})
	if v := s.sees(t, "a~1"); !v.agents[0].host().Draining {
		t.Error("not draining")
	}
	s.away(s.now, "a~1")
	s.sees(t, "")
}

func TestRosterSilence(t *testing.T) {
	s := newScene()
	s.joins("a~1", "1", 1)
	s.joins("b~1", "2", 2)
	s.away(s.now, "a~1")
	s.away(s.now, "b~1")
	s.pass(sceneGrace)
	if v := s.seesIf(t, false, "a~1 b~1"); !v.withheld {
		t.Error("does not say that it knows nothing")
	}
	s.joins("b~1", "2", 2)
	// This member was cut off, and hears of the others one by one: those that it has not heard of
	// yet have some time left.
	if v := s.sees(t, "a~1 b~1"); v.withheld {
		t.Error("still says that it knows nothing")
	}
	s.pass(sceneGrace)
	s.sees(t, "b~1")
}

func TestRosterRestart(t *testing.T) {
	t.Run("at the same address", func(t *testing.T) {
		s := newScene()
		s.joins("a~1", "1", 1)
		s.joins("b~1", "2", 2)
		s.sees(t, "a~1 b~1")
		s.joins("a~2", "1", 3)
		if v := s.sees(t, "b~1 a~2"); len(v.conflicts) > 0 {
			t.Errorf("takes a restart for a conflict: %v", v.conflicts)
		}
		s.away(s.now, "a~1")
		s.pass(sceneGrace)
		s.sees(t, "b~1 a~2")
	})
	t.Run("at another address", func(t *testing.T) {
		s := newScene()
		s.joins("a~1", "1", 1)
		s.joins("b~1", "2", 2)
		s.sees(t, "a~1 b~1")
		s.joins("a~2", "7", 3)
		s.sees(t, "a~1 b~1")
		s.away(s.now, "a~1")
		s.sees(t, "b~1 a~2")
	})
	t.Run("after a list without it", func(t *testing.T) {
		s := newScene()
		s.joins("a~1", "1", 1)
		s.sees(t, "a~1")
		s.away(s.now, "a~1")
		s.pass(sceneGrace)
		s.sees(t, "")
		s.joins("a~2", "1", 3)
		s.sees(t, "a~2")
	})
	t.Run("with a clock that went back", func(t *testing.T) {
		s := newScene()
		s.joins("a~1", "1", 10)
		s.sees(t, "a~1")
		s.joins("a~2", "1", 3)
		s.sees(t, "a~2")
	})
}

func TestRosterConflict(t *testing.T) {
	s := newScene()
	s.joins("a~1", "1", 5)
	s.joins("a~2", "2", 6)
	v := s.sees(t, "a~1")
	if len(v.conflicts) != 1 || v.conflicts[0].kept.addr != "1" || v.conflicts[0].refused.addr != "2" {
		t.Errorf("conflicts %+v", v.conflicts)
	}
	s.joins("a~3", "3", 1) // the host stays with its agent, whatever start others claim
	if v = s.sees(t, "a~1"); len(v.conflicts) != 1 {
		t.Errorf("conflicts %+v", v.conflicts)
	}
	if v = s.sees(t, "a~1"); len(v.conflicts) != 0 {
		t.Errorf("says again %+v", v.conflicts)
	}
	s.away(s.now, "a~1")
	s.sees(t, "a~3") // of several claims, the oldest start wins
}

// TestRosterHolderIsNotUnderstood: an agent whose Meta can no longer be decoded loses its host to
// another agent that claims it.
func TestRosterHolderIsNotUnderstood(t *testing.T) {
	s := newScene()
	s.joins("a~1", "1", 5)
	s.joins("a~2", "2", 6)
	s.sees(t, "a~1")
	s.here("a~1", "1", nil)
	s.sees(t, "a~2")
	s.joins("a~1", "1", 5)
	s.sees(t, "a~2")
}

func TestRosterRival(t *testing.T) {
	s := newScene()
	me := Meta{Name: "a", Start: time.Unix(5, 0)}
	s.joins("a~0", "9", 7)
	s.joins("b~1", "8", 1)
	s.joins("a~2", "1", 1)
	if p := s.rival(s.now, sceneGrace, "a~1", "1", me); p != nil {
		t.Errorf("rival %+v", p) // one is younger, one is of another host, one had this address before
	}
	s.joins("a~3", "7", 4)
	if p := s.rival(s.now, sceneGrace, "a~1", "1", me); p == nil || p.node != "a~3" {
		t.Errorf("rival %+v", p)
	}
	s.away(s.now, "a~3")
	if p := s.rival(s.now, sceneGrace, "a~1", "1", me); p == nil {
		t.Error("buried alive")
	}
	s.pass(sceneGrace)
	if p := s.rival(s.now, sceneGrace, "a~1", "1", me); p != nil {
		t.Errorf("a dead rival %+v", p)
	}
	if s.purge(s.now, sceneGrace); len(s.peers) != 3 {
		t.Errorf("%d peers are kept", len(s.peers))
	}
}

func TestGrace(t *testing.T) {
	r := newRoster()
	for _, c := range []struct {
		peers int
		want  time.Duration
	}{{3, 600}, {9, 600}, {99, 300}, {499, 100}} {
		for i := len(r.peers); i < c.peers; i++ {
			r.here(fmt.Sprint("p", i), "", nil)
		}
		if got := r.grace(defaultProbeInterval, defaultPatience).Round(time.Millisecond); got != c.want*time.Millisecond {
			t.Errorf("%d peers: %v, want %v", c.peers, got, c.want*time.Millisecond)
		}
	}
}
