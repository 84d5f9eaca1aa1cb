package cuda

import (
	"errors"
	"fmt"
)

var (
	// ErrUnavailable reports that this process cannot use CUDA, or the device that it wants: the
	// driver is missing or too old, or the device does not exist or is too old.
	ErrUnavailable = errors.New("cuda: not available")
	// ErrOutOfMemory matches, by errors.Is, the error of a device or host without free memory.
	ErrOutOfMemory = errors.New("cuda: out of memory")
	// ErrSticky matches, by errors.Is, an error after which the device's context is unusable: every
	// later call fails too, on every Device of this process that shares the context. Only a new
	// process can use the device.
	ErrSticky = errors.New("cuda: the context is broken")
	// ErrClosed is returned by methods of a Device, and of its slices, streams and events, after
	// Close.
	ErrClosed = errors.New("cuda: the device is closed")
)

// result is a CUresult.
type result int32

// Results that the package handles.
const (
	success          result = 0
	outOfMemory      result = 2
	eccUncorrectable result = 214
	nvlinkError      result = 220
	contained        result = 226
	notReady         result = 600
	illegalAddress   result = 700
	launchTimeout    result = 702
	assertFailed     result = 710
	hardwareStack    result = 714
	illegalOperation result = 715
	misaligned       result = 716
	invalidSpace     result = 717
	invalidCounter   result = 718
	launchFailed     result = 719
)

// Error is a failed call of the driver. The cause may be earlier work, whose errors the driver
// reports late.
type Error struct {
	Call string // such as "cuMemAlloc_v2"
	Code int    // the CUresult
	Name string // CUDA's name of the code, such as "CUDA_ERROR_OUT_OF_MEMORY"; empty if the driver does not know it
	Text string // CUDA's description; may be empty
}

// Error names the call and the result.
func (e *Error) Error() string {
	name := e.Name
	if name == "" {
		name = fmt.Sprintf("CUresult %d", e.Code)
	}
	if e.Text == "" {
		return fmt.Sprintf("cuda: %s: %s", e.Call, name)
	}
	return fmt.Sprintf("cuda: %s: %s (%s)", e.Call, name, e.Text)
}

// Is reports whether the error is target, which is [ErrOutOfMemory] or [ErrSticky].
func (e *Error) Is(target error) bool {
	return target == ErrOutOfMemory && result(e.Code) == outOfMemory || target == ErrSticky && result(e.Code).sticky()
}

// sticky reports whether the context is unusable after a result, according to the driver's manual.
func (r result) sticky() bool {
	switch r {
	case eccUncorrectable, nvlinkError, contained, illegalAddress, launchTimeout, assertFailed, hardwareStack, illegalOperation,
		misaligned, invalidSpace, invalidCounter, launchFailed:
		return true
	}
	return false
}
