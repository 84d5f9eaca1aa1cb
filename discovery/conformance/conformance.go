// Package conformance checks whether a discovery.Discoverer keeps the promises of the interface. It
// needs nothing but the Discoverer and the hosts that it should find.
//
// Package discoverytest runs these checks as tests of an implementation in Go. `hvdrun discover
// --verify` runs them on any source of a job, in any language.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// prompt is how soon a source must end after its context. It does not measure speed: it is long
	// enough for a busy machine, and only detects a source that waits for something else.
	prompt = 30 * time.Second
	// patience is how long an answer may take.
	patience = time.Minute
	// lull is how long a source is observed for things that it must not do.
	lull = 50 * time.Millisecond
)

// Promise is one promise of a Discoverer.
type Promise struct {
	// Name describes the promise, as the predicate of a sentence.
	Name string
	// Check returns an error that describes how d breaks the promise, or nil. want are the hosts
	// that exist throughout the call. Check blocks for up to some minutes if the source does not
	// answer, and leaves nothing running except calls from which d does not return. It is safe for
	// concurrent use.
	Check func(d discovery.Discoverer, want []plan.Host) error
}

// All returns the promises of discovery.Discoverer and of discovery.Watcher. A Discoverer that is
// not a Watcher keeps the latter trivially.
func All() []Promise {
	return []Promise{
		{"finds the whole list, in the same order every time", checkWhole},
		{"gives the list away", checkOwnership},
		{"ends at once where its context has ended", checkEnded},
		{"ends with its context, with an error rather than half a list", checkNoHalfList},
		{"may be asked by several at once", checkConcurrent},
		{"watches: the whole list at once, then only whole lists, until its context ends", checkWatch},
		{"watches: one list at a time, and none after its end", checkWatchCalls},
		{"may be asked while it watches", checkWatchAndAsk},
	}
}

// Fails checks the promise that d returns an error if its hosts cannot be found.
func Fails(d discovery.Discoverer) error {
	err := within(patience, func(ctx context.Context) error {
		got, err := d.Discover(ctx)
		switch {
		case err == nil:
			return fmt.Errorf("found %v, and no error", got)
		case len(got) > 0:
			return fmt.Errorf("returned both a list, %v, and an error, %w", got, err)
		case ctx.Err() != nil:
			return fmt.Errorf("no answer in %v", patience)
		}
		return nil
	})
	w, ok := d.(discovery.Watcher)
	if err != nil || !ok {
		return err
	}
	s := watch(w, nil)
	defer s.stop()
	select {
	case got := <-s.lists:
		return fmt.Errorf("watching: found %v, and no error", got)
	case <-s.ended:
		select {
		case got := <-s.lists: // both channels were ready
			return fmt.Errorf("watching: found %v, and no error", got)
		default:
		}
		if s.err == nil {
			return errors.New("watching: ended without an error")
		}
		return nil
	case <-time.After(patience):
		return fmt.Errorf("watching: did not end with an error in %v", patience)
	}
}

// Changes checks the promise that d follows its hosts. It calls set with each of the lists, in
// order, and expects d to find that list afterwards.
func Changes(d discovery.Discoverer, set func([]plan.Host), lists ...[]plan.Host) error {
	w, ok := d.(discovery.Watcher)
	var s *session
	if ok {
		s = watch(w, nil)
		defer s.stop()
	}
	for _, want := range lists {
		set(slices.Clone(want))
		if err := mustFind(d, want); err != nil {
			return err
		}
		if s == nil {
			continue
		}
		if err := s.await(want); err != nil && !errors.Is(err, discovery.ErrNoWatch) {
			return fmt.Errorf("watching: %w", err)
		}
	}
	return nil
}

// ask calls Discover. answer is the error of Discover, for the caller to judge. broken describes
// how the result breaks a promise; nil: it breaks none.
func ask(ctx context.Context, d discovery.Discoverer, want []plan.Host) (answer error, broken error) {
	got, err := d.Discover(ctx)
	switch {
	case err != nil && len(got) > 0:
		return err, fmt.Errorf("returned both a list, %v, and an error, %w", got, err)
	case err != nil:
		return err, nil
	case !slices.Equal(got, want):
		return nil, differs(got, want)
	}
	return nil, plan.CheckHosts(got)
}

