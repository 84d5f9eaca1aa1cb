package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/retry"
)

const (
	maxBytes = 1 << 20 // of all files together

	// busyLimit is how long Discover and Watch wait until nobody writes the files.
	busyLimit = 5 * time.Second

	// quiet is how long a file must stay unchanged to count as complete, if it was changed less
	// than young ago and only its modification time can tell. young is longer, since the clocks of
	// file servers may differ.
	quiet = 100 * time.Millisecond
	young = 2 * time.Second
)

// errBusy marks a state in which reading again soon may succeed.
var errBusy = errors.New("it is being written")

// stamp identifies one state of a file.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
}

func stampOf(info os.FileInfo) stamp {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{size: info.Size()}
	}
	return stamp{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}
}

// readBackoff is the pause between attempts to read files that somebody writes.
var readBackoff = retry.Backoff{First: 5 * time.Millisecond, Most: quiet}

// snapshot holds the texts that all files had at one time.
type snapshot struct {
	names, texts []string
	stamps       []stamp
	doubtful     []stamp // stamps of files that somebody may be writing
}

// read reads all files while nobody writes them. It waits up to busyLimit for writers.
func (c *config) read(ctx context.Context) (listing, error) {
	var (
		before []stamp // doubtful at an earlier attempt, and the time of that
		since  time.Time
		start  = time.Now()
	)
	for looks := 1; ; looks++ {
		if ctx.Err() != nil {
			return listing{}, ended(ctx)
		}
		snap, err := c.snapshot()
		switch {
		case err == nil && (len(snap.doubtful) == 0 || slices.Equal(before, snap.doubtful) && time.Since(since) >= quiet):
			hosts, err := merge(snap.names, snap.texts, c.defaultSlots)
			return listing{hosts, snap.names}, err
		case err == nil:
			if !slices.Equal(before, snap.doubtful) {
				before, since = snap.doubtful, time.Now()
			}
			err = fmt.Errorf("file: %s: %w", c.path, errBusy)
		case !errors.Is(err, errBusy):
			return listing{}, err
		}
		if time.Since(start) > busyLimit {
			return listing{}, err
		}
		if err := pause(ctx, readBackoff.After(looks)); err != nil {
			return listing{}, err
		}
	}
}

// snapshot reads all files. The error is errBusy if they change meanwhile or are open for writing.
func (c *config) snapshot() (*snapshot, error) {
	names, err := c.files()
	if err != nil {
		return nil, err
	}
	s := &snapshot{names: names}
	left := int64(maxBytes)
	for _, name := range names {
		if err := s.add(name, left, c.lease); err != nil {
			if now, again := c.files(); errors.Is(err, fs.ErrNotExist) && again == nil && !slices.Equal(now, names) {
				err = errBusy // removed after files listed it
			}
			return nil, fmt.Errorf("file: %s: %w", name, err)
		}
		left -= int64(len(s.texts[len(s.texts)-1]))
	}
	// Check that the files had these texts at one time. A ConfigMap, for example, replaces all at
	// once.
	if now, err := c.files(); err != nil || !slices.Equal(now, names) {
		return nil, fmt.Errorf("file: %s: %w", c.path, errBusy)
	}
	for i, name := range names {
		if info, err := os.Stat(name); err != nil || stampOf(info) != s.stamps[i] {
			return nil, fmt.Errorf("file: %s: %w", name, errBusy)
		}
	}
	return s, nil
}

// files returns the path, or, if it is a directory, the paths of its files sorted by name.
func (c *config) files() ([]string, error) {
	info, err := os.Stat(c.path)
	if err != nil {
		return nil, fmt.Errorf("file: %w", err)
	}
	if !info.IsDir() {
		return []string{c.path}, nil
	}
	entries, err := os.ReadDir(c.path)
	if err != nil {
		return nil, fmt.Errorf("file: %w", err)
	}
	var names []string
	for _, e := range entries {
		path := filepath.Join(c.path, e.Name())
		if !c.wants(e.Name()) {
			continue
		}
		if e.Type()&os.ModeSymlink != 0 { // the target of a link counts; a dangling link is an error later
			if info, err := os.Stat(path); err == nil && info.IsDir() {
				continue
			}
		} else if !e.Type().IsRegular() {
			continue
		}
		names = append(names, path)
	}
	return names, nil
}

// wants reports whether a file of that name in the directory lists hosts. Hidden files and backups
// of editors do not.
func (c *config) wants(name string) bool {
	if strings.HasPrefix(name, ".") || strings.HasPrefix(name, "#") || strings.HasSuffix(name, "~") {
		return false
	}
	ok, err := filepath.Match(c.pattern, name)
	return ok && err == nil
}

// add reads one file of up to most bytes.
func (s *snapshot) add(name string, most int64, lease func(*os.File) leaseState) error {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe would block
	if err != nil {
		return err
	}
	defer f.Close() // also releases the lease
	info, err := f.Stat()
	switch {
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return errors.New("it is neither a file nor a directory")
	}
	held := lease(f)
	if held == leaseRefused {
		return errBusy
	}
	if info, err = f.Stat(); err != nil { // it may have been written between the opening and the lease
		return err
	}
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return err
	}
	if int64(len(text)) > most {
		return fmt.Errorf("the lists of hosts are longer than %d bytes", maxBytes)
	}
	after, err := f.Stat()
	if err != nil {
		return err
	}
	mark := stampOf(info)
	if mark != stampOf(after) {
		return errBusy
	}
	if age := time.Since(info.ModTime()); held == leaseUnknown && age < young {
		s.doubtful = append(s.doubtful, mark)
	}
	s.texts, s.stamps = append(s.texts, string(text)), append(s.stamps, mark)
	return nil
}

// leaseState is the result of an attempt to take a read lease.
type leaseState int

const (
	leaseUnknown leaseState = iota // the file system or the file's owner does not permit leases
	leaseHeld                      // nobody has the file open for writing, and an open for writing blocks until we close it
	leaseRefused                   // somebody has it open for writing
)

// readLease tries to take a read lease, the only way to learn whether somebody on this machine is
// writing a file. Only the file's owner and root may take it. The Go runtime ignores SIGIO, by
// which the kernel tells the holder that somebody waits.
func readLease(f *os.File) leaseState {
	switch _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); {
	case err == nil:
		return leaseHeld
	case errors.Is(err, unix.EAGAIN):
		return leaseRefused
	}
	return leaseUnknown
}
