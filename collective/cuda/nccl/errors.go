package nccl

import (
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/internal/dlopen"
)

// ErrInProgress is returned by [Comm.Poll] while calls are in progress.
var ErrInProgress = errors.New("nccl: in progress")

// result is an ncclResult_t.
type result int32

const (
	success    result = 0
	inProgress result = 7
)

var names = []string{"ncclSuccess", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidArgument",
	"ncclInvalidUsage", "ncclRemoteError", "ncclInProgress", "ncclTimeout"}

// String returns NCCL's name of the result.
func (r result) String() string {
	if r >= 0 && int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("ncclResult %d", int32(r))
}

// Error is the failure of a call of NCCL, or a later failure of a communicator.
type Error struct {
	Call string // such as "ncclAllReduce"
	Code int    // the ncclResult_t
	Name string // NCCL's name of the code, such as "ncclSystemError"
	Text string // NCCL's description
	Last string // NCCL's text about the last error of the process, which may be a different one; may be empty
}

// Error names the call and the result, with NCCL's texts.
func (e *Error) Error() string {
	s := fmt.Sprintf("nccl: %s: %s (%s)", e.Call, e.Name, e.Text)
	if e.Last != "" {
		s += ": " + e.Last
	}
	return s
}

// check returns the error of a call's result. A call that is still in progress is no error.
func (l *Library) check(call string, r result, comm uintptr) error {
	if r == success || r == inProgress {
		return nil
	}
	return &Error{Call: call, Code: int(r), Name: r.String(), Text: dlopen.String(l.getErrorString(r)), Last: dlopen.String(l.getLastError(comm))}
}
