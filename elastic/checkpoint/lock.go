package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const lockName = ".lock"

// maxOwner bounds what is read of who holds a lock.
const maxOwner = 1 << 10

// Owner says who writes into a folder.
type Owner struct {
	// Job is the same for all writers of one job, which follow each other; empty for a program that
	// is alone.
	Job string
	// Process shows people which process it is.
	Process string
}

// LockedError says that another job writes into a folder.
type LockedError struct {
	Dir   string
	Owner Owner
}

// Error names folder and owner.
func (e *LockedError) Error() string {
	job := "another program"
	if e.Owner.Job != "" {
		job = "the job " + e.Owner.Job
	}
	return fmt.Sprintf("checkpoint: %s writes into %s (%s): each job needs a folder of its own", job, e.Dir, e.Owner.Process)
}

// Lock is the right to write into a folder. It ends with the process.
type Lock struct{ file *os.File }

// Acquire makes a job the only one that writes into a folder, which it makes. While another has it,
// it returns a *LockedError. While another process of the same job has it, it returns nil and no
// error: one writer of a job follows the other, and the next try may find it free. So it does where
// the file system has no locks. It does not block.
func Acquire(dir string, owner Owner) (*Lock, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); {
	case errors.Is(err, syscall.EWOULDBLOCK):
		defer f.Close()
		text, err := io.ReadAll(io.LimitReader(f, maxOwner))
		if err != nil {
			return nil, fmt.Errorf("checkpoint: %w", err)
		}
		job, process, _ := strings.Cut(strings.TrimRight(string(text), "\n"), "\n")
		if job != "" && job == owner.Job {
			return nil, nil
		}
		return nil, &LockedError{Dir: dir, Owner: Owner{Job: job, Process: process}}
	case err != nil:
		return nil, f.Close()
	}
	// Who cannot say who it is, on a disk that is full, has the lock all the same.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(owner.Job+"\n"+owner.Process+"\n"), 0)
	}
	return &Lock{f}, nil
}

// Release gives the right back. A nil lock is none.
func (l *Lock) Release() {
	if l != nil {
		_ = l.file.Close()
	}
}
