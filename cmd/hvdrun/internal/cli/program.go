// Package cli provides the environment of a command of hvdrun: the streams, the log on stderr, the
// handling of signals, and the exit statuses of errors.
package cli

import (
	"context"
	"encoding/json"
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

// Exit statuses of hvdrun besides those of job.ExitStatus.
const (
	StatusUsage = 2
	statusShell = 128 // plus the number of the signal
)

// Program is one run of hvdrun: its arguments, environment, streams and signals.
type Program struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Env            []string
	Args           []string         // as returned by settings.Normalize
	Log            *Queue           // queues the log for stderr; nil: the log is written to stderr directly
	Hurried        *atomic.Bool     // the user has asked a second time to stop
	Hurry          <-chan struct{}  // receives when the user asks again to stop
	Signals        <-chan os.Signal // receives SIGUSR1 and SIGUSR2, which are passed on to the workers
	Stop           func(now bool)   // acts as the first signal to stop or, if now is set, as the second
}

// RunError is an error of the work itself; all other errors are about the command line.
type RunError struct{ error }

func (e RunError) Unwrap() error { return e.error }

// Failed returns err as an error of the work itself. Nil stays nil.
func Failed(err error) error {
	if err == nil {
		return nil
	}
	return RunError{err}
}

// programExit is the failure of a program whose exit status becomes the exit status of this
// process.
type programExit struct {
	error
	code int
}

// ExitWith returns an error for which Status returns code.
func ExitWith(err error, code int) error { return programExit{err, code} }

// StopSignal is the cause of a context that a signal ended.
type StopSignal = job.StopSignal

// FlushPatience returns how long the end of the program waits for a writer that accepts nothing.
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

// Again sends to hurry without blocking that the user has asked again to stop. It returns false if
// the previous value has not been received.
func Again(hurry chan<- struct{}) bool {
	select {
	case hurry <- struct{}{}:
		return true
	default:
		return false
	}
}

// OwnScript is a shell script that executes the hvdrun program of the host's agent with its
// arguments. Its path may differ from the path on this machine.
const OwnScript = `exec "${` + plan.EnvAgentProgram + `:?the agent of this host does not say where its program is: it is an older hvdrun}" "$@"`

// Lookup returns the value of an environment variable.
func Lookup(env []string, name string) (text string, ok bool) {
	for _, e := range env {
		if n, t, _ := strings.Cut(e, "="); n == name {
			text, ok = t, true // the last entry counts, as in os/exec
		}
	}
	return text, ok
}

// Impatience returns a context that ends at any signal to stop except a first SIGTERM: that asks a
// worker to leave its job gracefully, and package elastic handles it.
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

// Background calls run in a goroutine. stop ends run's context, and waits until run has returned.
func Background(run func(ctx context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// WriteJSON writes v as indented JSON.
func WriteJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
