package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// maxDrops is how many times in a row a watch may break, without an event in between, before
	// that counts as a failure.
	maxDrops = 3
	// settling is how long publish waits for more changes: many pods often change at once.
	settling = 5 * time.Millisecond
)

var errClosed = errors.New("kubernetes: the API server ends watches at once")

// follow lists and watches the pods until that fails, and returns the error.
func (s *source) follow(ctx context.Context, found func([]plan.Host)) error {
	ctx, stop := context.WithCancelCause(quiet(ctx))
	v := &view{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: wake.New()}
	f := &feed{source: s, stop: stop}
	var wg sync.WaitGroup
	wg.Go(func() { f.run(ctx, v) })
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-v.changed:
		}
		if err := retry.Pause(ctx, settling); err != nil {
			return err
		}
		if err := s.publish(v, found); err != nil {
			stop(err)
		}
	}
}

// view holds the pods that one Watch knows: the store of a reflector, which reports when it
// changes.
type view struct {
	cache.Store
	changed wake.Flag
	told    bool
	last    []plan.Host
}

// Replace replaces all pods.
func (v *view) Replace(list []any, version string) error {
	defer v.UpdateResourceVersion(version)
	return v.Store.Replace(list, version)
}

// UpdateResourceVersion is called after each event.
func (v *view) UpdateResourceVersion(string) {
	v.changed.Set()
}

// publish calls found with the hosts if they differ from the last ones.
func (s *source) publish(v *view, found func([]plan.Host)) error {
	var pods []*pod
	for _, p := range v.List() {
		pods = append(pods, p.(*pod))
	}
	if len(pods) > maxPods {
		return fmt.Errorf("kubernetes: %w", errTooMany)
	}
	hosts, err := s.hosts(pods)
	if err != nil || v.told && slices.Equal(hosts, v.last) {
		return err
	}
	v.told, v.last = true, slices.Clone(hosts)
	found(hosts)
	return nil
}

// feed lists and watches for a reflector. It decides which failures to retry; the reflector would
// silently retry all of them forever.
type feed struct {
	source *source
	stop   context.CancelCauseFunc // ends the whole Watch with an error
	drops  int                     // consecutive
	opened bool                    // a watch has begun since the last list
	broken error                   // the error that ended the last watch; nil: its time was over
}

// run runs a reflector until ctx ends. After a permanent failure it calls stop.
func (f *feed) run(ctx context.Context, v *view) {
	logger := logr.Discard()
	r := cache.NewReflectorWithOptions(unstreamed{&cache.ListWatch{ListWithContextFunc: f.list, WatchFuncWithContext: f.watch}},
		&pod{}, v, cache.ReflectorOptions{Name: "pods", Logger: &logger})
	for ctx.Err() == nil {
		f.opened, f.broken = false, nil
		_ = r.ListAndWatchWithContext(ctx) // f has recorded the reason
		if ctx.Err() == nil {
			f.pause(ctx, cmp.Or(f.broken, errClosed))
		}
	}
}

// unstreamed makes a reflector request a list in pages of bounded size. By default it would watch
// from the beginning, which not every server supports.
type unstreamed struct{ *cache.ListWatch }

// IsWatchListSemanticsUnSupported is a method that client-go looks for.
func (unstreamed) IsWatchListSemanticsUnSupported() bool { return true }

// list requests the newest list. The reflector would also accept a cached one, in which deleted
// pods could return.
func (f *feed) list(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
	list, err := f.source.client.list(ctx)
	if err != nil {
		f.stop(err)
	}
	return list, err
}

// watch continues where the last watch ended. An error means that a list is needed first, or that
// ctx has ended.
func (f *feed) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	err := f.broken
	if f.opened && err == nil {
		f.heard() // it ended regularly
	}
	for {
		if err != nil && (errors.Is(err, errGone) || !f.pause(ctx, err)) {
			f.broken = err
			return nil, err
		}
		var w *stream
		if w, err = f.source.client.watch(ctx, options.ResourceVersion); err == nil {
			f.opened, f.broken = true, nil
			w.Interface = watch.Filter(w.Interface, f.check(ctx, w.Interface))
			return w, nil
		}
	}
}

// check returns a filter that passes valid events, and ends the watch at any other.
func (f *feed) check(ctx context.Context, w watch.Interface) watch.FilterFunc {
	return func(e watch.Event) (watch.Event, bool) {
		if f.broken != nil {
			return e, false
		}
		p, is := e.Object.(*pod)
		switch {
		case e.Type == watch.Error:
			f.broken = fault(ctx, apierrors.FromObject(e.Object))
		case !is || p.ResourceVersion == "" || p.Name == "" && e.Type != watch.Bookmark:
			f.broken = fmt.Errorf("kubernetes: watch: the event %s has no name or no version", e.Type)
		default:
			p.ManagedFields = nil
			f.heard()
			return e, true
		}
		w.Stop()
		return e, false
	}
}

// heard resets the counts of failures.
func (f *feed) heard() {
	f.drops = 0
	f.source.recovered()
}

// pause waits after a watch that broke. It returns false if a retry is useless or ctx ends
// meanwhile; in both cases ctx has ended.
func (f *feed) pause(ctx context.Context, err error) bool {
	if f.drops++; f.drops > maxDrops || permanent(err) {
		f.stop(err)
		return false
	}
	f.source.log.WithError(err).Info("kubernetes: the watch broke; watching again")
	return f.source.wait(ctx, backoff(f.drops, err)) == nil
}
