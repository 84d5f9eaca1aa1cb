package job

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/hvdrun/hvdrun/plan"
)

// Errors with which a job ends, wrapped with what led to them.
var (
	// ErrNotEnoughSlots: the hosts had not enough free slots within Timeouts.Elastic.
	ErrNotEnoughSlots = errors.New("driver: not enough slots in time")
	// ErrResetLimit: the job would have needed more resets than Blame.ResetLimit.
	ErrResetLimit = errors.New("driver: reset limit exceeded")
	// ErrStateLost: the job had made progress, and no worker is left that has its state.
	ErrStateLost = errors.New("driver: state lost")
	// ErrDiscovery: the first discovery failed.
	ErrDiscovery = errors.New("driver: the first discovery failed")
	// ErrCheckpoint: the job ended well, or was stopped, but its last checkpoint could not be
	// written.
	ErrCheckpoint = errors.New("driver: the last checkpoint could not be written")
)

// StopSignal is why a job ends that a signal has ended, as the cause of a context: ExitStatus knows
// it, also where another driver has to bring the job to its end.
type StopSignal struct{ syscall.Signal }

// Error returns "stopped by signal: terminated".
func (s StopSignal) Error() string { return "stopped by signal: " + s.Signal.String() }

// WorkerError ends a job when a worker has failed. It tells the first such worker.
type WorkerError struct {
	Slot plan.SlotID
	Rank int
	Exit Exit
	// Reason is set where the driver stopped the worker because it did not do its part, or where
	// the exit alone does not tell what was wrong.
	Reason string
}

// Error names host, slot, rank and exit.
func (e *WorkerError) Error() string {
	return "driver: one or more processes exited with non-zero status: " + e.What()
}

// What is Error without its first words.
func (e *WorkerError) What() string {
	how := e.Reason
	if how == "" {
		how = e.Exit.String()
	}
	return fmt.Sprintf("host %s slot %d rank %d %s", e.Slot.Host, e.Slot.Index, e.Rank, how)
}

// Exit tells how a worker's process ended. The zero Exit is a clean one.
type Exit struct {
	Code   int
	Signal syscall.Signal
	// Err is set where the process could not be started at all.
	Err error
	// Evicted: the agent of its host has ended it, or not started it, because the agent itself was
	// asked to end.
	Evicted bool
	// Unkillable: the process is still there, though it was killed. Err says more.
	Unkillable bool
}

// String says it in words: "exited with code 7", "was killed by signal 9 (killed)".
func (e Exit) String() string {
	switch {
	case e.Unkillable:
		return fmt.Sprintf("could not be killed: %v", e.Err)
	case e.Err != nil:
		return "could not be started: " + e.Err.Error()
	case e.Signal != 0:
		return fmt.Sprintf("was killed by signal %d (%v)", int(e.Signal), e.Signal)
	}
	return fmt.Sprintf("exited with code %d", e.Code)
}

// Clean tells whether the process ended with status 0.
func (e Exit) Clean() bool { return e.Code == 0 && e.Signal == 0 && e.Err == nil }

// statuses are those of the errors that have one of their own.
var statuses = []struct {
	err    error
	status int
}{{ErrNotEnoughSlots, 3}, {ErrResetLimit, 4}, {ErrStateLost, 5}, {ErrDiscovery, 6}, {ErrCheckpoint, 7}}

// ExitStatus returns the exit status that stands for the error with which a job ends: 0 for nil,
// 128+n for StopSignal n, 1 for an error that has none of its own.
func ExitStatus(err error) int {
	for _, s := range statuses {
		if errors.Is(err, s.err) {
			return s.status
		}
	}
	var stopped StopSignal
	switch {
	case err == nil:
		return 0
	case errors.As(err, &stopped):
		return 128 + int(stopped.Signal)
	}
	return 1
}

// Sentinel returns the error that has the exit status as its own; nil where none has.
func Sentinel(status int) error {
	for _, s := range statuses {
		if s.status == status {
			return s.err
		}
	}
	return nil
}
