package store

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	// filePoll is how often Wait looks at a file.
	filePoll = 20 * time.Millisecond
	// lockPoll is how often a lock is tried that another process holds.
	lockPoll = 2 * time.Millisecond
	// fileHead is the version before a value.
	fileHead = 8
)

// File is a store in a folder, which several processes share: those of one machine, or those of all
// that have the folder, if its file system has locks. A process that dies holds nobody up. Its clock
// is that of each machine.
type File struct{ dir string }

var _ Store = (*File)(nil)

// OpenFile returns the store in a folder, which it makes if there is none; only the folder's owner
// may use it.
func OpenFile(dir string) (*File, error) {
	if err := safefile.MakeDir(dir, safefile.Private); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	if err := safefile.PrivateDir(dir); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	return &File{dir}, nil
}

// path returns the file of a key: keys have characters that names of files have not.
func (f *File) path(key string) string {
	sum := sha256.Sum256([]byte(key))
	return filepath.Join(f.dir, hex.EncodeToString(sum[:]))
}

// Get implements Store.
func (f *File) Get(ctx context.Context, key string) (Entry, error) {
	if err := begin(ctx, key, nil); err != nil {
		return Entry{}, err
	}
	return f.read(key)
}

func (f *File) read(key string) (Entry, error) {
	b, err := safefile.OwnText(f.path(key), fileHead+MaxValue)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Entry{Now: time.Now()}, nil
	case err == nil && len(b) < fileHead:
		err = fmt.Errorf("%s has %d bytes", f.path(key), len(b))
	}
	if err != nil {
		return Entry{}, fmt.Errorf("store: %w", err)
	}
	return Entry{Value: b[fileHead:], Version: binary.LittleEndian.Uint64(b), Now: time.Now()}, nil
}

// CompareAndSet implements Store. The file is replaced as a whole.
func (f *File) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (Entry, bool, error) {
	if err := begin(ctx, key, value); err != nil {
		return Entry{}, false, err
	}
	unlock, err := f.lock(ctx)
	if err != nil {
		return Entry{}, false, err
	}
	defer unlock()
	e, err := f.read(key)
	if err != nil || e.Version != version {
		return e, false, err
	}
	b := append(binary.LittleEndian.AppendUint64(nil, version+1), value...)
	if err := safefile.Replace(f.path(key), b, safefile.Private); err != nil {
		return Entry{}, false, fmt.Errorf("store: %w", err)
	}
	return Entry{Value: b[fileHead:], Version: version + 1, Now: e.Now}, true, nil
}

// lock locks the folder. The kernel unlocks it for a process that dies.
func (f *File) lock(ctx context.Context) (unlock func(), err error) {
	file, err := safefile.Update(filepath.Join(f.dir, "lock"), safefile.Private, true)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	ticker := time.NewTicker(lockPoll)
	defer ticker.Stop()
	for {
		err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		switch {
		case err == nil:
			return func() { _ = file.Close() }, nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			return nil, errors.Join(fmt.Errorf("store: locking %s: %w", f.dir, err), file.Close())
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), file.Close())
		}
	}
}

// Wait implements Store. It looks at the file fifty times a second.
func (f *File) Wait(ctx context.Context, key string, version uint64) (Entry, error) {
	ticker := time.NewTicker(filePoll)
	defer ticker.Stop()
	for {
		e, err := f.Get(ctx, key)
		if err != nil || e.Version != version {
			return e, err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return Entry{}, context.Cause(ctx)
		}
	}
}

// Remove removes a store that nobody uses any more.
func (f *File) Remove() error { return os.RemoveAll(f.dir) }
