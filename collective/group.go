package collective

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/wake"
)

const lingers = 200 // number of times that linger yields the core

// Group is the connected ranks of one generation, or some of them ([Group.Subset]). Its operations
// are the functions of this package. With a nil Group they return errors; methods on a nil Group
// return errors or zero values, and Rank returns −1.
type Group struct {
	membership
	activity

	mu sync.Mutex // guards outcome and subgroups
	outcome
	subgroups

	background
	points points

	call levels.Call // the operation in progress; kept for its buffers
}

// membership describes which ranks are in a group. It does not change.
type membership struct {
	rank, size int
	generation uint64
	lane       uint64  // identifies the group among those of the generation; 0 for the group of all ranks
	members    []int   // by rank, the ranks in the group of all ranks; nil if they are the same
	family     *family // the groups of the generation in this process
	oneWay     bool    // rank exchange.Sender sends messages to the other rank
	tally      *tally  // counts the group's operations; nil if they are not counted
}

// activity is the state of a group's operations.
type activity struct {
	state   atomic.Uint64 // see claim
	closing atomic.Bool
}

// outcome is the reason why a group has failed.
type outcome struct {
	failure error
	notice  frame.Notice // as passed to failAs
}

// subgroups are the groups that were made from a group.
type subgroups struct {
	children []*Group // those that are not closed
	subsets  uint64   // number of subsets agreed on
}

// background is the state for asynchronous operations in a group, or in the engine's own group.
type background struct {
	asyncMu  sync.Mutex
	async    atomic.Pointer[engine] // nil until the first operation
	cycle    atomic.Uint64          // in an engine's own group: the highest cycle of which this rank was notified
	begun    atomic.Uint64          // the last cycle that this rank has begun
	peerLeft atomic.Bool            // a rank has left
	changed  wake.Flag              // one of these fields has changed
}

// newGroup returns the group of a lane. It is not connected yet.
func newGroup(f *family, l lane) *Group {
	g := &Group{
		membership: membership{rank: l.Rank, size: l.Size, generation: f.Number, lane: l.ID, members: l.Members, family: f, oneWay: l.oneWay, tally: f.tally},
		background: background{changed: wake.New()},
	}
	if l.carries {
		g.tally = nil
	}
	g.call.Place = exchange.Place{Rank: l.Rank, Size: l.Size, Generation: f.Number, Strict: l.strict, Forced: &f.forced}
	g.call.Links = exchange.Links{Group: (*inner)(g), Boxes: frame.Inboxes((*inner)(g), f.Number, l.Rank, l.Size),
		Wake: wake.New(), Failed: make(chan struct{})}
	return g
}

// Rank returns this rank's number, from 0.
func (g *Group) Rank() int {
	if g == nil {
		return -1
	}
	return g.rank
}

// Size returns the number of ranks.
func (g *Group) Size() int {
	if g == nil {
		return 0
	}
	return g.size
}

// Generation returns the generation of the world whose ranks the group connects; 0 for a group of
// [Local].
func (g *Group) Generation() uint64 {
	if g == nil {
		return 0
	}
	return g.generation
}

// Lane returns a number that identifies the group among those of its generation. It is the same on
// all its ranks, and for a group that is made in the same way in another generation. It is 0 for
// the group of all ranks and for a nil Group.
func (g *Group) Lane() uint64 {
	if g == nil {
		return 0
	}
	return g.lane
}

// Sent returns the number of bytes that this rank has sent over sockets in operations of the
// generation so far, in all its groups, including headers; 0 for a nil Group.
func (g *Group) Sent() uint64 {
	if g == nil {
		return 0
	}
	return g.family.Sent.Load()
}

// Failed returns a channel that is closed when the group fails, also while no operation is in
// progress: every later operation then returns an error. It is for callers that wait for something
// else that needs the other ranks. The channel of a nil Group is never closed.
func (g *Group) Failed() <-chan struct{} {
	if g == nil {
		return nil
	}
	return g.call.Failed
}

// Close leaves the group. Ranks that are still in an operation that this one has finished can
// finish it; operations that would need this rank afterwards fail on every rank with an
// [*AbortedError] that names it. Close blocks until the others have read everything that this rank
// has sent, for at most a second. During an operation of this rank, also an asynchronous one, it
// acts as [Group.Abort]. Subsets of the group are closed with it. Close always returns nil. A
// second call does nothing.
func (g *Group) Close() error {
	if g == nil || !g.closing.CompareAndSwap(false, true) {
		return nil
	}
	g.stopEngine()
	g.stopPoints()
	g.eachChild(func(child *Group) { child.Close() })
	if g.claim(closing) {
		if g.call.Path != nil && g.err() == nil {
			g.call.Path.Leave()
		}
	} else {
		g.fail(frame.Gone(ErrClosed, g.rank))
	}
	g.releaseAll()
	g.family.remove(g)
	return nil
}

