// Package blob stores values, by the SHA-256 hashes of their bytes, in memory that the processes of
// a host share. Each value is a file below /dev/shm, so that it outlives the process that has
// created it. If that file system is small, as in most containers, values are in the temporary
// folder.
//
// The processes of a run on a host share a folder, and each holds a lock there while it has the
// store open. The last one to close the store removes the folder. Folders of processes that were
// killed are removed by [Clean], and an hour later by any process that opens a store of another
// run.
package blob

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// ID is the SHA-256 hash of a value's bytes, and identifies the value.
type ID [sha256.Size]byte

// String returns the ID in hexadecimal digits.
func (id ID) String() string { return hex.EncodeToString(id[:]) }

// ParseID returns the ID of bytes in a message.
func ParseID(b []byte) (id ID, ok bool) {
	copy(id[:], b)
	return id, len(b) == len(id)
}

var (
	// ErrFull is wrapped by the error of Create if the store has no room.
	ErrFull = errors.New("blob: the store is full")
	// ErrMissing is returned for a value that the store does not have.
	ErrMissing = errors.New("blob: the store does not have the value")
)

// Config configures a Store, which Run and Host identify.
type Config struct {
	// Root is the folder that contains stores. Empty: /dev/shm, or the temporary folder if /dev/shm
	// has less than a gigabyte.
	Root      string
	Run, Host string
	// Most bounds the bytes that the processes of the host store together. 0: 30 % of the memory or
	// of the size of the file system, whichever is less.
	Most int64
}

const (
	leastShared = 1 << 30   // bytes that /dev/shm must have
	stale       = time.Hour // age after which a folder that nobody has open is removed
	liveName    = ".live"   // each process that has the store open holds a shared lock of it
	countName   = ".count"  // the number of bytes taken; changed while its lock is held exclusively
	unfinished  = ".new-"   // prefix of files that are being written; their writers hold exclusive locks
)

// Store is a store that this process has open. It is safe for concurrent use.
type Store struct {
	dir  string
	most int64
	live *os.File
}

// root returns the folder that contains stores.
func root(cfg string) string {
	var st unix.Statfs_t
	if cfg != "" {
		return cfg
	}
	const shared = "/dev/shm"
	if unix.Statfs(shared, &st) == nil && int64(st.Blocks)*st.Bsize >= leastShared && unix.Access(shared, unix.W_OK) == nil {
		return shared
	}
	return os.TempDir()
}

// top returns the folder of a user's stores.
func top(cfg string, uid int) string {
	return filepath.Join(root(cfg), "hvdrun-blobs-"+strconv.Itoa(uid))
}

func nameOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:8])
}

// most returns the default bound of a store in a folder.
func most(dir string) int64 {
	bound := int64(1) << 40
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		bound = int64(info.Totalram) * int64(info.Unit)
	}
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) == nil {
		bound = min(bound, int64(st.Blocks)*st.Bsize)
	}
	return bound / 10 * 3
}

// Open opens the store of a run on a host, and creates it if it does not exist.
func Open(cfg Config) (*Store, error) {
	all := top(cfg.Root, os.Geteuid())
	if err := safefile.MakePrivateDir(all); err != nil {
		return nil, fmt.Errorf("blob: %w", err)
	}
	sweep(all, nameOf(cfg.Run), os.Geteuid())
	s := &Store{dir: filepath.Join(all, nameOf(cfg.Run), nameOf(cfg.Host)), most: cfg.Most}
	for try := 0; ; try++ {
		err := s.open()
		if err == nil {
			break
		}
		// Another process may be removing the folder.
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errRemoved) || try == 100 {
			return nil, fmt.Errorf("blob: %w", err)
		}
	}
	if s.most <= 0 {
		s.most = most(s.dir)
	}
	return s, nil
}

var errRemoved = errors.New("the folder was removed meanwhile")

func (s *Store) open() error {
	if err := safefile.MakeDir(s.dir, safefile.Private); err != nil {
		return err
	}
	live, err := lockLive(s.dir)
	if err != nil {
		return err
	}
	now := time.Now()
	_ = os.Chtimes(s.dir, now, now) // records when the folder was used
	s.live = live
	return nil
}

