package foreign

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/collective"
)

// Group performs calls on a group of ranks, one after the other in the order in which they come. A
// call that fails ends the group, and with it all later calls. Any goroutine may use it.
type Group struct {
	g *collective.Group

	mu      sync.Mutex
	limit   time.Duration // of a call; 0: none
	queue   []func(context.Context) error
	begun   uint64        // calls so far
	ended   uint64        // of them, those that have ended well
	running bool          // the first of the queue is under way
	failed  error         // why a call has failed
	turned  chan struct{} // closed and set to nil when a call has ended; nil: nobody waits
	served  sync.WaitGroup
	serving bool       // a goroutine performs what was started
	work    *sync.Cond // for it: the queue has changed
}

func newGroup(g *collective.Group) *Group {
	s := &Group{g: g}
	s.work = sync.NewCond(&s.mu)
	return s
}

var errClosed = errors.New("the group is closed")

// Limit sets the longest that a call may take from now on, from its beginning; 0: for ever. A call
// that takes longer ends the group.
func (s *Group) Limit(limit time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = limit
}

// Rank is this process's rank, Size the number of ranks.
func (s *Group) Rank() int { return s.g.Rank() }

// Size is the number of ranks.
func (s *Group) Size() int { return s.g.Size() }

// Run performs a call, after all those before it, on the caller's goroutine.
func (s *Group) Run(c Call, check Check) error {
	do, err := s.operation(&c)
	if err != nil {
		return err
	}
	return s.run(do, check)
}

func (s *Group) run(do func(context.Context) error, check Check) error {
	s.mu.Lock()
	ticket, err := s.push(do)
	s.mu.Unlock()
	if err == nil {
		_, err = s.Wait(ticket, -1, check)
	}
	return err
}

// Start begins a call, and returns the ticket for Wait: its number among the calls of the group. It
// keeps no reference to c.
func (s *Group) Start(c Call) (ticket uint64, err error) {
	c.Counts = append([]int64(nil), c.Counts...)
	if len(c.Counts) == 0 {
		c.Counts = nil
	}
	do, err := s.operation(&c)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if ticket, err = s.push(do); err != nil {
		return 0, err
	}
	if !s.serving {
		s.serving = true
		s.served.Go(s.serve)
	}
	s.work.Signal()
	return ticket, nil
}

func (s *Group) operation(c *Call) (func(context.Context) error, error) {
	if err := c.check(s.g.Rank(), s.g.Size()); err != nil {
		name := "a call"
		if c.Kind > 0 && c.Kind < kinds {
			name = kindNames[c.Kind]
		}
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	perform := typed[c.Type].perform
	return func(ctx context.Context) error { return perform(ctx, s.g, c) }, nil
}

// push puts a call into the queue. The caller holds mu.
func (s *Group) push(do func(context.Context) error) (ticket uint64, err error) {
	if s.failed != nil {
		return 0, s.failed
	}
	s.queue = append(s.queue, do)
	s.begun++
	return s.begun, nil
}

// Wait waits until the call of a ticket has ended, and returns its error. Where limit is not
// negative it waits no longer than that, and done is false if the call has not ended. A negative
// limit is none: then it performs calls itself that nobody performs yet, and ends the group where
// check says so.
func (s *Group) Wait(ticket uint64, limit time.Duration, check Check) (done bool, err error) {
	var until time.Time
	if limit >= 0 {
		until = time.Now().Add(limit)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case ticket == 0 || ticket > s.begun:
			return false, fmt.Errorf("there is no call %d", ticket)
		case ticket <= s.ended:
			return true, nil
		case s.failed != nil && !s.running: // nothing touches the caller's memory any more
			return true, s.failed
		case limit < 0 && !s.running && len(s.queue) > 0:
			s.perform(check)
			continue
		}
		slice := Slice
		if limit >= 0 {
			if slice = time.Until(until); slice <= 0 {
				return false, nil
			}
		}
		if !s.await(slice) && limit < 0 && check != nil && s.free(check) {
			s.mu.Unlock()
			s.Abort(errInterrupted.Error())
			s.mu.Lock()
			return true, errInterrupted
		}
	}
}

