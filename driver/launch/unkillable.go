package launch

import (
	"fmt"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// UnkillableError is the end of the wait for a worker's process that is still there though it was
// sent SIGKILL: it hangs in the kernel. It is also an *ExitError of SIGKILL. Its text has no
// package prefix: it completes a sentence.
type UnkillableError struct {
	// PID is the process, on the worker's host.
	PID int
	// After is how long it was waited for after SIGKILL.
	After time.Duration
	// State is the process's as proc_pid_stat(5) has it, such as "D"; empty where it is not known.
	State string
}

// Error returns "process 123 still exists 10s after SIGKILL (state D)".
func (e *UnkillableError) Error() string {
	state := ""
	if e.State != "" {
		state = " (state " + e.State + ")"
	}
	return fmt.Sprintf("process %d still exists %v after SIGKILL%s", e.PID, e.After, state)
}

// Unwrap returns an *ExitError.
func (e *UnkillableError) Unwrap() error {
	return &ExitError{Code: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL}
}

func newUnkillable(pid int) error {
	e := &UnkillableError{PID: pid, After: proc.KillPatience}
	if _, state, err := proc.Born(pid); err == nil {
		e.State = string(rune(state))
	}
	return e
}
