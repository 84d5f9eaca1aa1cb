// Package storetest tests whether an implementation of store.Store keeps its promises.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/torchrun/store"
)

// Run tests a store. open returns another user of the same store, which is empty at first.
func Run(t *testing.T, open func(t *testing.T) store.Store) {
	a, b := open(t), open(t)
	t.Run("Values", func(t *testing.T) { values(t, a, b) })
	t.Run("Sizes", func(t *testing.T) { sizes(t, a) })
	t.Run("Wait", func(t *testing.T) { wait(t, a, b) })
	t.Run("Race", func(t *testing.T) { race(t, open) })
	t.Run("Canceled", func(t *testing.T) { canceled(t, a) })
}

func set(t *testing.T, s store.Store, key string, version uint64, value string) store.Entry {
	t.Helper()
	e, is, err := s.CompareAndSet(t.Context(), key, version, []byte(value))
	if err != nil || !is || string(e.Value) != value || e.Version == 0 || e.Version == version {
		t.Fatalf("setting %s: %q of version %d after %d, %v, %v", key, e.Value, e.Version, version, is, err)
	}
	return e
}

// values tests that one user gets what the other sets, and that only the current version can be
// replaced.
func values(t *testing.T, a, b store.Store) {
	if e, err := a.Get(t.Context(), "k"); err != nil || e.Version != 0 || len(e.Value) > 0 {
		t.Fatalf("a value that nobody has set: %+v, %v", e, err)
	}
	if _, is, err := a.CompareAndSet(t.Context(), "k", 99, []byte("x")); is || err != nil {
		t.Errorf("a version that there is not is replaced: %v, %v", is, err)
	}
	first := set(t, a, "k", 0, "first")
	if e, is, err := b.CompareAndSet(t.Context(), "k", 0, []byte("x")); is || err != nil || string(e.Value) != "first" || e.Version != first.Version {
		t.Errorf("a loser is told %q of version %d, %v, %v", e.Value, e.Version, is, err)
	}
	second := set(t, b, "k", first.Version, "first") // the same bytes get a new version
	set(t, a, "k", second.Version, "")
	if e, err := b.Get(t.Context(), "k"); err != nil || len(e.Value) > 0 || e.Version == 0 {
		t.Errorf("an empty value: %+v, %v", e, err)
	}
	set(t, store.WithPrefix(a, "p/"), "k", 0, "with prefix")
	if e, err := b.Get(t.Context(), "p/k"); err != nil || string(e.Value) != "with prefix" {
		t.Errorf("%+v, %v", e, err)
	}
}

func sizes(t *testing.T, s store.Store) {
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<20/16)
	for i, value := range [][]byte{nil, {0}, large} {
		key := strings.Repeat("k", store.MaxKey-1) + fmt.Sprint(i)
		if _, is, err := s.CompareAndSet(t.Context(), key, 0, value); !is || err != nil {
			t.Errorf("%d bytes: %v, %v", len(value), is, err)
		}
		if e, err := s.Get(t.Context(), key); err != nil || !bytes.Equal(e.Value, value) {
			t.Errorf("%d bytes: %d are read, %v", len(value), len(e.Value), err)
		}
	}
	var size *store.SizeError
	if _, _, err := s.CompareAndSet(t.Context(), "k", 0, make([]byte, store.MaxValue+1)); !errors.As(err, &size) {
		t.Errorf("a value that is too long: %v", err)
	}
	for _, key := range []string{"", strings.Repeat("k", store.MaxKey+1)} {
		if _, err := s.Get(t.Context(), key); !errors.As(err, &size) {
			t.Errorf("a key of %d bytes: %v", len(key), err)
		}
	}
}

func wait(t *testing.T, a, b store.Store) {
	got := make(chan store.Entry)
	next := func(version uint64) {
		e, err := b.Wait(t.Context(), "w", version)
		if err != nil {
			t.Error(err)
		}
		got <- e
	}
	go next(0)
	first := set(t, a, "w", 0, "first")
	if e := <-got; e.Version != first.Version || string(e.Value) != "first" {
		t.Errorf("%q of version %d", e.Value, e.Version)
	}
	go next(first.Version)
	set(t, a, "other", 0, "other")
	second := set(t, a, "w", first.Version, "first")
	if e := <-got; e.Version != second.Version {
		t.Errorf("version %d after %d", e.Version, first.Version)
	}
	go next(0) // a version that no longer exists
	if e := <-got; e.Version != second.Version {
		t.Errorf("version %d", e.Version)
	}
}

// race tests that no addition is lost if several users add to a number at the same time.
func race(t *testing.T, open func(t *testing.T) store.Store) {
	const users, times = 4, 25
	var adding sync.WaitGroup
	for range users {
		s := open(t)
		adding.Go(func() {
			for range times {
				if err := add(t.Context(), s); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	adding.Wait()
	if e, err := open(t).Get(t.Context(), "sum"); err != nil || len(e.Value) != users*times {
		t.Errorf("%d of %d, %v", len(e.Value), users*times, err)
	}
}

func add(ctx context.Context, s store.Store) error {
	e, err := s.Get(ctx, "sum")
	for err == nil {
		var is bool
		if e, is, err = s.CompareAndSet(ctx, "sum", e.Version, append(e.Value, '+')); is {
			return err
		}
	}
	return err
}

func canceled(t *testing.T, s store.Store) {
	e, err := s.Get(t.Context(), "never")
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error)
	go func() {
		_, err := s.Wait(ctx, "never", e.Version)
		ended <- err
	}()
	cancel(why)
	if err := <-ended; !errors.Is(err, why) {
		t.Errorf("Wait: %v", err)
	}
	if _, err := s.Get(ctx, "never"); !errors.Is(err, why) {
		t.Errorf("Get: %v", err)
	}
	if _, _, err := s.CompareAndSet(ctx, "never", e.Version, nil); !errors.Is(err, why) {
		t.Errorf("CompareAndSet: %v", err)
	}
}
