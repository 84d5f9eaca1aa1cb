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
	"syscall"

	"github.com/hvdrun/hvdrun/elastic/image"
)

const (
	prefix    = "commit-"
	suffix    = ".safetensors"
	temporary = ".commit-*.tmp"
)

// Path returns the name of the checkpoint of a commit in a folder.
func Path(dir string, commits uint64) string {
	return filepath.Join(dir, fmt.Sprintf("%s%020d%s", prefix, commits, suffix))
}

// List returns the commits of which there are checkpoints in a folder, newest first; none where there is no folder.
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

// Write writes a checkpoint into the folder, which it makes. It takes its name when all of it is on the disk: whenever the program
// or the machine dies, and whatever fails, what was there before is whole, and files that have not come to an end are removed by
// a later Write. It blocks as long as the disk takes.
func Write(dir string, about About, tensors [][]Tensor, pieces []image.Piece) (err error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	sweep(dir)
	name := strings.Replace(temporary, "*", rand.Text(), 1)
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("checkpoint: commit %d: %w", about.Commits, err)
			_ = f.Close()
			_ = os.Remove(f.Name()) // sweep does it otherwise
		}
	}()
	// The lock is what sweep knows a living writer by.
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return err
	}
	if err := Encode(f, about, tensors, pieces); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), Path(dir, about.Commits)); err != nil {
		return err
	}
	return errors.Join(f.Close(), syncDir(dir))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// sweep removes what writers have left that are gone.
func sweep(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, temporary))
	for _, path := range left {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			_ = os.Remove(path)
		}
		_ = f.Close()
	}
}

// Prune removes the checkpoints of a folder but the newest ones, of which it keeps as many as it is told.
func Prune(dir string, keep int) error {
	all, err := List(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range all[min(keep, len(all)):] {
		if err := os.Remove(Path(dir, n)); !errors.Is(err, fs.ErrNotExist) { // another job's writer may have been here
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// SetAside gives a damaged checkpoint another name, so that it does not count any more.
func SetAside(path string) error { return os.Rename(path, path+".damaged") }
