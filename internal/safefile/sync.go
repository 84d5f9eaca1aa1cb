package safefile

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// fsync, fdatasync and renameat2 are the system calls. Tests replace them.
var fsync, fdatasync, renameat2 = unix.Fsync, unix.Fdatasync, unix.Renameat2

// Sync blocks until a file is on disk. If its file system lacks the call, Sync reports that (see
// TellLacks) and returns no error.
func Sync(f *os.File) error { return syncBy("fsync", fsync, f) }

// SyncData is like Sync, for the contents, without the file's times.
func SyncData(f *os.File) error { return syncBy("fdatasync", fdatasync, f) }

// SyncDir is like Sync, for the names in a folder.
func SyncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(syncBy("fsync", fsync, dir), dir.Close())
}

func syncBy(call string, sync func(int) error, f *os.File) error {
	_, err := retry(func() (int, error) { return 0, sync(int(f.Fd())) })
	switch {
	case err == nil:
		return nil
	case cannot(err):
		lack(call, f.Name(), err, "what was written there last may be lost when the machine fails")
		return nil
	}
	return &os.PathError{Op: "sync", Path: f.Name(), Err: err}
}

// Exchange exchanges the names of two files in one folder. If the file system lacks the call,
// Exchange only renames from as to, and exchanged is false.
func Exchange(from, to string) (exchanged bool, err error) {
	_, err = retry(func() (int, error) {
		return 0, renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	})
	if err == nil || !cannot(err) {
		return err == nil, err
	}
	return false, os.Rename(from, to)
}

// cannot returns whether the error of a call means that the file system lacks it. Sandboxes return
// EPERM and EACCES for calls that they do not know; on an open file, none of these calls needs a
// permission.
func cannot(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOSYS, unix.EOPNOTSUPP, unix.EINVAL, unix.ENOLCK, unix.EPERM, unix.EACCES},
		func(target error) bool { return errors.Is(err, target) })
}

// lacks records the calls that some file system lacks. Each is reported once.
var lacks struct {
	sync.Mutex
	texts []string
	known map[string]bool
	tell  func(text string)
}

// TellLacks makes tell be called once for each call that a file system lacks and this process
// continues without, including those found before. tell must not block. Only the last function that
// was set is called.
func TellLacks(tell func(text string)) {
	lacks.Lock()
	defer lacks.Unlock()
	lacks.tell = tell
	for _, text := range lacks.texts {
		tell(text)
	}
	lacks.texts = nil
}

// lack reports a call that a file system lacks, or that fails there, and the consequence.
func lack(call, path string, err error, consequence string) {
	lacks.Lock()
	defer lacks.Unlock()
	if lacks.known[call] {
		return
	}
	if lacks.known == nil {
		lacks.known = map[string]bool{}
	}
	lacks.known[call] = true
	var cause unix.Errno
	errors.As(err, &cause)
	text := fmt.Sprintf("the file system of %s has no %s (%v): %s", path, call, cause, consequence)
	if lacks.tell == nil {
		lacks.texts = append(lacks.texts, text)
		return
	}
	lacks.tell(text)
}
