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

// Writer writes a value of a known size. Its bytes come in any order by WriteAt, and are hashed
// from the first one on as far as they are there. It is for one goroutine.
type Writer struct {
	s      *Store
	file   *os.File
	size   int64
	sum    hash.Hash
	hashed int64
	ranges map[int64]int64 // that are there, behind what is hashed: from, to
	at     int64           // of Write
	buf    []byte
	over   bool
}

// Create begins a value. The caller calls Commit or Abort. The error wraps ErrFull if there is no
// room.
func (s *Store) Create(size int64) (*Writer, error) {
	if size < 0 {
		return nil, fmt.Errorf("blob: a value of %d bytes", size)
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

// Borrow has a value that another store of the run has on this machine, below the same root,
// without a copy of it: both have the file. The error wraps ErrMissing if that store does not have
// it, or is not there, and ErrFull if there is no room.
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
	case errors.Is(err, fs.ErrExist): // another process has it meanwhile
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return ErrMissing
	}
	return fmt.Errorf("blob: %w", err)
}

// give gives room back.
func (s *Store) give(size int64) error {
	return s.count(func(taken int64) (int64, error) { return taken - size, nil })
}

// Write appends bytes.
func (w *Writer) Write(b []byte) (int, error) {
	n, err := w.WriteAt(b, w.at)
	w.at += int64(n)
	return n, err
}

// WriteAt writes bytes at a place where none were written before.
func (w *Writer) WriteAt(b []byte, at int64) (int, error) {
	if at < w.hashed || at+int64(len(b)) > w.size {
		return 0, fmt.Errorf("blob: bytes %d to %d of a value of %d, of which %d are there", at, at+int64(len(b)), w.size, w.hashed)
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

// catchUp hashes what came before its turn.
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

// Commit makes the value one of the store, and returns its ID. All bytes must have been written.
// The Writer is of no more use.
func (w *Writer) Commit() (id ID, err error) {
	if w.hashed != w.size {
		w.Abort()
		return id, fmt.Errorf("blob: %d of %d bytes were written", w.hashed, w.size)
	}
	w.sum.Sum(id[:0])
	w.over = true
	if w.s.Has(id) { // the same value is there already
		return id, w.discard()
	}
	if err := os.Rename(w.file.Name(), w.s.path(id)); err != nil {
		return id, fmt.Errorf("blob: %w", errors.Join(err, w.discard()))
	}
	return id, w.file.Close()
}

// Abort removes what was written. After Commit it does nothing.
func (w *Writer) Abort() {
	if !w.over {
		w.over = true
		_ = w.discard()
	}
}

func (w *Writer) discard() error {
	return errors.Join(os.Remove(w.file.Name()), w.file.Close(), w.s.give(w.size))
}
