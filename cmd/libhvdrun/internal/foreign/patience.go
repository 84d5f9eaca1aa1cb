package foreign

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// errInterrupted is the cause if the caller's Check ended a wait.
var errInterrupted = errors.New("the caller was interrupted")

// errTimeout is the cause if a call took longer than the group's limit.
var errTimeout = errors.New("the call took longer than")

// Check reports whether a waiting caller gives up. It is called on the waiting goroutine, about
// every [slice], and may run the caller's signal handlers.
type Check func() (giveUp bool)

// slice is the time between two calls of a [Check].
const slice = 50 * time.Millisecond

// patience is the context of the operations of a line. A waiting operation polls the error of its
// context on its own goroutine, and Err then calls check. So a caller handles its signals without
// another goroutine between it and the operation.
type patience struct {
	check Check
	limit time.Duration // 0: none
	began time.Time
	asked time.Time
	done  chan struct{}
	err   error

	of    *Group   // the group of the operations
	ended error    // why check ended the group; nil: it has not
	later []func() // what remains to be done after the operation
}

// checking has, by thread id, the patience whose check runs on the thread.
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

// inCheck returns the patience whose check is the caller of the present call, if its operation
// belongs to s or to a subset of s; otherwise nil. Such a caller must not wait for the operation,
// since it would wait for itself.
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

// begin makes p the context of the next operation. It is not called after a failed operation.
func (p *patience) begin(check Check, limit time.Duration) {
	now := time.Now()
	p.check, p.limit, p.began, p.asked = check, limit, now, now
	if p.done == nil {
		p.done = make(chan struct{})
	}
}

// Deadline returns no deadline, because an operation would set a timer for one.
func (p *patience) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done is closed once Err has returned an error.
func (p *patience) Done() <-chan struct{} { return p.done }

// Value returns nil for every key.
func (p *patience) Value(any) any { return nil }

// Err returns the reason why the operation must end, or nil. Only the operation's goroutine calls
// it.
func (p *patience) Err() error {
	if p.err != nil {
		return p.err
	}
	now := time.Now()
	switch {
	case p.limit > 0 && now.Sub(p.began) > p.limit:
		p.err = fmt.Errorf("%w %v", errTimeout, p.limit)
	case p.check != nil && now.Sub(p.asked) >= slice:
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
