package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"syscall"

	"github.com/hvdrun/hvdrun/plan"
)

// Errors with which a job ends, wrapped with their causes.
var (
	// ErrNotEnoughSlots: the hosts had too few free slots within Timeouts.Elastic.
	ErrNotEnoughSlots = errors.New("driver: not enough slots in time")
	// ErrResetLimit: the job exceeded Blame.ResetLimit.
	ErrResetLimit = errors.New("driver: reset limit exceeded")
	// ErrStateLost: the job has made progress, but no remaining worker has its state.
	ErrStateLost = errors.New("driver: state lost")
	// ErrDiscovery: the first discovery failed.
	ErrDiscovery = errors.New("driver: the first discovery failed")
	// ErrCheckpoint: the job succeeded or was stopped, but its last checkpoint could not be
	// written.
	ErrCheckpoint = errors.New("driver: the last checkpoint could not be written")
	// ErrDriven: there is nothing to resume, another driver runs the job.
	ErrDriven = errors.New("driver: another driver runs the job")
	// ErrFinished: there is nothing to resume, the job has ended.
	ErrFinished = errors.New("driver: the job has ended")
)

// StopSignal is the cause of the context of a job that a signal ends. ExitStatus recognizes it,
// also after another driver has taken over.
type StopSignal struct{ syscall.Signal }

// Error returns "stopped by signal: terminated".
func (s StopSignal) Error() string { return "stopped by signal: " + s.Signal.String() }

// StopCommand is the cause of the context of a job that a stop command ends. It is a StopSignal of
// SIGTERM too.
type StopCommand struct {
	// UID is the user who gave the command; empty: unknown.
	UID string
}

// Error returns "stopped by command (hvdrun stop), uid 1000".
func (s StopCommand) Error() string {
	text := "stopped by command (hvdrun stop)"
	if s.UID != "" {
		text += ", uid " + s.UID
	}
	return text
}

// Unwrap returns the signal that has the same effect.
func (s StopCommand) Unwrap() error { return StopSignal{syscall.SIGTERM} }

// WorkerError ends a job because a worker has failed. It describes the first failure.
type WorkerError struct {
	Slot plan.SlotID
	Rank int
	Exit Exit
	// Reason is set if the driver stopped the worker for a failure, or if the exit alone does not
	// show the cause.
	Reason string `json:",omitempty"`
}

// Error includes host, slot, rank and exit.
func (e *WorkerError) Error() string {
	return "driver: one or more processes exited with non-zero status: " + e.What()
}

// What returns Error without its prefix.
func (e *WorkerError) What() string {
	how := e.Reason
	if how == "" {
		how = e.Exit.String()
	}
	if e.Exit.Early {
		how += " (a program that fails must end with another status, as elastic.Main does)"
	}
	return fmt.Sprintf("host %s slot %d rank %d %s", e.Slot.Host, e.Slot.Index, e.Rank, how)
}

// Own reports whether the program itself failed: it exited with a status other than 0, or too
// early. Other failures are caused by the machine, or by whoever ended the process.
func (e *WorkerError) Own() bool {
	x := e.Exit
	return e.Reason == "" && (x.Code != 0 || x.Early) && x.Signal == 0 && x.Err == nil
}

// Faulty reports whether the program may fail in the same way on any machine: by itself, or by a
// signal of a fault such as SIGSEGV.
func (e *WorkerError) Faulty() bool {
	switch e.Exit.Signal {
	case syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGABRT, syscall.SIGFPE, syscall.SIGILL, syscall.SIGSYS, syscall.SIGTRAP:
		return true
	}
	return e.Own()
}

// Exit is how a worker's process ended. The zero Exit is a clean one.
type Exit struct {
	Code   int
	Signal syscall.Signal `json:",omitempty"`
	// Err is set if the process could not be started.
	Err error
	// Evicted: the agent of its host ended it or did not start it, because the agent itself was
	// asked to end.
	Evicted bool `json:",omitempty"`
	// TakenBy is the run whose worker occupies the slot, so that no process was started; empty:
	// none does.
	TakenBy string `json:",omitempty"`
	// Unkillable: the process still exists after SIGKILL. Err has details.
	Unkillable bool `json:",omitempty"`
	// Early: the worker had joined, and exited with status 0 before its training was done.
	Early bool `json:",omitempty"`
	// Said is the error that the program itself reported, such as "ValueError: bad sample
	// (train.py:34)", or the line of its standard error that gives the reason.
	Said string `json:",omitempty"`
	// Lost: the host cannot be reached, so it is unknown how the process ended; it counts as
	// killed.
	Lost bool `json:",omitempty"`
	// Why gives further information about the reason, such as that the kernel killed the process
	// because memory ran out. Empty: none is known.
	Why string `json:",omitempty"`
}

// exitJSON is an Exit with the text of its Err.
type exitJSON struct {
	fields
	Err string `json:",omitempty"`
}

type fields Exit // without methods

// MarshalJSON encodes the exit with the text of its Err.
func (e Exit) MarshalJSON() ([]byte, error) {
	x := exitJSON{fields: fields(e)}
	if e.Err != nil {
		x.Err = e.Err.Error()
	}
	return json.Marshal(x)
}

// UnmarshalJSON decodes what MarshalJSON has encoded. It refuses unknown fields.
func (e *Exit) UnmarshalJSON(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var x exitJSON
	err := d.Decode(&x)
	if *e = Exit(x.fields); x.Err != "" {
		e.Err = errors.New(x.Err)
	}
	return err
}

// String describes the exit: "exited with code 7", "was killed by signal 9 (killed)".
func (e Exit) String() string {
	switch {
	case e.Unkillable:
		return fmt.Sprintf("could not be killed: %v", e.Err)
	case e.Err != nil:
		return "could not be started: " + e.Err.Error()
	case e.Lost:
		return "is out of reach and counts as killed" + e.because()
	case e.Signal != 0:
		return fmt.Sprintf("was killed by signal %d (%v)", int(e.Signal), e.Signal) + e.because()
	case e.Early:
		return "exited with status 0 before training was done" + e.because()
	}
	return fmt.Sprintf("exited with code %d", e.Code) + e.because()
}

func (e Exit) because() (text string) {
	for _, more := range []string{e.Said, e.Why} {
		if more != "" {
			text += ": " + more
		}
	}
	return text
}

// Clean reports whether the process exited with status 0, as it should.
func (e Exit) Clean() bool { return e.Code == 0 && e.Signal == 0 && e.Err == nil && !e.Early }

// statuses lists the errors that have their own exit status.
var statuses = []struct {
	err    error
	status int
}{{ErrNotEnoughSlots, 3}, {ErrResetLimit, 4}, {ErrStateLost, 5}, {ErrDiscovery, 6}, {ErrCheckpoint, 7}}

// ExitStatus returns the exit status for the error with which a job ends: 0 for nil, 128+n for
// StopSignal n, 1 for an error without its own status.
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

// Stopped reports whether the exit status is that of a job that a person or a signal ended, without
// a failure.
func Stopped(status int) bool { return status > 128 }

// Sentinel returns the error with the given exit status; nil if no error has it.
func Sentinel(status int) error {
	for _, s := range statuses {
		if s.status == status {
			return s.err
		}
	}
	return nil
}