// Abort ends the group at once on every rank, and with it all other groups of the generation:
// operations in progress and all later ones return an [*AbortedError] that names this rank or, if
// cause is itself an AbortedError, the ranks that cause names. Abort may be called from any
// goroutine. It blocks until the goroutines of the group and of its subsets have ended. Close is
// not needed afterwards.
func (g *Group) Abort(cause error) {
	if g == nil {
		return
	}
	n := frame.Gone(cause, g.rank)
	var a *AbortedError
	if errors.As(cause, &a) && len(a.Dead) > 0 {
		n.Dead = a.Dead
	}
	g.fail(n)
	<-g.call.Failed
	g.releaseAll()
	g.stopEngine()
	g.stopPoints()
	g.eachChild(func(child *Group) { child.Abort(cause) })
}

// releaseAll stops all transfers and blocks until the group's goroutines have ended.
func (g *Group) releaseAll() {
	if g.call.Path != nil {
		g.call.Path.Release()
		g.call.Path.Quiesce()
	}
	g.call.Here().Close()
}

// fail ends the group and all other groups of the generation, and reports the reason to every rank.
// The first reason counts. The notice names ranks as numbered in the group.
func (g *Group) fail(n frame.Notice) { g.failAs(g.outward(n)) }

// failAs is like fail, with a notice that names ranks as numbered in the group of all ranks. All
// notices that are sent to other ranks use these numbers: a rank that is not in this group may be
// in other groups of the receivers.
func (g *Group) failAs(n frame.Notice) {
	inside := g.inward(n)
	g.mu.Lock()
	if g.failure != nil {
		g.mu.Unlock()
		return
	}
	g.failure, g.notice = errorOf(&inside, g.generation), n
	g.mu.Unlock()
	if h := g.call.Here(); h != nil {
		h.Abort()
	}
	if g.call.Path != nil && !g.family.Killed.Load() {
		g.call.Path.Flood(&n) // before this rank's operation can return and its process can end
	}
	g.family.failOthers(g, n)
	close(g.call.Failed)
	if g.call.Path != nil {
		g.call.Path.Release()
	}
}

// Err returns the error that the next operation of a failed group would return; nil if the group
// has not failed, and for a nil Group. If ranks share memory and another rank of this host has
// given up an operation, so that it may write to its tensors again, Err is not nil on this rank. It
// may be called from any goroutine, and blocks for at most a second until the reason is known.
func (g *Group) Err() error {
	if g == nil {
		return nil
	}
	if err := g.err(); err != nil {
		return err
	}
	if h := g.call.Here(); h != nil {
		return h.Failure()
	}
	return nil
}

// err returns the error of a failed group, or nil.
func (g *Group) err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failure
}

// inner implements sockets.Group and exchange.Group for a group.
type inner Group

func (g *inner) Enroll() bool            { return g.family.add((*Group)(g)) }
func (g *inner) Fail(n frame.Notice)     { (*Group)(g).fail(n) }
func (g *inner) FailAll(n frame.Notice)  { (*Group)(g).failAs(n) }
func (g *inner) Failed() <-chan struct{} { return g.call.Failed }
func (g *inner) Poke()                   { (*Group)(g).poke() }
func (g *inner) Wake() wake.Flag         { return g.call.Wake }
func (g *inner) Finished() uint64        { return g.call.Finished.Load() }
func (g *inner) Closing() bool           { return g.closing.Load() }
func (g *inner) Lost() error             { return (*Group)(g).lost() }
func (g *inner) Departed()               { (*Group)(g).departed() }
func (g *inner) Nudged(cycle uint64)     { (*Group)(g).nudged(cycle) }
func (g *inner) Knows(c frame.Call) bool { return operation.Called(c).Known() }

func (g *inner) Failure() (n frame.Notice, failed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.notice, g.failure != nil
}

func (g *inner) Left(rank int) {
	if h := g.call.Here(); h != nil {
		h.Left(rank)
	}
}

// poke wakes the operation in progress, which then checks its requests again.
func (g *Group) poke() {
	g.call.Wake.Set()
	if g.call.TCP != nil {
		g.call.TCP.Poke()
	}
}

// exitIfKilled ends the calling goroutine if its worker, which is a goroutine, has been killed. The
// engine's goroutine does not call it, since it must end the operations.
func (g *Group) exitIfKilled() {
	if g != nil && g.family.Killed.Load() {
		runtime.Goexit()
	}
}

