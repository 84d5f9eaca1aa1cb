// Package yield has this process give way to the others of its machine while it runs side work and
// has no place in training: the kernel runs its threads when no others want the processor.
//
// That is the scheduling policy SCHED_IDLE. A process that may not go back from it stays as it is:
// that takes CAP_SYS_NICE, or a limit of nice (RLIMIT_NICE, ulimit -e) that permits its own.
package yield

import (
	"errors"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// linger is how long the process still gives way when its side work is over: other such work
// follows, and each change takes a system call for each thread.
const linger = 20 * time.Millisecond

// state is that of this process.
var state struct {
	mu      sync.Mutex
	waits   bool // for a place in training
	running int  // pieces of side work
	yields  bool
	timer   *time.Timer // ends it; nil: it was never begun
}

// Wait says that the process waits for a place in training: from now on it gives way while it runs
// side work.
func Wait() {
	state.mu.Lock()
	defer state.mu.Unlock()
	state.waits = true
	change()
}

// Placed says that the process has a place: it gives way no more. It does so before it returns.
func Placed() {
	state.mu.Lock()
	defer state.mu.Unlock()
	state.waits = false
	change()
}

// While runs side work.
func While(work func()) {
	count(1)
	defer count(-1)
	work()
}

func count(n int) {
	state.mu.Lock()
	defer state.mu.Unlock()
	state.running += n
	switch {
	case state.running > 0 || !state.yields:
		change()
	case state.timer == nil:
		state.timer = time.AfterFunc(linger, func() {
			state.mu.Lock()
			defer state.mu.Unlock()
			change()
		})
	default:
		state.timer.Reset(linger)
	}
}

// change gives way, or ends that, if it is time to; the lock is held.
func change() {
	if want := state.waits && state.running > 0; want != state.yields && (state.yields || permitted()) {
		state.yields = want
		setThreads(want)
	}
}

// permitted returns whether the process can end it.
func permitted() bool {
	own, err := unix.SchedGetAttr(0, 0)
	if err != nil || own.Policy != unix.SCHED_NORMAL {
		return false // a person has chosen another
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NICE, &limit); err == nil && int64(min(limit.Cur, 40)) >= 20-int64(own.Nice) {
		return true
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err = unix.Capget(&head, &data[0])
	return err == nil && data[0].Effective&(1<<unix.CAP_SYS_NICE) != 0
}

// setThreads sets the policy of all threads. A thread that begins meanwhile has that of the one
// which has begun it, so it looks again until there are none that it has not seen.
func setThreads(idle bool) {
	from, to := uint32(unix.SCHED_NORMAL), uint32(unix.SCHED_IDLE)
	if !idle {
		from, to = to, from
	}
	seen := make(map[string]bool)
	for more := true; more; {
		more = false
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return
		}
		for _, t := range threads {
			if seen[t.Name()] {
				continue
			}
			seen[t.Name()], more = true, true
			if id, err := strconv.Atoi(t.Name()); err == nil {
				_ = setThread(id, from, to) // it may have ended
			}
		}
	}
}

func setThread(id int, from, to uint32) error {
	a, err := unix.SchedGetAttr(id, 0)
	if err != nil || a.Policy != from {
		return err
	}
	a.Policy = to
	if err := unix.SchedSetAttr(id, a, 0); !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}
