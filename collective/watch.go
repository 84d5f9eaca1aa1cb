package collective

import (
	"context"
	"sync"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// watches end a group when the context of an operation under way ends. The watch of the latest
// context stays when its operations have ended, since the next one mostly has the same context, and
// to begin and end a watch costs a small operation more than the rest of it.
type watches struct {
	g       *Group
	latest  *watch
	running sync.WaitGroup
}

// watch is of one context.
type watch struct {
	done  <-chan struct{}
	stop  func() bool
	users int   // operations under way
	ended error // the context's
}

// begin watches the context of an operation; nil where it cannot end. The caller holds mu, which is
// locked when the context ends too.
func (w *watches) begin(ctx context.Context, mu *sync.Mutex) *watch {
	done := ctx.Done()
	if done == nil {
		return nil
	}
	if w.latest == nil || w.latest.done != done {
		last := w.latest
		one := &watch{done: done}
		w.running.Add(1)
		one.stop = context.AfterFunc(ctx, func() {
			defer w.running.Done()
			mu.Lock()
			one.ended = ctx.Err()
			used := one.users > 0
			if w.latest == one {
				w.latest = nil
			}
			mu.Unlock()
			if used {
				w.g.fail(frame.Gone(one.ended, w.g.rank))
			}
		})
		w.latest = one
		w.forget(last)
	}
	w.latest.users++
	return w.latest
}

// end is the end of an operation that begin was called for. It returns the error of its context if
// that has ended. The caller holds the lock.
func (w *watches) end(one *watch) error {
	if one == nil {
		return nil
	}
	one.users--
	w.forget(one)
	return one.ended
}

// forget ends a watch that no operation needs.
func (w *watches) forget(one *watch) {
	if one != nil && one.users == 0 && one != w.latest && one.stop() {
		w.running.Done()
	}
}

// close ends the last watch. All operations have ended, and none begins any more.
func (w *watches) close(mu *sync.Mutex) {
	mu.Lock()
	last := w.latest
	w.latest = nil
	w.forget(last)
	mu.Unlock()
	w.running.Wait()
}
