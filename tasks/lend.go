package tasks

import (
	"context"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// lenderKey is where the context of a function has its *lender.
type lenderKey struct{}

// lender is an attempt, for what its function calls.
type lender struct {
	w *server
	a *attempt
}

// lend has the task whose function's context ctx is, if any, lend its processors until back is
// called. They may be taken meanwhile: then more runs for a time than the worker offers, and
// nothing begins.
func lend(ctx context.Context) (back func()) {
	l, ok := ctx.Value(lenderKey{}).(*lender)
	if !ok {
		return func() {}
	}
	l.wait(1)
	return func() { l.wait(-1) }
}

// wait says that one call more of the function waits, or one less.
func (l *lender) wait(n int) {
	w, a := l.w, l.a
	w.mu.Lock()
	defer w.mu.Unlock()
	was := a.waits > 0
	if a.waits += n; a.ended || was == (a.waits > 0) {
		return // what has ended has given all back
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
