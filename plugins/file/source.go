package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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

// debounce is how long after the first sign of a change the files are read: editors and scripts do
// several things at once.
const debounce = 20 * time.Millisecond

// source is the Discoverer and Watcher. Configure comes first.
type source struct{ cfg atomic.Pointer[config] }

// config is what the settings say; it does not change.
type config struct {
	path         string // absolute
	pattern      string // of the names in a directory
	defaultSlots int
	settle       time.Duration // how long a fault, or a file that is missing, may be part of a change
	rescan       time.Duration // 0: never

	// What the system does, for tests to replace.
	lease func(*os.File) leaseState
	watch func(w *fsnotify.Watcher, path string) error
}

// Configure takes the settings of the README.
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

var errNotConfigured = errors.New("file: no settings yet")

// Discover reads the files once. Where they cannot be parsed it reads them again a little later,
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

// Watch finds the list and every one that differs from the last. It returns an error where the
// files have been missing or faulty for longer than a change takes.
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
		doubt time.Time // since when the files look like something in the making
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

// listing is what the files say.
type listing struct {
	hosts []plan.Host
	files []string // that were read
}

// lacks reports whether one of these files is no longer there.
func (l listing) lacks(files []string) bool {
	return slices.ContainsFunc(files, func(name string) bool { return !slices.Contains(l.files, name) })
}

// merge makes one list of the files' lists. A host may stand in several files if its slots are the
// same everywhere.
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
	if err := plan.CheckHosts(all); err != nil { // more slots than there can be, in all files together
		return nil, fmt.Errorf("file: %w", err)
	}
	return all, nil
}

// pause waits, or returns an error where ctx ends before.
func pause(ctx context.Context, d time.Duration) error {
	if retry.Pause(ctx, d) != nil {
		return ended(ctx)
	}
	return nil
}

func ended(ctx context.Context) error { return fmt.Errorf("file: %w", context.Cause(ctx)) }

func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
