package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/plugins/settings"
)

// debounce is the time from the first event of a change until the files are read: editors and
// scripts change several things in quick succession.
const debounce = 20 * time.Millisecond

// source implements Discoverer and Watcher. Configure must be called first.
type source struct{ cfg atomic.Pointer[config] }

// config holds the settings; it does not change.
type config struct {
	path         string // absolute
	pattern      string // for the file names in a directory
	defaultSlots int
	settle       time.Duration // how long a fault or a missing file may be part of a change in progress
	rescan       time.Duration // 0: never

	// System calls, which tests replace.
	lease func(*os.File) leaseState
	watch func(w *fsnotify.Watcher, path string) error
}

// Configure reads the settings that the README describes.
func (s *source) Configure(values map[string]string) error {
	r := settings.Read("file", values)
	c := &config{
		path:         r.Required("path"),
		pattern:      r.Text("pattern", "*"),
		defaultSlots: r.Int("default_slots", 1, 0, plan.MaxSlots),
		settle:       r.Duration("settle", 500*time.Millisecond, 0, 10*time.Second),
		rescan:       r.Duration("rescan", 5*time.Second, 0, time.Hour),
		lease:        readLease,
		watch:        (*fsnotify.Watcher).Add,
	}
	if _, err := filepath.Match(c.pattern, ""); err != nil {
		r.Fault("pattern", "%q: %w", c.pattern, err)
	}
	if err := r.Err(); err != nil {
		return err
	}
	abs, err := filepath.Abs(c.path)
	if err != nil {
		return fmt.Errorf("file: %w", err)
	}
	c.path = abs
	s.cfg.Store(c)
	return nil
}

var errNotConfigured = errors.New("file: the source was asked before it got its settings")

// Discover reads the files once. If they cannot be parsed, it reads them again a little later,
// since somebody may be writing them line by line.
func (s *source) Discover(ctx context.Context) ([]plan.Host, error) {
	c := s.cfg.Load()
	if c == nil {
		return nil, errNotConfigured
	}
	l, err := c.read(ctx)
	var parse *plan.ParseError
	if errors.As(err, &parse) && c.settle > 0 {
		if err := pause(ctx, c.settle); err != nil {
			return nil, err
		}
		l, err = c.read(ctx)
	}
	return l.hosts, err
}

// Watch calls found with the list and with every list that differs from the last. It returns an
// error if the files have been missing or faulty for longer than config.settle.
func (s *source) Watch(ctx context.Context, found func([]plan.Host)) error {
	c := s.cfg.Load()
	if c == nil {
		return errNotConfigured
	}
	f := &follower{c: c}
	defer f.close()
	var (
		last  listing
		known bool
		doubt time.Time // since when a change seems to be in progress
	)
	for {
		if err := f.follow(); err != nil {
			return err
		}
		now, err := c.read(ctx)
		if ctx.Err() != nil {
			return ended(ctx)
		}
		wait := c.rescan
		switch doubtful := err != nil || known && now.lacks(last.files); {
		case doubtful && doubt.IsZero() && c.settle > 0:
			doubt, wait = time.Now(), c.settle
		case doubtful && time.Since(doubt) < c.settle:
			wait = c.settle - time.Since(doubt)
		case err != nil:
			return err
		default:
			doubt = time.Time{}
			if !known || !slices.Equal(last.hosts, now.hosts) {
				found(slices.Clone(now.hosts))
			}
			last, known = now, true
		}
		if err := f.wait(ctx, wait); err != nil {
			return err
		}
	}
}

// listing is the contents of the files.
type listing struct {
	hosts []plan.Host
	files []string // the files that were read
}

// lacks reports whether one of these files was not read.
func (l listing) lacks(files []string) bool {
	return slices.ContainsFunc(files, func(name string) bool { return !slices.Contains(l.files, name) })
}

// merge merges the lists of the files. A host may be in several files if it has the same slots in
// all of them.
func merge(names []string, texts []string, defaultSlots int) ([]plan.Host, error) {
	var all []plan.Host
	first := map[string]int{} // host → index in all
	where := map[string]string{}
	for i, text := range texts {
		hosts, err := plan.ParseHosts(text, defaultSlots)
		if err != nil {
			return nil, fmt.Errorf("file: %s: %w", names[i], err)
		}
		for _, h := range hosts {
			at, again := first[h.Name]
			if !again {
				first[h.Name], where[h.Name] = len(all), names[i]
				all = append(all, h)
			} else if all[at].Slots != h.Slots {
				return nil, fmt.Errorf("file: %s: host %s has %d slots here but %d in %s",
					names[i], h.Name, h.Slots, all[at].Slots, where[h.Name])
			}
		}
	}
	if err := plan.CheckHosts(all); err != nil { // all files together may have too many slots
		return nil, fmt.Errorf("file: %w", err)
	}
	return all, nil
}

// pause blocks for the time d, or returns an error if ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	if retry.Pause(ctx, d) != nil {
		return ended(ctx)
	}
	return nil
}

func ended(ctx context.Context) error { return fmt.Errorf("file: %w", context.Cause(ctx)) }
