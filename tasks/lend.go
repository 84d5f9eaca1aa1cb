package tasks

import (
	"context"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// lenderKey is the key of the *lender in the context of a function.
type lenderKey struct{}

// lender is an attempt, as far as functions that its function calls need it.
type lender struct {
	w *worker
	a *attempt
}

// lend makes the task, if ctx is the context of its function, lend its processors until back is
// called. Others may use them meanwhile. After back, more may therefore run for a while than the
// worker offers, during which nothing else begins.
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
