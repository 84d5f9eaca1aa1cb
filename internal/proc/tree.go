package proc

import (
	"context"
	"syscall"
	"time"
)

// KillPatience is how long a process that was sent SIGKILL is waited for.
const KillPatience = 10 * time.Second

// Command is a worker that Fork starts.
type Command struct {
	// Path is the program's, relative to Dir, and Args are its name and arguments.
	Path string
	Args []string
	// Env is the whole environment, and Dir the working directory; empty: this process's.
	Env []string
	Dir string
	// Files become the descriptors from 0 on.
	Files []uintptr
	// Mark is an entry of Env (NAME=value) by which descendants are found that have lost their
	// parents. Empty: no mark.
	Mark string
	// CoreLimit bounds the core file in bytes, and is never more than this process's own hard
	// limit. 0: no core is dumped; UnlimitedCore: no other bound.
	CoreLimit uint64
	// User, if not nil, is whom the worker runs as. That needs the rights of root.
	User *User
	// Cgroup, if not empty, is the folder of a cgroup of version 2, below which the worker gets its
	// own. Where it cannot, it is not started. Empty: it gets one where that can be made.
	Cgroup string
}

// Stop says how a process is ended.
type Stop struct {
	// Grace is the time between SIGTERM and SIGKILL. Zero or less: SIGKILL at once.
	Grace time.Duration
	// Signal, if not nil, returns what is sent in place of SIGTERM.
	Signal func() syscall.Signal
	// Hurry, if not nil, ends the grace when it is closed. More, if not nil, has the whole grace
	// begin anew with each value.
	Hurry, More <-chan struct{}
	// Dying, if not nil, is called once where the process dumps its core by itself, which may take
	// long, and where a look finds that a signal is ending it; what completes a sentence. The
	// signal is 0 where there is more to say than that.
	Dying func(what string, by syscall.Signal)
	// Look, if not nil, demands a look with each value.
	Look <-chan struct{}
	// Closed, if not nil, is closed when the process has closed a descriptor that it keeps as long
	// as it lives. A look follows: a process that has been killed closes its descriptors one after
	// the other, and those of a GPU take a tenth of a second.
	Closed <-chan struct{}
}

// closedLook is how long a process that closes its descriptors has to end.
const closedLook = 3 * time.Millisecond

// Tree is a worker's process with everything that it starts. Where cgroups of version 2 can be
// made, it has one of its own. It is for one goroutine.
type Tree struct {
	*Child
	cgroup      *cgroup
	descendants *descendants
	dump        *dumpWatch
	memory      memoryKills
	left        []string
}

// Fork starts a worker. The caller must call Wait, and Release after that.
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
	if err != nil && g != nil { // it may be the cgroup that the kernel refuses
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

// Wait blocks until the process has ended, and kills what it leaves. Once ctx has ended it ends the
// process by stop. It returns false where the process is still there KillPatience after it was sent
// SIGKILL: then it is not waited for any longer.
func (t *Tree) Wait(ctx context.Context, stop Stop) (status syscall.WaitStatus, ended bool) {
	stopped := t.await(ctx, stop)
	if !t.hasEnded() {
		t.abandon()
		return 0, false
	}
	if !stopped {
		t.left = t.descendants.living()
	}
	status, _ = t.Reap() // fails only where it was reaped elsewhere
	t.descendants.root = 0
	t.cgroup.empty()
	if stopped || adopting.Load() && len(own.inherited()) > 0 {
		t.Sweep()
	}
	return status, true
}

// Why returns what else is known of why the process was killed, that the kernel has killed for lack
// of memory where it runs; empty: nothing.
func (t *Tree) Why() string { return t.memory.why() }

// Left returns the processes that a process has left when it ended without being asked to, each as
// "sleep, process 7", as far as they are found without a search of all of /proc: where this process
// inherits them (Adopt). Wait has killed them.
func (t *Tree) Left() []string { return t.left }

// Sweep kills what the process has started, after its end, as far as it can be found. It reads all
// of /proc where this process does not inherit what its descendants leave (Adopt).
func (t *Tree) Sweep() { t.descendants.kill() }

// Release lets go of what belongs to the tree.
func (t *Tree) Release() {
	t.dump.close()
	t.descendants.release()
	t.cgroup.remove()
}

// await blocks until the child has ended, or SIGKILL has not ended it in time. It ends the child
// once ctx has ended, and returns whether it had to.
func (t *Tree) await(ctx context.Context, stop Stop) (stopped bool) {
	if t.endsByItself(ctx, stop) {
		return false
	}
	if stop.Grace > 0 && !closed(stop.Hurry) {
		if !adopting.Load() {
			t.descendants.find() // now: those whose parent ends cannot be found by it later
		}
		t.Signal(stop.signal())
		t.Signal(syscall.SIGCONT) // a stopped process handles no SIGTERM
		if t.within(stop.Grace, stop.Hurry, stop.More) {
			return true
		}
	}
	for bound := time.Now().Add(dumpBound); t.dump.dumping() && !closed(stop.Hurry) && time.Now().Before(bound); {
		if t.within(dumpLook, stop.Hurry, nil) { // the core file is wanted whole
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

// endsByItself blocks until the child has ended, which it returns, or ctx has.
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
		by := EndedBy(t.PID)
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

// within returns whether the child ends before the time is over, which begins anew with each value
// of more, or hurry is closed.
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

// signal returns what begins the grace.
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
