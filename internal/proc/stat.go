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

// stat returns the fields of /proc/PID/stat, by their numbers; the first two are empty. There are
// none where the process is not there.
func stat(pid int) ([]string, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return nil, err
	}
	fields := parseStat(text)
	if len(fields) <= statExitCode {
		return nil, fmt.Errorf("proc: /proc/%d/stat has %d fields; %d were expected", pid, len(fields)-1, statExitCode)
	}
	return fields, nil
}

// parseStat parses "pid (name) state parent …", where the name may hold anything.
func parseStat(text []byte) []string {
	return append(make([]string, statState), strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))...)
}

// Born returns when a process began, in ticks after boot, and its state as proc_pid_stat(5) has it.
func Born(pid int) (birth uint64, state byte, err error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, 0, err
	}
	birth, err = strconv.ParseUint(fields[statStartTime], 10, 64)
	return birth, fields[statState][0], err
}

// EndedBy returns the signal that is ending a process; 0: none is, or it is not known yet, because
// an older kernel tells it only when the main thread ends. A process that was killed is there until
// the kernel has freed its memory, which takes tens of milliseconds for each gigabyte.
func EndedBy(pid int) syscall.Signal {
	fields, err := stat(pid)
	if err != nil {
		return 0
	}
	code, err := strconv.Atoi(fields[statExitCode])
	if err != nil || code <= 0 || code > 0xff { // more: it exits by itself
		return 0
	}
	switch sig := syscall.Signal(code & 0x7f); sig {
	case syscall.SIGSTOP, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU:
		return 0 // it is stopped, and may go on
	default:
		return sig
	}
}

// ticks is the time since boot in the unit of /proc/PID/stat.
func ticks() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // fails for no clock that there is
	const perSecond = 100                            // USER_HZ, whatever the kernel's own rate
	return uint64(now.Nano()) / (uint64(time.Second) / perSecond)
}

// parentOf returns the parent of a process that is alive.
func parentOf(pid int) (int, bool) {
	fields, err := stat(pid)
	if err != nil || strings.ContainsAny(fields[statState], "ZX") {
		return 0, false
	}
	parent, err := strconv.Atoi(fields[statParent])
	return parent, err == nil
}

// processes returns the parents of all living processes.
func processes() map[int]int {
	parents := make(map[int]int)
	for _, pid := range processIDs() {
		if parent, ok := parentOf(pid); ok {
			parents[pid] = parent
		}
	}
	return parents
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

// below returns the parents of the living processes below the roots, and of the roots; false where
// the kernel does not tell the children of a process.
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

// carries returns whether the environment with which a process was started has that entry, or that
// it is unclear, because the process is becoming another program or has just done so.
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

// startedWithout returns whether a process whose environment read as empty was started with an
// empty one, or is a thread of the kernel, or dead. During an exec there is a program without an
// environment's addresses yet, and after it the addresses of one that was not there before.
func startedWithout(pid int) bool {
	fields, err := stat(pid)
	if err != nil {
		return true
	}
	if end := fields[statEnvEnd]; end != "0" {
		return end == fields[statEnvStart]
	}
	_, err = os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe") // only a program has one
	return err != nil
}
