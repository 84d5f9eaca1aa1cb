package proc

import (
	"context"
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

// adopting: this process becomes the parent of processes that its descendants leave behind.
var adopting atomic.Bool

// Adopt makes this process the one that inherits the processes its descendants leave behind
// (PR_SET_CHILD_SUBREAPER), for as long as it lives. From then on a Tree finds everything that a
// worker started among this process's descendants: nothing of it outlives the worker, whatever
// session and environment it has. The process should run Reap as well. Adopt starts nothing.
func Adopt() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	adopting.Store(true)
	return nil
}

// own are the children that this process has started by this package.
var own = children{started: make(map[int]startedChild), forking: make(map[int]uint64)}

// children are the child processes that this one has started, to tell them from inherited ones.
type children struct {
	mu      sync.Mutex
	started map[int]startedChild // by process id, from the fork until it is reaped
	forks   int
	forking map[int]uint64 // forks under way, and when they began, in ticks after boot
}

type startedChild struct {
	worker bool
	birth  uint64 // in ticks after boot
}

// fork calls what starts a child, and records the child.
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
	if err == nil {
		c.started[pid] = startedChild{worker, begun}
	}
	return err
}

// reaped records that a child is gone.
func (c *children) reaped(pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.started, pid)
}

// inherited returns the children that this process has not started, the dead among them too.
func (c *children) inherited() []int {
	pids, _ := c.look()
	return pids
}

// look returns the inherited children. Those of forks under way may be this process's own, and are
// left out: unsure says that one of them is dead.
func (c *children) look() (pids []int, unsure bool) {
	self := os.Getpid()
	all, err := childrenOf(self, self) // of the first thread, to which inherited processes come
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

// noWorkerStarted returns whether no worker that lives can have started a process that was born
// then.
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

// StartSession starts a command that leads a session of its own and does not end with this process.
// The caller must call WaitSession.
func StartSession(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return own.fork(false, func() (int, error) {
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		return cmd.Process.Pid, nil
	})
}

// WaitSession is cmd.Wait of a command that StartSession has started.
func WaitSession(cmd *exec.Cmd) error {
	err := cmd.Wait()
	own.reaped(cmd.Process.Pid)
	return err
}

// forkPause is when the dead are looked at again that may be of a fork under way.
const forkPause = 10 * time.Millisecond

// Reap reaps processes that this one has inherited, so that none stays defunct, and blocks until
// ctx ends. It leaves a process that has ended to others for the time of patience: a process that
// this one has started without the help of this package is not told from an inherited one.
func Reap(ctx context.Context, patience time.Duration) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	defer reapNow(nil, time.Time{})
	seen := make(map[int]time.Time) // the dead, and since when they are known to be
	timer := time.NewTimer(0)       // there may be some already
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
		case unsure: // no signal tells that the fork is over
			timer.Reset(forkPause)
		case !next.IsZero():
			timer.Reset(next.Add(patience).Sub(now))
		}
	}
}

// reapNow reaps the inherited dead that have been seen before that time, and returns when the first
// of the others was. Without a map it reaps them all. Unsure: there may be others.
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
		_ = unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG, nil) // fails where it was reaped meanwhile
	}
	return first, unsure
}
