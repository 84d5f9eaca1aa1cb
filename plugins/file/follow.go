package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/discovery"
)

const maxLinks = 40 // as in the kernel

// step is one directory entry that the resolution of a path depends on.
type step struct {
	path string // in a directory without links
	mark stamp  // of the entry itself; zero if it does not exist. Only dev and ino count.
}

// trail returns the directory entries that the resolution of an absolute path depends on: its own,
// and those of the links on the way. It ends with the first that does not exist.
func trail(path string) (steps []step) {
	left := strings.Split(path, "/")
	at := "/"
	for links := 0; len(left) > 0 && links <= maxLinks; {
		name := left[0]
		left = left[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		s := step{path: filepath.Join(at, name)}
		info, err := os.Lstat(s.path)
		if err != nil {
			return append(steps, s)
		}
		id := stampOf(info)
		s.mark.dev, s.mark.ino = id.dev, id.ino
		steps = append(steps, s)
		if info.Mode()&os.ModeSymlink == 0 {
			at = s.path
			continue
		}
		links++
		target, err := os.Readlink(s.path)
		if err != nil {
			return steps
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		left = append(strings.Split(target, "/"), left...)
	}
	return steps
}

// follower watches everything that determines the contents of the files: the files, and each
// directory in which a rename or a new link could replace them.
type follower struct {
	c     *config
	w     *fsnotify.Watcher
	steps []step
	dir   string   // the directory whose files are read, without links; "" where the path is a file
	held  []string // paths that w watches
}

func (f *follower) close() {
	if f.w != nil {
		f.w.Close()
	}
}

// follow makes the watches match what the path means now. wait reports later changes.
func (f *follower) follow() error {
	for range 10 { // if it changes again, the next event calls follow again
		steps, dir := f.survey()
		if f.w != nil && dir == f.dir && slices.Equal(steps, f.steps) && f.holds() {
			return nil
		}
		f.close()
		// A new watcher, since existing watches may be of directories that have been moved
		// elsewhere.
		w, err := fsnotify.NewWatcher()
		if err != nil {
			return fmt.Errorf("file: inotify: %w: %w", err, discovery.ErrNoWatch)
		}
		f.w, f.steps, f.dir, f.held = w, steps, dir, nil
		if err := f.watchAll(); err != nil {
			return err
		}
	}
	return nil
}

// holds reports whether all watches still exist. The watch of a removed file is gone even if
// another file looks the same: file systems reuse inode numbers.
func (f *follower) holds() bool {
	list := map[string]bool{}
	for _, path := range f.w.WatchList() {
		list[path] = true
	}
	return !slices.ContainsFunc(f.held, func(path string) bool { return !list[path] })
}

// survey returns the trails of the path and of the files in it.
func (f *follower) survey() (steps []step, dir string) {
	steps = trail(f.c.path)
	if info, err := os.Stat(f.c.path); err != nil || !info.IsDir() {
		return steps, ""
	}
	dir, err := filepath.EvalSymlinks(f.c.path)
	if err != nil {
		return steps, "" // it has just changed
	}
	files, err := f.c.files()
	if err != nil {
		return steps, dir
	}
	seen := map[step]bool{}
	for _, s := range steps {
		seen[s] = true
	}
	for _, name := range files {
		for _, s := range trail(filepath.Join(dir, filepath.Base(name))) {
			if !seen[s] {
				seen[s] = true
				steps = append(steps, s)
			}
		}
	}
	return steps, dir
}

// watchAll adds the watches: of the directory of each step, and of the files themselves, since a
// file may be changed through another name. It skips directories that this process may not watch;
// rescan covers these.
func (f *follower) watchAll() error {
	watched := map[string]bool{}
	add := func(path string) error {
		if watched[path] {
			return nil
		}
		watched[path] = true
		err := f.c.watch(f.w, path)
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENOMEM) {
			return fmt.Errorf("file: inotify: %s: %w: %w", path, err, discovery.ErrNoWatch)
		}
		if err == nil {
			f.held = append(f.held, path)
		}
		return nil
	}
	paths := []string{}
	if f.dir != "" {
		paths = append(paths, f.dir)
	}
	for _, s := range f.steps {
		paths = append(paths, filepath.Dir(s.path))
		if info, err := os.Lstat(s.path); err == nil && info.Mode().IsRegular() {
			paths = append(paths, s.path)
		}
	}
	for _, path := range paths {
		if err := add(path); err != nil {
			return err
		}
	}
	return nil
}

// wait blocks until something may have changed, or for the time d; 0 means no limit. Its error is
// that of ctx.
func (f *follower) wait(ctx context.Context, d time.Duration) error {
	var late <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		late = timer.C
	}
	for {
		select {
		case <-ctx.Done():
			return ended(ctx)
		case <-late:
			return nil
		case e := <-f.w.Events:
			if f.concerns(e.Name) {
				return f.gather(ctx)
			}
		case <-f.w.Errors: // events were lost
			return f.gather(ctx)
		}
	}
}

// gather waits until the events of one change have arrived.
func (f *follower) gather(ctx context.Context) error {
	timer := time.NewTimer(debounce)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ended(ctx)
		case <-timer.C:
			return nil
		case <-f.w.Events:
		case <-f.w.Errors:
		}
	}
}

// concerns reports whether an event at the path matters: other files in the directories may change
// often.
func (f *follower) concerns(path string) bool {
	path = filepath.Clean(path) // events in / have paths such as //name
	if f.dir != "" && filepath.Dir(path) == f.dir && f.c.wants(filepath.Base(path)) {
		return true
	}
	return path == f.dir || slices.ContainsFunc(f.steps, func(s step) bool { return s.path == path })
}
