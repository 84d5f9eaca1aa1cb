package collective

import (
	"context"
	"sync"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// watches ends a group when the context of an operation in progress ends. The watch of the latest
// context is kept after its operations have ended: the next operation mostly has the same context,
// and starting and stopping a watch costs more than the whole rest of a small operation.
type watches struct {
	g       *Group
	latest  *watch
	running sync.WaitGroup
}

// watch watches one context.
type watch struct {
	done  <-chan struct{}
	stop  func() bool
	users int   // operations in progress
	ended error // the context's error, once it has ended
}

// begin watches the context of an operation; it returns nil if the context cannot end. The caller
// holds mu, which the watch also locks when the context ends.
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

// end ends the watch that begin began for an operation. It returns the error of the operation's
// context if the context has ended. The caller holds the lock.
func (w *watches) end(one *watch) error {
	if one == nil {
		return nil
	}
	one.users--
	w.forget(one)
	return one.ended
}

// forget stops a watch that no operation needs.
func (w *watches) forget(one *watch) {
	if one != nil && one.users == 0 && one != w.latest && one.stop() {
		w.running.Done()
	}
}

// close stops the last watch. All operations have ended, and no further one begins.
func (w *watches) close(mu *sync.Mutex) {
	mu.Lock()
	last := w.latest
	w.latest = nil
	w.forget(last)
	mu.Unlock()
	w.running.Wait()
}
