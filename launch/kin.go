package launch

import (
	"bytes"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// killBound is how long processes that were sent SIGKILL are waited for: one that hangs in the
// kernel never ends.
const killBound = 2 * time.Second

// execPause is between two looks at a process that is in the middle of becoming another program.
const execPause = time.Millisecond

// kin finds and kills what a process started: its descendants, and whoever carries its mark in the
// environment.
//
// Processes are held by descriptors. One is opened first and what it stands for is looked at after,
// so that an id that changed hands is noticed; a descriptor never changes hands.
type kin struct {
	mark string      // NAME=value; empty: none
	root int         // a process that has not been reaped; 0: none
	held map[int]int // descriptors by process id
}

func newKin(incarnation string, root int) *kin {
	k := &kin{root: root, held: make(map[int]int)}
	if incarnation != "" {
		k.mark = incarnationVariable + "=" + incarnation
	}
	return k
}

func (k *kin) release() {
	for pid, fd := range k.held {
		_ = unix.Close(fd)
		delete(k.held, pid)
	}
}

// kill kills all kin and those they start meanwhile, until none is left or killBound has passed.
func (k *kin) kill() {
	deadline := time.Now().Add(killBound)
	for {
		k.freeze(deadline)
		if len(k.held) == 0 {
			return
		}
		k.signal(syscall.SIGKILL)
		if k.await(deadline); time.Now().After(deadline) {
			return
		}
	}
}

// freeze stops all kin: who is stopped starts nobody who would then have lost the parent to be
// found by.
func (k *kin) freeze(deadline time.Time) {
	k.await(time.Now())
	for {
		k.signal(syscall.SIGSTOP)
		found, unclear := k.find()
		if found == 0 && !unclear || time.Now().After(deadline) {
			return
		}
		if found == 0 {
			time.Sleep(execPause)
		}
	}
}

func (k *kin) signal(sig syscall.Signal) {
	for _, fd := range k.held {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0) // fails for the dead
	}
}

// await blocks until all held processes have ended or the deadline has passed, and lets go of the
// dead.
func (k *kin) await(deadline time.Time) {
	for len(k.held) > 0 {
		pids := make([]int, 0, len(k.held))
		fds := make([]unix.PollFd, 0, len(k.held))
		for pid, fd := range k.held {
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
				_ = unix.Waitid(unix.P_PIDFD, int(fd.Fd), nil, unix.WEXITED|unix.WNOHANG, nil) // fails unless it is inherited
				_ = unix.Close(int(fd.Fd))
				delete(k.held, pids[i])
			}
		}
		if n == 0 && left == 0 {
			return
		}
	}
}

// find holds kin that are not held yet and returns how many these were, and whether there may be
// more: it is not clear what a process carries while it becomes another program.
func (k *kin) find() (found int, unclear bool) {
	parents := k.around()
	before := len(k.held)
	for pid := range parents {
		if k.mark == "" {
			break
		}
		its, unknown := carries(pid, k.mark)
		if its {
			k.hold(pid, func() bool {
				its, again := carries(pid, k.mark)
				unclear = unclear || again
				return its
			})
		}
		unclear = unclear || unknown
	}
	k.claim(parents)
	for grown := true; grown; {
		grown = false
		for pid, parent := range parents {
			if _, held := k.held[parent]; (held || k.isRoot(parent)) && !k.isRoot(pid) {
				grown = k.hold(pid, func() bool { return k.isParent(parent, pid) }) || grown
			}
		}
	}
	return len(k.held) - before, unclear
}

// around returns the parents of those among whom kin are sought: where this process inherits all of
// them, its descendants.
func (k *kin) around() map[int]int {
	if !adopting.Load() {
		return processes()
	}
	roots := relatives.strays()
	if k.root != 0 {
		roots = append(roots, k.root)
	}
	for pid := range k.held {
		roots = append(roots, pid)
	}
	if parents, ok := descendants(roots); ok {
		return parents
	}
	return processes()
}

// claim holds those that this process has inherited and that carry no mark of any worker, where
// nobody who lives can have started them.
func (k *kin) claim(parents map[int]int) {
	if !adopting.Load() || k.mark == "" || k.root != 0 {
		return
	}
	self := os.Getpid()
	for pid, parent := range parents {
		if parent != self {
			continue
		}
		k.hold(pid, func() bool {
			birth, _, err := born(pid)
			now, ok := parentOf(pid)
			return err == nil && ok && now == self && relatives.nobodys(birth) && slices.Contains(relatives.strays(), pid)
		})
	}
}

// hold opens the process and keeps it if it is kin still. It returns whether the process is held
// now and was not before.
func (k *kin) hold(pid int, isKin func() bool) bool {
	if _, ok := k.held[pid]; ok || pid == os.Getpid() || pid <= 1 {
		return false
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	if !isKin() {
		_ = unix.Close(fd)
		return false
	}
	k.held[pid] = fd
	return true
}

// isRoot is false for id 0, which stands in /proc for parents outside the container and for the
// kernel.
func (k *kin) isRoot(pid int) bool { return pid != 0 && pid == k.root }

// isParent tells whether pid is a child of parent and that id is still the kinsman's: the root's,
// or a held one's that has not been reaped.
func (k *kin) isParent(parent, pid int) bool {
	if now, ok := parentOf(pid); !ok || now != parent {
		return false
	}
	return k.isRoot(parent) || unix.PidfdSendSignal(k.held[parent], 0, nil, 0) == nil
}

// processes returns the parents of all living processes.
func processes() map[int]int {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer proc.Close()
	names, _ := proc.Readdirnames(-1)
	parents := make(map[int]int, len(names))
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			if parent, ok := parentOf(pid); ok {
				parents[pid] = parent
			}
		}
	}
	return parents
}

// parentOf returns the parent of a process that is alive.
func parentOf(pid int) (int, bool) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false
	}
	// "pid (name) state parent …", and the name may hold anything.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 || bytes.ContainsAny(fields[0], "ZX") {
		return 0, false
	}
	parent, err := strconv.Atoi(string(fields[1]))
	return parent, err == nil
}

// carries tells whether the environment with which a process was started has that entry, or that it
// is unclear, because the process is becoming another program or has just done so.
func carries(pid int, entry string) (its, unclear bool) {
	proc := "/proc/" + strconv.Itoa(pid)
	environ, err := os.ReadFile(proc + "/environ")
	if err != nil {
		return false, false
	}
	if len(environ) == 0 {
		return false, !startedWithout(proc)
	}
	entry += "\x00"
	return bytes.HasPrefix(environ, []byte(entry)) || bytes.Contains(environ, []byte("\x00"+entry)), false
}

// startedWithout tells whether a process whose environment read as empty was started with an empty
// one, or is a thread of the kernel, or dead. During an exec there is a program without an
// environment's addresses yet, and after it the addresses of one that was not there before.
func startedWithout(proc string) bool {
	stat, err := os.ReadFile(proc + "/stat")
	if err != nil {
		return true
	}
	const envStart, envEnd = 50, 51 // counted from 1, as proc_pid_stat(5) does; after the name, the third comes first
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= envEnd-3 {
		return true
	}
	if end := string(fields[envEnd-3]); end != "0" {
		return end == string(fields[envStart-3])
	}
	_, err = os.Readlink(proc + "/exe") // only a program has one
	return err != nil
}
