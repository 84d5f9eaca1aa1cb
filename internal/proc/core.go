package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// UnlimitedCore as a CoreLimit bounds core files no more than this process's own hard limit
	// does.
	UnlimitedCore = ^uint64(0)

	// dumpLook and rareLook are the pauses between two looks whether a worker dumps its core: where
	// that is to be expected, and where only one that has raised its own limit can. They grow with
	// the number of workers, by lookEach for each.
	dumpLook = 150 * time.Millisecond
	rareLook = 2 * time.Second
	lookEach = 3 * time.Millisecond
	// dumpBound is how long a dump may go on after the worker should have ended.
	dumpBound = 2 * time.Minute
)

// coreLimit is held while this process's own limit, which its children inherit, is a worker's.
var coreLimit sync.Mutex

// watched counts the workers that are looked at.
var watched atomic.Int64

// forkWithCore forks a worker with its limit of core files. Its hard limit is this process's: it
// may raise the limit itself.
func forkWithCore(c Command, attr *syscall.ProcAttr) (int, error) {
	coreLimit.Lock()
	defer coreLimit.Unlock()
	var before unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_CORE, nil, &before); err != nil {
		return 0, os.NewSyscallError("prlimit", err)
	}
	limit := unix.Rlimit{Cur: min(c.CoreLimit, before.Max), Max: before.Max}
	if err := unix.Prlimit(0, unix.RLIMIT_CORE, &limit, nil); err != nil {
		return 0, os.NewSyscallError("prlimit", err)
	}
	defer unix.Prlimit(0, unix.RLIMIT_CORE, &before, nil) // to what it was: that is allowed
	return syscall.ForkExec(c.Path, c.Args, attr)
}

// dumpWatch looks whether a process dumps its core. While it does, which takes as long as writing
// its memory, its connections stay open and no peer can know that it is dead.
type dumpWatch struct {
	pid    int
	pause  time.Duration
	status *os.File // nil: it is not watched
	buf    []byte
}

func watchDump(pid int, limit uint64) *dumpWatch {
	w := &dumpWatch{pid: pid, pause: rareLook, buf: make([]byte, 4<<10)}
	if limit > 0 || piped() {
		w.pause = dumpLook
	}
	w.status, _ = os.Open(fmt.Sprintf("/proc/%d/status", pid)) // fails where it has just ended
	watched.Add(1)
	return w
}

// piped returns whether the kernel gives core files to a program: then no limit but 1 keeps it from
// that.
func piped() bool {
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	return err == nil && bytes.HasPrefix(pattern, []byte("|"))
}

func (w *dumpWatch) close() {
	watched.Add(-1)
	if w.status != nil {
		w.status.Close()
	}
}

// every is the pause until the next look.
func (w *dumpWatch) every() time.Duration {
	return max(w.pause, time.Duration(watched.Load())*lookEach)
}

// dumping returns whether the process does.
func (w *dumpWatch) dumping() bool {
	if w.status == nil {
		return false
	}
	n, _ := w.status.ReadAt(w.buf, 0) // none: it has ended
	return bytes.Contains(w.buf[:n], []byte("\nCoreDumping:\t1"))
}

// what describes the end of a process that dumps its core.
func (w *dumpWatch) what() string {
	if fields, err := stat(w.pid); err == nil {
		if code, err := strconv.Atoi(fields[statExitCode]); err == nil && code&0x7f != 0 {
			return signalText(syscall.Signal(code&0x7f)) + " and dumps its core"
		}
	}
	return "dumps its core"
}
