package elastic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/micro"
)

// gradients is memory for all tensors of a model's gradients.
type gradients[T collective.Element] struct {
	flat    []T
	tensors [][]T
}

// held is the sum of the gradients of the microbatches under a node.
type held[T collective.Element] struct {
	node collective.Node
	sum  *gradients[T]
}

// take returns memory with undefined content.
func (s *Steps[T]) take() *gradients[T] {
	if last := len(s.free) - 1; last >= 0 {
		g := s.free[last]
		s.free = s.free[:last]
		return g
	}
	total := 0
	for _, n := range s.lengths {
		total += n
	}
	g := new(gradients[T])
	var err error
	if g.flat, err = collective.Alloc[T](total); err != nil { // no shared memory is left
		g.flat = make([]T, total)
	}
	rest := g.flat
	for _, n := range s.lengths {
		g.tensors = append(g.tensors, rest[:n:n])
		rest = rest[n:]
	}
	return g
}

// prepare allocates the memory that every step needs, before others wait for this rank: the first
// write to so many pages takes longer than an ordinary step.
func (s *Steps[T]) prepare() {
	if s.mean != nil {
		return
	}
	s.mean = s.take()
	clear(s.mean.flat)
	one := s.take()
	clear(one.flat)
	s.free = append(s.free, one)
}

// forget drops everything computed for a step.
func (s *Steps[T]) forget() {
	for _, h := range s.nodes {
		s.free = append(s.free, h.sum)
	}
	s.nodes, s.sealed = s.nodes[:0], false
}

// close frees the memory. The steps cannot be used afterwards.
func (s *Steps[T]) close() {
	s.forget()
	s.returned()
	for _, g := range append(s.free, s.mean) {
		if g != nil {
			collective.Free(g.flat)
		}
	}
	s.free, s.mean = nil, nil
	s.invalid = errors.New("elastic: Step was called after the worker was closed")
}

// try runs the next step in the current world.
func (s *Steps[T]) try(ctx context.Context, backward func(Micro[T]) error) error {
	g := s.state.worker.group()
	if !s.sealed {
		plan, err := s.plan(g)
		if err != nil {
			return err
		}
		if err := s.compute(ctx, g, plan.shares[g.Rank()], backward); err != nil {
			return err
		}
		if err := s.reduce(ctx, g, plan); err != nil {
			return err
		}
	}
	// No rank applies the step before all ranks can apply it. Until then each rank can send the
	// averages to a rank that lacks them; afterwards no rank needs them.
	if err := s.pace.exchange(ctx, g, s.options.Balance); err != nil {
		return err
	}
	if err := s.applySealed(); err != nil {
		return err
	}
	return s.state.Commit()
}

// applySealed applies the averages and moves to the next step.
func (s *Steps[T]) applySealed() error {
	if err := s.keep(); err != nil {
		return err
	}
	if err := s.callApply(); err != nil {
		if errors.Is(err, collective.ErrAborted) { // from a collective call of apply, which may have changed tensors
			s.forget()
			return s.state.run.rollBack(err)
		}
		return err
	}
	s.advance()
	return nil
}

// leastCalm is the number of consecutive calls of apply without a collective operation after which
// commits lie in place. If a later call has a collective operation that fails, this rank has no
// commit to go back to.
const leastCalm = 2

// callApply calls apply, and detects collective operations, which apply must not call.
func (s *Steps[T]) callApply() error {
	s.state.auditSome()
	s.state.vacate()
	done := false
	defer func() {
		if !done {
			s.state.saved.Abandon()
		}
	}()
	g := s.state.worker.group()
	before := g.Progress()
	err := s.apply(s.mean.tensors)
	switch calm := s.calm.Load(); {
	case errors.Is(err, collective.ErrAborted) || !slices.Equal(before, g.Progress()):
		s.calm.Store(-1)
	case calm >= 0 && calm < leastCalm:
		s.calm.Store(calm + 1)
	}
	done = err == nil
	return err
}

// applyIsCalm reports whether commits can lie in place.
func (s *Steps[T]) applyIsCalm() bool { return s.calm.Load() >= leastCalm }

// applyIsUnknown reports whether the next steps can make apply calm. It is safe for concurrent use.
func (s *Steps[T]) applyIsUnknown() bool {
	calm := s.calm.Load()
	return calm >= 0 && calm < leastCalm
}

// inStep reports whether a call of Step is in progress.
func (s *Steps[T]) inStep() bool { return s.within }

// restless makes commits copy the state, rather than lie in place, until further calls of apply
// show that it is calm.
func (s *Steps[T]) restless() { s.calm.Store(min(s.calm.Load(), 0)) }

// stepPlan describes what each rank does in a step.
type stepPlan struct {
	shares   [][]int // by rank: the microbatches that it computes
	partials *collective.Partials
	own      []collective.Node // nodes of this rank in partials
}

