package launch

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// adopting: this process becomes the parent of whoever its descendants leave behind.
var adopting atomic.Bool

// Adopt makes this process the one that inherits the processes its descendants leave behind
// (PR_SET_CHILD_SUBREAPER), for as long as it lives. From then on Local finds everything that a
// worker started among its own descendants: nothing of it outlives the worker, whatever session and
// environment it has. The process should run Reap as well. It starts nothing.
func Adopt() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	adopting.Store(true)
	return nil
}

// relatives are the children that this process has started itself.
var relatives = family{own: make(map[int]relative), forking: make(map[int]uint64)}

// family tells the children that this process has started from those that it has inherited.
type family struct {
	mu      sync.Mutex
	own     map[int]relative // by process id, from the fork until it is reaped
	forks   int
	forking map[int]uint64 // forks under way, and when they began, in ticks after boot
}

type relative struct {
	worker bool
	birth  uint64 // in ticks after boot
}

// fork runs what starts a child and takes note of it.
func (f *family) fork(worker bool, start func() (pid int, err error)) error {
	f.mu.Lock()
	f.forks++
	n, begun := f.forks, ticks()
	f.forking[n] = begun
	f.mu.Unlock()
	pid, err := start()
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.forking, n)
	if err == nil {
		f.own[pid] = relative{worker, begun}
	}
	return err
}

// reaped notes that a child is gone.
func (f *family) reaped(pid int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.own, pid)
}

// strays returns the children that this process has not started, the dead among them too. Those of
// forks under way may be its own, and are left out.
func (f *family) strays() (pids []int) {
	self := os.Getpid()
	children, err := adopted(self)
	if err != nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, pid := range children {
		if _, ours := f.own[pid]; ours {
			continue
		}
		birth, _, err := born(pid)
		if err != nil {
			continue
		}
		fresh := false
		for _, begun := range f.forking {
			fresh = fresh || birth >= begun
		}
		if !fresh {
			pids = append(pids, pid)
		}
	}
	return pids
}

// nobodys tells whether no worker that lives can have started a process that was born then.
func (f *family) nobodys(birth uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.own {
		if r.worker && r.birth <= birth {
			return false
		}
	}
	return true
}

// adopted returns the children of a process's first thread, which are those that it inherits.
func adopted(pid int) ([]int, error) { return childrenOf(pid, pid) }

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

// descendants returns the parents of the living processes below the roots, and of the roots; false
// where the kernel does not tell who is whose child.
func descendants(roots []int) (parents map[int]int, ok bool) {
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

// ticks is the time since boot in the unit of /proc/PID/stat.
func ticks() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // fails for no clock that there is
	const perSecond = 100                            // USER_HZ, whatever the kernel's own rate
	return uint64(now.Nano()) / (uint64(time.Second) / perSecond)
}

// Reap takes note of the end of processes that this one has inherited, so that none stays defunct,
// and blocks until ctx ends. It leaves an end to whoever waits for it for that long: a process that
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
		if next := reapNow(seen, now.Add(-patience)); !next.IsZero() {
			timer.Reset(next.Add(patience).Sub(now))
		}
	}
}

// reapNow reaps the inherited dead that have been seen before, and returns when the first of the
// others was. Without a map it reaps them all.
func reapNow(seen map[int]time.Time, before time.Time) (first time.Time) {
	strays := relatives.strays()
	for pid := range seen {
		if !slices.Contains(strays, pid) {
			delete(seen, pid)
		}
	}
	for _, pid := range strays {
		if _, state, err := born(pid); err != nil || state != 'Z' {
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
		_ = unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG, nil) // fails where somebody else has
	}
	return first
}
