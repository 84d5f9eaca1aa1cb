package checkpoint

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

const lockName = ".lock"

// maxOwner limits the bytes read about the owner of a lock.
const maxOwner = 1 << 10

// Owner identifies the writer of a folder.
type Owner struct {
	// Job is the same for all writers of one job; empty for a program that runs without hvdrun.
	Job string
	// Process describes the process in error messages.
	Process string
}

// LockedError reports that another job writes to a folder.
type LockedError struct {
	Dir   string
	Owner Owner
}

// Error returns a message with the folder and the owner.
func (e *LockedError) Error() string {
	job := "another program"
	if e.Owner.Job != "" {
		job = "the job " + e.Owner.Job
	}
	return fmt.Sprintf("checkpoint: %s writes into %s (%s): each job needs a folder of its own", job, e.Dir, e.Owner.Process)
}

// Lock is the exclusive right to write to a folder. It ends with the process.
type Lock struct{ file *os.File }

// Acquire locks dir for a job. It creates dir if necessary, for all users if shared is set. It does
// not block. If another job has locked dir, it returns a *LockedError. It returns a nil Lock and no
// error in two cases, in which the caller may try again: another process of the same job has locked
// dir, and is about to end; or the file system does not support locks. It returns an error if the
// lock file belongs to another user.
func Acquire(dir string, shared bool, owner Owner) (*Lock, error) {
	if err := makeDir(dir, shared); err != nil {
		return nil, err
	}
	// The lock file is truncated below, so it must belong to this user: in a folder in which others
	// may create files, its name could be a link to any file.
	f, err := safefile.Update(filepath.Join(dir, lockName), safefile.Private, true)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	locked, err := safefile.TryOptionalLock(f, "no two jobs may write checkpoints into that folder")
	switch {
	case err != nil:
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
	case !locked:
		return nil, f.Close()
	}
	// The lock is valid without the owner's name, for example if the disk is full.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(owner.Job+"\n"+owner.Process+"\n"), 0)
	}
	return &Lock{f}, nil
}

// Release releases the lock. l may be nil.
func (l *Lock) Release() {
	if l != nil {
		_ = l.file.Close()
	}
}
