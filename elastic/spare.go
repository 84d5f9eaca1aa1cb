package elastic

import (
	"context"
	"sync"
)

// placement records whether the worker has been in a world. The zero value: it has not.
type placement struct {
	mu   sync.Mutex
	is   bool
	news chan struct{} // closed when the worker enters one; nil: nobody waits
}

func (a *placement) note() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.is && a.news != nil {
		close(a.news)
	}
	a.is = true
}

func (a *placement) noted() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.news == nil {
		a.news = make(chan struct{})
		if a.is {
			close(a.news)
		}
	}
	return a.news
}

// WhileSpare returns a context that ends with ctx, or when the worker becomes a member of a world.
// Until then the worker is a spare or is not in a world yet, and its computations do not delay
// training:
//
//	spare, cancel := w.WhileSpare(ctx)
//	defer cancel()
//	go evaluate(spare)
//
// The caller must call cancel when it no longer needs the context.
func (w *Worker) WhileSpare(ctx context.Context) (spare context.Context, cancel context.CancelFunc) {
	spare, end := context.WithCancel(ctx)
	noted := w.placed.noted()
	var waiting sync.WaitGroup
	waiting.Go(func() {
		select {
		case <-noted:
			end()
		case <-spare.Done():
		}
	})
	return spare, func() {
		end()
		waiting.Wait()
	}
}
