package collective

import (
	"cmp"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// Progress is the progress of a rank in one of the groups of a generation.
type Progress struct {
	// Lane identifies the group, as in [Span]. Asynchronous operations have two more lanes: one
	// that counts their tensors, and one on which the ranks perform them.
	Lane uint64
	// Operation is the number of operations of the lane that this rank has entered, or of tensors
	// that it has submitted since the last time that all ranks joined. The operation with a given
	// number is the same on all ranks.
	Operation uint64
	// Waiting reports whether the last operation, or some tensor, has not ended.
	Waiting bool
	// What is the name of the last operation, such as AllReduce, or of the oldest tensor in
	// progress. It is empty before the first operation.
	What string
}

// Progress returns the progress of this rank in the groups of its generation: the group of all
// ranks first, the others in the order of their lanes. Any goroutine may call it at any time. It
// does not block for long and does not slow down operations. A rank that is Waiting in two calls
// with the same Operation has waited all the time between them.
func (g *Group) Progress() []Progress {
	if g == nil {
		return nil
	}
	g.family.mu.Lock()
	groups := make([]*Group, 0, len(g.family.lanes))
	for _, member := range g.family.lanes {
		groups = append(groups, member)
	}
	g.family.mu.Unlock()
	all := make([]Progress, 0, len(groups))
	engines := map[uint64]operation.Action{}
	for _, member := range groups {
		all = append(all, member.progress())
		if e := member.async.Load(); e != nil {
			tensors, last := e.progress()
			engines[laneID(member.lane, asyncLane, 0)] = last
			all = append(all, tensors)
		}
	}
	for i := range all {
		if last := engines[all[i].Lane]; last != 0 {
			all[i].What = last.String()
		}
	}
	slices.SortFunc(all, func(a, b Progress) int { return cmp.Compare(a.Lane, b.Lane) })
	return all
}

// The beginning and the end of an operation each write one word, so that Progress costs an
// operation nothing. The word has the number of operations that this rank has entered, whether the
// last one is in progress, and its action.
const (
	actionMask = 1<<7 - 1
	underWay   = 1 << 7
	stateMask  = underWay | actionMask
	entered    = 1 << 8
	closing    = operation.Action(actionMask) // the action of Close
)

// claim begins an operation. It returns false if another one is in progress.
func (g *Group) claim(a operation.Action) bool {
	was := g.state.Load()
	return was&underWay == 0 && g.state.CompareAndSwap(was, was&^stateMask+entered|underWay|uint64(a))
}

// free ends the operation that claim began.
func (g *Group) free() { g.state.Store(g.state.Load() &^ underWay) }

// progress returns the progress in the operations of this group alone.
func (g *Group) progress() Progress {
	state := g.state.Load()
	p := Progress{Lane: g.lane, Operation: state / entered, Waiting: state&underWay != 0}
	if a := operation.Action(state & actionMask); a < operation.Actions {
		p.What = g.noted(a).String()
	} else {
		p.Waiting = false
	}
	return p
}

// tensorLane is the kind of the lane on which an engine counts tensors.
const tensorLane = 't'

// progress returns the progress in the engine's tensors, and the action of the oldest one.
func (e *engine) progress() (Progress, operation.Action) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := Progress{Lane: laneID(e.g.lane, tensorLane, 0), Operation: e.submitted, Waiting: len(e.names) > 0}
	var oldest *Handle
	for _, h := range e.names {
		if oldest == nil || cmp.Or(h.since.Compare(oldest.since), cmp.Compare(h.name, oldest.name)) < 0 {
			oldest = h
		}
	}
	switch {
	case oldest == nil:
		return p, operation.AllReduceAsync
	case oldest.name == joinName:
		p.What = "Join"
	default:
		p.What = oldest.name
	}
	return p, oldest.request.Action()
}