// differs returns an error that describes the first difference of two lists, or nil.
func differs(got, want []plan.Host) error {
	for i := range max(len(got), len(want)) {
		switch {
		case i >= len(want):
			return fmt.Errorf("found %d hosts, want %d: %v is too many", len(got), len(want), got[i])
		case i >= len(got):
			return fmt.Errorf("found %d hosts, want %d: %v is missing", len(got), len(want), want[i])
		case got[i] != want[i]:
			return fmt.Errorf("host %d is %s, want %s", i+1, describe(got[i]), describe(want[i]))
		}
	}
	return nil
}

func describe(h plan.Host) string {
	if h.Draining {
		return h.String() + " (draining)"
	}
	return h.String()
}

// mustFind is like ask, but also treats an error of Discover as a broken promise.
func mustFind(d discovery.Discoverer, want []plan.Host) error {
	return within(patience, func(ctx context.Context) error {
		err, broken := ask(ctx, d, want)
		return errors.Join(err, broken)
	})
}

func checkWhole(d discovery.Discoverer, want []plan.Host) error {
	for i := range 5 {
		if err := mustFind(d, want); err != nil {
			return fmt.Errorf("call %d: %w", i+1, err)
		}
	}
	return nil
}

func checkOwnership(d discovery.Discoverer, want []plan.Host) error {
	err := within(patience, func(ctx context.Context) error {
		got, err := d.Discover(ctx)
		scribble(got)
		return err
	})
	if err != nil {
		return err
	}
	if err := mustFind(d, want); err != nil {
		return fmt.Errorf("after the caller changed the list: %w", err)
	}
	return nil
}

// scribble changes a list, as its owner may.
func scribble(hosts []plan.Host) {
	for i := range hosts {
		hosts[i] = plan.Host{Name: "overwritten", Slots: -1}
	}
}

func checkEnded(d discovery.Discoverer, want []plan.Host) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return within(prompt, func(context.Context) error {
		err, broken := ask(ctx, d, want)
		if broken == nil && err == nil {
			return errors.New("found hosts for a context that had ended before")
		}
		return broken
	})
}

// checkNoHalfList ends the context at various moments during a call.
func checkNoHalfList(d discovery.Discoverer, want []plan.Host) error {
	for after := time.Duration(0); after < 20*time.Millisecond; after += time.Millisecond {
		ctx, cancel := context.WithTimeout(context.Background(), after)
		err := within(after+prompt, func(context.Context) error {
			_, broken := ask(ctx, d, want)
			return broken
		})
		cancel()
		if err != nil {
			return fmt.Errorf("context ended after %v: %w", after, err)
		}
	}
	if err := mustFind(d, want); err != nil { // the interrupted calls did no harm
		return fmt.Errorf("the next call: %w", err)
	}
	return nil
}

func checkConcurrent(d discovery.Discoverer, want []plan.Host) error {
	return together(4, func() error { return mustFind(d, want) })
}

