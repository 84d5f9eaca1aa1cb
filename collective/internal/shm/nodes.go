package shm

import (
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// The memory of a member is on the memory node on which the member first writes it: its area,
// except the words of control that others write, its arena, and its tensors. So a member that moves
// to another core stays on its node if possible.

// nodes are the cores of each memory node; nil if unknown, or if there is only one node.
type nodes []unix.CPUSet

var systemNodes = sync.OnceValue(func() nodes { return readNodes(os.DirFS("/sys/devices/system/node")) })

// readNodes reads the memory nodes from the system's directory of nodes.
func readNodes(dir fs.FS) (all nodes) {
	names, _ := fs.Glob(dir, "node[0-9]*") // the pattern is valid
	for _, name := range names {
		text, err := fs.ReadFile(dir, path.Join(name, "cpulist"))
		if err != nil {
			return nil
		}
		set, ok := parseCores(strings.TrimSpace(string(text)))
		if !ok {
			return nil
		}
		if set.Count() > 0 { // other nodes have only memory
			all = append(all, set)
		}
	}
	if len(all) < 2 {
		return nil
	}
	return all
}

// parseCores parses a list such as 0-3,8,10-11.
func parseCores(text string) (set unix.CPUSet, ok bool) {
	if text == "" {
		return set, true
	}
	for part := range strings.SplitSeq(text, ",") {
		first, last, ranged := strings.Cut(part, "-")
		if !ranged {
			last = first
		}
		lo, err1 := strconv.Atoi(first)
		hi, err2 := strconv.Atoi(last)
		if err1 != nil || err2 != nil || lo < 0 || lo > hi || hi >= len(set)*64 {
			return unix.CPUSet{}, false
		}
		for core := lo; core <= hi; core++ {
			set.Set(core)
		}
	}
	return set, true
}

// near returns those of some cores that are on the node of core, or all of them if the node is
// unknown.
func (n nodes) near(core int, cores unix.CPUSet) unix.CPUSet {
	for i := range n {
		if !n[i].IsSet(core) {
			continue
		}
		for j := range cores {
			cores[j] &= n[i][j]
		}
		break
	}
	return cores
}

// others returns the cores, among all cores of a thread, to which the thread may move from the core
// here: the other cores of its node or, if far is true, of any node.
func (n nodes) others(here int, all unix.CPUSet, far bool) unix.CPUSet {
	near := n.near(here, all)
	near.Clear(here)
	if all.Clear(here); far || near.Count() == 0 {
		return all
	}
	return near
}

const coreBits = len(unix.CPUSet{}) * 64

// roomiest returns the core, among all cores of a thread, with the fewest members, if it has at
// least two members fewer than the thread's core. It prefers cores of the thread's node. If there
// is no such core, it returns the thread's core.
func (n nodes) roomiest(here int, all unix.CPUSet, on *[coreBits]uint16) int {
	for _, cores := range [...]unix.CPUSet{n.near(here, all), all} {
		best := here
		for core := range on {
			if cores.IsSet(core) && on[core] < on[best] {
				best = core
			}
		}
		if on[here] >= on[best]+2 {
			return best
		}
	}
	return here
}