// lockLive locks the file that shows that a store is open. It returns errRemoved if another process
// has removed the file meanwhile.
func lockLive(dir string) (*os.File, error) {
	live, err := lockFile(filepath.Join(dir, liveName), unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	a, err := live.Stat()
	if err == nil {
		var b fs.FileInfo
		if b, err = os.Stat(live.Name()); err == nil && !os.SameFile(a, b) {
			err = errRemoved
		}
	}
	if err != nil {
		return nil, errors.Join(err, live.Close())
	}
	return live, nil
}

// lockFile opens a file, creates it if it does not exist, and locks it.
func lockFile(path string, how int) (*os.File, error) {
	f, err := safefile.Update(path, safefile.Private, true)
	if err != nil {
		return nil, err
	}
	if err := safefile.Flock(f, how); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close closes the store. Its values remain as long as another process has it open.
func (s *Store) Close() error {
	err := s.live.Close()
	run := filepath.Dir(s.dir)
	if of, open := openFolder(unix.AT_FDCWD, run, os.Geteuid()); open == nil {
		removeUnused(of, filepath.Base(s.dir), os.Geteuid())
		_ = of.Close()
	}
	_ = os.Remove(run) // fails while the run has other folders
	return err
}

func (s *Store) path(id ID) string { return filepath.Join(s.dir, id.String()) }

// Open opens a value for reading, and returns its size. The caller must close the file. The error
// is ErrMissing if there is no such value.
func (s *Store) Open(id ID) (*os.File, int64, error) {
	f, err := safefile.ReadOwn(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, ErrMissing
	} else if err != nil {
		return nil, 0, fmt.Errorf("blob: %w", err)
	}
	fi, err := f.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, fi.Size(), nil
}

// Has returns whether the store has a value.
func (s *Store) Has(id ID) bool {
	_, err := os.Lstat(s.path(id))
	return err == nil
}

// Remove removes a value, if it exists. Processes that have it open can still read it.
func (s *Store) Remove(id ID) error {
	fi, err := os.Lstat(s.path(id))
	if err == nil {
		err = os.Remove(s.path(id))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("blob: %w", err)
	}
	return s.count(func(taken int64) (int64, error) { return taken - fi.Size(), nil })
}

// List returns all values, in no order.
func (s *Store) List() ([]ID, error) {
	names, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("blob: %w", err)
	}
	var all []ID
	for _, n := range names {
		b, err := hex.DecodeString(n.Name())
		if id, ok := ParseID(b); err == nil && ok {
			all = append(all, id)
		}
	}
	return all, nil
}

// Usage returns the number of bytes taken, and its bound.
func (s *Store) Usage() (taken, most int64, err error) {
	err = s.count(func(n int64) (int64, error) {
		taken = n
		return n, nil
	})
	return taken, s.most, err
}

// count changes the number of bytes taken.
func (s *Store) count(change func(int64) (int64, error)) error {
	f, err := lockFile(filepath.Join(s.dir, countName), unix.LOCK_EX)
	if err != nil {
		return fmt.Errorf("blob: %w", err)
	}
	defer f.Close()
	var b [8]byte
	if _, err := f.ReadAt(b[:], 0); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("blob: %w", err)
	}
	n, err := change(max(int64(binary.LittleEndian.Uint64(b[:])), 0))
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(b[:], uint64(max(n, 0)))
	if _, err := f.WriteAt(b[:], 0); err != nil {
		return fmt.Errorf("blob: %w", err)
	}
	return nil
}

// reserve takes room for a value. If there is not enough, it first frees the room taken by
// processes that were killed.
func (s *Store) reserve(size int64) error {
	return s.count(func(taken int64) (int64, error) {
		if taken+size > s.most {
			taken = s.recount()
		}
		if taken+size > s.most {
			return 0, fmt.Errorf("%w: %d of at most %d bytes are taken, and %d more are needed, in %s", ErrFull, taken, s.most, size, s.dir)
		}
		return taken + size, nil
	})
}

// recount removes files whose writers were killed, and returns the total size of the others.
func (s *Store) recount() (taken int64) {
	names, _ := os.ReadDir(s.dir)
	for _, n := range names {
		path := filepath.Join(s.dir, n.Name())
		if strings.HasPrefix(n.Name(), unfinished) {
			if f, err := lockFile(path, unix.LOCK_EX|unix.LOCK_NB); err == nil {
				_ = os.Remove(path)
				_ = f.Close()
				continue
			}
		} else if strings.HasPrefix(n.Name(), ".") {
			continue
		}
		if fi, err := n.Info(); err == nil {
			taken += fi.Size()
		}
	}
	return taken
}