// free calls check without mu, which the caller holds.
func (s *Group) free(check Check) bool {
	s.mu.Unlock()
	defer s.mu.Lock()
	return check()
}

// await waits for the end of a call, for a slice of time at most. The caller holds mu, which is
// free meanwhile.
func (s *Group) await(slice time.Duration) (turned bool) {
	if s.turned == nil {
		s.turned = make(chan struct{})
	}
	end := s.turned
	s.mu.Unlock()
	defer s.mu.Lock()
	timer := time.NewTimer(slice)
	defer timer.Stop()
	select {
	case <-end:
		return true
	case <-timer.C:
		return false
	}
}

// perform performs the first call of the queue. The caller holds mu, which is free meanwhile.
func (s *Group) perform(check Check) {
	do := s.queue[0]
	s.queue[0] = nil
	if s.queue = s.queue[1:]; len(s.queue) == 0 {
		s.queue = nil
	}
	s.running = true
	ctx := context.Background() // of which an operation that waits asks less
	if check != nil || s.limit > 0 {
		ctx = newPatience(check, s.limit)
	}
	s.mu.Unlock()
	err := safely(ctx, do)
	if err != nil {
		s.g.Abort(err) // where it has not ended the group by itself
	}
	s.mu.Lock()
	s.running = false
	if err == nil {
		s.ended++
	} else {
		s.end(err)
	}
	s.turn()
	s.work.Signal()
}

// safely is do; a panic of it is an error.
func safely(ctx context.Context, do func(context.Context) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return do(ctx)
}

// end ends all calls that have not begun, and later ones. The caller holds mu.
func (s *Group) end(err error) {
	if s.failed == nil {
		s.failed = err
	}
	s.queue = nil
	s.work.Signal()
}

// turn tells those who wait. The caller holds mu.
func (s *Group) turn() {
	if s.turned != nil {
		close(s.turned)
		s.turned = nil
	}
}

// serve performs what was started, until the group has failed or is closed.
func (s *Group) serve() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.failed == nil {
		if s.running || len(s.queue) == 0 {
			s.work.Wait()
			continue
		}
		s.perform(nil)
	}
}

// Subset makes a group of some of the ranks of this one, which all ranks call alike; nil where this
// rank is not among them. Calls on it do not wait for those of others.
func (s *Group) Subset(ranks []int, check Check) (*Group, error) {
	var made *collective.Group
	err := s.run(func(ctx context.Context) (err error) {
		made, err = s.g.Subset(ctx, ranks)
		return err
	}, check)
	if err != nil || made == nil {
		return nil, err
	}
	return newGroup(made), nil
}

// Err is why the group has failed; nil while it has not.
func (s *Group) Err() error {
	s.mu.Lock()
	failed := s.failed
	s.mu.Unlock()
	if failed != nil {
		return failed
	}
	return s.g.Err()
}

// Abort ends the group on all ranks: calls under way and later ones fail with the cause. It returns
// when nothing touches the memory of calls any more.
func (s *Group) Abort(cause string) {
	err := errors.New(cause)
	s.g.Abort(err)
	s.finish(&collective.AbortedError{Generation: s.g.Generation(), Dead: []int{s.g.Rank()}, Cause: err})
}

// Close leaves the group, after which the other ranks cannot use it. Calls that have not ended
// fail, on all ranks.
func (s *Group) Close() {
	s.mu.Lock()
	s.end(errClosed)
	s.mu.Unlock()
	s.g.Close()
	s.finish(errClosed)
}

// finish waits for what is under way.
func (s *Group) finish(err error) {
	s.mu.Lock()
	s.end(err)
	for s.running {
		s.await(Slice)
	}
	s.turn()
	s.mu.Unlock()
	s.served.Wait()
}
