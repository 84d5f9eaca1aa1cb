package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Fields of /proc/PID/stat, counted from 1 as proc_pid_stat(5) does.
const (
	statState     = 3
	statParent    = 4
	statStartTime = 22
	statEnvStart  = 50
	statEnvEnd    = 51
	statExitCode  = 52
)

// stat returns the fields of /proc/PID/stat, indexed by their numbers; the first two are empty. It
// returns an error if the process does not exist.
func stat(pid int) ([]string, error) {
	// All processes of a machine may be read this way, and os.ReadFile takes twice as many calls.
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var text [4 << 10]byte // the kernel writes it as a whole, and less than a page
	n, err := unix.Read(fd, text[:])
	_ = unix.Close(fd)
	if err != nil {
		return nil, err
	}
	fields := parseStat(text[:n])
	if len(fields) <= statExitCode {
		return nil, fmt.Errorf("proc: /proc/%d/stat has %d fields; %d were expected", pid, len(fields)-1, statExitCode)
	}
	return fields, nil
}

// parseStat parses "pid (name) state parent …"; the name may contain any characters.
func parseStat(text []byte) []string {
	return append(make([]string, statState), strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))...)
}

// Born returns when a process began, in ticks after boot, and its state as in proc_pid_stat(5).
func Born(pid int) (birth uint64, state byte, err error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, 0, err
	}
	birth, err = strconv.ParseUint(fields[statStartTime], 10, 64)
	return birth, fields[statState][0], err
}

// Stopped returns whether a signal or a debugger has stopped a process.
func Stopped(pid int) bool {
	_, state, err := Born(pid)
	return err == nil && (state == 'T' || state == 't')
}

// Descendants returns the processes below a process, parents before their children. It reads one
// file of each process of the machine.
func Descendants(pid int) (all []int) {
	for _, d := range families().below(pid) {
		all = append(all, d.pid)
	}
	return all
}

// endedBy returns the signal that is ending a process. It returns 0 if no signal is, or if the
// signal is not known yet: older kernels report it only when the main thread ends. A killed process
// exists until the kernel has freed its memory, which takes tens of milliseconds for each gigabyte.
func endedBy(pid int) syscall.Signal {
	fields, err := stat(pid)
	if err != nil {
		return 0
	}
	code, err := strconv.Atoi(fields[statExitCode])
	if err != nil || code <= 0 || code > 0xff { // larger codes: it exits by itself
		return 0
	}
	switch sig := syscall.Signal(code & 0x7f); sig {
	case syscall.SIGSTOP, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU:
		return 0 // it is stopped, and may continue
	default:
		return sig
	}
}

// ticks returns the time since boot in the unit of /proc/PID/stat.
func ticks() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail: the clock exists
	const perSecond = 100                            // USER_HZ, whatever the kernel's own rate
	return uint64(now.Nano()) / (uint64(time.Second) / perSecond)
}

// parentOf returns the parent of a living process.
func parentOf(pid int) (int, bool) {
	fields, err := stat(pid)
	if err != nil || strings.ContainsAny(fields[statState], "ZX") {
		return 0, false
	}
	parent, err := strconv.Atoi(fields[statParent])
	return parent, err == nil
}

// processes returns the parents of all living processes, by process id.
func processes() map[int]int {
	parents := make(map[int]int)
	for _, pid := range processIDs() {
		if parent, ok := parentOf(pid); ok {
			parents[pid] = parent
		}
	}
	return parents
}

// family is the children of processes, by parent.
type family map[int][]member

// member is a process and its start time in ticks after boot, which tells it from a later process
// with the same number.
type member struct {
	pid   int
	birth string
}

// families returns the children of all processes.
func families() family {
	all := make(family)
	for _, pid := range processIDs() {
		fields, err := stat(pid)
		if err != nil {
			continue
		}
		if parent, err := strconv.Atoi(fields[statParent]); err == nil && parent != pid {
			all[parent] = append(all[parent], member{pid, fields[statStartTime]})
		}
	}
	return all
}

// below returns the descendants of a process, parents before their children.
func (f family) below(pid int) (all []member) {
	seen := map[int]bool{pid: true} // numbers may have been used again while families searched
	for next := []int{pid}; len(next) > 0; next = next[1:] {
		for _, child := range f[next[0]] {
			if !seen[child.pid] {
				seen[child.pid] = true
				all, next = append(all, child), append(next, child.pid)
			}
		}
	}
	return all
}

func processIDs() (pids []int) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer proc.Close()
	names, _ := proc.Readdirnames(-1)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// below returns the parents of the living processes below the roots, and of the roots themselves.
// ok is false if the kernel does not list the children of a process.
func below(roots []int) (parents map[int]int, ok bool) {
	parents = make(map[int]int)
	for len(roots) > 0 {
		pid := roots[len(roots)-1]
		roots = roots[:len(roots)-1]
		if _, seen := parents[pid]; seen {
			continue
		}
		parent, alive := parentOf(pid)
		if alive {
			parents[pid] = parent
		}
		threads, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
		if err != nil {
			continue // it has ended
		}
		for _, t := range threads {
			thread, _ := strconv.Atoi(t.Name())
			children, err := childrenOf(pid, thread)
			if err != nil && alive && thread == pid {
				if _, stillThere := parentOf(pid); stillThere {
					return nil, false
				}
			}
			roots = append(roots, children...)
		}
	}
	return parents, true
}

func childrenOf(pid, thread int) (children []int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, thread))
	if err != nil {
		return nil, err
	}
	for _, word := range strings.Fields(string(text)) {
		if child, err := strconv.Atoi(word); err == nil {
			children = append(children, child)
		}
	}
	return children, nil
}

// carries returns whether the initial environment of a process has the entry. unclear reports that
// the process is executing another program or has just done so, so that this is unknown.
func carries(pid int, entry string) (carried, unclear bool) {
	environ, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false, false
	}
	if len(environ) == 0 {
		return false, !startedWithout(pid)
	}
	entry += "\x00"
	return bytes.HasPrefix(environ, []byte(entry)) || bytes.Contains(environ, []byte("\x00"+entry)), false
}

// startedWithout returns whether a process whose environment reads as empty was started with an
// empty one, is a kernel thread, or is dead. During an exec, the new program has no addresses of
// its environment at first; right after it, a read may have used the old addresses.
func startedWithout(pid int) bool {
	fields, err := stat(pid)
	if err != nil {
		return true
	}
	if end := fields[statEnvEnd]; end != "0" {
		return end == fields[statEnvStart]
	}
	_, err = os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe") // kernel threads have none
	return err != nil
}
