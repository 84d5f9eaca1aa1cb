// Package cli provides the environment of a command of hvdrun: the streams, the log on stderr, the
// handling of signals, and the exit statuses of errors.
package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Exit statuses of the contract that are not the driver's.
const (
	StatusUsage = 2
	statusShell = 128 // plus the signal
)

// Program is one run of hvdrun: its streams, and what signals ask of it.
type Program struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Env            []string
	Args           []string         // as settings.Normalize has them
	Log            *Queue           // what is logged, on its way to stderr; nil: it goes there at once
	Hurried        *atomic.Bool     // a person has asked again to stop
	Hurry          <-chan struct{}  // receives when a person asks again to stop
	Signals        <-chan os.Signal // receives SIGUSR1 and SIGUSR2, which are for the workers
	Stop           func(now bool)   // does what a signal does, and where now is set what another does
}

// RunError is an error of the work itself; all others are of the command line.
type RunError struct{ error }

func (e RunError) Unwrap() error { return e.error }

// Failed returns an error of the work itself.
func Failed(err error) error { return RunError{err} }

// programExit is the failure of a program whose exit status becomes that of its worker.
type programExit struct {
	error
	code int
}

// ExitWith returns the failure of a program, which becomes this one's exit status.
func ExitWith(err error, code int) error { return programExit{err, code} }

// StopSignal is why what runs was stopped.
type StopSignal = job.StopSignal

// FlushPatience is how long the end of the program waits for a writer that takes nothing.
func (p *Program) FlushPatience() time.Duration {
	if p.Hurried.Load() {
		return HurriedFlush
	}
	return FlushPatience
}

// Status maps an error to the exit status of the contract.
func Status(err error) int {
	var stopped StopSignal
	var failed RunError
	var exit programExit
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.code
	case errors.As(err, &stopped) && !errors.Is(err, job.ErrCheckpoint):
		return statusShell + int(stopped.Signal)
	case errors.As(err, &failed):
		return job.ExitStatus(failed.error)
	}
	return StatusUsage
}

// Again passes on, without delay, that a person is impatient. It returns false if nobody has
// received the previous call.
func Again(hurry chan<- struct{}) bool {
	select {
	case hurry <- struct{}{}:
		return true
	default:
		return false
	}
}

// OwnScript runs the hvdrun that is the agent of a host: there it may have another path than here,
// and where there are agents of a cluster it is theirs.
const OwnScript = `exec "${` + plan.EnvAgentProgram + `:?the agent of this host does not say where its program is: it is an older hvdrun}" "$@"`

// Lookup returns the value of an environment variable.
func Lookup(env []string, name string) (text string, ok bool) {
	for _, e := range env {
		if n, t, _ := strings.Cut(e, "="); n == name {
			text, ok = t, true // the last counts, as in a process's environment made by os/exec
		}
	}
	return text, ok
}

// Impatience returns a context that ends with any signal but the first SIGTERM, which asks a worker
// to leave its job in good order: package elastic handles it.
func (p *Program) Impatience(asked context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(asked))
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-asked.Done():
		case <-ctx.Done():
			return
		}
		if errors.Is(context.Cause(asked), StopSignal{Signal: syscall.SIGTERM}) {
			select {
			case <-p.Hurry:
			case <-ctx.Done():
				return
			}
		}
		cancel()
	})
	return ctx, func() {
		cancel()
		watching.Wait()
	}
}
