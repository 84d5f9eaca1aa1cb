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

	"golang.org/x/sys/unix"

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

// List returns the commits of which there are checkpoints in a folder, newest first; none where
// there is no folder.
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

// Write writes a checkpoint into the folder, which it makes. It takes its name when all of it is on
// the disk: whenever the program or the machine dies, and whatever fails, what was there before is
// whole, and files that have not come to an end are removed by a later Write. It blocks as long as
// the disk takes.
func Write(dir string, about About, tensors [][]Tensor, pieces []image.Piece) error {
	return WriteTelling(dir, about, tensors, pieces, func(int64) {})
}

// WriteTelling is Write, and tells how many more bytes have reached the disk, now and then and by
// the calling goroutine.
func WriteTelling(dir string, about About, tensors [][]Tensor, pieces []image.Piece, told func(bytes int64)) (err error) {
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
	if err := Encode(&settling{f: f, told: told}, about, tensors, pieces); err != nil {
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

// settleEvery is how many bytes go to the disk together.
const settleEvery = 8 << 20

// settling is a file of which the system begins to write each part to the disk when it is whole,
// and waits for the part before: so a slow disk can be told from one that does nothing.
type settling struct {
	f                 *os.File
	end, begun, there int64 // what is written, on its way to the disk, and on it
	told              func(bytes int64)
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

// settle has the last part go on its way. What it cannot do, Sync does in the end, which tells of
// errors too.
func (s *settling) settle() {
	fd := int(s.f.Fd())
	_ = unix.SyncFileRange(fd, s.begun, s.end-s.begun, unix.SYNC_FILE_RANGE_WRITE)
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if s.begun > s.there {
		_ = unix.SyncFileRange(fd, s.there, s.begun-s.there, all)
		s.told(s.begun - s.there)
	}
	s.there, s.begun = s.begun, s.end
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

// Prune removes the checkpoints of a folder but the newest ones, of which it keeps as many as it is
// told.
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
