package tasks

import (
	"context"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// lenderKey is the key of the *lender in the context of a function.
type lenderKey struct{}

// lender lets the functions of this package that an attempt's function calls lend the attempt's
// processors.
type lender struct {
	w *worker
	a *attempt
}

// lend makes a task lend its processors to other tasks until back is called, if ctx is the context
// of the task's function; otherwise it does nothing. After back, the running tasks may use more
// processors than the worker offers, until some end; meanwhile no task begins.
func lend(ctx context.Context) (back func()) {
	l, ok := ctx.Value(lenderKey{}).(*lender)
	if !ok {
		return func() {}
	}
	l.wait(1)
	return func() { l.wait(-1) }
}

// wait records that one more call of the function waits, or one less if n is -1.
func (l *lender) wait(n int) {
	w, a := l.w, l.a
	w.mu.Lock()
	defer w.mu.Unlock()
	was := a.waits > 0
	if a.waits += n; a.ended || was == (a.waits > 0) {
		return // an ended attempt has given everything back
	}
	w.take(a, int64(-n), func(name string) bool { return name == queue.CPU })
	if w.link != nil {
		w.link.Say(func(m *taskspb.ToTasks) {
			if n > 0 {
				m.Waits = append(m.Waits, a.push.GetOf())
			} else {
				m.Waited = append(m.Waited, a.push.GetOf())
			}
		})
	}
	if n > 0 {
		w.begin()
	}
}
