package blob

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Writer writes a value of a known size. WriteAt accepts its bytes in any order; they are hashed in
// order as soon as they are contiguous from the beginning. A Writer is for one goroutine.
type Writer struct {
	s      *Store
	file   *os.File
	size   int64
	sum    hash.Hash
	hashed int64
	ranges map[int64]int64 // written ranges after the hashed bytes: from, to
	at     int64           // offset of the next Write
	buf    []byte
	over   bool
}

// Create begins a value. The caller must call Commit or Abort. The error wraps ErrFull if there is
// no room.
func (s *Store) Create(size int64) (*Writer, error) {
	if size < 0 {
		return nil, fmt.Errorf("blob: a value cannot have %d bytes", size)
	}
	if err := s.reserve(size); err != nil {
		return nil, err
	}
	f, err := safefile.Create(filepath.Join(s.dir, unfinished+rand.Text()), safefile.Private)
	if err == nil {
		if err = errors.Join(safefile.TryLock(f), f.Truncate(size)); err != nil {
			err = errors.Join(err, os.Remove(f.Name()), f.Close())
		}
	}
	if err != nil {
		_ = s.give(size)
		return nil, fmt.Errorf("blob: %w", err)
	}
	return &Writer{s: s, file: f, size: size, sum: sha256.New(), ranges: map[int64]int64{}}, nil
}

// Borrow adds a value that another store of the run, on this machine and below the same root, has.
// It does not copy the value: both stores link to one file. The error wraps ErrMissing if that
// store does not exist or does not have the value, and ErrFull if there is no room.
func (s *Store) Borrow(id ID, host string) error {
	from := filepath.Join(filepath.Dir(s.dir), nameOf(host), id.String())
	fi, err := os.Lstat(from)
	switch {
	case err != nil || !fi.Mode().IsRegular():
		return ErrMissing
	case s.Has(id):
		return nil
	}
	if err := s.reserve(fi.Size()); err != nil {
		return err
	}
	if err = os.Link(from, s.path(id)); err == nil {
		return nil
	}
	_ = s.give(fi.Size())
	switch {
	case errors.Is(err, fs.ErrExist): // another process has added it meanwhile
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return ErrMissing
	}
	return fmt.Errorf("blob: %w", err)
}

// give releases room.
func (s *Store) give(size int64) error {
	return s.count(func(taken int64) (int64, error) { return taken - size, nil })
}

// Write appends bytes.
func (w *Writer) Write(b []byte) (int, error) {
	n, err := w.WriteAt(b, w.at)
	w.at += int64(n)
	return n, err
}

// WriteAt writes bytes at an offset. Bytes must not be written twice.
func (w *Writer) WriteAt(b []byte, at int64) (int, error) {
	if at < w.hashed || at+int64(len(b)) > w.size {
		return 0, fmt.Errorf("blob: bytes %d to %d cannot be written: the value has %d bytes, of which the first %d were written", at, at+int64(len(b)), w.size, w.hashed)
	}
	n, err := w.file.WriteAt(b, at)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return n, fmt.Errorf("%w: %w", ErrFull, err)
	} else if err != nil {
		return n, fmt.Errorf("blob: %w", err)
	}
	if at > w.hashed {
		w.ranges[at] = at + int64(n)
		return n, nil
	}
	_, _ = w.sum.Write(b)
	w.hashed += int64(n)
	return n, w.catchUp()
}

// catchUp hashes ranges that were written early and are now contiguous.
func (w *Writer) catchUp() error {
	for {
		to, ok := w.ranges[w.hashed]
		if !ok {
			return nil
		}
		delete(w.ranges, w.hashed)
		if w.buf == nil {
			w.buf = make([]byte, 1<<20)
		}
		n, err := io.CopyBuffer(w.sum, struct{ io.Reader }{io.NewSectionReader(w.file, w.hashed, to-w.hashed)}, w.buf)
		if w.hashed += n; err != nil {
			return fmt.Errorf("blob: %w", err)
		}
	}
}

// Commit adds the value to the store, and returns its ID. All bytes must have been written. The
// Writer must not be used afterwards.
func (w *Writer) Commit() (id ID, err error) {
	if w.hashed != w.size {
		w.Abort()
		return id, fmt.Errorf("blob: %d of %d bytes were written", w.hashed, w.size)
	}
	w.sum.Sum(id[:0])
	w.over = true
	if w.s.Has(id) { // the store already has the value
		return id, w.discard()
	}
	if err := os.Rename(w.file.Name(), w.s.path(id)); err != nil {
		return id, fmt.Errorf("blob: %w", errors.Join(err, w.discard()))
	}
	return id, w.file.Close()
}

// Abort removes what was written. After Commit it has no effect.
func (w *Writer) Abort() {
	if !w.over {
		w.over = true
		_ = w.discard()
	}
}

func (w *Writer) discard() error {
	return errors.Join(os.Remove(w.file.Name()), w.file.Close(), w.s.give(w.size))
}
