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
	// UnlimitedCore as a CoreLimit leaves only this process's own hard limit as a bound of core
	// files.
	UnlimitedCore = ^uint64(0)

	// dumpLook and rareLook are the pauses between checks whether a worker dumps its core: dumpLook
	// if a dump is possible, rareLook if the worker would have to raise its own limit first. With
	// many workers the pause is at least lookEach for each of them.
	dumpLook = 150 * time.Millisecond
	rareLook = 2 * time.Second
	lookEach = 3 * time.Millisecond
	// dumpBound is how long a dump may continue after the worker should have ended.
	dumpBound = 2 * time.Minute
)

// coreLimit is held while this process's own limit, which children inherit, is set to a worker's.
var coreLimit sync.Mutex

// watched is the number of workers that are checked for dumps.
var watched atomic.Int64

// forkWithCore forks a worker with its limit of core files. The worker inherits this process's hard
// limit, and may raise its limit up to that.
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
	defer unix.Prlimit(0, unix.RLIMIT_CORE, &before, nil) // restores the earlier limit, which is always permitted
	return syscall.ForkExec(c.Path, c.Args, attr)
}

// dumpWatch checks whether a process dumps its core. While it does, which takes as long as writing
// its memory, its connections stay open and no peer can notice that it is dead.
type dumpWatch struct {
	pid    int
	pause  time.Duration
	status *os.File // nil: it had ended
	buf    []byte
}

func watchDump(pid int, limit uint64) *dumpWatch {
	w := &dumpWatch{pid: pid, pause: rareLook, buf: make([]byte, 4<<10)}
	if limit > 0 || piped() {
		w.pause = dumpLook
	}
	w.status, _ = os.Open(fmt.Sprintf("/proc/%d/status", pid)) // fails if it has just ended
	watched.Add(1)
	return w
}

// piped returns whether the kernel pipes core files to a program. In that case it ignores every
// limit but 1.
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

// every returns the pause until the next check.
func (w *dumpWatch) every() time.Duration {
	return max(w.pause, time.Duration(watched.Load())*lookEach)
}

// dumping returns whether the process dumps its core.
func (w *dumpWatch) dumping() bool {
	if w.status == nil {
		return false
	}
	n, _ := w.status.ReadAt(w.buf, 0) // an error means that it has ended
	return bytes.Contains(w.buf[:n], []byte("\nCoreDumping:\t1"))
}

// what describes how a process that dumps its core ends.
func (w *dumpWatch) what() string {
	if fields, err := stat(w.pid); err == nil {
		if code, err := strconv.Atoi(fields[statExitCode]); err == nil && code&0x7f != 0 {
			return signalText(syscall.Signal(code&0x7f)) + " and dumps its core"
		}
	}
	return "dumps its core"
}
