package foreign

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// errInterrupted is the cause where the caller's Check has ended a wait.
var errInterrupted = errors.New("the caller was interrupted")

// errTimeout is the cause where a call has taken longer than the group's limit.
var errTimeout = errors.New("no end within")

// Check reports whether a caller that waits is to give up. It is called on the goroutine that
// waits, about every [Slice], and may run the caller's handlers of signals.
type Check func() (giveUp bool)

// Slice is the time between two calls of a [Check].
const Slice = 50 * time.Millisecond

// patience is the context of the operations of a line. While an operation waits it asks for the
// error of its context, on its own goroutine: that is when check is called. So a caller sees its
// signals without another goroutine between it and the operation.
type patience struct {
	check Check
	limit time.Duration // 0: none
	began time.Time
	asked time.Time
	done  chan struct{}
	err   error

	of    *Group   // whose operations these are
	ended error    // why check has ended the group; nil: it has not
	later []func() // what is left of that to do after the operation
}

// checking has the patience whose check runs on a thread, by the thread's id.
var checking sync.Map

// ask calls check.
func (p *patience) ask() (giveUp bool) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	thread := syscall.Gettid()
	checking.Store(thread, p)
	defer checking.Delete(thread)
	return p.check()
}

// inCheck returns the patience whose check calls this, if its operation is of the group or of a
// subset: one that waits for the operation waits for itself. Otherwise it returns nil.
func (s *Group) inCheck() *patience {
	found, is := checking.Load(syscall.Gettid())
	if !is {
		return nil
	}
	p := found.(*patience)
	for g := p.of; g != nil; g = g.parent {
		if g == s {
			return p
		}
	}
	return nil
}

// begin makes it the context of another operation. After a failed operation it is not called again.
func (p *patience) begin(check Check, limit time.Duration) {
	now := time.Now()
	p.check, p.limit, p.began, p.asked = check, limit, now, now
	if p.done == nil {
		p.done = make(chan struct{})
	}
}

// Deadline returns no deadline: an operation would set a timer for it.
func (p *patience) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done is closed once Err has returned an error.
func (p *patience) Done() <-chan struct{} { return p.done }

// Value is nil for every key.
func (p *patience) Value(any) any { return nil }

// Err is why the operation is to end. One goroutine calls it, that of the operation.
func (p *patience) Err() error {
	if p.err != nil {
		return p.err
	}
	now := time.Now()
	switch {
	case p.limit > 0 && now.Sub(p.began) > p.limit:
		p.err = fmt.Errorf("%w %v", errTimeout, p.limit)
	case p.check != nil && now.Sub(p.asked) >= Slice:
		p.asked = now
		if giveUp := p.ask(); p.ended != nil {
			p.err = p.ended
		} else if giveUp {
			p.err = errInterrupted
		}
	}
	if p.err != nil {
		close(p.done)
	}
	return p.err
}
