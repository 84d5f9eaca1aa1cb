package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// adopting is set by Adopt: this process becomes the parent of its orphaned descendants.
var adopting atomic.Bool

// Adopt makes this process the parent of its orphaned descendants (PR_SET_CHILD_SUBREAPER) until it
// ends. From then on a Tree finds all processes that a worker started among this process's
// descendants, so that none of them outlives the worker, whatever its session and environment. The
// process should run Reap as well. Adopt starts nothing.
func Adopt() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	adopting.Store(true)
	return nil
}

// own records the children that this process has started through this package.
var own = children{started: make(map[int]startedChild), forking: make(map[int]uint64)}

// children records the child processes that were started, to tell them from inherited ones.
type children struct {
	mu      sync.Mutex
	started map[int]startedChild // by process id, from the fork until it is reaped
	forks   int
	forking map[int]uint64 // forks in flight, with their start in ticks after boot
}

type startedChild struct {
	worker bool
	birth  uint64 // in ticks after boot
}

// fork calls start, which starts a child, and records the child. If there are too many processes,
// it adds the limit to the error.
func (c *children) fork(worker bool, start func() (pid int, err error)) error {
	c.mu.Lock()
	c.forks++
	n, begun := c.forks, ticks()
	c.forking[n] = begun
	c.mu.Unlock()
	pid, err := start()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.forking, n)
	switch {
	case err == nil:
		c.started[pid] = startedChild{worker, begun}
	case errors.Is(err, unix.EAGAIN):
		err = fmt.Errorf("%w: %s", err, processLimit())
	}
	return err
}

// reaped forgets a child that has been reaped.
func (c *children) reaped(pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.started, pid)
}

// inherited returns the children that this process has not started, including dead ones.
func (c *children) inherited() []int {
	pids, _ := c.look()
	return pids
}

// look returns the inherited children. It leaves out children born since the first fork in flight
// began, which may be this process's own; unsure reports that one of those is dead.
func (c *children) look() (pids []int, unsure bool) {
	self := os.Getpid()
	all, err := childrenOf(self, self) // of the first thread, which inherits orphans
	if err != nil {
		return nil, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pid := range all {
		if _, ours := c.started[pid]; ours {
			continue
		}
		birth, state, err := Born(pid)
		if err != nil {
			continue
		}
		fresh := false
		for _, begun := range c.forking {
			fresh = fresh || birth >= begun
		}
		if !fresh {
			pids = append(pids, pid)
		}
		unsure = unsure || fresh && state == 'Z'
	}
	return pids, unsure
}

// noWorkerStarted returns whether all living workers were born after birth, so that none of them
// can have started a process born then.
func (c *children) noWorkerStarted(birth uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, child := range c.started {
		if child.worker && child.birth <= birth {
			return false
		}
	}
	return true
}

// StartSession starts a command that leads its own session and outlives this process. The
// caller must call WaitSession.
func StartSession(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return own.fork(false, func() (int, error) {
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		return cmd.Process.Pid, nil
	})
}

// WaitSession is like cmd.Wait, for a command that StartSession has started.
func WaitSession(cmd *exec.Cmd) error {
	err := cmd.Wait()
	own.reaped(cmd.Process.Pid)
	return err
}

// KillSession kills the process group of a command that StartSession has started, unless the
// command has ended and been waited for. Processes of the command that have left its group stay.
func KillSession(cmd *exec.Cmd) {
	if cmd.Process.Signal(syscall.Signal(0)) == nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // fails if it has just ended
	}
}

// forkPause is the pause before the next check of dead children that may belong to a fork in
// flight.
const forkPause = 10 * time.Millisecond

// Reap reaps inherited children, so that none stays defunct, and blocks until ctx ends. It reaps a
// child only once it has been dead for the time of patience: children that this process started
// without this package look inherited, and their starter must be able to wait for them.
func Reap(ctx context.Context, patience time.Duration) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	defer reapNow(nil, time.Time{})
	seen := make(map[int]time.Time) // the dead, and when each was first seen dead
	timer := time.NewTimer(0)       // some may be dead already
	defer timer.Stop()
	for {
		select {
		case <-ended:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		next, unsure := reapNow(seen, now.Add(-patience))
		switch {
		case unsure: // no signal reports the end of a fork
			timer.Reset(forkPause)
		case !next.IsZero():
			timer.Reset(next.Add(patience).Sub(now))
		}
	}
}

// reapNow reaps the inherited dead processes that were first seen dead before the given time. first
// is the earliest time at which one of the others was first seen dead. If seen is nil, it reaps all
// of them. unsure reports that there may be more.
func reapNow(seen map[int]time.Time, before time.Time) (first time.Time, unsure bool) {
	inherited, unsure := own.look()
	for pid := range seen {
		if !slices.Contains(inherited, pid) {
			delete(seen, pid)
		}
	}
	for _, pid := range inherited {
		if _, state, err := Born(pid); err != nil || state != 'Z' {
			continue
		}
		since, known := seen[pid]
		if !known && seen != nil {
			since = time.Now()
			seen[pid] = since
		}
		if seen != nil && since.After(before) {
			if first.IsZero() || since.Before(first) {
				first = since
			}
			continue
		}
		_ = unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG, nil) // fails if it was reaped meanwhile
	}
	return first, unsure
}
