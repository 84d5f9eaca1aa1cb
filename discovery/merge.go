package discovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// Named is a source with a name for messages about its failures.
type Named struct {
	Name   string
	Source Discoverer
}

// named puts the source's name before an error.
func (n Named) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", n.Name, err)
}

// Merged is one source that consists of several. Merge makes one.
type Merged struct {
	sources []Named

	mu    sync.Mutex
	order []string // host names of the last list
}

// Merge makes one source of several by these rules:
//
//   - A host is listed as long as any source lists it.
//   - Its number of slots is taken from the first of these sources, in the order of sources. It is
//     draining if any of them says so. Sources that do not list it do not count.
//   - Hosts that stay listed keep their order, whichever source lists them. New hosts follow: first
//     the hosts of the first source, in its order, then the hosts that only the second source
//     lists, and so on.
//   - The first discovery of every source must succeed. A source that fails later keeps its own
//     last list, while the others go on.
//   - Each source is watched if it can push, and polled otherwise; its list takes effect at once.
//
// A Poll applies its Interval, RemovalAfter, Known, Failed and Log to each source: a failure is
// reported with the source's name and the age of its list. Without one, sources are polled every
// second and failures go to the standard log.
func Merge(sources ...Named) *Merged { return &Merged{sources: slices.Clone(sources)} }

// Discover asks all sources at once. If one fails, the list would be incomplete, and Discover
// returns an error that names the source.
func (m *Merged) Discover(ctx context.Context) ([]plan.Host, error) {
	lists, errs := make([][]plan.Host, len(m.sources)), make([]error, len(m.sources))
	var all sync.WaitGroup
	for i, s := range m.sources {
		all.Go(func() {
			var err error
			if lists[i], err = s.Source.Discover(ctx); err == nil {
				err = checkList(lists[i])
			}
			errs[i] = s.named(err)
		})
	}
	all.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("discovery: %w", context.Cause(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return m.merge(lists), nil
}

// Scale asks each source that can create hosts for all slots; there should be only one such source.
// It returns ErrNoScale if no source can.
func (m *Merged) Scale(ctx context.Context, least, most int) error {
	some := false
	var errs []error
	for _, s := range m.sources {
		scaler, can := s.Source.(Scaler)
		if !can {
			continue
		}
		if err := scaler.Scale(ctx, least, most); !errors.Is(err, ErrNoScale) {
			some = true
			errs = append(errs, s.named(err))
		}
	}
	if !some {
		return ErrNoScale
	}
	return errors.Join(errs...)
}

// Watch calls found when every source has provided its first list, and then with each change. It
// ends with ctx, or when the first discovery of a source fails.
func (m *Merged) Watch(ctx context.Context, found func([]plan.Host)) error {
	return m.watch(ctx, &Poll{}, found)
}

// watch runs a Poll for each source, with the settings of the Poll like.
func (m *Merged) watch(ctx context.Context, like *Poll, found func([]plan.Host)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &mergeSession{merged: m, found: found, lists: make([][]plan.Host, len(m.sources)), heard: make([]bool, len(m.sources))}
	if len(m.sources) == 0 {
		found(nil)
	}
	var mu sync.Mutex // guards failed, and serialises the calls of like's functions
	failed := make([]bool, len(m.sources))
	var all sync.WaitGroup
	for i, source := range m.sources {
		p := Poll{Source: source.Source, Interval: like.Interval, RemovalAfter: like.RemovalAfter, Known: like.Known,
			Log: like.log().WithField("source", source.Name)}
		p.Failed = func(err error, age time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			failed[i] = true
			if like.Failed != nil {
				like.Failed(source.named(err), age)
			}
		}
		p.Stands = func() {
			mu.Lock()
			defer mu.Unlock()
			failed[i] = false
			if like.Stands != nil && !slices.Contains(failed, true) {
				like.Stands()
			}
		}
		all.Go(func() {
			err := p.Run(ctx, func(hosts []plan.Host) { s.take(i, hosts) })
			if first, ok := errors.AsType[*FirstError](err); ok {
				cancel(source.named(first.Err))
			}
		})
	}
	<-ctx.Done()
	all.Wait()
	return context.Cause(ctx)
}

// mergeSession is one Watch of a Merged.
type mergeSession struct {
	merged *Merged
	found  func([]plan.Host)

	mu    sync.Mutex
	lists [][]plan.Host // the last list of each source
	heard []bool        // which sources have provided a list
	told  bool
	last  []plan.Host
}

// take records the new list of a source, and passes on the merged list if it has changed.
func (s *mergeSession) take(source int, hosts []plan.Host) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists[source], s.heard[source] = hosts, true
	if slices.Contains(s.heard, false) {
		return
	}
	list := s.merged.merge(s.lists)
	if s.told && slices.Equal(list, s.last) {
		return
	}
	s.told, s.last = true, slices.Clone(list)
	s.found(list)
}

// merge returns the merged list of the sources' lists, and remembers its order.
func (m *Merged) merge(lists [][]plan.Host) []plan.Host {
	hosts := map[string]plan.Host{}
	var newcomers []string
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, list := range lists {
		for _, h := range list {
			first, listed := hosts[h.Name]
			if listed {
				first.Draining = first.Draining || h.Draining
				h = first
			} else {
				newcomers = append(newcomers, h.Name)
			}
			hosts[h.Name] = h
		}
	}
	order := slices.DeleteFunc(m.order, func(name string) bool { _, stays := hosts[name]; return !stays })
	known := make(map[string]bool, len(order))
	for _, name := range order {
		known[name] = true
	}
	for _, name := range newcomers {
		if !known[name] {
			order = append(order, name)
		}
	}
	m.order = order
	whole := make([]plan.Host, len(order))
	for i, name := range order {
		whole[i] = hosts[name]
	}
	return whole
}
