package foreign

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/collective"
)

// Group performs calls on a group of ranks: each of its lines performs its own, one after the other
// in the order in which they come, and beside those of the other lines. Messages to each rank are a
// line, those from each rank another one, and all other calls one more. A call that fails ends the
// group, and with it all later calls. Any goroutine may use it.
type Group struct {
	g      *collective.Group
	parent *Group // of a subset; nil: it is not a subset

	mu     sync.Mutex
	limit  time.Duration // of a call; 0: none
	failed error         // why a call has failed
	lines  map[int]*line
}

// line is calls in their order. The group's mutex guards it.
type line struct {
	queue   []func(context.Context) error
	room    [1]func(context.Context) error // for the queue, as long as that does
	begun   uint64                         // calls so far
	ended   uint64                         // of them, those that have ended well
	running bool                           // the first of the queue is under way
	turned  chan struct{}                  // closed and set to nil when a call has ended; nil: nobody waits
	serving bool                           // a goroutine performs what was started
	served  sync.WaitGroup
	work    *sync.Cond // for it: the queue has changed

	patience patience // of the call under way
}

func newGroup(g *collective.Group) *Group { return &Group{g: g, lines: map[int]*line{}} }

// A ticket is the number of a call in its line, and above that the number of the line.
const (
	lineShift = 40
	mostCalls = 1<<lineShift - 1
)

// line returns a line by its number. The caller holds mu.
func (s *Group) line(n int) *line {
	l := s.lines[n]
	if l == nil {
		l = new(line)
		l.queue = l.room[:0]
		l.work = sync.NewCond(&s.mu)
		l.patience.of = s
		s.lines[n] = l
	}
	return l
}

// line is the number of the line of a call: 0, and two more for each rank.
func (c *Call) line() int {
	switch c.Kind {
	case Send:
		return 1 + 2*int(c.Arg)
	case Recv:
		return 2 + 2*int(c.Arg)
	}
	return 0
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
	return s.run(c.line(), do, check)
}

func (s *Group) run(line int, do func(context.Context) error, check Check) error {
	s.mu.Lock()
	ticket, err := s.push(line, do)
	s.mu.Unlock()
	if err == nil {
		_, err = s.Wait(ticket, -1, check)
	}
	return err
}

// Start begins a call, and returns the ticket for Wait. It keeps no reference to c.
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
	if ticket, err = s.push(c.line(), do); err != nil {
		return 0, err
	}
	l := s.line(c.line())
	if !l.serving {
		l.serving = true
		l.served.Go(func() { s.serve(l) })
	}
	l.work.Signal()
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

// push puts a call into the queue of a line. The caller holds mu.
func (s *Group) push(line int, do func(context.Context) error) (ticket uint64, err error) {
	if s.failed != nil {
		return 0, s.failed
	}
	l := s.line(line)
	l.queue = append(l.queue, do)
	l.begun++
	return uint64(line)<<lineShift | l.begun, nil
}

