// Package discoverytest holds what every discovery.Discoverer promises, as tests that each implementation runs.
package discoverytest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/plan"
)

// prompt is how soon a Discoverer must end with its context. It is no measure of speed: only of not waiting for something
// else, on a machine that is busy.
const prompt = 10 * time.Second

// patience is how long an answer may take.
const patience = time.Minute

// Run tests a Discoverer. newD makes one that must find these hosts, in this order, as long as the test lasts; it is called
// with several lists, among them an empty one. A Discoverer that is a discovery.Watcher is tested as one, too.
func Run(t *testing.T, newD func(t *testing.T, hosts []plan.Host) discovery.Discoverer) {
	for _, l := range lists() {
		t.Run(l.name, func(t *testing.T) {
			for _, p := range promises {
				t.Run(p.name, func(t *testing.T) {
					if err := p.check(newD(t, slices.Clone(l.hosts)), l.hosts); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

type hostList struct {
	name  string
	hosts []plan.Host
}

func lists() []hostList {
	many := make([]plan.Host, 500)
	for i := range many {
		// Neither sorted by name nor in the order of any hash.
		many[i] = plan.Host{Name: fmt.Sprintf("rack-%d.node_%d.example", i*7919%500, i), Slots: i % 9}
	}
	return []hostList{
		{"no hosts", nil},
		{"one host", []plan.Host{{Name: "localhost", Slots: 4}}},
		{"some hosts", []plan.Host{{Name: "z", Slots: 1}, {Name: "10.0.0.7", Slots: 8}, {Name: "fe80::1%eth0", Slots: 2},
			{Name: "a", Slots: 0}, {Name: "2001:db8::1:4", Slots: 1}}},
		{"many hosts", many},
	}
}

// promises are those of discovery.Discoverer's documentation. A check returns how one is broken.
var promises = []struct {
	name  string
	check func(d discovery.Discoverer, want []plan.Host) error
}{
	{"finds the whole list in the same order every time", checkWhole},
	{"gives the list away", checkOwnership},
	{"ends with a context that has ended", checkEnded},
	{"gives no half list when its context ends", checkNoHalfList},
	{"may be called by several goroutines at once", checkConcurrent},
	{"watches", checkWatch},
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
		return nil, fmt.Errorf("found %v, want %v", got, want)
	}
	return nil, plan.CheckHosts(got)
}

// mustFind is ask where there is no reason for an error.
func mustFind(d discovery.Discoverer, want []plan.Host) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return within(patience+prompt, func() error {
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
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got, err := d.Discover(ctx)
	if err != nil {
		return err
	}
	for i := range got {
		got[i] = plan.Host{Name: "overwritten", Slots: -1}
	}
	if err := mustFind(d, want); err != nil {
		return fmt.Errorf("after the caller changed the list: %w", err)
	}
	return nil
}

func checkEnded(d discovery.Discoverer, want []plan.Host) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return within(prompt, func() error {
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
		err := within(after+prompt, func() error {
			_, broken := ask(ctx, d, want)
			return broken
		})
		cancel()
		if err != nil {
			return fmt.Errorf("context ended after %v: %w", after, err)
		}
	}
	if err := mustFind(d, want); err != nil { // it is none the worse for that
		return fmt.Errorf("the next call: %w", err)
	}
	return nil
}

func checkConcurrent(d discovery.Discoverer, want []plan.Host) error {
	errs := make([]error, 4)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() { errs[i] = mustFind(d, want) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// checkWatch expects the whole list first, from each of two sessions, and the end with the context.
func checkWatch(d discovery.Discoverer, want []plan.Host) error {
	w, ok := d.(discovery.Watcher)
	if !ok {
		return nil
	}
	for i := range 2 {
		if err := checkSession(w, want); err != nil {
			return fmt.Errorf("session %d: %w", i+1, err)
		}
	}
	return nil
}

func checkSession(w discovery.Watcher, want []plan.Host) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	first := make(chan []plan.Host, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- w.Watch(ctx, func(hosts []plan.Host) {
			select {
			case first <- hosts:
			default:
			}
		})
	}()
	select {
	case got := <-first:
		if !slices.Equal(got, want) {
			return fmt.Errorf("found %v, want %v", got, want)
		}
	case err := <-ended:
		return fmt.Errorf("stopped watching before its context ended: %w", err)
	case <-time.After(patience):
		return fmt.Errorf("no list in %v", patience)
	}
	cancel()
	select {
	case <-ended:
		return nil
	case <-time.After(prompt):
		return fmt.Errorf("still watching %v after its context ended", prompt)
	}
}

// within fails where f takes longer. f goes on then, since nothing can stop it.
func within(bound time.Duration, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(bound):
		return fmt.Errorf("no answer in %v", bound)
	}
}
