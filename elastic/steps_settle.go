package elastic

import (
	"context"
	"errors"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/line"
)

// When a world ends, its ranks can be at different points of a step. They are all in the same step,
// except that at its end some ranks may have applied it and others not yet. Between receiving the
// averages and applying them, the ranks meet in a barrier, so a rank that has applied a step knows
// that all ranks have its averages. In the next world, before they synchronise, the ranks settle
// what happens to the step. If any rank has its averages, all ranks get and apply them. Otherwise
// each rank reports what it has computed of the step, and the ranks share the rest.

// stepper is the Steps of a State, of any element type.
type stepper interface {
	Part
	bind(*State) error
	settle(ctx context.Context, g *collective.Group, root int) (int, error)
	together() bool
	prepare()
	Applied() uint64
	applyIsCalm() bool
	applyIsUnknown() bool
	inStep() bool
	restless()

	averaged() int
	appliedIn([]byte) (uint64, error)
	lent(n int) [][]byte
	returned()
	caughtUp() bool
}

// roster is what the members of a world had computed of a step when the world began.
type roster struct {
	generation uint64
	next       uint64 // the step, as the number of steps before it
	held       [][]collective.Node
}

func (s *Steps[T]) bind(to *State) error {
	if s.invalid != nil {
		return s.invalid
	}
	if s.state != nil {
		return errors.New("elastic: a Steps is a part of two states")
	}
	s.state = to
	return nil
}

// together reports whether all members of the current world were in a Step when the world began.
func (s *Steps[T]) together() bool { return s.joined == s.state.worker.Generation() }

// standing is what one rank reports to the others in a settlement.
type standing struct {
	State   bool `json:",omitempty"` // the rank has the state
	Within  bool `json:",omitempty"` // the rank is in a Step
	Sealed  bool `json:",omitempty"` // it has the averages of the step after Applied, and has not applied them
	Replays bool `json:",omitempty"` // it has arrived by applying the averages of others, and can apply another step
	Keeps   bool `json:",omitempty"` // it has kept the averages of the last applied step
	Applied uint64
	Feed    uint64            `json:",omitempty"` // feed that it follows or by which others follow it; 0: neither
	Nodes   []collective.Node `json:",omitempty"` // what it has computed of the step after Applied
}

// reached returns the number of steps that the rank has applied or can apply.
func (r standing) reached() uint64 {
	if r.Sealed {
		return r.Applied + 1
	}
	return r.Applied
}

// settle determines what happens to the step in which the previous world has ended, and returns the
// sync root: the given one, unless others are a step ahead of it. It is collective.
func (s *Steps[T]) settle(ctx context.Context, g *collective.Group, root int) (int, error) {
	all, err := tell(ctx, g, s.standing())
	if err != nil {
		return root, err
	}
	if v := verdictOf(all, root); slices.ContainsFunc(all, func(o standing) bool { return o.awaits(all, v) }) {
		if err := s.await(ctx, all[g.Rank()].awaits(all, v)); err != nil {
			return root, err
		}
		if all, err = tell(ctx, g, s.standing()); err != nil {
			return root, err
		}
	}
	if !slices.ContainsFunc(all, func(o standing) bool { return !o.Within }) {
		s.joined = g.Generation()
	}
	v := verdictOf(all, root)
	if v.source >= 0 {
		if v.kept && v.source == g.Rank() {
			s.state.worker.log.Debugf("elastic: sends the averages of step %d, which it has kept, to the ranks that lack them", s.last.number)
		}
		applies := all[g.Rank()].applies(v.reached)
		if v.lacking {
			if err := s.give(ctx, g, v, applies); err != nil {
				return root, err
			}
		}
		if v.replayed {
			if err := s.settleCarried(ctx, g, v, applies && s.state.catchUp != nil); err != nil {
				return root, err
			}
		}
		if applies {
			if err := s.settleApply(); err != nil {
				return root, err
			}
		}
	}
	s.others = roster{generation: g.Generation(), next: v.reached, held: v.held}
	s.caught, s.caughtAt = all[g.Rank()].Replays && s.live.applied == v.reached, s.live
	return v.root, nil
}

// standing returns the report of this rank.
func (s *Steps[T]) standing() standing {
	mine := standing{State: s.state.holds, Within: s.within, Sealed: s.sealed && s.within, Applied: s.live.applied, Feed: s.state.following(), Keeps: s.keepsLast()}
	if c := s.state.catchUp; c != nil {
		mine.Within, mine.Replays = false, s.within && c.follower != nil && !c.spoiled
	}
	for _, h := range s.nodes {
		mine.Nodes = append(mine.Nodes, h.node)
	}
	return mine
}

// awaits reports whether the rank lacks only the averages of the last step, which all others have
// applied, and the member that it follows has kept them. The rank then applies that one step in the
// same Step of train, and no more: what apply does can depend on what train has derived from the
// position.
func (r standing) awaits(all []standing, v verdict) bool {
	return v.source < 0 && r.lacksLast(v.reached) && r.follows(all, v.reached)
}

