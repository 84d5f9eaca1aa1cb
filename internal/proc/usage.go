package proc

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Usage is what a process and its living descendants use.
type Usage struct {
	// Processor is the user and system time since the process began. It includes that of
	// descendants that have ended and were reaped.
	Processor time.Duration
	// Resident is the resident memory in bytes. Pages that several of the processes share count for
	// each of them.
	Resident uint64
	// Used and Limit are the used bytes and the size of the memory with the least left: that of a
	// control group of the process, or the machine's. Caches that the kernel can drop do not count
	// as used. Limit is 0 if neither is known.
	Used, Limit uint64
}

// UsageOf returns what a process uses, or the zero Usage if it has ended. It finds descendants up
// to searchPause after they have begun.
func UsageOf(pid int) Usage {
	var u Usage
	u.add(pid, "")
	if u.Resident == 0 {
		return Usage{}
	}
	if pid != os.Getpid() || hasChildren() {
		for _, d := range descended.below(pid, time.Now()) {
			u.add(d.pid, d.birth)
		}
	}
	own, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup"))
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	machine, _ := os.ReadFile("/proc/meminfo")
	u.Used, u.Limit = tightest(parseMeminfo(string(machine)), groupMemory(memoryGroup(string(own), string(mounts))))
	return u
}

// add adds what one process uses, unless it has ended, or was born at another time than birth, if
// that is not empty.
func (u *Usage) add(pid int, birth string) {
	fields, err := stat(pid)
	if err != nil || birth != "" && fields[statStartTime] != birth {
		return
	}
	processor, resident := parseUsage(fields)
	u.Processor += processor
	u.Resident += resident
}

// searchPause is the pause between two searches for descendants. A search reads one file of each
// process of the machine, which takes some 20 µs a file.
const searchPause = 10 * time.Second

// descended is the family tree of the machine's processes, in which UsageOf finds the descendants
// of all processes that it measures. The kernel's own lists (/proc/PID/task/TID/children) would be
// read for each thread, and reading them slows the end of a process: the kernel caches an entry for
// each thread, and drops them while the process is reaped, which takes tens of milliseconds on busy
// processors.
var descended tree

type tree struct {
	mu       sync.Mutex
	searched time.Time
	children family
}

// below returns the descendants of a process.
func (t *tree) below(pid int, now time.Time) []member {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.children == nil || now.Sub(t.searched) >= searchPause {
		t.searched, t.children = now, families()
	}
	return t.children.below(pid)
}

// hasChildren reports whether this process has children, including dead ones. Most workers in Go
// have no children, and need no search.
func hasChildren() bool {
	err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT|unix.WALL, nil)
	return err != unix.ECHILD
}

// parseUsage takes the processor time and the resident memory from the fields of /proc/PID/stat.
func parseUsage(fields []string) (processor time.Duration, resident uint64) {
	const userTime, reapedSystemTime, residentPages = 14, 17, 24
	const tick = time.Second / 100 // USER_HZ, whatever the kernel's own rate
	for _, field := range fields[userTime : reapedSystemTime+1] {
		ticks, _ := strconv.ParseUint(field, 10, 63)
		processor += time.Duration(ticks) * tick
	}
	pages, _ := strconv.ParseUint(fields[residentPages], 10, 63)
	return processor, pages * uint64(os.Getpagesize())
}

// memory is how much of a limit is used, in bytes. limit is 0 if there is no limit.
type memory struct{ used, limit uint64 }

// tightest returns the used bytes and the limit of the memory with the least left.
func tightest(all ...memory) (used, limit uint64) {
	left := uint64(math.MaxUint64)
	for _, m := range all {
		if m.limit == 0 {
			continue
		}
		if rest := m.limit - min(m.used, m.limit); rest < left {
			left, used, limit = rest, min(m.used, m.limit), m.limit
		}
	}
	return used, limit
}

func parseMeminfo(text string) memory {
	total, available := keyed(text, "MemTotal:"), keyed(text, "MemAvailable:")
	return memory{1024 * (total - min(available, total)), 1024 * total}
}

// keyed returns the number in the line that begins with the key, or 0 if no line does.
func keyed(text, key string) uint64 {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == key {
			n, _ := strconv.ParseUint(fields[1], 10, 63)
			return n
		}
	}
	return 0
}

// memoryFiles are the names of the files with a control group's memory.
type memoryFiles struct{ current, limit, stat, inactive string }

var (
	memoryFiles1 = memoryFiles{"memory.usage_in_bytes", "memory.limit_in_bytes", "memory.stat", "total_inactive_file"}
	memoryFiles2 = memoryFiles{"memory.current", "memory.max", "memory.stat", "inactive_file"}
)

// memoryGroup returns the folder of the control group that accounts for a process's memory, from
// the text of /proc/PID/cgroup and of /proc/PID/mountinfo, or "" if no such hierarchy is mounted.
func memoryGroup(own, mounts string) (dir string, files memoryFiles) {
	if dir, is := groupOf("memory", own, mounts); is {
		return dir, memoryFiles1
	}
	return cgroupDir(own, mounts), memoryFiles2
}

// groupOf returns the folder of a process's control group in the hierarchy of version 1 that has
// the controller, as memoryGroup does. The second result reports whether there is such a hierarchy.
func groupOf(controller, own, mounts string) (dir string, is bool) {
	for line := range strings.Lines(own) {
		id, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		if id != "0" && slices.Contains(strings.Split(controllers, ","), controller) {
			return mountedAt(path, mounts, func(kind, options string) bool {
				return kind == "cgroup" && slices.Contains(strings.Split(options, ","), controller)
			}), true
		}
	}
	return "", false
}

// groupMemory returns the memory with the least left among those of a control group and of all
// groups above it, up to the root of the mount.
func groupMemory(dir string, files memoryFiles) (tight memory) {
	for dir != "" {
		m := memory{number(dir, files.current), number(dir, files.limit)}
		if text, err := os.ReadFile(filepath.Join(dir, files.stat)); err == nil {
			m.used -= min(m.used, keyed(string(text), files.inactive))
		}
		tight.used, tight.limit = tightest(tight, m)
		if dir = filepath.Dir(dir); !isGroup(dir) {
			break
		}
	}
	return tight
}

func isGroup(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "cgroup.procs"))
	return err == nil
}

// number returns the number in a file of a folder, or 0 if the file holds a word, such as max.
func number(dir, file string) uint64 {
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 63)
	return n
}