func together(n int, f func() error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() { errs[i] = f() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// within calls f with a context that ends after bound, and waits a little longer for f to return.
// If f does not return, within returns an error and leaves f running, because nothing can stop it.
func within(bound time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	select {
	case err := <-done:
		return err
	case <-time.After(bound + prompt):
		return fmt.Errorf("no answer in %v", bound+prompt)
	}
}

// session is a running call of Watch.
type session struct {
	lists  chan []plan.Host // all lists found, as long as there is room
	broken chan error       // gets an error if found was called wrongly
	cancel context.CancelFunc
	ended  chan struct{} // closed when Watch has returned err
	err    error
}

// watch starts a session. If hold is not nil, it is called with each list before found returns.
func watch(w discovery.Watcher, hold func()) *session {
	ctx, cancel := context.WithCancel(context.Background())
	s := &session{
		lists: make(chan []plan.Host, 100), broken: make(chan error, 1), cancel: cancel, ended: make(chan struct{}),
	}
	var inside, over atomic.Bool
	found := func(hosts []plan.Host) {
		if over.Load() {
			s.breaks(errors.New("found was called after the end"))
			return
		}
		if !inside.CompareAndSwap(false, true) {
			s.breaks(errors.New("found was called twice at once"))
			return
		}
		defer inside.Store(false)
		select {
		case s.lists <- slices.Clone(hosts):
		default:
		}
		scribble(hosts)
		if hold != nil {
			hold()
		}
	}
	go func() {
		s.err = w.Watch(ctx, found)
		over.Store(true)
		close(s.ended)
	}()
	return s
}

func (s *session) breaks(err error) {
	select {
	case s.broken <- err:
	default:
	}
}

// await waits until the list is found. Other lists may precede it.
func (s *session) await(want []plan.Host) error {
	late := time.After(patience)
	last := errors.New("found no list")
	for {
		select {
		case got := <-s.lists:
			if slices.Equal(got, want) {
				return nil
			}
			last = differs(got, want)
		case err := <-s.broken:
			return err
		case <-s.ended:
			if s.err == nil {
				return errors.New("stopped watching before its context ended")
			}
			return fmt.Errorf("stopped watching before its context ended: %w", s.err)
		case <-late:
			return fmt.Errorf("%w after %v", last, patience)
		}
	}
}

// stop ends the session. It returns an error if that took too long or something was wrong with the
// session.
func (s *session) stop() error {
	s.cancel()
	select {
	case <-s.ended:
	case <-time.After(prompt):
		return fmt.Errorf("still watching %v after its context ended", prompt)
	}
	select {
	case err := <-s.broken:
		return err
	default:
		return nil
	}
}

// watcher returns d as a Watcher; false if it is not one, or cannot push.
func watcher(d discovery.Discoverer) (discovery.Watcher, bool) {
	w, ok := d.(discovery.Watcher)
	if !ok {
		return nil, false
	}
	s := watch(w, nil)
	defer s.stop()
	select {
	case <-s.ended:
		return w, !errors.Is(s.err, discovery.ErrNoWatch)
	case <-s.lists:
	case <-time.After(patience):
	}
	return w, true
}

// checkWatch expects the complete list first, nothing more while nothing changes, and the end of
// Watch with its context. It checks this twice.
func checkWatch(d discovery.Discoverer, want []plan.Host) error {
	w, ok := watcher(d)
	if !ok {
		return nil
	}
	for i := range 2 {
		s := watch(w, nil)
		err := s.await(want)
		if err == nil {
			err = s.quiet(want)
		}
		if err := errors.Join(err, s.stop()); err != nil {
			return fmt.Errorf("session %d: %w", i+1, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return within(prompt, func(context.Context) error {
		w.Watch(ctx, func([]plan.Host) {}) // any error is allowed here
		return nil
	})
}

// quiet checks that no different list follows.
func (s *session) quiet(want []plan.Host) error {
	for over := time.After(lull); ; {
		select {
		case got := <-s.lists:
			if !slices.Equal(got, want) {
				return fmt.Errorf("a list that nothing has changed: %w", differs(got, want))
			}
		case <-over:
			return nil
		}
	}
}

// checkWatchCalls delays the return of found, so that a concurrent call would be noticed, and
// checks that found is not called after Watch has returned.
func checkWatchCalls(d discovery.Discoverer, want []plan.Host) error {
	w, ok := watcher(d)
	if !ok {
		return nil
	}
	s := watch(w, func() { <-time.After(lull) })
	if err := errors.Join(s.await(want), s.stop()); err != nil {
		return err
	}
	select {
	case err := <-s.broken:
		return err
	case <-time.After(lull):
		return nil
	}
}

func checkWatchAndAsk(d discovery.Discoverer, want []plan.Host) error {
	w, ok := watcher(d)
	if !ok {
		return nil
	}
	s := watch(w, nil)
	return errors.Join(s.await(want), checkConcurrent(d, want), s.stop())
}
