package tasks

import (
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

var (
	// ErrNoJob is wrapped by the errors of Connect and Serve in a program that does not belong to a
	// job or whose job is over.
	ErrNoJob = errors.New("tasks: there is no job")
	// ErrCancelled is wrapped by the error of a task that was cancelled.
	ErrCancelled = errors.New("tasks: the task was cancelled")
	// ErrWorkerLost is wrapped by the error of a task whose worker was lost in each of its
	// permitted attempts.
	ErrWorkerLost = errors.New("tasks: the worker was lost")
	// ErrPoison is wrapped in addition to ErrWorkerLost if the task has probably caused the loss of
	// its workers.
	ErrPoison = errors.New("tasks: the task ends its workers")
	// ErrTimeLimit is wrapped by the error of a task that ran for longer than its TimeLimit.
	ErrTimeLimit = errors.New("tasks: the time limit of the task has passed")
	// ErrClosed is returned by a Pool after Close.
	ErrClosed = errors.New("tasks: the pool is closed")
	// ErrForgotten is wrapped by the error of a task that the scheduler had recorded and no longer
	// knows, because the client was disconnected for too long or the journal is lost.
	ErrForgotten = errors.New("tasks: the scheduler no longer knows the task")
	// ErrStoreFull is wrapped by the error of Put or Submit if a store has no room for the value.
	ErrStoreFull = errors.New("tasks: the store is full")
	// ErrQueueFull means that the scheduler's memory limit is reached. It is wrapped by the error
	// of Submit, together with the error of its context, if the context ended while Submit waited
	// for room, and by the error of a task if there was no room for its result.
	ErrQueueFull = errors.New("tasks: the scheduler has no room")
	// ErrGone is wrapped if a stored value is no longer on any host and cannot be recomputed.
	ErrGone = errors.New("tasks: a stored value is lost")
)

// FunctionError is an error that a function has returned, or its panic.
type FunctionError struct {
	// Function is the function's name. Text is the text of the error.
	Function, Text string
	// Stack is the stack of the goroutine, of at most 64 KiB, if the function has panicked;
	// otherwise it is empty.
	Stack string
}

// Error includes the function's name but not the stack.
func (e *FunctionError) Error() string { return fmt.Sprintf("tasks: %s: %s", e.Function, e.Text) }

// DependencyError is the error of a task that was not run because a task whose result is its
// argument failed or was cancelled.
type DependencyError struct {
	Function, Text string
}

// Error names that task.
func (e *DependencyError) Error() string {
	return fmt.Sprintf("tasks: %s was not run: %s", e.Function, e.Text)
}

// failure returns the error of a task that has not succeeded.
func failure(f *function, r *taskspb.TaskResult) error {
	switch {
	case queue.State(r.GetState()) == queue.Cancelled:
		return fmt.Errorf("%w: %s", ErrCancelled, f.name)
	case queue.State(r.GetState()) == queue.Succeeded:
		return nil
	}
	switch queue.Failure(r.GetFailure()) {
	case queue.ByUser:
		return &FunctionError{f.name, r.GetText(), string(r.GetInlined())}
	case queue.Dependency:
		return &DependencyError{f.name, r.GetText()}
	case queue.Lost, queue.NoMember:
		return fmt.Errorf("%w: %s: %s", ErrWorkerLost, f.name, r.GetText())
	case queue.Poison:
		return fmt.Errorf("%w: %w: %s: %s", ErrPoison, ErrWorkerLost, f.name, r.GetText())
	case queue.Gone:
		return fmt.Errorf("%w: %s: %s", ErrGone, f.name, r.GetText())
	case queue.Full:
		return fmt.Errorf("%w: %s: %s", ErrQueueFull, f.name, r.GetText())
	case queue.TimedOut:
		return fmt.Errorf("%w: %s: %s", ErrTimeLimit, f.name, r.GetText())
	}
	return fmt.Errorf("tasks: %s: %s", f.name, r.GetText())
}
