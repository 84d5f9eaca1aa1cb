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

// Sync blocks until a file is on the disk. If its file system has no such call, that is reported,
// see TellLacks, and is no error.
func Sync(f *os.File) error { return syncBy("fsync", fsync, f) }

// SyncData is Sync for what was written, without the file's times.
func SyncData(f *os.File) error { return syncBy("fdatasync", fdatasync, f) }

// SyncDir is Sync for the names in a folder.
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

// Exchange has two files of one folder exchange their names. Where the file system has no such
// call, from replaces to, and exchanged is false.
func Exchange(from, to string) (exchanged bool, err error) {
	_, err = retry(func() (int, error) {
		return 0, renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	})
	if err == nil || !cannot(err) {
		return err == nil, err
	}
	return false, os.Rename(from, to)
}

// cannot returns whether an error of a call that not every file system has means just that. EPERM
// and EACCES are of sandboxes that refuse a call which they do not know: on a file that is open
// already, none of these calls asks for a right.
func cannot(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOSYS, unix.EOPNOTSUPP, unix.EINVAL, unix.ENOLCK, unix.EPERM, unix.EACCES},
		func(target error) bool { return errors.Is(err, target) })
}

// lacks are the calls that some file system did without, which are told once each.
var lacks struct {
	sync.Mutex
	texts []string
	known map[string]bool
	tell  func(text string)
}

// TellLacks has tell called with each thing that a file system lacks and that this process does
// without, once each: also with those that are known by now. It must not block. One such function
// counts, the last.
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
