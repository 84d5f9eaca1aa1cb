package proc

import (
	"context"
	"syscall"
	"time"
)

// KillPatience is how long Wait waits for a process that was sent SIGKILL.
const KillPatience = 10 * time.Second

// Command is a worker that Fork starts.
type Command struct {
	// Path is the path of the program, relative to Dir; Args are its name and arguments.
	Path string
	Args []string
	// Env is the whole environment, and Dir the working directory. Empty: this process's.
	Env []string
	Dir string
	// Files become the descriptors from 0 on.
	Files []uintptr
	// Mark is an entry of Env (NAME=value) by which orphaned descendants are found. Empty: no mark.
	Mark string
	// CoreLimit bounds the core file in bytes, and never exceeds this process's own hard limit. 0:
	// no core is dumped; UnlimitedCore: no other bound.
	CoreLimit uint64
	// User, if not nil, is the user that the worker runs as. Setting it needs the rights of root.
	User *User
	// Cgroup, if not empty, is the folder of a cgroup of version 2 below which the worker gets its
	// own; if that cannot be created, the worker is not started. Empty: the worker gets a cgroup if
	// one can be created.
	Cgroup string
}

// Stop says how a process is ended.
type Stop struct {
	// Grace is the time between SIGTERM and SIGKILL. Zero or less: SIGKILL at once.
	Grace time.Duration
	// Signal, if not nil, returns the signal that is sent instead of SIGTERM.
	Signal func() syscall.Signal
	// Hurry, if not nil, ends the grace period when it is closed. Each value of More, if not nil,
	// starts the whole grace period again.
	Hurry, More <-chan struct{}
	// Dying, if not nil, is called once, if the process dumps its core before Wait stops it, which
	// may take long, or if a check finds that a signal is ending it. what completes a sentence; by
	// is 0 if the process dumps its core.
	Dying func(what string, by syscall.Signal)
	// Look, if not nil, requests a check with each value.
	Look <-chan struct{}
	// Closed, if not nil, is closed when the process has closed a descriptor that it normally keeps
	// open until it ends. A check follows: a killed process closes its descriptors one after the
	// other, which takes a tenth of a second for those of a GPU.
	Closed <-chan struct{}
}

// closedLook is the time from Closed to the check, within which a process usually ends.
const closedLook = 3 * time.Millisecond

// Tree is the process of a worker with everything that it starts. It has its own cgroup if one
// of version 2 can be created. A Tree is for one goroutine.
type Tree struct {
	*Child
	cgroup      *cgroup
	descendants *descendants
	dump        *dumpWatch
	memory      memoryKills
	left        []string
}

// Fork starts a worker. The caller must call Wait, then Release.
func Fork(c Command) (*Tree, error) {
	memory := watchMemory(c.Cgroup)
	g, err := c.newCgroup()
	if err != nil {
		return nil, err
	}
	child, err := c.fork(g)
	if err != nil && c.Cgroup != "" {
		g.remove()
		return nil, err
	}
	if err != nil && g != nil { // the kernel may refuse the cgroup
		g.remove()
		g = nil
		if child, err = c.fork(nil); err == nil {
			noCgroups.Store(true)
		}
	}
	if err != nil {
		return nil, err
	}
	return &Tree{
		Child: child, cgroup: g, descendants: newDescendants(c.Mark, child.PID), dump: watchDump(child.PID, c.CoreLimit),
		memory: memory,
	}, nil
}

func (c Command) fork(g *cgroup) (*Child, error) {
	attr := &syscall.ProcAttr{Dir: c.Dir, Env: c.Env, Files: c.Files, Sys: &syscall.SysProcAttr{Credential: c.User.credential()}}
	lead(attr.Sys)
	g.enter(attr.Sys)
	return start(true, func() (int, error) { return forkWithCore(c, attr) })
}

