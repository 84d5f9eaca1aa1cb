package collective

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/sockets"
)

// TestWatches: the end of a context ends the group if, and only if, an operation with that context
// is in progress, whatever other contexts are used.
func TestWatches(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(w *watches, mu *sync.Mutex, a, b context.Context, end func()) // end ends a
		ends bool
	}{
		{"under way", func(w *watches, mu *sync.Mutex, a, _ context.Context, end func()) {
			one := w.begin(a, mu)
			end()
			failed(w, mu)
			if err := w.end(one); !errors.Is(err, context.Canceled) {
				t.Errorf("the operation ends with %v", err)
			}
		}, true},
		{"one of two", func(w *watches, mu *sync.Mutex, a, _ context.Context, end func()) {
			w.end(w.begin(a, mu))
			one := w.begin(a, mu)
			w.end(w.begin(a, mu))
			end()
			failed(w, mu)
			w.end(one)
		}, true},
		{"another since", func(w *watches, mu *sync.Mutex, a, b context.Context, end func()) {
			one := w.begin(a, mu)
			w.end(w.begin(b, mu))
			end()
			failed(w, mu)
			w.end(one)
		}, true},
		{"before", func(w *watches, mu *sync.Mutex, a, _ context.Context, end func()) {
			end()
			one := w.begin(a, mu)
			failed(w, mu)
			w.end(one)
		}, true},
		{"after", func(w *watches, mu *sync.Mutex, a, _ context.Context, end func()) {
			if err := w.end(w.begin(a, mu)); err != nil {
				t.Error(err)
			}
			end()
		}, false},
		{"after, another under way", func(w *watches, mu *sync.Mutex, a, b context.Context, end func()) {
			w.end(w.begin(a, mu))
			other := w.begin(b, mu)
			end()
			if err := w.end(other); err != nil {
				t.Error(err)
			}
		}, false},
		{"one that cannot end", func(w *watches, mu *sync.Mutex, a, b context.Context, end func()) {
			one := w.begin(context.WithoutCancel(a), mu)
			end()
			if err := w.end(one); one != nil || err != nil {
				t.Errorf("%v is watched", one)
			}
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var mu sync.Mutex
			w := &watches{g: newGroup(newFamily(&sockets.Generation{}), lane{Lane: sockets.Lane{Size: 2}})}
			a, end := context.WithCancel(t.Context())
			b, other := context.WithCancel(t.Context())
			defer other()
			mu.Lock()
			c.do(w, &mu, a, b, end)
			mu.Unlock()
			w.close(&mu)
			if ended := w.g.err() != nil; ended != c.ends {
				t.Errorf("the group has ended: %v", ended)
			}
		})
	}
}

// failed blocks until the group has failed. It releases the lock meanwhile.
func failed(w *watches, mu *sync.Mutex) {
	mu.Unlock()
	defer mu.Lock()
	<-w.g.Failed()
}
