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
)

const lingers = 200 // yields

// Group is the connected ranks of one generation, or some of them ([Group.Subset]). Its operations
// are the functions of this package; they and its methods on a nil Group return errors or zero
// values, Rank −1.
type Group struct {
	membership
	activity

	mu sync.Mutex // guards outcome and subgroups
	outcome
	subgroups

	background
	points points

	call levels.Call // the operation under way; kept for its buffers
}

// membership is who is in a group. It does not change.
type membership struct {
	rank, size int
	generation uint64
	lane       uint64  // tells the group from the others of the generation; 0 for that of all ranks
	members    []int   // by rank: the ranks in the group of all; nil where these are the same
	family     *family // the groups of the generation in this process
	oneWay     bool    // rank Sender sends messages to the other one
	tally      *tally  // counts its operations; nil: nobody does
}

// activity is what a group does.
type activity struct {
	state   atomic.Uint64 // see claim
	closing atomic.Bool
}

// outcome is why a group has failed.
type outcome struct {
	failure error
	notice  frame.Notice // as failAs has received it
}

// subgroups are the groups that were made from one.
type subgroups struct {
	children []*Group // that are not closed
	subsets  uint64   // how many have been agreed on
}

// background is what asynchronous operations need of a group, or of the engine's own one.
type background struct {
	asyncMu  sync.Mutex
	async    atomic.Pointer[engine] // nil until the first operation
	cycle    atomic.Uint64          // of an engine's own group: the highest one that this rank has been told of
	begun    atomic.Uint64          // the one that this rank has begun last
	peerLeft atomic.Bool            // a rank has left
	changed  chan struct{}          // one token: one of these has changed
}

// newGroup returns the group of a lane, which is not connected.
func newGroup(f *family, l lane) *Group {
	g := &Group{
		membership: membership{rank: l.rank, size: l.size, generation: f.Number, lane: l.id, members: l.members, family: f, oneWay: l.oneWay, tally: f.tally},
		background: background{changed: make(chan struct{}, 1)},
	}
	if l.carries {
		g.tally = nil
	}
	g.call.Place = exchange.Place{Rank: l.rank, Size: l.size, Generation: f.Number, Strict: l.strict, Forced: &f.forced}
	g.call.Links = exchange.Links{Group: (*inner)(g), Boxes: frame.Inboxes((*inner)(g), f.Number, l.rank, l.size),
		Wake: make(chan struct{}, 1), Failed: make(chan struct{})}
	return g
}

// Rank is this rank's number, from 0.
func (g *Group) Rank() int {
	if g == nil {
		return -1
	}
	return g.rank
}

// Size is the number of ranks.
func (g *Group) Size() int {
	if g == nil {
		return 0
	}
	return g.size
}

// Generation is that of the world whose ranks the group connects; 0 for a group of [Local].
func (g *Group) Generation() uint64 {
	if g == nil {
		return 0
	}
	return g.generation
}

// Lane tells the group from the others of its generation. It is the same on all its ranks, and for
// a group that is made in the same way in another generation; 0 for that of all ranks, and for a
// nil Group.
func (g *Group) Lane() uint64 {
	if g == nil {
		return 0
	}
	return g.lane
}

// Sent is how many bytes this rank has sent over sockets in operations of the generation so far,
// with their headers, in all its groups; 0 for a nil Group.
func (g *Group) Sent() uint64 {
	if g == nil {
		return 0
	}
	return g.family.Sent.Load()
}

// Failed returns a channel that is closed once the group has failed, also while none of its
// operations is under way: then every later one returns an error. It is for callers that wait for
// something else that needs the other ranks. The channel of a nil Group is never closed.
func (g *Group) Failed() <-chan struct{} {
	if g == nil {
		return nil
	}
	return g.call.Failed
}

// Close leaves the group. Ranks that are still in an operation that this one has finished can
// finish it; operations that would need this rank afterwards fail on every rank with an
// [*AbortedError] that names it. Close waits until the others have read all that this rank has
// sent, for a second at most. During an operation of this rank it acts as [Group.Abort]. Subsets
// that were made from the group are closed with it. Asynchronous operations under way count as one.
// It always returns nil. A second call does nothing.
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

// Abort ends the group at once on every rank, and with it all other groups of the generation: the
// operations under way and all later ones return an [*AbortedError] that names this rank, or, where
// cause is an AbortedError itself, those that cause names. It may be called from any goroutine and
// returns when the goroutines of the group and of its subsets have ended. Close is not needed after
// it.
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

