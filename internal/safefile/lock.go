package safefile

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// errNoLocks: the file system has no locks, such as Lustre without the option flock, or NFS without
// a lock daemon.
var errNoLocks = errors.New("the file system has no locks")

// ErrLocked: another process, or another open file of this one, holds the lock.
var ErrLocked = errors.New("it is locked")

// flock is the system call. Tests replace it.
var flock = unix.Flock

// TryLock locks the whole file until it is closed. It does not block. The file must be open for
// writing, as NFS requires. The error wraps ErrLocked, or errNoLocks if the file system has no
// locks.
func TryLock(f *os.File) error { return Flock(f, unix.LOCK_EX|unix.LOCK_NB) }

// TryOptionalLock is like TryLock, for a caller that continues without a lock if locking fails with
// an error other than ErrLocked. It then reports the failure and the consequence (see TellLacks).
func TryOptionalLock(f *os.File, consequence string) (locked bool, err error) {
	err = TryLock(f)
	if errors.Is(err, ErrLocked) {
		return false, err
	}
	if err != nil {
		lack("locks", f.Name(), err, consequence)
	}
	return err == nil, nil
}

// Flock locks a file with the flags LOCK_SH, LOCK_EX and LOCK_NB of the system call. Its errors are
// those of TryLock.
func Flock(f *os.File, how int) error {
	_, err := retry(func() (int, error) { return 0, flock(int(f.Fd()), how) })
	return lockError(f.Name(), err)
}

// LockRange locks a file for writing, with the other of Linux's two kinds of locks: it also belongs
// to the open file, and works over NFS. With wait it blocks. Its errors are those of TryLock.
func LockRange(f *os.File, wait bool) error {
	how := unix.F_OFD_SETLK
	if wait {
		how = unix.F_OFD_SETLKW
	}
	_, err := retry(func() (int, error) { return 0, unix.FcntlFlock(f.Fd(), how, &unix.Flock_t{Type: unix.F_WRLCK}) })
	return lockError(f.Name(), err)
}

// RangeLocked returns whether another open file holds a lock of LockRange.
func RangeLocked(f *os.File) (bool, error) {
	is := unix.Flock_t{Type: unix.F_WRLCK}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &is)
	return is.Type != unix.F_UNLCK, lockError(f.Name(), err)
}

// lockError translates err, the error of a call that locks the file at path. Nil stays nil. Linux
// returns EAGAIN if another holds the lock.
func lockError(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("%s: %w", path, ErrLocked)
	case cannot(err):
		return fmt.Errorf("locking %s: %w (%w): a folder on another file system is needed, or a mount option such as flock", path, errNoLocks, err)
	}
	return fmt.Errorf("locking %s: %w", path, err)
}
