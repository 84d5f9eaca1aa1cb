package routes

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/netif"
)

// way returns a route to 10.0.0.n by interface n of both hosts.
func way(n int, rate float64, trip time.Duration) Route {
	name := fmt.Sprintf("eth%d", n)
	return Route{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), Near: netif.Card{Name: name}, Far: netif.Card{Name: name}, Rate: rate, Trip: trip}
}

func rated(r Route, near, far int64) Route {
	r.Near.Bits, r.Far.Bits = near, far
	return r
}

func names(all []Route) string {
	var n []string
	for _, r := range all {
		n = append(n, r.Near.Name)
	}
	return strings.Join(n, " ")
}

const us = time.Microsecond

func TestOrder(t *testing.T) {
	one := func(r Route) Route { r.Near.Name, r.Far.Name = "eth1", "eth1"; return r }
	for _, c := range []struct {
		name  string
		all   []Route
		kept  int // 0: none
		want  string
		rails int
	}{
		{"nothing", nil, 0, "", 0},
		{"one", []Route{way(1, 1e9, 100*us)}, 0, "eth1", 1},
		{"the faster one", []Route{way(1, 1e9, 100*us), way(2, 10e9, 100*us)}, 0, "eth2 eth1", 1},
		{"the faster one, though the other is kept", []Route{way(1, 1e9, 100*us), way(2, 10e9, 100*us)}, 1, "eth2 eth1", 1},
		{"equal within a fifth", []Route{way(1, 9e9, 100*us), way(2, 8e9, 90*us)}, 0, "eth1 eth2", 2},
		{"the kept one stays", []Route{way(1, 9e9, 100*us), way(2, 8e9, 90*us)}, 2, "eth2 eth1", 2},
		{"not equal", []Route{way(1, 7e9, 100*us), way(2, 10e9, 90*us)}, 1, "eth2 eth1", 1},
		{"two of one interface are no rails", []Route{one(way(1, 9e9, 100*us)), one(way(2, 9e9, 100*us))}, 0, "eth1 eth1", 1},
		{"two rails beside such", []Route{one(way(1, 9e9, 100*us)), one(way(2, 9e9, 100*us)), way(3, 9e9, 100*us)}, 0, "eth1 eth3 eth1", 2},
		{"a far interface in common", []Route{way(1, 9e9, 100*us), func() Route { r := way(2, 9e9, 100*us); r.Far.Name = "eth1"; return r }()}, 0, "eth1 eth2", 1},
		{"unknown interfaces are no rails", []Route{{Addr: netip.MustParseAddr("10.0.0.1"), Rate: 1e9}, {Addr: netip.MustParseAddr("10.0.0.2"), Rate: 1e9}}, 0, " ", 1},
		{"a long way round", []Route{way(1, 9e9, 2*time.Millisecond), way(2, 9e9, 100*us)}, 0, "eth2 eth1", 1},
		{"the speed counts more than the way", []Route{way(1, 9e9, 2*time.Millisecond), way(2, 1e9, 100*us)}, 0, "eth1 eth2", 1},
		{"links decide between bursts that are close",
			[]Route{rated(way(1, 8e9, 100*us), 25e9, 25e9), rated(way(2, 6e9, 100*us), 100e9, 100e9)}, 0, "eth2 eth1", 1},
		{"the slower end counts",
			[]Route{rated(way(1, 8e9, 100*us), 25e9, 25e9), rated(way(2, 7e9, 100*us), 100e9, 10e9)}, 0, "eth1 eth2", 1},
		{"a link that is slower than it says",
			[]Route{rated(way(1, 8e9, 100*us), 25e9, 25e9), rated(way(2, 0.5e9, 100*us), 100e9, 100e9)}, 0, "eth1 eth2", 1},
		{"equal links, bursts that differ by chance",
			[]Route{rated(way(1, 6e9, 100*us), 100e9, 100e9), rated(way(2, 11e9, 100*us), 100e9, 100e9)}, 0, "eth1 eth2", 2},
		{"one link of unknown speed: the bursts decide",
			[]Route{rated(way(1, 6e9, 100*us), 100e9, 0), rated(way(2, 11e9, 100*us), 10e9, 10e9)}, 0, "eth2 eth1", 1},
		{"four rails and a slow one", []Route{way(5, 1e9, 100*us), way(4, 9e9, 100*us), way(3, 9e9, 100*us), way(2, 9e9, 100*us), way(1, 9e9, 100*us)},
			0, "eth1 eth2 eth3 eth4 eth5", 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			var kept netip.Addr
			if c.kept > 0 {
				kept = way(c.kept, 0, 0).Addr
			}
			got, rails := order(c.all, kept)
			if names(got) != c.want || rails != c.rails {
				t.Errorf("%q with %d rails, not %q with %d", names(got), rails, c.want, c.rails)
			}
		})
	}
}

