// Package launch runs one worker: it starts the process, carries its output, stops it with
// everything it started, and reports how it ended.
//
// Local does so on this machine, and internal/agent/client on other hosts through their agents.
// Every Launcher passes the kit in driver/launch/launchtest. Output joins the lines of all workers.
// The package needs Linux 5.3 or newer (process descriptors).
package launch

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

// UnlimitedCore as a Spec's CoreLimit bounds core files no more than the launcher's own hard limit
// does.
const UnlimitedCore = proc.UnlimitedCore

// User is whom a worker runs as, where that is not the launcher's own user.
type User struct {
	Name     string
	UID, GID uint32
	// Groups are the supplementary groups.
	Groups []uint32
	// Home is the user's home directory.
	Home string
}

// Spec says what to run. A Launcher keeps nothing of it beyond Run and changes none of its slices.
type Spec struct {
	// Incarnation names this one life of the worker. Env must hold it as HVD_INCARNATION: by that,
	// children that left the process group are found when the worker is stopped. Empty: they are
	// found only by their parents.
	Incarnation string
	// Slot is where the worker runs.
	Slot plan.SlotID
	// Command is the program and its arguments. A program without a slash is looked for in the PATH
	// of Env, and then in Dir.
	Command []string
	// Env is the whole environment as NAME=value; of two entries of one name the later counts.
	// Nothing is added.
	Env []string
	// Dir is the working directory; empty is that of the driver.
	Dir string
	// Stdin, if not nil, is the input of the process; the launcher does not read it. nil: no input.
	// Only Local uses it.
	Stdin *os.File
	// Talk, if not nil, gives the process one end of a stream socket, as the descriptor that
	// HVD_WORKER_SOCKET names, and is called with the other as soon as the process runs, in a
	// goroutine of its own; conn is closed when it has returned. When the process has ended, what
	// it has written can still be read, and the end is told once Talk has returned. Run calls
	// cleanup, which may be nil, before it returns. ctx ends with Run's. Only Local uses it.
	Talk func(ctx context.Context, pid int, conn net.Conn) (cleanup func())
	// Stdout and Stderr receive the output as it comes; nil throws it away. Each is written by one
	// goroutine at a time, but both at the same time. Run waits for a Write that blocks. After a
	// Write that fails the rest is thrown away.
	Stdout, Stderr io.Writer
	// Grace is the time between SIGTERM and SIGKILL once the context has ended. Zero or less:
	// SIGKILL at once.
	Grace time.Duration
	// Signal, if not nil, returns the signal that replaces SIGTERM. Only Local uses it.
	Signal func() syscall.Signal
	// CoreLimit bounds, in bytes, the core file that the process leaves when it crashes, and is
	// never more than the launcher's own hard limit. 0: there is none; UnlimitedCore: no bound but
	// that.
	CoreLimit uint64
	// As, if not nil, is whom the process runs as, and Cgroup, if not empty, the folder of a cgroup
	// of version 2 below which it gets its own. Local needs the rights of root for them; other
	// Launchers ignore them.
	As     *User
	Cgroup string
	// Dying, if not nil, is called once, and by the calling goroutine, where the process is as good
	// as dead but may be there for long, because it dumps its core or, after a value of Look,
	// because the kernel still frees its memory; what completes a sentence. by is the signal that
	// ends it, or 0 where there is more to say than that. Run returns when it has ended.
	Dying func(what string, by syscall.Signal)
	// Look, if not nil, demands with each value a look whether a signal is ending the process.
	// Launchers that cannot tell ignore it.
	Look <-chan struct{}
	// Hurry, if not nil, ends the grace when it is closed. More, if not nil, has the whole grace
	// begin anew with each value.
	Hurry, More <-chan struct{}
	// Resumed says that a driver before this one has started the process, for a Keeper. Where it is
	// not known, it is not started, but lost. Command, Env and Dir are ignored.
	Resumed bool
	// Passed, if not nil, is called by a Keeper with how many bytes of output have been written to
	// Stdout and Stderr together, after each line and from the goroutine that has written it.
	// PassedBefore is what it was called with last for the process, under a driver before this one:
	// what that wrote is not written again.
	Passed       func(bytes uint64)
	PassedBefore uint64
	// Ended, if not nil, is called at most once when the process has ended and its output may still
	// be on its way, with what Run will return. It does not block, and may be called from any
	// goroutine. Run may return without calling it.
	Ended func(err error)
}

// Launcher starts workers. Its methods may be called by many goroutines.
type Launcher interface {
	// Run starts the process and blocks until it has ended, what was left of its process group has
	// been killed, and its output has been drained. started, if not nil, is called once with the
	// process's id, by the calling goroutine, as soon as the process runs: the driver admits
	// the worker to a world only after that. The standard input of the process is empty.
	//
	// When ctx ends, the process group gets SIGTERM and, after s.Grace or as soon as the process
	// has ended, everything that the process started is killed: its group, its descendants, and all
	// that carry its incarnation.
	//
	// Run returns nil where the process exited with 0, *ExitError where it ended in another way, be
	// it because ctx ended or not, and *StartError where there never was a process, for instance
	// because ctx had ended already. A process that is still there 10 seconds after it was sent
	// SIGKILL is waited for no longer: *UnkillableError.
	Run(ctx context.Context, s Spec, started func(pid int)) error
}

// ExitError is the end of a process other than exit 0. Its text has no package prefix: it completes
// a sentence.
type ExitError struct {
	// Code is the exit code, or 128+Signal as shells have it.
	Code int
	// Signal is the signal that ended the process, or 0.
	Signal syscall.Signal
	// Evicted: the agent of its host, and not its driver, has asked it to end.
	Evicted bool
}

// Error returns "exited with code 7" or "was killed by signal 9 (killed)".
func (e *ExitError) Error() string {
	if e.Signal != 0 {
		return fmt.Sprintf("was killed by signal %d (%s)", int(e.Signal), e.Signal)
	}
	return "exited with code " + strconv.Itoa(e.Code)
}

func exitError(ws syscall.WaitStatus) error {
	switch {
	case ws.Signaled():
		return &ExitError{Code: 128 + int(ws.Signal()), Signal: ws.Signal()}
	case ws.ExitStatus() != 0:
		return &ExitError{Code: ws.ExitStatus()}
	}
	return nil
}

// StartError is why a process could not be started. It wraps the cause.
type StartError struct {
	// Command is the program as it was given.
	Command string
	Err     error
	// Evicted: the agent of the host starts nothing any more, because it was asked to end.
	Evicted bool
}

// Error returns one line that names the command.
func (e *StartError) Error() string {
	return fmt.Sprintf("launch: cannot start %q: %v", e.Command, e.Err)
}

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.Err }

// NewStartError returns that of the spec's command.
func NewStartError(s Spec, err error) *StartError {
	e := &StartError{Err: err}
	if len(s.Command) > 0 {
		e.Command = s.Command[0]
	}
	return e
}