// lacksLast reports whether the rank lacks only the averages of the last of reached steps.
func (r standing) lacksLast(reached uint64) bool { return r.Replays && r.Applied+1 == reached }

// follows reports whether the rank follows a member that has applied reached steps.
func (r standing) follows(all []standing, reached uint64) bool {
	return r.Feed != 0 && slices.ContainsFunc(all, func(o standing) bool {
		return o.State && o.Feed == r.Feed && o.Applied == reached
	})
}

// await applies the step that this rank awaits, if mine is set. If that fails, the sync sends the
// state to this rank.
func (s *Steps[T]) await(ctx context.Context, mine bool) error {
	if !mine {
		return nil
	}
	if err := s.applyNext(ctx); err != nil {
		s.state.catchUp.spoiled = true
		s.state.worker.log.Debugf("elastic: the last step could not be applied, so the sync sends the state: %v", err)
	}
	return ctx.Err()
}

// verdict is the conclusion from the reports of all ranks. It is the same on all ranks.
type verdict struct {
	reached uint64 // number of steps that the ranks with the state have applied, or apply now
	source  int    // the rank that has averages to apply; -1: none
	kept    bool   // source has already applied them, and has kept them for ranks that lack them
	lacking bool   // other ranks need them
	// replayed means that a rank that is not a member yet applies them too.
	replayed bool
	held     [][]collective.Node
	root     int
}

func verdictOf(all []standing, root int) verdict {
	v := verdict{source: -1, root: root, held: make([][]collective.Node, len(all))}
	for _, o := range all {
		if o.State {
			v.reached = max(v.reached, o.reached())
		}
	}
	for r, o := range all {
		if !o.State {
			continue
		}
		if o.Applied == v.reached {
			v.held[r] = o.Nodes
		} else if o.reached() == v.reached && v.source < 0 {
			v.source = r
		}
	}
	if v.source < 0 && slices.ContainsFunc(all, func(o standing) bool { return o.lacksLast(v.reached) && !o.follows(all, v.reached) }) {
		v.source = slices.IndexFunc(all, func(o standing) bool { return o.State && o.Keeps && o.Applied == v.reached })
		v.kept = v.source >= 0
	}
	arrives := func(o standing) bool {
		return o.State && (o.Applied == v.reached || v.source >= 0 && o.applies(v.reached))
	}
	for _, o := range all {
		applies := v.source >= 0 && o.applies(v.reached)
		v.lacking = v.lacking || applies && !o.Sealed
		v.replayed = v.replayed || applies && o.Replays
	}
	if all[root].State && !arrives(all[root]) {
		v.root = slices.IndexFunc(all, arrives)
	}
	return v
}

// applies reports whether the rank applies the last of reached steps, provided that any rank has
// its averages.
func (r standing) applies(reached uint64) bool {
	return (r.State && r.Within || r.Replays) && r.Applied+1 == reached
}

// give broadcasts the averages from one rank to all. Afterwards the ranks with wanted set have
// them.
func (s *Steps[T]) give(ctx context.Context, g *collective.Group, v verdict, wanted bool) error {
	s.prepare()
	data := s.mean.flat
	switch {
	case !v.kept || wanted:
	case g.Rank() == v.source:
		data = s.last.averages
	default: // keep the averages of the next step, which are complete here
		other := s.take()
		defer func() { s.free = append(s.free, other) }()
		data = other.flat
	}
	if err := collective.Broadcast(ctx, g, data, v.source); err != nil {
		return err
	}
	s.sealed = s.sealed || wanted
	return nil
}

// settleApply applies the step and saves the state, like the commit of a Step. The sync that
// follows takes the place of that commit's agreement. The save gets the mark of that commit, as on
// ranks that made the commit in the previous world, so that the sync sends them nothing.
func (s *Steps[T]) settleApply() error {
	if s.state.catchUp != nil {
		s.state.saved.clean = false
	}
	s.state.worker.doing.enter(line.Training)
	defer s.state.worker.doing.enter(line.Syncing)
	if err := s.applySealed(); err != nil {
		return err
	}
	if s.state.catchUp != nil { // the sync saves
		return nil
	}
	s.state.locals.unreplicated()
	mark := s.state.saved.nextMark(s.state.saved.given.Generation)
	if err := s.state.saveAs(s.state.commits+1, s.state.savesInPlace()); err != nil {
		return err
	}
	s.state.saved.mark = mark
	s.state.commits++
	return nil
}

// goOn enters the next world within a Step, with the live state, and reports whether all its
// members are in a Step.
func (s *State) goOn(err error) (together bool, _ error) {
	r := s.run
	for {
		if r.ctx.Err() != nil {
			return false, r.ctx.Err()
		}
		s.saved.clean, s.saved.promised = true, nil // only apply changes tensors, and a commit follows it
		if err = r.reset(err); err == nil {
			break
		}
		if !goesOn(err) {
			return false, err
		}
	}
	s.worker.beginTraining()
	return s.steps.together(), nil
}
