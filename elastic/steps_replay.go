package elastic

import (
	"context"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// replay is like Step, on a worker that is in no world yet.
func (s *Steps[T]) replay(ctx context.Context) error {
	c := s.state.catchUp
	step, err := c.next(ctx)
	switch {
	case err != nil:
		return err
	case step == nil:
		return c.enter()
	}
	return s.applyGiven(step)
}

// applyGiven applies a step of another worker, and saves the state like the commit of a Step.
func (s *Steps[T]) applyGiven(step *transfer.Step) error {
	c := s.state.catchUp
	defer c.follower.Done(step)
	c.spoiled = true // until everything has succeeded
	if step.Number != s.live.applied || !s.state.resembles(step.Sums) {
		return errUnlike
	}
	s.state.saved.clean = false
	if err := s.state.parts.readCarried(step.Carried); err != nil {
		return err
	}
	if s.live.applied != step.Number {
		return errUnlike
	}
	if err := s.applyLoan(s.loans[step.Buffer]); err != nil {
		return err
	}
	s.state.commits++
	c.applied++
	if err := s.state.saveReplayed(); err != nil {
		return err
	}
	c.spoiled = false
	return nil
}

// applyLoan applies averages that are in other memory than s.mean.
func (s *Steps[T]) applyLoan(averages *gradients[T]) error {
	own := s.mean
	defer func() { s.mean = own }() // also if apply does not return
	s.mean, s.sealed = averages, true
	return s.applySealed()
}

// applyNext applies the next step, which the followed member has kept.
func (s *Steps[T]) applyNext(ctx context.Context) error {
	f := s.state.catchUp.follower
	select {
	case step := <-f.Ready():
		return s.applyGiven(step)
	case <-ctx.Done():
		return ctx.Err()
	case <-f.Failed():
	}
	select {
	case step := <-f.Ready():
		return s.applyGiven(step)
	default:
		return fmt.Errorf("%w: %w", errThread, f.Err())
	}
}

// keep keeps the averages that are about to be applied, for workers that follow this one.
func (s *Steps[T]) keep() error {
	if err := s.keepLast(); err != nil || s.state.feed == nil {
		return err
	}
	return s.state.feed.Keep(s.live.applied, s.state.commits, s.state.parts.carried, kernel.Bytes(s.mean.flat))
}

// mostLast is the largest number of bytes of averages that every member keeps.
const mostLast = 32 << 20

// lastStep is what every member keeps of the last step while any worker follows a member. A
// follower lacks that step if the member that it follows dies before it has sent it.
type lastStep[T collective.Element] struct {
	number   uint64
	carried  [][]byte
	averages []T // nil: nothing is kept
}

// keepLast keeps the averages that are about to be applied as those of the last step.
func (s *Steps[T]) keepLast() (err error) {
	if !s.state.followed || s.state.catchUp != nil || s.averaged() > mostLast {
		s.last = lastStep[T]{}
		return nil
	}
	s.last.number = s.live.applied
	s.last.averages = append(s.last.averages[:0], s.mean.flat...)
	s.last.carried, err = s.state.parts.carried()
	return err
}

// keepsLast reports whether this rank has kept the averages of the last step that it applied.
func (s *Steps[T]) keepsLast() bool {
	return s.last.averages != nil && s.last.number+1 == s.live.applied
}

// averaged returns the number of bytes of the averages of a step.
func (s *Steps[T]) averaged() int {
	total := 0
	for _, n := range s.lengths {
		total += n
	}
	return total * len(kernel.Bytes(make([]T, 1)))
}

// appliedIn returns the number of applied steps in an encoded position.
func (s *Steps[T]) appliedIn(b []byte) (uint64, error) {
	p, err := parsePosition(b)
	return p.applied, err
}

// lent returns memory for the averages of n steps. It is valid until returned is called.
func (s *Steps[T]) lent(n int) (all [][]byte) {
	for len(s.loans) < n {
		g := s.take()
		clear(g.flat)
		s.loans = append(s.loans, g)
	}
	for _, g := range s.loans {
		all = append(all, kernel.Bytes(g.flat))
	}
	return all
}

// returned takes back the memory of lent, keeps as much as a small world needs at first, and frees
// the rest.
func (s *Steps[T]) returned() {
	for _, g := range s.loans {
		if len(s.free) < transfer.Depth(1<<62) {
			s.free = append(s.free, g)
		} else {
			collective.Free(g.flat)
		}
	}
	s.loans = nil
}

// caughtUp reports whether this worker has reached the position of the world's members by applying
// only their steps, and is still at that position.
func (s *Steps[T]) caughtUp() bool { return s.caught && s.live == s.caughtAt }

// settleCarried sets the parts that are in no blob, on ranks that replay the step, to the values
// that the source has, or had, right before it applies the same step. It is collective.
func (s *Steps[T]) settleCarried(ctx context.Context, g *collective.Group, v verdict, wanted bool) error {
	var b []byte
	if g.Rank() == v.source {
		values, err := s.last.carried, error(nil)
		if !v.kept {
			values, err = s.state.parts.carried()
		}
		if err != nil {
			return err
		}
		b = transfer.Seal(transfer.AppendList(nil, values))
	}
	b, err := collective.BroadcastBytes(ctx, g, b, v.source)
	if err != nil || !wanted {
		return err
	}
	if b, err = transfer.Unseal(b); err != nil {
		return fmt.Errorf("elastic: sync: %w", err)
	}
	r := transfer.NewReader(b)
	values := r.List()
	if err := r.End(); err != nil {
		return fmt.Errorf("elastic: sync: %w", err)
	}
	return s.state.parts.readCarried(values)
}
