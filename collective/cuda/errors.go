package cuda

import (
	"errors"
	"fmt"
)

var (
	// ErrUnavailable says that this process cannot use CUDA: there is no driver, one that lacks
	// what is needed, or no device.
	ErrUnavailable = errors.New("cuda: not available")
	// ErrOutOfMemory is, by errors.Is, the error of a device or host without free memory.
	ErrOutOfMemory = errors.New("cuda: out of memory")
	// ErrSticky is, by errors.Is, an error after which the device's context is unusable: every
	// later call fails as well, on every Device of this process that shares the context. Only a new
	// process helps.
	ErrSticky = errors.New("cuda: the context is broken")
	// ErrClosed is returned by what is called on a Device, or on something of it, after its Close.
	ErrClosed = errors.New("cuda: the device is closed")
)

// result is a CUresult.
type result int32

// Results that the package handles.
const (
	success           result = 0
	invalidValue      result = 1
	outOfMemory       result = 2
	notInitialized    result = 3
	noDevice          result = 100
	invalidDevice     result = 101
	invalidContext    result = 201
	eccUncorrectable  result = 214
	invalidPTX        result = 218
	nvlinkError       result = 220
	contained         result = 226
	invalidHandle     result = 400
	notFound          result = 500
	notReady          result = 600
	illegalAddress    result = 700
	launchTimeout     result = 702
	alreadyRegistered result = 712
	assertFailed      result = 710
	hardwareStack     result = 714
	illegalOperation  result = 715
	misaligned        result = 716
	invalidSpace      result = 717
	invalidCounter    result = 718
	launchFailed      result = 719
	notSupported      result = 801
)

// Error is the result of a call of the driver. It may belong to earlier work: the driver reports
// that late.
type Error struct {
	Call string // such as "cuMemAlloc_v2"
	Code int    // the CUresult
	Name string // CUDA's name of it, such as "CUDA_ERROR_OUT_OF_MEMORY"; empty for one that the driver does not know
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

// Is makes an Error [ErrOutOfMemory] or [ErrSticky] where it is one.
func (e *Error) Is(target error) bool {
	return target == ErrOutOfMemory && result(e.Code) == outOfMemory || target == ErrSticky && result(e.Code).sticky()
}

// sticky reports whether the context is lost after a result, as the driver's manual says.
func (r result) sticky() bool {
	switch r {
	case eccUncorrectable, nvlinkError, contained, illegalAddress, launchTimeout, assertFailed, hardwareStack, illegalOperation,
		misaligned, invalidSpace, invalidCounter, launchFailed:
		return true
	}
	return false
}