// Wait waits until the call of a ticket has ended, and returns its error. Where limit is not
// negative it waits no longer than that, and done is false if the call has not ended. With a
// negative limit it waits without one: it performs calls itself that nobody performs yet, and ends
// the group where check says so.
func (s *Group) Wait(ticket uint64, limit time.Duration, check Check) (done bool, err error) {
	var until time.Time
	if limit >= 0 {
		until = time.Now().Add(limit)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l, number := s.lines[int(ticket>>lineShift)], ticket&mostCalls
	for {
		switch {
		case l == nil || number == 0 || number > l.begun:
			return false, fmt.Errorf("there is no call %d", ticket)
		case number <= l.ended:
			return true, nil
		case s.failed != nil && !l.running: // nothing touches the caller's memory any more
			return true, s.failed
		case limit < 0 && !l.running && len(l.queue) > 0:
			s.perform(l, check)
			continue
		}
		slice := Slice
		if limit >= 0 {
			if slice = time.Until(until); slice <= 0 {
				return false, nil
			}
		}
		if !s.await(l, slice) && limit < 0 && check != nil && s.free(check) {
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

// await waits for the end of a call of a line, for a slice of time at most. The caller holds mu,
// which is free meanwhile.
func (s *Group) await(l *line, slice time.Duration) (turned bool) {
	if l.turned == nil {
		l.turned = make(chan struct{})
	}
	end := l.turned
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

// perform performs the first call of a line. The caller holds mu, which is free meanwhile.
func (s *Group) perform(l *line, check Check) {
	do := l.queue[0]
	l.queue[0] = nil
	if l.queue = l.queue[1:]; len(l.queue) == 0 {
		l.queue = l.room[:0]
	}
	l.running = true
	ctx := context.Background() // of which an operation that waits asks less
	if check != nil || s.limit > 0 {
		l.patience.begin(check, s.limit)
		ctx = &l.patience
	}
	s.mu.Unlock()
	err := safely(ctx, do)
	if err != nil {
		s.g.Abort(err) // where it has not ended the group by itself
	}
	s.mu.Lock()
	l.running = false
	if err == nil {
		l.ended++
	} else {
		s.end(err)
	}
	l.turn()
	l.work.Signal()
	if later := l.patience.later; later != nil {
		l.patience.later = nil
		s.mu.Unlock()
		for _, end := range later {
			end()
		}
		s.mu.Lock()
	}
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
	for _, l := range s.lines {
		l.queue = nil
		l.turn()
		l.work.Signal()
	}
}

// turn tells those who wait. The caller holds the group's mutex.
func (l *line) turn() {
	if l.turned != nil {
		close(l.turned)
		l.turned = nil
	}
}

// serve performs what was started in a line, until the group has failed or is closed.
func (s *Group) serve(l *line) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.failed == nil {
		if l.running || len(l.queue) == 0 {
			l.work.Wait()
			continue
		}
		s.perform(l, nil)
	}
}

// Subset makes a group of some of the ranks of this one, which all ranks call alike; nil where this
// rank is not among them. Calls on it do not wait for those of others.
func (s *Group) Subset(ranks []int, check Check) (*Group, error) {
	var made *collective.Group
	err := s.run(0, func(ctx context.Context) (err error) {
		made, err = s.g.Subset(ctx, ranks)
		return err
	}, check)
	if err != nil || made == nil {
		return nil, err
	}
	subset := newGroup(made)
	subset.parent = s
	return subset, nil
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
// when nothing touches the memory of calls any more; where the Check of a call under way calls it,
// at once, and the call ends then.
func (s *Group) Abort(cause string) {
	err := errors.New(cause)
	why := &collective.AbortedError{Generation: s.g.Generation(), Dead: []int{s.g.Rank()}, Cause: err}
	s.leave(why, func() { s.g.Abort(err) })
}

// Close leaves the group, after which the other ranks cannot use it. Calls that have not ended
// fail, on all ranks. A Check may call it as it may call Abort.
func (s *Group) Close() {
	s.leave(errClosed, func() {
		s.mu.Lock()
		s.end(errClosed)
		s.mu.Unlock()
		s.g.Close()
	})
}

// leave ends all calls, by a function that waits for those under way. If it is called by the check
// of one of these, the rest is done after that one.
func (s *Group) leave(why error, by func()) {
	rest := func() {
		by()
		s.finish(why)
	}
	if p := s.inCheck(); p != nil {
		p.ended, p.later = why, append(p.later, rest)
		s.mu.Lock()
		s.end(why)
		s.mu.Unlock()
		return
	}
	rest()
}

// finish waits for what is under way.
func (s *Group) finish(err error) {
	s.mu.Lock()
	s.end(err)
	lines := slices.Collect(maps.Values(s.lines))
	for _, l := range lines {
		for l.running {
			s.await(l, Slice)
		}
	}
	s.mu.Unlock()
	for _, l := range lines {
		l.served.Wait()
	}
}