// releaseAll ends all movement and blocks until the group's goroutines have ended.
func (g *Group) releaseAll() {
	if g.call.Path != nil {
		g.call.Path.Release()
		g.call.Path.Quiesce()
	}
	g.call.Here().Close()
}

// fail ends the group and all other groups of the generation, and tells every rank why. The first
// reason stays. The notice names ranks as the group numbers them.
func (g *Group) fail(n frame.Notice) { g.failAs(g.outward(n)) }

// failAs is fail with a notice that names ranks as the group of all ranks numbers them, as all do
// that go to others: a rank that is not in this group may be in other groups of the ranks that
// receive it.
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
		g.call.Path.Flood(&n) // before this rank's operation can return, and its process end
	}
	g.family.failOthers(g, n)
	close(g.call.Failed)
	if g.call.Path != nil {
		g.call.Path.Release()
	}
}

// Err is why the group has failed, as its next operation would return it; nil while it has not, and
// for a nil Group. Once another rank of this host has given up an operation, and may write to its
// tensors again, it is not nil here, where the ranks share memory. It may be called from any
// goroutine, and waits for at most a second until the reason is known.
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

func (g *Group) err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failure
}

// inner is a group as its inboxes and connections see it.
type inner Group

func (g *inner) Enroll() bool            { return g.family.add((*Group)(g)) }
func (g *inner) Fail(n frame.Notice)     { (*Group)(g).fail(n) }
func (g *inner) FailAll(n frame.Notice)  { (*Group)(g).failAs(n) }
func (g *inner) Failed() <-chan struct{} { return g.call.Failed }
func (g *inner) Poke()                   { (*Group)(g).poke() }
func (g *inner) Wake() chan struct{}     { return g.call.Wake }
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

// poke wakes the operation under way, which looks at its requests again.
func (g *Group) poke() {
	select {
	case g.call.Wake <- struct{}{}:
	default:
	}
	if g.call.TCP != nil {
		g.call.TCP.Poke()
	}
}

// exitIfKilled ends the calling goroutine if its worker, a goroutine, has been killed. The engine's
// goroutine does not call it, since it has operations to end.
func (g *Group) exitIfKilled() {
	if g != nil && g.family.Killed.Load() {
		runtime.Goexit()
	}
}

// run runs one operation.
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

// operate runs one operation. With invalid arguments the ranks still agree on the call, since the
// others would wait for ever otherwise.
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
	// Others may leave this operation, and send frames of the next one, as soon as this rank has
	// compared its call with those of its host: it has begun before.
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
	// Ranks of one host reduce each other's tensors where they lie, and send the sums to other
	// hosts. They look for an abort in between; this is a second look, by those that receive them.
	if err == nil && g.call.TwoLevels() {
		err = g.Err()
	}
	if err = c.End(err); err == nil && invalid != nil {
		return d.Refuse(invalid)
	}
	if err == nil && g.tally != nil {
		g.tally.note(g.noted(d.Action), d.Bytes(), begun, g.ran())
	}
	return err
}

// meetsInMemory reports whether the body of an operation has the ranks of a host meet in memory,
// and compare their calls there.
func (g *Group) meetsInMemory(d operation.Descriptor) bool {
	switch d.Action {
	case operation.AllReduce:
		return g.call.Hierarchical()
	case operation.AllGather, operation.ReduceScatter, operation.AllToAll, operation.AllGatherInto, operation.AllToAllInto, operation.ReduceTree:
		return g.call.TwoLevels()
	}
	return false
}

// enter begins an operation, or returns why it cannot begin. The caller frees the group again.
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

// lost is the error of an operation whose group has failed.
func (g *Group) lost() error {
	if g.call.Here() != nil {
		g.linger()
	}
	<-g.call.Failed
	return g.err()
}

// linger waits for some microseconds until all have been told, without giving up this thread: after
// a death the tripwire is about to finish, and another thread would need a core first.
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

// do runs an operation among the ranks of one host, which are all of the group, in their memory.
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
		return d.Refuse(invalid)
	}
	if g.tally == nil {
		return h.Within(ctx, d, body)
	}
	cell := g.tally.cell(g.noted(d.Action), d.Bytes(), operation.InMemory)
	timed := cell.due(d, g.state.Load()/entered)
	h.Waited() // in operations that are not counted here
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
