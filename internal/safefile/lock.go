package safefile

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNoLocks: the file system has no locks, as Lustre without the option flock, and NFS without a
// lock daemon.
var ErrNoLocks = errors.New("the file system has no locks")

// ErrLocked: another process, or another open file of this one, has the lock.
var ErrLocked = errors.New("it is locked")

// flock is the system call. Tests replace it.
var flock = unix.Flock

// TryLock locks the file as a whole, until it is closed, and does not block. Its error wraps
// ErrLocked, or ErrNoLocks where there are none: a caller that can do without goes on.
func TryLock(f *os.File) error {
	for {
		if err := flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EINTR) {
			return LockError(f.Name(), err)
		}
	}
}

// LockError returns what err, which a call that locks the file at path has returned, means. Nil
// stays nil.
func LockError(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%s: %w", path, ErrLocked)
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ENOLCK), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("locking %s: %w (%w): a folder on another file system is needed, or a mount option such as flock", path, ErrNoLocks, err)
	}
	return fmt.Errorf("locking %s: %w", path, err)
}
