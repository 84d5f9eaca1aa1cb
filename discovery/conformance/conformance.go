// Package conformance checks whether a discovery.Discoverer keeps the promises of the interface,
// with the Discoverer alone.
//
// Package discoverytest runs them as tests of an implementation in Go. `hvdrun discover --verify`
// runs them on any source of a job, whatever its language.
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
	// prompt is how soon a source must end with its context. It is no measure of speed: only of not
	// waiting for something else, on a machine that is busy.
	prompt = 30 * time.Second
	// patience is how long an answer may take.
	patience = time.Minute
	// lull is for how long a source is given the chance to do what it must not.
	lull = 50 * time.Millisecond
)

// Promise is one promise of a Discoverer.
type Promise struct {
	// Name describes it, as the predicate of a sentence.
	Name string
	// Check returns how d breaks the promise. want are the hosts that exist, from before the call
	// until after it. It blocks for up to some minutes if the source does not answer, and leaves
	// nothing running except calls from which d does not return. It may be used by several
	// goroutines.
	Check func(d discovery.Discoverer, want []plan.Host) error
}

// All returns the promises of discovery.Discoverer and of discovery.Watcher; a Discoverer that is
// no Watcher keeps the latter.
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

// Fails checks the promise that d, if its hosts cannot be found, returns an error.
func Fails(d discovery.Discoverer) error {
	err := within(patience, func(ctx context.Context) error {
		got, err := d.Discover(ctx)
		switch {
		case err == nil:
			return fmt.Errorf("found %v, and no error", got)
		case len(got) > 0:
			return fmt.Errorf("both a list, %v, and an error, %w", got, err)
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
		case got := <-s.lists: // both were there
			return fmt.Errorf("watching: found %v, and no error", got)
		default:
		}
		if s.err == nil {
			return errors.New("watching: ended without an error")
		}
		return nil
	case <-time.After(patience):
		return fmt.Errorf("watching: no error in %v", patience)
	}
}

// Changes checks the promise that d follows its hosts: set changes them to each of several lists,
// which d must then find, in this order.
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

// ask calls Discover and judges what it says: an error is for the caller to judge.
func ask(ctx context.Context, d discovery.Discoverer, want []plan.Host) (answer error, broken error) {
	got, err := d.Discover(ctx)
	switch {
	case err != nil && len(got) > 0:
		return err, fmt.Errorf("both a list, %v, and an error, %w", got, err)
	case err != nil:
		return err, nil
	case !slices.Equal(got, want):
		return nil, differs(got, want)
	}
	return nil, plan.CheckHosts(got)
}

// differs tells the first difference of two lists.
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

// mustFind is ask where there is no reason for an error.
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

// scribble does to a list what its owner may do.
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

// checkNoHalfList ends the context at all sorts of moments of a call.
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
	if err := mustFind(d, want); err != nil { // the last call did no harm
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

// within gives f so long, and a little more to notice that its context has ended; then it fails,
// and f goes on, since nothing can stop it.
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

// session is a Watch that runs.
type session struct {
	lists  chan []plan.Host // all that was found, as long as there is room
	broken chan error       // how found was called wrongly, if it was
	cancel context.CancelFunc
	ended  chan struct{} // closed when Watch has returned err
	err    error
}

// watch starts a session. hold, where it is not nil, is called with each list that was found,
// before found returns.
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

// await waits until the list is found, which others may precede.
func (s *session) await(want []plan.Host) error {
	late := time.After(patience)
	last := errors.New("no list")
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

// stop ends the session and returns whether that took too long, or what was wrong with it.
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

// watcher returns d as a Watcher, where it is one that can push.
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

// checkWatch expects the whole list first, nothing else while nothing changes, and the end with the
// context; twice.
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
		w.Watch(ctx, func([]plan.Host) {}) // with whatever error
		return nil
	})
}

// quiet sees to it that no other list follows.
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

// checkWatchCalls is slow to take a list, so that the next may come too early, and looks on after
// the end.
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
