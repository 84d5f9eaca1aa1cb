package proc

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Child is a process that this process has started. It leads its own process group, and the
// kernel kills it when this process dies. Its methods may be called by many goroutines.
type Child struct {
	// PID is the id of the process and of its group.
	PID int

	ended   chan struct{} // closed when it has ended
	release chan struct{} // closed when it has been reaped, or may be
	reaping sync.Once
	status  syscall.WaitStatus // set by reap, as err is
	err     error

	mu       sync.Mutex
	released bool // no more signals will be sent
}

// Start starts a command, whose streams must be files. After success the caller must call Reap, and
// must not call cmd.Wait. Errors are those of ExplainStart.
func Start(cmd *exec.Cmd) (*Child, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	lead(cmd.SysProcAttr)
	c, err := start(false, func() (int, error) {
		if err := cmd.Start(); err != nil {
			return 0, ExplainStart(err, cmd.Path)
		}
		return cmd.Process.Pid, nil
	})
	if err == nil {
		_ = cmd.Process.Release() // wait waits for the process id instead
	}
	return c, err
}

// lead makes a process that is to be started lead a group and die with this process.
func lead(attr *syscall.SysProcAttr) {
	attr.Setpgid, attr.Pdeathsig = true, syscall.SIGKILL
}

// explainFork returns err, the error of a fork on this thread. If the kernel refuses the system
// call that lead asks for, explainFork adds its name.
func explainFork(err error) error {
	var now int32
	if unix.Prctl(unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&now)), 0, 0, 0) != nil {
		return err
	}
	if refused := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(now), 0, 0, 0); refused != nil && errors.Is(err, refused) {
		return fmt.Errorf("prctl(PR_SET_PDEATHSIG), which ends a process with its parent: %w", err)
	}
	return err
}

// start starts a child from a thread that exists until the child is reaped: the kernel sends the
// parent-death signal when the forking thread ends, not when the process does.
func start(worker bool, fork func() (pid int, err error)) (*Child, error) {
	c := newChild()
	forked := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := own.fork(worker, func() (pid int, err error) {
			if c.PID, err = fork(); err != nil {
				err = explainFork(err)
			}
			return c.PID, err
		})
		forked <- err
		if err == nil {
			c.wait()
		}
	}()
	if err := <-forked; err != nil {
		return nil, err
	}
	return c, nil
}

func newChild() *Child {
	return &Child{ended: make(chan struct{}), release: make(chan struct{})}
}

// wait blocks until the child has ended, closes ended, and blocks until the child has been reaped.
func (c *Child) wait() {
	for unix.Waitid(unix.P_PID, c.PID, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
		continue
	}
	close(c.ended)
	<-c.release
	c.reap()
}

// reap reaps the child, which has ended, unless that is done.
func (c *Child) reap() {
	c.reaping.Do(func() {
		for {
			if _, c.err = syscall.Wait4(c.PID, &c.status, 0, nil); c.err != syscall.EINTR {
				own.reaped(c.PID)
				return
			}
		}
	})
}

// Ended returns a channel that is closed when the process has ended. Until Reap the process keeps
// its id and its group's id, so that no signal can hit another process with a reused id.
func (c *Child) Ended() <-chan struct{} { return c.ended }

func (c *Child) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// Signal sends a signal to the process group, unless the child has been reaped.
func (c *Child) Signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.released {
		return
	}
	err := syscall.Kill(-c.PID, sig)
	if err == syscall.ESRCH || sig == syscall.SIGKILL {
		_ = syscall.Kill(c.PID, sig) // it may have moved to another group
	}
}

// Reap kills what is left of the process group, blocks until the process has ended, and returns its
// status. It must be called once.
func (c *Child) Reap() (syscall.WaitStatus, error) {
	c.Signal(syscall.SIGKILL)
	c.mu.Lock()
	c.released = true
	c.mu.Unlock()
	<-c.ended
	c.reap() // here: the thread that waits for the child may have to wait for a processor
	close(c.release)
	return c.status, c.err
}

// abandon sends the child no more signals, and lets it be reaped whenever it ends. It does not
// block.
func (c *Child) abandon() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.released = true
	close(c.release)
}
