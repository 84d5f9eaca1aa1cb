package launch

import (
	"fmt"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// UnkillableError reports that a worker's process still exists after SIGKILL, and that the wait for
// it has ended: it hangs in the kernel. It is also an *ExitError of SIGKILL. Its text has no
// package prefix: it completes a sentence.
type UnkillableError struct {
	// PID is the process, on the worker's host.
	PID int
	// After is the length of the wait after SIGKILL.
	After time.Duration
	// State is the state of the process as in proc_pid_stat(5), such as "D"; empty if it is
	// unknown.
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
