package checkpoint

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	prefix    = "commit-"
	suffix    = ".safetensors"
	temporary = ".commit-*.tmp"
)

// Path returns the path of the checkpoint of a commit in a folder.
func Path(dir string, commits uint64) string {
	return filepath.Join(dir, fmt.Sprintf("%s%020d%s", prefix, commits, suffix))
}

// List returns the numbers of the commits that have a checkpoint in a folder, newest first; none if
// the folder does not exist.
func List(dir string) ([]uint64, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []uint64
	for _, f := range files {
		digits, ok := strings.CutSuffix(strings.TrimPrefix(f.Name(), prefix), suffix)
		n, err := strconv.ParseUint(digits, 10, 64)
		if ok && err == nil && Path("", n) == f.Name() {
			all = append(all, n)
		}
	}
	slices.SortFunc(all, func(a, b uint64) int { return cmp.Compare(b, a) })
	return all, nil
}

// makeDir creates a folder for checkpoints if necessary, with mode 0700, or 0755 if it is shared
// with all users. An existing folder keeps its mode.
func makeDir(dir string, shared bool) error {
	if err := safefile.MakeDir(dir, safefile.Mode(shared)); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// Write writes a checkpoint into dir, which it creates if necessary. If shared is set, all users
// may read the file, otherwise only this one. The file gets its name after all of it is on disk, so
// a crash or an error leaves existing checkpoints intact; a later Write removes incomplete files.
// Write blocks until the data is on disk. Meanwhile it calls progress, from the calling goroutine,
// with the number of bytes that have reached the disk since the last call.
func Write(
	dir string, shared bool, about About, tensors [][]Tensor, blobs []snapshot.Blob, progress func(bytes int64),
) (err error) {
	if err := makeDir(dir, shared); err != nil {
		return err
	}
	sweep(dir)
	name := strings.Replace(temporary, "*", rand.Text(), 1)
	f, err := safefile.Create(filepath.Join(dir, name), safefile.Mode(shared))
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("checkpoint: commit %d: %w", about.Commits, err)
			_ = f.Close()
			_ = os.Remove(f.Name()) // if this fails, a later sweep removes it
		}
	}()
	// The lock tells sweep that the writer is alive. On a file system without locks, sweep removes
	// nothing.
	if _, err := safefile.TryOptionalLock(f, "checkpoints that are incomplete stay there"); err != nil {
		return err
	}
	if err := encode(&settling{f: f, progress: progress}, about, tensors, blobs); err != nil {
		return err
	}
	if err := safefile.Sync(f); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), Path(dir, about.Commits)); err != nil {
		return err
	}
	return errors.Join(f.Close(), safefile.SyncDir(dir))
}

// settleEvery is the number of bytes that are sent to the disk at a time.
const settleEvery = 8 << 20

// settling is a file that starts writing each section to disk when it is complete and waits for the
// previous one, so that progress on a slow disk can be reported.
type settling struct {
	f                  *os.File
	end, begun, synced int64 // offsets: written, being sent to disk, on disk
	progress           func(bytes int64)
}

func (s *settling) Write(b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		var k int
		k, err = s.f.Write(b[:min(int64(len(b)), s.begun+settleEvery-s.end)])
		b, n, s.end = b[k:], n+k, s.end+int64(k)
		if s.end-s.begun == settleEvery {
			s.settle()
		}
	}
	return n, err
}

// settle starts writing the last section to disk. It ignores errors, because the final Sync reports
// them.
func (s *settling) settle() {
	fd := int(s.f.Fd())
	_ = unix.SyncFileRange(fd, s.begun, s.end-s.begun, unix.SYNC_FILE_RANGE_WRITE)
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if s.begun > s.synced {
		_ = unix.SyncFileRange(fd, s.synced, s.begun-s.synced, all)
		s.progress(s.begun - s.synced)
	}
	s.synced, s.begun = s.begun, s.end
}

// sweep removes incomplete files whose writer has ended. It opens only regular files of this user:
// a pipe would block it.
func sweep(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, temporary))
	for _, path := range left {
		f, err := safefile.Update(path, 0, false)
		if err != nil {
			continue
		}
		if safefile.TryLock(f) == nil {
			_ = os.Remove(path)
		}
		_ = f.Close()
	}
}

// Prune removes the checkpoints of a folder up to that of commit number commits, except the newest
// keep of these. It does not remove later ones, which another job may have written.
func Prune(dir string, commits uint64, keep int) error {
	all, err := List(dir)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(n uint64) bool { return n > commits })
	var errs []error
	for _, n := range all[min(keep, len(all)):] {
		if err := os.Remove(Path(dir, n)); !errors.Is(err, fs.ErrNotExist) { // another writer may have removed it
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// SetAside renames a damaged checkpoint so that List ignores it.
func SetAside(path string) error { return os.Rename(path, path+damagedSuffix) }

const damagedSuffix = ".damaged"

// Aside returns the paths in a folder to which SetAside has renamed damaged checkpoints; none if
// there is no folder.
func Aside(dir string) ([]string, error) {
	all, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var aside []string
	for _, e := range all {
		if strings.HasSuffix(e.Name(), suffix+damagedSuffix) {
			aside = append(aside, filepath.Join(dir, e.Name()))
		}
	}
	return aside, err
}
