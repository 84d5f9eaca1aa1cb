// Package launch runs one worker: it starts the process, carries its output, stops it with
// everything it started, and reports how it ended.
//
// Local does so on this machine, and internal/agent/client on other hosts through their agents.
// Every Launcher passes the kit in launch/launchtest. Output joins the lines of all workers.
// The package needs Linux 5.3 or newer (process descriptors).
package launch

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

// UnlimitedCore, as a Spec's CoreLimit, leaves core files bounded only by the launcher's own hard
// limit.
const UnlimitedCore = proc.UnlimitedCore

// User is the user that a worker runs as, if that is not the launcher's own user.
type User struct {
	Name     string
	UID, GID uint32
	// Groups are the supplementary groups.
	Groups []uint32
	// Home is the user's home directory.
	Home string
}

// Spec describes the process to run. A Launcher keeps no part of it after Run and changes none of
// its slices.
type Spec struct {
	// Incarnation names this process of the worker. Env must hold it as HVD_INCARNATION: it
	// identifies children that left the process group when the worker is stopped. Empty: such
	// children are found only by their parents.
	Incarnation string
	// Slot is where the worker runs.
	Slot plan.SlotID
	// Command is the program and its arguments. A program without a slash is searched for in the
	// PATH of Env, and then in Dir.
	Command []string
	// Env is the whole environment as NAME=value; of two entries with the same name the later
	// counts. Local, on whichever node it runs, adds what describes that node and Env lacks: see
	// plan.WithNode. Prepare may add more.
	Env []string
	// Prepare, if not nil, returns the environment of the process, given Env with the additions.
	// It may change its argument. Only Local uses it.
	Prepare func(env []string) []string
	// Dir is the working directory; empty: the driver's.
	Dir string
	// Stdin, if not nil, is the input of the process; the launcher does not read it. nil: no input.
	// Only Local uses it.
	Stdin *os.File
	// Talk, if not nil, gives the process one end of a stream socket, as the descriptor that
	// HVD_WORKER_SOCKET names. As soon as the process runs, Talk is called with the other end, in a
	// separate goroutine; conn is closed when Talk has returned. After the process has ended, conn
	// can still be read, and the end is reported when Talk has returned. conn may have a method
	// Ended() <-chan struct{}, whose channel is closed when the process has ended. Run calls
	// cleanup, which may be nil, before it returns. ctx ends with Run's. If the kernel permits no
	// socket, the process has none and conn is at its end. Only Local uses it.
	Talk func(ctx context.Context, pid int, conn net.Conn) (cleanup func())
	// Line, if not nil, is called by a Teller with each line of the worker for the driver, in
	// order, after started has returned and before Ended; it must not keep text. noted is called
	// once the line need not be repeated to another driver. Stream, if not nil, is called by a
	// Teller with each connection that the worker opens for a protocol other than lines; it closes
	// conn and returns when the connection has ended. Both may be called from any goroutine.
	Line   func(text []byte, noted func())
	Stream func(protocol string, conn net.Conn)
	// Stdout and Stderr receive the output as it comes; nil drops it. Each is written by one
	// goroutine at a time, but both may be written at the same time. Run waits for a Write that
	// blocks. After a failed Write the rest is dropped.
	Stdout, Stderr io.Writer
	// Grace is the time between SIGTERM and SIGKILL after the context has ended. Zero or less:
	// SIGKILL at once.
	Grace time.Duration
	// Signal, if not nil, returns the signal that replaces SIGTERM. Only Local uses it.
	Signal func() syscall.Signal
	// CoreLimit bounds, in bytes, the core file of a process that crashes, up to the launcher's own
	// hard limit. 0: no core file; UnlimitedCore: only the hard limit counts.
	CoreLimit uint64
	// As, if not nil, is the user that the process runs as. Cgroup, if not empty, is the folder of
	// a version 2 cgroup; the process gets its own cgroup below it. Local needs the rights of root
	// for them; other Launchers ignore them.
	As     *User
	Cgroup string
	// Dying, if not nil, is called once, by the calling goroutine, when the process is lost but may
	// exist for long: it dumps its core, or the kernel still frees its memory or its GPU. The
	// latter is checked after a value of Look, and when the process has closed the socket of Talk.
	// what completes a sentence about the process. by is the signal that ends it, or 0 if what says
	// more than the signal would. Run still returns only when the process has ended.
	Dying func(what string, by syscall.Signal)
	// Left, if not nil, is called once, by the calling goroutine, when the process has exited with
	// status 0 by itself and has left other processes behind, which are then killed; each is
	// described as "sleep, process 7". Launchers that cannot know do not call it.
	Left func(processes []string)
	// Look, if not nil: each value received requests a check whether a signal is ending the
	// process. Launchers that cannot check ignore it.
	Look <-chan struct{}
	// Hurry, if not nil, ends the grace period when it is closed. More, if not nil, restarts the
	// grace period with each value received.
	Hurry, More <-chan struct{}
	// Resumed, for a Keeper: an earlier driver started the process. If the Keeper does not know the
	// process, it does not start one: the worker is lost. Command, Env and Dir are ignored.
	Resumed bool
	// Passed, if not nil, is called by a Keeper with the number of bytes of output written to
	// Stdout and Stderr together, after each line and from the goroutine that has written it.
	// PassedBefore is the value of its last call for the process under an earlier driver: output up
	// to there is not written again.
	Passed       func(bytes uint64)
	PassedBefore uint64
	// Ended, if not nil, is called at most once, with the result of Run, when the process has ended
	// but its output may not be complete. It must not block, and may be called from any goroutine.
	// Run may return without calling it.
	Ended func(err error)
}

