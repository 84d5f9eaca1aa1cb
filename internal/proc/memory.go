package proc

import (
	"fmt"
	"os"
	"path/filepath"
)

// memoryKills counts the processes in a worker's cgroup, or on the machine, that the kernel has
// killed for lack of memory.
type memoryKills struct {
	file   string // a file of the kernel with a line "oom_kill N"
	dir    string // of the control group; empty: the whole machine
	files  memoryFiles
	before uint64
}

// watchMemory begins to count in a cgroup of version 2, or, if cgroup is empty, in this process's
// cgroup, which its children inherit.
func watchMemory(cgroup string) memoryKills {
	k := memoryKills{dir: cgroup, files: memoryFiles2}
	if cgroup == "" {
		own, _ := os.ReadFile("/proc/self/cgroup")
		mounts, _ := os.ReadFile("/proc/self/mountinfo")
		k.dir, k.files = memoryGroup(string(own), string(mounts))
	}
	k.file = killsFile(k.dir)
	if k.file == "" {
		k.file, k.dir = "/proc/vmstat", ""
	}
	k.before = k.count()
	return k
}

// killsFile returns the file that counts the kills in a control group, or in the nearest group
// above that has such a file: groups of version 2 have it only with the memory controller. It
// returns "" if no group has one.
func killsFile(dir string) string {
	for ; dir != "" && isGroup(dir); dir = filepath.Dir(dir) {
		for _, name := range []string{"memory.events", "memory.oom_control"} {
			if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
				return filepath.Join(dir, name)
			}
		}
	}
	return ""
}

func (k memoryKills) count() uint64 {
	text, err := os.ReadFile(k.file)
	if err != nil {
		return 0
	}
	return keyed(string(text), "oom_kill")
}

// why returns the kills since the count began, in words that complete "was killed: …", or "" if
// there were none.
func (k memoryKills) why() string {
	if k.count() <= k.before {
		return ""
	}
	where := "on its host"
	if k.dir != "" {
		where = "in its cgroup"
		if limit := groupMemory(k.dir, k.files).limit; limit != 0 && limit < 1<<60 { // version 1 writes a huge number for no limit
			where += fmt.Sprintf(" (limit %d MiB)", limit>>20)
		}
	}
	return "the kernel has killed processes for lack of memory " + where
}
