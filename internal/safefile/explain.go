package safefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Explain adds to err, the error of a file, what a person can do about it, if the disk is full or
// read-only, or a limit or a missing permission prevents the call. Nil stays nil.
func Explain(err error) error {
	if _, done := errors.AsType[*explained](err); done {
		return err
	}
	remedy := ""
	of, isPath := errors.AsType[*fs.PathError](err)
	switch {
	case errors.Is(err, unix.ENOSPC):
		remedy = "free space there, or name another place"
	case errors.Is(err, unix.EDQUOT):
		remedy = fmt.Sprintf("the quota of user %d is used up: free space there, or name another place", os.Geteuid())
	case errors.Is(err, unix.EROFS):
		remedy = "the file system is read-only: name another place"
	case errors.Is(err, unix.EFBIG):
		remedy = "a file may have no more bytes: raise the limit (ulimit -f), or name another place"
	case isPath && of.Op != "fork/exec" && (errors.Is(of.Err, unix.EACCES) || errors.Is(of.Err, unix.EPERM)):
		remedy = fmt.Sprintf("give user %d the permission (chmod, chown), or name another place", os.Geteuid())
	default:
		return err
	}
	return &explained{err, remedy}
}

// explained is an error with the remedy.
type explained struct {
	error
	remedy string
}

func (e *explained) Error() string { return e.error.Error() + ": " + e.remedy }
func (e *explained) Unwrap() error { return e.error }