// Wait blocks until the process has ended, and kills what it leaves behind. Once ctx has ended,
// Wait ends the process as stop says. It returns false if the process still exists KillPatience
// after it was sent SIGKILL; nothing waits for the process after that.
func (t *Tree) Wait(ctx context.Context, stop Stop) (status syscall.WaitStatus, ended bool) {
	stopped := t.await(ctx, stop)
	if !t.hasEnded() {
		t.abandon()
		return 0, false
	}
	if !stopped {
		t.left = t.descendants.living()
	}
	status, _ = t.Reap() // fails only if it was reaped elsewhere
	t.descendants.root = 0
	t.cgroup.empty()
	if stopped || adopting.Load() && len(own.inherited()) > 0 {
		t.Sweep()
	}
	return status, true
}

// Why returns why the process was killed, if the kernel has killed processes for lack of memory in
// its cgroup or on the machine, and "" otherwise.
func (t *Tree) Why() string { return t.memory.why() }

// Left returns the processes that were left behind by a process that ended without being stopped,
// each as "sleep, process 7". It includes only those that this process has inherited (Adopt). Wait
// has killed them.
func (t *Tree) Left() []string { return t.left }

// Sweep kills what the process has started, as far as that can be found. It is called after the end
// of the process. It reads all of /proc unless this process inherits its orphaned descendants
// (Adopt).
func (t *Tree) Sweep() { t.descendants.kill() }

// Release frees the descriptors and the cgroup of the tree.
func (t *Tree) Release() {
	t.dump.close()
	t.descendants.release()
	t.cgroup.remove()
}

// await blocks until the child has ended, or for KillPatience after SIGKILL. It ends the child once
// ctx has ended, and returns whether it did so.
func (t *Tree) await(ctx context.Context, stop Stop) (stopped bool) {
	if t.endsByItself(ctx, stop) {
		return false
	}
	if stop.Grace > 0 && !closed(stop.Hurry) {
		if !adopting.Load() {
			t.descendants.find() // now: orphans cannot be found by descent later
		}
		t.Signal(stop.signal())
		t.Signal(syscall.SIGCONT) // a stopped process handles no SIGTERM
		if t.within(stop.Grace, stop.Hurry, stop.More) {
			return true
		}
	}
	for bound := time.Now().Add(dumpBound); t.dump.dumping() && !closed(stop.Hurry) && time.Now().Before(bound); {
		if t.within(dumpLook, stop.Hurry, nil) { // let the core file become complete
			return true
		}
	}
	if t.cgroup.kill() != nil {
		t.descendants.freeze(time.Now().Add(killBound))
	}
	t.Signal(syscall.SIGKILL)
	t.within(KillPatience, nil, nil)
	return true
}

// endsByItself blocks until the child has ended, and returns true, or until ctx has ended.
func (t *Tree) endsByItself(ctx context.Context, stop Stop) bool {
	look := time.NewTimer(t.dump.every())
	defer look.Stop()
	told := stop.Dying == nil
	for {
		select {
		case <-t.ended:
			return true
		case <-ctx.Done():
			return false
		case <-stop.Closed:
			stop.Closed = nil
			look.Reset(closedLook)
			continue
		case <-stop.Look:
		case <-look.C:
		}
		by := endedBy(t.PID)
		switch {
		case told:
		case t.dump.dumping():
			told = true
			stop.Dying(t.dump.what(), 0)
		case by != 0:
			told = true
			what := signalText(by)
			if why := t.Why(); why != "" {
				what += ": " + why
			}
			stop.Dying(what, by)
		default:
			look.Reset(t.dump.every())
		}
	}
}

// within returns whether the child ends within d, which starts again with each value of more, and
// before hurry is closed.
func (t *Tree) within(d time.Duration, hurry, more <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-t.ended:
			return true
		case <-more:
			timer.Reset(d)
			continue
		case <-timer.C:
		case <-hurry:
		}
		return false
	}
}

// signal returns the signal that begins the grace period.
func (s Stop) signal() syscall.Signal {
	if s.Signal == nil {
		return syscall.SIGTERM
	}
	return s.Signal()
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
