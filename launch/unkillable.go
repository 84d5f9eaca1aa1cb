package launch

import (
	"fmt"
	"syscall"
	"time"
)

// killPatience is how long a process that was sent SIGKILL is waited for.
const killPatience = 10 * time.Second

// UnkillableError says that a worker's process is still there though it was sent SIGKILL, and that
// nobody waits for it any longer: it hangs in the kernel. It is also an *ExitError of SIGKILL. Its
// text has no package prefix: it completes a sentence.
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
func (e *UnkillableError) Unwrap() error { return exitOfSignal(syscall.SIGKILL) }

func newUnkillable(pid int) *UnkillableError {
	e := &UnkillableError{PID: pid, After: killPatience}
	if _, state, err := born(pid); err == nil {
		e.State = string(rune(state))
	}
	return e
}
