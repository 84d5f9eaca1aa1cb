package foreign

import (
	"errors"

	"github.com/hvdrun/hvdrun/collective"
)

// The numbers of errors, as in hvdrun.h.
const (
	codeFailed      = -1
	codeAborted     = -2
	codeMismatch    = -3
	codeTimeout     = -4
	codeInterrupted = -5
)

// Code returns the number of an error, which is negative.
func Code(err error) int32 {
	var mismatch *collective.MismatchError
	switch {
	case errors.Is(err, errInterrupted):
		return codeInterrupted
	case errors.Is(err, errTimeout):
		return codeTimeout
	case errors.Is(err, collective.ErrAborted), errors.Is(err, collective.ErrClosed), errors.Is(err, errClosed):
		return codeAborted
	case errors.As(err, &mismatch):
		return codeMismatch
	}
	return codeFailed
}

// Counts returns the length of the Counts of a call, in a group of size ranks.
func (k Kind) Counts(size int) int {
	switch k {
	case AllToAll:
		return 2 * size
	case ReduceTree:
		return size + 1
	}
	return 0
}
