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

// Group performs calls on a group of ranks. It has several lines: each line performs its calls one
// after another, in the order of the calls, and concurrently with the other lines. There is one
// line for the messages to each rank, one for the messages from each rank, and one for all other
// calls. A failed call ends the group: all later calls fail. Any goroutine may use a Group.
type Group struct {
	g      *collective.Group
	parent *Group // nil: the group is not a subset

	mu     sync.Mutex
	limit  time.Duration // time limit of a call; 0: none
	failed error         // the error of the first failed call
	lines  map[int]*line
}

// line is a queue of calls. The group's mutex guards it.
type line struct {
	queue   []func(context.Context) error
	room    [1]func(context.Context) error // memory for a queue of one call
	begun   uint64                         // number of calls so far
	ended   uint64                         // number of these that succeeded
	running bool                           // the first call of the queue is in progress
	turned  chan struct{}                  // closed and set to nil when a call has ended; nil: nobody waits
	serving bool                           // a goroutine performs started calls
	served  sync.WaitGroup
	work    *sync.Cond // for that goroutine: the queue has changed

	patience patience // of the call in progress
}

func newGroup(g *collective.Group) *Group { return &Group{g: g, lines: map[int]*line{}} }

// A ticket is the number of a call in its line, with the number of the line in the bits above.
const (
	lineShift = 40
	mostCalls = 1<<lineShift - 1
)

// line returns the line with the given number. The caller holds mu.
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

// line returns the number of the call's line: two for each rank, and 0 for all other calls.
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

// Limit sets the longest duration of each later call; 0: no limit. A call that takes longer ends
// the group.
func (s *Group) Limit(limit time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = limit
}

// Rank returns this process's rank.
func (s *Group) Rank() int { return s.g.Rank() }

// Size returns the number of ranks.
func (s *Group) Size() int { return s.g.Size() }

// Run performs a call on the caller's goroutine, after all earlier calls of its line.
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

// Start queues a call and returns its ticket for Wait. It does not block, and copies c.Counts.
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

// Wait blocks until the call of a ticket has ended, and returns its error. If limit is not
// negative, Wait blocks for at most limit, and done is false if the call has not ended. If limit is
// negative, Wait performs calls itself that no goroutine performs yet, and ends the group if check
// returns true.
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
		case s.failed != nil && !l.running: // nothing accesses the caller's memory any more
			return true, s.failed
		case limit < 0 && !l.running && len(l.queue) > 0:
			s.perform(l, check)
			continue
		}
		slice := slice
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

// free unlocks mu, which the caller holds, while it calls check.
func (s *Group) free(check Check) bool {
	s.mu.Unlock()
	defer s.mu.Lock()
	return check()
}

// await blocks until a call of a line has ended, for at most slice. The caller holds mu, which is
// unlocked meanwhile.
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

// perform performs the first call of a line. The caller holds mu, which is unlocked meanwhile.
func (s *Group) perform(l *line, check Check) {
	do := l.queue[0]
	l.queue[0] = nil
	if l.queue = l.queue[1:]; len(l.queue) == 0 {
		l.queue = l.room[:0]
	}
	l.running = true
	ctx := context.Background() // cheaper for an operation that waits
	if check != nil || s.limit > 0 {
		l.patience.begin(check, s.limit)
		ctx = &l.patience
	}
	s.mu.Unlock()
	err := safely(ctx, do)
	if err != nil {
		s.g.Abort(err) // if the operation has not ended the group itself
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

// safely calls do and returns a panic as an error.
func safely(ctx context.Context, do func(context.Context) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return do(ctx)
}

// end makes all calls that have not begun, and all later calls, fail with err. The caller holds mu.
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

// turn wakes the goroutines that wait for the line. The caller holds the group's mutex.
func (l *line) turn() {
	if l.turned != nil {
		close(l.turned)
		l.turned = nil
	}
}

// serve performs the started calls of a line, until the group has failed or is closed.
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

// Subset returns a new group of some of the ranks of s, or nil if this rank is not among them. All
// ranks of s call it with the same list. Calls on the subset do not wait for calls on other groups.
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

// Err returns the reason why the group has failed, or nil if it has not.
func (s *Group) Err() error {
	s.mu.Lock()
	failed := s.failed
	s.mu.Unlock()
	if failed != nil {
		return failed
	}
	return s.g.Err()
}

// Abort ends the group on all ranks: calls in progress and later calls fail with the cause. It
// blocks until nothing accesses the memory of calls any more. If the Check of a call in progress
// calls Abort, it returns at once, and that call ends afterwards.
func (s *Group) Abort(cause string) {
	err := errors.New(cause)
	why := &collective.AbortedError{Generation: s.g.Generation(), Dead: []int{s.g.Rank()}, Cause: err}
	s.leave(why, func() { s.g.Abort(err) })
}

// Close leaves the group, so that the other ranks cannot use it any more. Calls that have not ended
// fail on all ranks. A Check may call Close, with the same effect as for Abort.
func (s *Group) Close() {
	s.leave(errClosed, func() {
		s.mu.Lock()
		s.end(errClosed)
		s.mu.Unlock()
		s.g.Close()
	})
}

// leave makes all calls fail with why, and calls by, which waits for calls in progress. If the
// Check of a call in progress calls leave, by is called after that call has ended.
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

// finish waits for the calls in progress.
func (s *Group) finish(err error) {
	s.mu.Lock()
	s.end(err)
	lines := slices.Collect(maps.Values(s.lines))
	for _, l := range lines {
		for l.running {
			s.await(l, slice)
		}
	}
	s.mu.Unlock()
	for _, l := range lines {
		l.served.Wait()
	}
}