func TestBeside(t *testing.T) {
	for _, c := range []struct {
		all   []Route
		rails int
		want  string
	}{
		{nil, 0, ""},
		{[]Route{way(1, 9e9, 100*us)}, 1, ""},
		{[]Route{way(1, 9e9, 100*us), way(2, 1e9, 300*us)}, 1, "eth2"},
		{[]Route{way(1, 9e9, 100*us), way(2, 1e9, 5*time.Millisecond), way(3, 1e8, 200*us)}, 1, "eth3"},
		{[]Route{way(1, 9e9, 100*us), way(2, 9e9, 100*us), way(3, 1e8, 200*us)}, 2, "eth3"},
		{[]Route{way(1, 9e9, 100*us), way(2, 9e9, 100*us), way(3, 1e8, 5*time.Millisecond)}, 2, "eth2"},
		{[]Route{way(1, 9e9, 100*us), way(2, 9e9, 100*us)}, 2, "eth2"},
		{[]Route{way(1, 9e9, 100*us), {Rate: 1e9}}, 1, ""},
	} {
		if got, ok := Beside(c.all, c.rails); got.Near.Name != c.want || ok != (c.want != "") {
			t.Errorf("%v with %d rails: %q", names(c.all), c.rails, got.Near.Name)
		}
	}
}

// TestMemory: measurements are kept, broken routes are avoided for a growing time, and new
// addresses have to be measured.
func TestMemory(t *testing.T) {
	var m Memory
	now := time.Unix(1000, 0)
	fast, slow := way(1, 9e9, 100*us), way(2, 1e9, 100*us)
	both := []netip.Addr{fast.Addr, slow.Addr}
	expect := func(what string, addrs []netip.Addr, want string, known bool) {
		t.Helper()
		c, ok := m.Choose("b", addrs)
		if ok != known || names(c.Routes) != want {
			t.Errorf("%s: %q, %v", what, names(c.Routes), ok)
		}
	}
	expect("at first", both, "", false)
	m.Learn(now, "b", both, []Route{slow, fast})
	expect("once learnt", both, "eth1 eth2", true)
	expect("one address of both", both[1:], "eth2", true)
	expect("a new address", append(both[:2:2], way(3, 0, 0).Addr), "", false)
	if r, ok := m.Spare("b", fast.Addr); !ok || r.Addr != slow.Addr {
		t.Errorf("beside the fast one there is %v, %v", r, ok)
	}
	m.Break(now, "b", fast.Addr)
	m.Break(now.Add(time.Millisecond), "b", fast.Addr)
	expect("the fast one has broken", both, "eth2 eth1", true)
	if _, ok := m.Spare("b", slow.Addr); ok {
		t.Error("a broken one is no spare")
	}
	if m.Stale(now.Add(penance.First-1), "b", both) || !m.Stale(now.Add(penance.First), "b", both) {
		t.Error("a route that broke is to be measured anew after its penance")
	}
	now = now.Add(penance.First)
	expect("after its penance, not measured yet", both, "eth2 eth1", true)
	m.Learn(now, "b", both, []Route{slow})
	if m.Stale(now.Add(penance.First-1), "b", both) {
		t.Error("a route that is still broken is tried again at once")
	}
	now = now.Add(penance.First)
	m.Learn(now, "b", both, []Route{slow, fast})
	expect("found to work", both, "eth1 eth2", true)
	m.Break(now, "b", fast.Addr)
	now = now.Add(penance.First)
	m.Learn(now, "b", both, []Route{slow, fast})
	expect("it broke again: twice as long", both, "eth2 eth1", true)
	m.Break(now, "b", slow.Addr)
	expect("all have broken", both, "eth1 eth2", true)
	now = now.Add(5 * penance.Most)
	m.Learn(now, "b", both, []Route{slow, fast})
	m.Break(now, "b", fast.Addr)
	now = now.Add(penance.First)
	m.Learn(now, "b", both, []Route{slow, fast})
	expect("a break long ago does not count", both, "eth1 eth2", true)
	m.Learn(now, "b", append(both[:2:2], way(3, 0, 0).Addr), []Route{slow})
	if !m.Stale(now, "b", append(both[:2:2], way(3, 0, 0).Addr)) {
		t.Error("one that was not reached is to be tried again")
	}
	expect("one that was not reached is as it was", both, "eth1 eth2", true)
	m.Learn(now, "c", both, nil)
	if c, ok := m.Choose("c", both); ok {
		t.Errorf("none was reached, and the choice is %v", c)
	}
}
