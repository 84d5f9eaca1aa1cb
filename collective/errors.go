package collective

import (
	"errors"
	"fmt"
	"strings"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

var (
	// ErrAborted matches every [*AbortedError] by errors.Is.
	ErrAborted = errors.New("collective: aborted")
	// ErrClosed is returned by operations on a group after its Close.
	ErrClosed = errors.New("collective: the group is closed")
	// ErrBusy is returned by an operation that is called while another one runs on the same group.
	ErrBusy = errors.New("collective: another operation is in progress on this group")

	errNoGroup = errors.New("collective: the group is nil")
)

// errorOf returns a notice as the error that operations of the group return.
func errorOf(n *frame.Notice, generation uint64) error {
	if n.Mismatch {
		return &MismatchError{Generation: generation, Tensor: n.Tensor, Ranks: n.Ranks,
			Calls: [2]string{operation.Called(n.Calls[0]).String(), operation.Called(n.Calls[1]).String()}}
	}
	return &AbortedError{Generation: generation, Dead: n.Dead, Cause: n.Cause}
}

// AbortedError reports that a group has ended because ranks are gone. Every operation of the group
// returns the same error; it must not be changed.
type AbortedError struct {
	Generation uint64
	// Dead are the ranks whose loss, Close or Abort was the cause, ascending, as numbered in this
	// group; this rank may be one of them. It is empty in a subset if the cause was a rank outside
	// the subset.
	Dead  []int
	Cause error // the error seen on this rank, or on the rank that reported it; may be nil
}

// Error names the ranks and the cause.
func (e *AbortedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "collective: generation %d aborted", e.Generation)
	for i, r := range e.Dead {
		switch {
		case i == 0 && len(e.Dead) == 1:
			fmt.Fprintf(&b, ": rank %d is gone", r)
		case i == 0:
			fmt.Fprintf(&b, ": ranks %d", r)
		case i == len(e.Dead)-1:
			fmt.Fprintf(&b, " and %d are gone", r)
		default:
			fmt.Fprintf(&b, ", %d", r)
		}
	}
	if e.Cause != nil {
		fmt.Fprintf(&b, ": %v", e.Cause)
	}
	return b.String()
}

// Is reports whether target is [ErrAborted].
func (e *AbortedError) Is(target error) bool { return target == ErrAborted }

// Unwrap returns the cause.
func (e *AbortedError) Unwrap() error { return e.Cause }

// MismatchError reports that two ranks called operations that do not match. It is not an
// [ErrAborted]: the program is wrong, and a new world would not help.
type MismatchError struct {
	Generation uint64
	Tensor     string    // the name of the asynchronous operation; empty for others
	Ranks      [2]int    // ascending
	Calls      [2]string // what each of them called, such as "AllReduce of 10 float32 (sum)"
}

// Error names both calls.
func (e *MismatchError) Error() string {
	name := ""
	if e.Tensor != "" {
		name = fmt.Sprintf("of %q ", e.Tensor)
	}
	return fmt.Sprintf("collective: calls %sdo not match: rank %d calls %s, rank %d calls %s",
		name, e.Ranks[0], e.Calls[0], e.Ranks[1], e.Calls[1])
}