// run runs one operation, and keeps its time for Waits. It ends the goroutine of a killed worker.
func (g *Group) run(ctx context.Context, d operation.Descriptor, invalid error, body func(*levels.Call) error) error {
	operation, begun := g.watched(d.Action)
	err := g.operate(ctx, d, invalid, body)
	if !begun.IsZero() && err == nil {
		g.family.waits.keep(operation, time.Since(begun))
	}
	if g != nil && !g.call.Strict {
		g.exitIfKilled()
	}
	return err
}

// operate runs one operation. The ranks compare the call even if its arguments are invalid;
// otherwise the other ranks would wait for ever.
func (g *Group) operate(ctx context.Context, d operation.Descriptor, invalid error, body func(*levels.Call) error) error {
	d = d.Judged(invalid)
	if err := g.enter(d.Action); err != nil {
		return err
	}
	defer g.free()
	if g.family.timeline != nil {
		defer func(begun time.Time) { g.record(d, begun, g.ran()) }(time.Now())
	}
	begun := time.Duration(0)
	if g.tally != nil {
		begun = g.tally.now()
	}
	c := &g.call
	if err := c.Begin(ctx, d); err != nil {
		return c.End(err)
	}
	// Other ranks may leave this operation and send frames of the next one as soon as this rank has
	// compared its call with those of its host. So the operation must have begun before that.
	if h := g.call.Here(); h != nil && (invalid != nil || !g.meetsInMemory(d)) {
		if err := h.Arrive(ctx, d); err != nil {
			return c.End(err)
		}
	}
	var err error
	if invalid != nil {
		err = c.Agree()
	} else {
		err = body(c)
	}
	if err == nil {
		err = c.Flush()
	}
	// Ranks of one host reduce each other's tensors in place and send the sums to other hosts. They
	// check for an abort in between; the ranks that receive the sums check again here.
	if err == nil && g.call.TwoLevels() {
		err = g.Err()
	}
	if err = c.End(err); err == nil && invalid != nil {
		return d.Action.Wrap(invalid)
	}
	if err == nil && g.tally != nil {
		g.tally.note(g.noted(d.Action), d.Bytes(), begun, g.ran())
	}
	return err
}

// meetsInMemory reports whether the body of an operation itself makes the ranks of a host compare
// their calls in shared memory.
func (g *Group) meetsInMemory(d operation.Descriptor) bool {
	switch d.Action {
	case operation.AllReduce:
		return g.call.Hierarchical()
	case operation.AllGather, operation.ReduceScatter, operation.AllToAll, operation.AllGatherInto, operation.AllToAllInto, operation.ReduceTree:
		return g.call.TwoLevels()
	}
	return false
}

// enter begins an operation, or returns the reason why it cannot begin. The caller calls free at
// the end.
func (g *Group) enter(a operation.Action) error {
	if g == nil {
		return errNoGroup
	}
	if g.closing.Load() {
		return ErrClosed
	}
	if !g.claim(a) {
		if g.closing.Load() {
			return ErrClosed
		}
		return ErrBusy
	}
	select {
	case <-g.call.Failed:
		g.free()
		return g.lost()
	default:
		return nil
	}
}

// lost returns the error of an operation whose group has failed.
func (g *Group) lost() error {
	if g.call.Here() != nil {
		g.linger()
	}
	<-g.call.Failed
	return g.err()
}

// linger waits for some microseconds until all ranks have been notified, without giving up this
// thread: after a death the tripwire is about to finish, and another thread would first need a
// core.
func (g *Group) linger() {
	for range lingers {
		select {
		case <-g.call.Failed:
			return
		default:
			runtime.Gosched()
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
}

// do runs an operation in shared memory, if all ranks of the group are on one host.
func (g *Group) do(ctx context.Context, d operation.Descriptor, invalid error, body func(*shm.Member, shm.Desc) error) error {
	h := g.call.Here()
	d = d.Judged(invalid)
	if err := g.enter(d.Action); err != nil {
		return err
	}
	defer g.free()
	if g.family.timeline != nil {
		defer g.recordPhases(h, d, h.Watch())
	}
	if invalid != nil {
		if err := h.Arrive(ctx, d); err != nil {
			return err
		}
		return d.Action.Wrap(invalid)
	}
	if g.tally == nil {
		return h.Within(ctx, d, body)
	}
	cell := g.tally.cell(g.noted(d.Action), d.Bytes(), operation.InMemory)
	timed := cell.due(d, g.state.Load()/entered)
	h.Waited() // discard the waits of operations that are not counted here
	begun := time.Duration(0)
	if timed {
		begun = g.tally.now()
	}
	if err := h.Within(ctx, d, body); err != nil {
		return err
	}
	took := h.Waited()
	if timed {
		whole := g.tally.now() - begun
		cell.usual.Store(int64(whole - took))
		took = whole
	} else {
		took += time.Duration(cell.usual.Load())
	}
	cell.note(d.Bytes(), took)
	return nil
}
