package elastic

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
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
	state   bool // the rank has the state
	within  bool // the rank is in a Step
	sealed  bool // it has the averages of the step after applied, and has not applied them
	replays bool // it has arrived by applying the averages of others, and can apply another step
	keeps   bool // it has kept the averages of the last applied step
	applied uint64
	feed    uint64            // feed that it follows or by which others follow it; 0: neither
	nodes   []collective.Node // what it has computed of the step after applied
}

// reached returns the number of steps that the rank has applied or can apply.
func (r standing) reached() uint64 {
	if r.sealed {
		return r.applied + 1
	}
	return r.applied
}

func (r standing) append(b []byte) []byte {
	flags := byte(0)
	for i, set := range []bool{r.state, r.within, r.sealed, r.replays, r.keeps} {
		if set {
			flags |= 1 << i
		}
	}
	b = transfer.AppendWord(transfer.AppendNumber(append(b, flags), r.applied), r.feed)
	b = transfer.AppendNumber(b, len(r.nodes))
	for _, n := range r.nodes {
		b = transfer.AppendNumber(b, n.Level, n.Index)
	}
	return b
}

func parseStanding(b []byte) (r standing, err error) {
	p := transfer.NewReader(b)
	if flags := p.Take(1); flags != nil {
		r.state, r.within, r.sealed, r.replays, r.keeps = flags[0]&1 != 0, flags[0]&2 != 0, flags[0]&4 != 0, flags[0]&8 != 0, flags[0]&16 != 0
	}
	r.applied = uint64(p.Number())
	r.feed = p.Word()
	for range p.Count() {
		r.nodes = append(r.nodes, collective.Node{Level: min(p.Number(), 64), Index: p.Number()})
	}
	if err := p.End(); err != nil {
		return standing{}, err
	}
	return r, nil
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
	if !slices.ContainsFunc(all, func(o standing) bool { return !o.within }) {
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
	s.caught, s.caughtAt = all[g.Rank()].replays && s.live.applied == v.reached, s.live
	return v.root, nil
}

// standing returns the report of this rank.
func (s *Steps[T]) standing() standing {
	mine := standing{state: s.state.holds, within: s.within, sealed: s.sealed && s.within, applied: s.live.applied, feed: s.state.following(), keeps: s.keepsLast()}
	if c := s.state.catchUp; c != nil {
		mine.within, mine.replays = false, s.within && c.follower != nil && !c.spoiled
	}
	for _, h := range s.nodes {
		mine.nodes = append(mine.nodes, h.node)
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
func (r standing) lacksLast(reached uint64) bool { return r.replays && r.applied+1 == reached }

// follows reports whether the rank follows a member that has applied reached steps.
func (r standing) follows(all []standing, reached uint64) bool {
	return r.feed != 0 && slices.ContainsFunc(all, func(o standing) bool {
		return o.state && o.feed == r.feed && o.applied == reached
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
		if o.state {
			v.reached = max(v.reached, o.reached())
		}
	}
	for r, o := range all {
		if !o.state {
			continue
		}
		if o.applied == v.reached {
			v.held[r] = o.nodes
		} else if o.reached() == v.reached && v.source < 0 {
			v.source = r
		}
	}
	if v.source < 0 && slices.ContainsFunc(all, func(o standing) bool { return o.lacksLast(v.reached) && !o.follows(all, v.reached) }) {
		v.source = slices.IndexFunc(all, func(o standing) bool { return o.state && o.keeps && o.applied == v.reached })
		v.kept = v.source >= 0
	}
	arrives := func(o standing) bool {
		return o.state && (o.applied == v.reached || v.source >= 0 && o.applies(v.reached))
	}
	for _, o := range all {
		applies := v.source >= 0 && o.applies(v.reached)
		v.lacking = v.lacking || applies && !o.sealed
		v.replayed = v.replayed || applies && o.replays
	}
	if all[root].state && !arrives(all[root]) {
		v.root = slices.IndexFunc(all, arrives)
	}
	return v
}

// applies reports whether the rank applies the last of reached steps, provided that any rank has
// its averages.
func (r standing) applies(reached uint64) bool {
	return (r.state && r.within || r.replays) && r.applied+1 == reached
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

// tell exchanges the reports of all ranks. It returns them by rank.
func tell(ctx context.Context, g *collective.Group, mine standing) ([]standing, error) {
	texts, err := collective.AllGather(ctx, g, transfer.Seal(mine.append(nil)))
	if err != nil {
		return nil, err
	}
	all := make([]standing, len(texts))
	for r, t := range texts {
		b, err := transfer.Unseal(t)
		if err == nil {
			all[r], err = parseStanding(b)
		}
		if err != nil {
			return nil, fmt.Errorf("elastic: sync: rank %d: %w", r, err)
		}
	}
	return all, nil
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
