package safefile

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTryLock: the meaning of each error of a lock for the caller.
func TestTryLock(t *testing.T) {
	f, err := Create(filepath.Join(t.TempDir(), "f"), Private)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	defer func() { flock = unix.Flock }()
	for _, c := range []struct {
		call   error
		is     error // nil: neither of the two
		locked bool
	}{
		{nil, nil, true},
		{unix.EAGAIN, ErrLocked, false}, {unix.EACCES, errNoLocks, false}, {unix.EPERM, errNoLocks, false},
		{unix.ENOSYS, errNoLocks, false}, {unix.ENOLCK, errNoLocks, false},
		{unix.EOPNOTSUPP, errNoLocks, false}, {unix.EINVAL, errNoLocks, false},
		{unix.EIO, nil, false}, {unix.EBADF, nil, false}, {unix.ESTALE, nil, false},
	} {
		interrupted := false
		flock = func(int, int) error {
			if !interrupted {
				interrupted = true
				return unix.EINTR
			}
			return c.call
		}
		err := TryLock(f)
		if (err == nil) != c.locked || errors.Is(err, ErrLocked) != (c.is == ErrLocked) || errors.Is(err, errNoLocks) != (c.is == errNoLocks) {
			t.Errorf("%v: %v", c.call, err)
		}
		if err != nil && (!strings.Contains(err.Error(), f.Name()) || !strings.Contains(err.Error(), "lock")) {
			t.Errorf("%v does not tell which file, or what", err)
		}
	}
}

func TestTryLockOfALockedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	first, err := Create(path, Private)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	second, err := ReadOwn(path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := TryLock(first); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(second); !errors.Is(err, ErrLocked) {
		t.Errorf("a second lock: %v", err)
	}
}