// mostLeft is how many processes LeftText names.
const mostLeft = 4

// LeftText returns the processes that a process left behind, as the end of a sentence about it. It
// is for Spec.Left.
func LeftText(processes []string) string {
	text := strings.Join(processes[:min(len(processes), mostLeft)], "; ")
	if more := len(processes) - mostLeft; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return "ended with status 0 and left processes behind, which were ended with it: " + text
}

// Launcher starts workers. Its methods may be called by many goroutines.
type Launcher interface {
	// Run starts the process. It blocks until the process has ended, the rest of its process group
	// has been killed, and its output has been drained. Run owns s, and may change it. started, if
	// not nil, is called once with the process's id, by the calling goroutine, as soon as the
	// process runs: the driver admits the worker to a world only after that. The standard input of
	// the process is empty.
	//
	// When ctx ends, the process group gets SIGTERM. After s.Grace, or as soon as the process has
	// ended, everything that the process started is killed: its group, its descendants, and all
	// processes that carry its incarnation.
	//
	// Run returns nil if the process exited with 0, *ExitError if it ended in another way, whether
	// ctx ended or not, and *StartError if there never was a process, for instance because ctx had
	// already ended. If a process still exists 10 seconds after SIGKILL, Run waits no longer and
	// returns *UnkillableError.
	Run(ctx context.Context, s *Spec, started func(pid int)) error
}

// ExitError is the end of a process other than exit 0. Its text has no package prefix: it completes
// a sentence.
type ExitError struct {
	// Code is the exit code, or 128+Signal as in shells.
	Code int
	// Signal is the signal that ended the process, or 0.
	Signal syscall.Signal
	// Evicted: the agent of its host, not its driver, asked it to end.
	Evicted bool
	// Lost: its host cannot be reached, so the process counts as killed.
	Lost bool
	// Said is the line of the process's standard error that gives the reason, such as the last
	// line of a traceback. If a signal killed the process, only a crash with SIGABRT has one.
	// Empty: there is no such line.
	Said string
	// Why gives further information about the reason, such as that the kernel killed the process
	// because memory ran out. Empty: none is known.
	Why string
}

// Error returns "exited with code 7", "was killed by signal 9 (killed)" or "was lost", what the
// program has said, and why.
func (e *ExitError) Error() string {
	text := "exited with code " + strconv.Itoa(e.Code)
	switch {
	case e.Lost:
		text = "was lost"
	case e.Signal != 0:
		text = fmt.Sprintf("was killed by signal %d (%s)", int(e.Signal), e.Signal)
	}
	for _, more := range []string{e.Said, e.Why} {
		if more != "" {
			text += ": " + more
		}
	}
	return text
}

// explain adds to the end of a process what its standard error says about the reason.
func explain(end error, words *proc.LastWords) error {
	exit, is := end.(*ExitError)
	if !is {
		return end
	}
	explained := *exit
	switch exit.Signal {
	case 0:
		explained.Said = words.Why()
	case syscall.SIGABRT:
		explained.Said = words.Crash()
	}
	return &explained
}

func exitError(ws syscall.WaitStatus, why string) error {
	switch {
	case ws.Signaled() && ws.Signal() == syscall.SIGKILL:
		return &ExitError{Code: 128 + int(ws.Signal()), Signal: ws.Signal(), Why: why}
	case ws.Signaled():
		return &ExitError{Code: 128 + int(ws.Signal()), Signal: ws.Signal()}
	case ws.ExitStatus() != 0: // what it started may have been killed
		return &ExitError{Code: ws.ExitStatus(), Why: why}
	}
	return nil
}

// StartError is the reason why a process could not be started. It wraps the cause.
type StartError struct {
	// Command is the program as given.
	Command string
	Err     error
	// Evicted: the agent of the host starts no more processes, because it was asked to end.
	Evicted bool
	// TakenBy is the run of the job whose worker occupies the slot; empty: the slot was free.
	TakenBy string
}

// Error returns one line that names the command.
func (e *StartError) Error() string {
	return fmt.Sprintf("launch: cannot start %q: %v", e.Command, e.Err)
}

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.Err }

// NewStartError returns the StartError of the spec's command. If descriptors have run out, the
// error also names the remedy.
func NewStartError(s *Spec, err error) *StartError {
	e := &StartError{Err: proc.ExplainDescriptors(err)}
	if len(s.Command) > 0 {
		e.Command = s.Command[0]
	}
	return e
}
