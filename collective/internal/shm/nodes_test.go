package shm

import (
	"slices"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
)

func coresIn(s *unix.CPUSet) (all []int) {
	for core := range len(s) * 64 {
		if s.IsSet(core) {
			all = append(all, core)
		}
	}
	return all
}

func setOf(cores ...int) (s unix.CPUSet) {
	for _, core := range cores {
		s.Set(core)
	}
	return s
}

// TestNodes: on systems with several nodes, the cores near a core are those of its node.
func TestNodes(t *testing.T) {
	list := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text + "\n")} }
	for _, c := range []struct {
		name string
		dir  fstest.MapFS
		core int
		want []int // of cores 0 to 7
	}{
		{"two sockets", fstest.MapFS{"node0/cpulist": list("0-3"), "node1/cpulist": list("4-7")}, 5, []int{4, 5, 6, 7}},
		{"threads", fstest.MapFS{"node0/cpulist": list("0-1,4-5"), "node1/cpulist": list("2-3,6-7")}, 4, []int{0, 1, 4, 5}},
		{"memory alone", fstest.MapFS{"node0/cpulist": list("0-3"), "node1/cpulist": list("4-7"), "node2/cpulist": list("")}, 0, []int{0, 1, 2, 3}},
		{"eleven nodes", fstest.MapFS{"node0/cpulist": list("0"), "node10/cpulist": list("1-7")}, 2, []int{1, 2, 3, 4, 5, 6, 7}},
		{"one node", fstest.MapFS{"node0/cpulist": list("0-7")}, 1, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{"a core of no node", fstest.MapFS{"node0/cpulist": list("0"), "node1/cpulist": list("1")}, 2, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{"nonsense", fstest.MapFS{"node0/cpulist": list("0-3"), "node1/cpulist": list("7-4")}, 0, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{"too many", fstest.MapFS{"node0/cpulist": list("0-3"), "node1/cpulist": list("4-99999999")}, 0, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{"nothing", fstest.MapFS{}, 0, []int{0, 1, 2, 3, 4, 5, 6, 7}},
	} {
		near := readNodes(c.dir).near(c.core, setOf(0, 1, 2, 3, 4, 5, 6, 7))
		if got := coresIn(&near); !slices.Equal(got, c.want) {
			t.Errorf("%s: near core %d are %v, not %v", c.name, c.core, got, c.want)
		}
	}
}

// TestMoveTo: a thread moves within its node if that has another core, unless it has to move far.
// It leaves a crowded core for another node only if its own node has no room.
func TestMoveTo(t *testing.T) {
	two := nodes{setOf(0, 1, 2, 3), setOf(4, 5, 6, 7)}
	all := setOf(0, 1, 2, 3, 4, 5, 6, 7)
	for _, c := range []struct {
		nodes nodes
		all   unix.CPUSet
		far   bool
		want  []int
	}{
		{two, all, false, []int{0, 2, 3}},
		{two, all, true, []int{0, 2, 3, 4, 5, 6, 7}},
		{two, setOf(1, 4, 5), false, []int{4, 5}},
		{nil, all, false, []int{0, 2, 3, 4, 5, 6, 7}},
		{two, setOf(1), false, nil},
	} {
		to := c.nodes.others(1, c.all, c.far)
		if got := coresIn(&to); !slices.Equal(got, c.want) {
			t.Errorf("from core 1 of %v, far %v: to %v, not %v", coresIn(&c.all), c.far, got, c.want)
		}
	}
	for _, c := range []struct {
		on   map[int]uint16 // members by core
		want int
	}{
		{map[int]uint16{0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, 1},
		{map[int]uint16{0: 1, 1: 3, 2: 1, 3: 0, 4: 0, 5: 0}, 3},
		{map[int]uint16{0: 2, 1: 3, 2: 2, 3: 2, 4: 2, 5: 0}, 5},
		{map[int]uint16{0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1}, 1},
	} {
		var on [coreBits]uint16
		for core, n := range c.on {
			on[core] = n
		}
		if got := two.roomiest(1, all, &on); got != c.want {
			t.Errorf("members by core %v: from core 1 to %d, not %d", c.on, got, c.want)
		}
	}
}
