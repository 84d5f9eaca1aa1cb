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

	"github.com/hvdrun/hvdrun/plan"
)

const (
	// maxDrops is how often in a row a watch may break, with nothing heard in between, before that
	// is a failure.
	maxDrops = 3
	// settling is how long more changes are waited for: many pods often change at once.
	settling = 5 * time.Millisecond
)

var errClosed = errors.New("kubernetes: the API server ends watches at once")

// follow lists and watches until that fails.
func (s *source) follow(ctx context.Context, found func([]plan.Host)) error {
	ctx, stop := context.WithCancelCause(quiet(ctx))
	v := &view{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: make(chan struct{}, 1)}
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
		if err := wait(ctx, settling); err != nil {
			return err
		}
		if err := s.publish(v, found); err != nil {
			stop(err)
		}
	}
}

// view is the pods as one Watch knows them: the store of a reflector, which tells when it changes.
type view struct {
	cache.Store
	changed chan struct{}
	told    bool
	last    []plan.Host
}

// Replace takes a whole list.
func (v *view) Replace(list []any, version string) error {
	defer v.UpdateResourceVersion(version)
	return v.Store.Replace(list, version)
}

// UpdateResourceVersion is called after each event.
func (v *view) UpdateResourceVersion(string) {
	select {
	case v.changed <- struct{}{}:
	default:
	}
}

// publish tells the hosts where they differ from the last.
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

// feed is what a reflector lists and watches by. It decides what is worth another try, which a
// reflector would do for ever, in silence.
type feed struct {
	source *source
	stop   context.CancelCauseFunc // of the whole Watch, with what it fails with
	drops  int                     // in a row
	opened bool                    // there has been a watch since the list
	broken error                   // what ended the last watch, but for its time
}

// run ends with ctx, which it may end itself.
func (f *feed) run(ctx context.Context, v *view) {
	logger := logr.Discard()
	r := cache.NewReflectorWithOptions(unstreamed{&cache.ListWatch{ListWithContextFunc: f.list, WatchFuncWithContext: f.watch}},
		&pod{}, v, cache.ReflectorOptions{Name: "pods", Logger: &logger})
	for ctx.Err() == nil {
		f.opened, f.broken = false, nil
		_ = r.ListAndWatchWithContext(ctx) // f knows why it ended
		if ctx.Err() == nil {
			f.pause(ctx, cmp.Or(f.broken, errClosed))
		}
	}
}

// unstreamed tells a reflector to ask for a list, in pages, whose size is bounded: it would rather
// watch from the beginning, which not every server can do.
type unstreamed struct{ *cache.ListWatch }

// IsWatchListSemanticsUnSupported has its name from client-go.
func (unstreamed) IsWatchListSemanticsUnSupported() bool { return true }

// list asks for the newest list, where the reflector would also take a cached one: pods that are
// gone must not come back.
func (f *feed) list(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
	list, err := f.source.client.list(ctx)
	if err != nil {
		f.stop(err)
	}
	return list, err
}

// watch goes on where the last one ended. An error means that there must be a list first, or that
// ctx has ended.
func (f *feed) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	err := f.broken
	if f.opened && err == nil {
		f.heard() // or it lasted at least
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

// check lets whole events pass, and ends a watch that says something else.
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
			f.broken = fmt.Errorf("kubernetes: watch: %s of no name or version", e.Type)
		default:
			p.ManagedFields = nil
			f.heard()
			return e, true
		}
		w.Stop()
		return e, false
	}
}

// heard forgets that anything failed.
func (f *feed) heard() {
	f.drops = 0
	f.source.recovered()
}

// pause waits after a watch that broke. It returns false where it is no use to go on: then, or when
// ctx ends meanwhile, ctx has ended.
func (f *feed) pause(ctx context.Context, err error) bool {
	if f.drops++; f.drops > maxDrops || permanent(err) {
		f.stop(err)
		return false
	}
	f.source.log.WithError(err).Info("kubernetes: the watch broke; going on")
	return f.source.wait(ctx, backoff(f.drops, err)) == nil
}
