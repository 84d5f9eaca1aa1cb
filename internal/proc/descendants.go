package proc

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// killBound is how long this package waits for processes that were sent SIGKILL: one that hangs in
// the kernel never ends.
const killBound = 2 * time.Second

// execPause is the pause between two looks at a process that is executing another program.
// mostExecs bounds the looks of living at such processes.
const (
	execPause = time.Millisecond
	mostExecs = 10
)

// descendants finds and kills what a process has started: the processes below it, and those with
// its mark in their environment.
//
// It holds processes by descriptors. It opens a process first and examines it afterwards, so that
// it notices a process id that was reused; a descriptor always refers to the same process.
type descendants struct {
	mark string      // NAME=value; empty: none
	root int         // id of a process that has not been reaped; 0: none
	held map[int]int // descriptors by process id
}

func newDescendants(mark string, root int) *descendants {
	return &descendants{mark: mark, root: root, held: make(map[int]int)}
}

func (d *descendants) release() {
	for pid, fd := range d.held {
		_ = unix.Close(fd)
		delete(d.held, pid)
	}
}

// kill kills all descendants and those that they start meanwhile, until none is left or killBound
// has passed.
func (d *descendants) kill() {
	deadline := time.Now().Add(killBound)
	for {
		d.freeze(deadline)
		if len(d.held) == 0 {
			return
		}
		d.signal(syscall.SIGKILL)
		if d.await(deadline); time.Now().After(deadline) {
			return
		}
	}
}

// freeze stops all descendants. A stopped process starts no others, which could not be found once
// their parent has been killed.
func (d *descendants) freeze(deadline time.Time) {
	d.await(time.Now())
	for {
		d.signal(syscall.SIGSTOP)
		found, unclear := d.find()
		if found == 0 && !unclear || time.Now().After(deadline) {
			return
		}
		if found == 0 {
			time.Sleep(execPause)
		}
	}
}

// living returns, when the root has just ended, the descendants that this process has inherited and
// that are alive. It leaves out helpers of Python's multiprocessing, which end by themselves
// shortly after the process that they serve.
func (d *descendants) living() (names []string) {
	if !adopting.Load() || len(own.inherited()) == 0 {
		return nil
	}
	for range mostExecs {
		if _, unclear := d.find(); !unclear {
			break
		}
		time.Sleep(execPause)
	}
	for _, pid := range slices.Sorted(maps.Keys(d.held)) {
		line, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if _, state, gone := Born(pid); err != nil || gone != nil || state == 'Z' || bytes.Contains(line, []byte("multiprocessing.")) {
			continue
		}
		names = append(names, fmt.Sprintf("%s, process %d", cmp.Or(Program(pid), "a program"), pid))
	}
	return names
}

func (d *descendants) signal(sig syscall.Signal) {
	for _, fd := range d.held {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0) // fails if it is dead
	}
}

// await blocks until all held processes have ended or the deadline has passed, and releases those
// that have ended.
func (d *descendants) await(deadline time.Time) {
	for len(d.held) > 0 {
		pids := make([]int, 0, len(d.held))
		fds := make([]unix.PollFd, 0, len(d.held))
		for pid, fd := range d.held {
			pids = append(pids, pid)
			fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
		left := max(0, time.Until(deadline))
		n, err := unix.Poll(fds, int((left+time.Millisecond-1)/time.Millisecond))
		if err != nil && err != unix.EINTR {
			return
		}
		for i, fd := range fds {
			if n > 0 && fd.Revents != 0 {
				_ = unix.Waitid(unix.P_PIDFD, int(fd.Fd), nil, unix.WEXITED|unix.WNOHANG, nil) // fails unless this process inherited it
				_ = unix.Close(int(fd.Fd))
				delete(d.held, pids[i])
			}
		}
		if n == 0 && left == 0 {
			return
		}
	}
}

// find holds the descendants that are not held yet and returns their number. unclear reports that
// there may be more: the mark of a process that is executing another program cannot be read.
func (d *descendants) find() (found int, unclear bool) {
	parents := d.candidates()
	before := len(d.held)
	for pid := range parents {
		if d.mark == "" {
			break
		}
		carried, unknown := carries(pid, d.mark)
		if carried {
			d.hold(pid, func() bool {
				carried, again := carries(pid, d.mark)
				unclear = unclear || again
				return carried
			})
		}
		unclear = unclear || unknown
	}
	d.holdInherited(parents)
	for grown := true; grown; {
		grown = false
		for pid, parent := range parents {
			if _, held := d.held[parent]; (held || d.isRoot(parent)) && !d.isRoot(pid) {
				grown = d.hold(pid, func() bool { return d.isParent(parent, pid) }) || grown
			}
		}
	}
	return len(d.held) - before, unclear
}

// candidates returns the processes among which find searches, with their parents: this process's
// own descendants if it inherits orphans, otherwise all processes.
func (d *descendants) candidates() map[int]int {
	if !adopting.Load() {
		return processes()
	}
	roots := own.inherited()
	if d.root != 0 {
		roots = append(roots, d.root)
	}
	for pid := range d.held {
		roots = append(roots, pid)
	}
	if parents, ok := below(roots); ok {
		return parents
	}
	return processes()
}

// holdInherited holds processes that this process has inherited and that no living worker can have
// started.
func (d *descendants) holdInherited(parents map[int]int) {
	if !adopting.Load() || d.mark == "" || d.root != 0 {
		return
	}
	self := os.Getpid()
	for pid, parent := range parents {
		if parent != self {
			continue
		}
		d.hold(pid, func() bool {
			birth, _, err := Born(pid)
			now, ok := parentOf(pid)
			return err == nil && ok && now == self && own.noWorkerStarted(birth) && slices.Contains(own.inherited(), pid)
		})
	}
}

// hold opens the process and holds it if belongs still returns true. It returns whether the process
// is newly held.
func (d *descendants) hold(pid int, belongs func() bool) bool {
	if _, ok := d.held[pid]; ok || pid == os.Getpid() || pid <= 1 {
		return false
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	if !belongs() {
		_ = unix.Close(fd)
		return false
	}
	d.held[pid] = fd
	return true
}

// isRoot returns whether pid is the root. It is false for 0, which /proc has for parents outside
// the container and for the kernel.
func (d *descendants) isRoot(pid int) bool { return pid != 0 && pid == d.root }

// isParent returns whether pid is a child of parent and the id parent still refers to the
// descendant: to the root, or to a held process that has not been reaped.
func (d *descendants) isParent(parent, pid int) bool {
	if now, ok := parentOf(pid); !ok || now != parent {
		return false
	}
	return d.isRoot(parent) || unix.PidfdSendSignal(d.held[parent], 0, nil, 0) == nil
}
