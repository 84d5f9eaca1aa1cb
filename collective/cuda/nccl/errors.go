package nccl

import (
	"errors"
	"fmt"
	"unsafe"
)

// ErrInProgress is what [Comm.Poll] returns while what was begun is under way.
var ErrInProgress = errors.New("nccl: in progress")

// result is an ncclResult_t.
type result int32

const (
	success    result = 0
	inProgress result = 7
)

var names = []string{"ncclSuccess", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidArgument",
	"ncclInvalidUsage", "ncclRemoteError", "ncclInProgress", "ncclTimeout"}

// String is NCCL's name of the result.
func (r result) String() string {
	if r >= 0 && int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("ncclResult %d", int32(r))
}

// Error is what a call of NCCL has answered, or what a communicator has met since.
type Error struct {
	Call string // such as "ncclAllReduce"
	Code int    // the ncclResult_t
	Name string // NCCL's name of it, such as "ncclSystemError"
	Text string // NCCL's description
	Last string // what NCCL says about the last error of all, which may be another; may be empty
}

// Error names the call and the result, and says what NCCL says.
func (e *Error) Error() string {
	s := fmt.Sprintf("nccl: %s: %s (%s)", e.Call, e.Name, e.Text)
	if e.Last != "" {
		s += ": " + e.Last
	}
	return s
}

// maxText bounds what is taken of a text of NCCL's.
const maxText = 1024

// check makes an error of what a call has returned. A call that is still in progress is no error.
func (l *Library) check(call string, r result, comm uintptr) error {
	if r == success || r == inProgress {
		return nil
	}
	return &Error{Call: call, Code: int(r), Name: r.String(), Text: cString(l.getErrorString(r)), Last: cString(l.getLastError(comm))}
}

// cString copies what p points to, up to its zero byte.
func cString(p unsafe.Pointer) string {
	if p == nil {
		return ""
	}
	n := 0
	for n < maxText && *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}
