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

// TryLock locks the file as a whole, until it is closed, and does not block. The file must be open
// for writing, which NFS asks for. The error wraps ErrLocked, or ErrNoLocks if the file system has
// no locks.
func TryLock(f *os.File) error { return Flock(f, unix.LOCK_EX|unix.LOCK_NB) }

// TryOptionalLock is TryLock for a caller that continues without a lock if locking fails, other
// than by ErrLocked. The failure and its consequence are reported then, see TellLacks.
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

// Flock is the system call, with its flags, which are LOCK_SH, LOCK_EX and LOCK_NB. Its errors are
// those of TryLock.
func Flock(f *os.File, how int) error {
	for {
		if err := flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return lockError(f.Name(), err)
		}
	}
}

// LockRange locks a file for writing, as Flock does, by the other of Linux's two kinds of locks: it
// is of the open file too, and works over NFS. With wait it blocks.
func LockRange(f *os.File, wait bool) error {
	how := unix.F_OFD_SETLK
	if wait {
		how = unix.F_OFD_SETLKW
	}
	_, err := retry(func() (int, error) { return 0, unix.FcntlFlock(f.Fd(), how, &unix.Flock_t{Type: unix.F_WRLCK}) })
	return lockError(f.Name(), err)
}

// RangeLocked returns whether another open file has a lock by LockRange.
func RangeLocked(f *os.File) (bool, error) {
	is := unix.Flock_t{Type: unix.F_WRLCK}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &is)
	return is.Type != unix.F_UNLCK, lockError(f.Name(), err)
}

// lockError returns what err, which a call that locks the file at path has returned, means. Nil
// stays nil. Linux tells of another's lock by EAGAIN.
func lockError(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("%s: %w", path, ErrLocked)
	case cannot(err):
		return fmt.Errorf("locking %s: %w (%w): a folder on another file system is needed, or a mount option such as flock", path, ErrNoLocks, err)
	}
	return fmt.Errorf("locking %s: %w", path, err)
}
