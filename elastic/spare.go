package elastic

import "context"

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
	stop := context.AfterFunc(w.first.placed, end)
	return spare, func() {
		stop()
		end()
	}
}
