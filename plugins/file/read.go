package main

import (
	"context"
	"errors"
	"fmt"
	"io"
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

	// busyLimit is how long Discover and Watch wait for somebody who is writing.
	busyLimit = 5 * time.Second

	// quiet is how old the last change of a file must be where only its time says that it is
	// finished, and young how new a change may look before that is asked; in between lies what
	// clocks of file servers may be off.
	quiet = 100 * time.Millisecond
	young = 2 * time.Second
)

// errBusy marks what is worth another look soon.
var errBusy = errors.New("it is being written")

// stamp tells one state of a file from another.
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

// readBackoff is the pause between looks at files that somebody writes.
var readBackoff = retry.Backoff{First: 5 * time.Millisecond, Most: quiet}

// snapshot is the texts of all files, as they were together.
type snapshot struct {
	names, texts []string
	stamps       []stamp
	doubtful     []stamp // of files that somebody may be writing
}

// read reads all files when nobody writes them. It waits for those who do, for a time.
func (c *config) read(ctx context.Context) (listing, error) {
	var (
		before []stamp // doubtful ones of an earlier look, and when that was
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

// snapshot reads all files. The error is errBusy where they changed meanwhile, or are open for
// writing.
func (c *config) snapshot() (*snapshot, error) {
	names, err := c.files()
	if err != nil {
		return nil, err
	}
	s := &snapshot{names: names}
	left := int64(maxBytes)
	for _, name := range names {
		if err := s.add(name, left, c.lease); err != nil {
			if now, again := c.files(); missing(err) && again == nil && !slices.Equal(now, names) {
				err = errBusy // it was removed between the two looks
			}
			return nil, fmt.Errorf("file: %s: %w", name, err)
		}
		left -= int64(len(s.texts[len(s.texts)-1]))
	}
	// Were they like this all at once? A ConfigMap, say, changes all its files in one step.
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

// files returns the path, or the paths of the files in it in the order of their names.
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
		if e.Type()&os.ModeSymlink != 0 { // of a link, what it points to counts; a dangling one is an error later
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

// wants reports whether a file of that name in the directory lists hosts. Hidden files and editors'
// backups do not.
func (c *config) wants(name string) bool {
	if strings.HasPrefix(name, ".") || strings.HasPrefix(name, "#") || strings.HasSuffix(name, "~") {
		return false
	}
	ok, err := filepath.Match(c.pattern, name)
	return ok && err == nil
}

// add reads one file, of at most so many bytes.
func (s *snapshot) add(name string, most int64, lease func(*os.File) leaseState) error {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe would block
	if err != nil {
		return err
	}
	defer f.Close() // ends the lease, too
	info, err := f.Stat()
	switch {
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return errors.New("neither a file nor a directory")
	}
	held := lease(f)
	if held == leaseRefused {
		return errBusy
	}
	if info, err = f.Stat(); err != nil { // a writer may have come between opening and the lease
		return err
	}
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return err
	}
	if int64(len(text)) > most {
		return fmt.Errorf("more than %d bytes of hosts", maxBytes)
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

// leaseState is what a try for a read lease says.
type leaseState int

const (
	leaseUnknown leaseState = iota // the file system or the file's owner does not allow leases
	leaseHeld                      // nobody has the file open for writing, and whoever opens it waits until we close it
	leaseRefused                   // somebody has it open for writing
)

// readLease tries for a read lease, the one way to learn whether somebody on this machine is in the
// middle of writing a file. Only its owner and root may; SIGIO, which tells the holder that
// somebody waits, is ignored by the Go runtime.
func readLease(f *os.File) leaseState {
	switch _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); {
	case err == nil:
		return leaseHeld
	case errors.Is(err, unix.EAGAIN):
		return leaseRefused
	}
	return leaseUnknown
}