// plan returns the plan of the next step, the same on all ranks.
func (s *Steps[T]) plan(g *collective.Group) (*stepPlan, error) {
	leaves := s.count()
	members := s.others.held
	if s.others.generation != g.Generation() || s.others.next != s.live.applied || len(members) != g.Size() {
		members = make([][]collective.Node, g.Size())
	}
	kept, missing := micro.Accept(leaves, members)
	s.keepOnly(kept[g.Rank()])
	shares := micro.Share(missing, g.Size(), s.pace.costs(g))
	nodes := make([][]collective.Node, g.Size())
	for r := range nodes {
		all := kept[r]
		for _, i := range shares[r] {
			all = append(all, collective.Node{Index: i})
		}
		nodes[r] = micro.Coalesce(all, leaves)
	}
	partials, err := collective.NewPartials(leaves, nodes)
	return &stepPlan{shares, partials, nodes[g.Rank()]}, err
}

// keepOnly drops the sums that this rank holds, except those of the given nodes.
func (s *Steps[T]) keepOnly(nodes []collective.Node) {
	counts := make(map[collective.Node]bool, len(nodes))
	for _, n := range nodes {
		counts[n] = true
	}
	rest := s.nodes[:0]
	for _, h := range s.nodes {
		if counts[h.node] {
			rest = append(rest, h)
		} else {
			s.free = append(s.free, h.sum)
		}
	}
	s.nodes = rest
}

// compute calls backward for the microbatches of share, and adds up their gradients as far as the
// tree allows. It returns early once the world is lost.
func (s *Steps[T]) compute(ctx context.Context, g *collective.Group, share []int, backward func(Micro[T]) error) error {
	began, done := time.Now(), 0
	for _, index := range share {
		select {
		case <-g.Failed():
			return collective.Barrier(ctx, g) // returns the reason
		default:
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		m := s.micro(index)
		sum := s.take()
		clear(sum.flat)
		m.Gradient = sum.tensors
		if err := backward(m); err != nil {
			s.free = append(s.free, sum)
			return err
		}
		done++
		s.add(held[T]{collective.Node{Index: index}, sum})
	}
	s.pace.measured(time.Since(began), done)
	return nil
}

// add adds a sum to those that this rank holds, and replaces the two halves of a node by the node.
func (s *Steps[T]) add(h held[T]) {
	leaves := s.count()
	for h.node.Level < collective.Root(leaves).Level {
		up, with := micro.Above(h.node, leaves)
		if with != nil {
			at := s.at(*with)
			if at < 0 {
				break
			}
			other := s.nodes[at]
			s.nodes[at] = s.nodes[len(s.nodes)-1]
			s.nodes = s.nodes[:len(s.nodes)-1]
			left, right := other.sum, h.sum
			if h.node.Index%2 == 0 {
				left, right = right, left
			}
			collective.CombineNodes(left.flat, left.flat, right.flat, up, leaves, collective.Average)
			s.free = append(s.free, right)
			h.sum = left
		}
		h.node = up
	}
	s.nodes = append(s.nodes, h)
}

// at returns the index of a node among those that this rank holds; −1: it does not hold the node.
func (s *Steps[T]) at(n collective.Node) int {
	for i, h := range s.nodes {
		if h.node == n {
			return i
		}
	}
	return -1
}

// reduce averages the gradients over all ranks.
func (s *Steps[T]) reduce(ctx context.Context, g *collective.Group, plan *stepPlan) error {
	parts := make([][]T, len(plan.own))
	for i, n := range plan.own {
		at := s.at(n)
		if at < 0 {
			return fmt.Errorf("elastic: steps: this rank has nothing of microbatches %d to %d", n.First(), n.End(s.count())-1)
		}
		parts[i] = s.nodes[at].sum.flat
	}
	if err := collective.ReduceTree(ctx, g, plan.partials, parts, s.mean.flat, collective.Average); err != nil {
		return err
	}
	s.sealed = true
	return nil
}

// pace records how long the ranks take for a microbatch.
type pace struct {
	own        uint64 // nanoseconds, a moving average; 0: unknown
	all        []uint64
	generation uint64 // generation of the world for which all is valid
}

// measured records the time that some microbatches took.
func (p *pace) measured(took time.Duration, microbatches int) {
	if microbatches == 0 {
		return
	}
	each := uint64(max(took, 1)) / uint64(microbatches)
	if p.own > 0 {
		each = (3*p.own + each) / 4
	}
	p.own = max(each, 1)
}

// exchange returns once all ranks have called it. If balance is set, the ranks then know each
// other's pace.
func (p *pace) exchange(ctx context.Context, g *collective.Group, balance bool) error {
	if !balance {
		return collective.Barrier(ctx, g)
	}
	if len(p.all) != g.Size() {
		p.all = make([]uint64, g.Size())
	}
	p.generation = 0
	if err := collective.AllGatherInto(ctx, g, []uint64{p.own}, p.all); err != nil {
		return err
	}
	p.generation = g.Generation()
	return nil
}

// costs returns the pace of all ranks of a world; nil: unknown.
func (p *pace) costs(g *collective.Group) []uint64 {
	if p.generation != g.Generation() {
		return nil
	}
	return p.all
}
