package collective

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const lingers = 200 // yields

// transport moves frames from one rank of a group to the others, and delivers what they send to the
// group's inboxes. Frames to one rank arrive in the order of their sends. It learns of the loss of
// a peer by itself and calls fail.
type transport interface {
	// send starts to move a frame to another rank. It does not block.
	send(to int, o *outgoing)
	// flood tells every other rank why the group has ended. It blocks for a moment at most.
	flood(n *notice)
	// release ends all movement at once; it may be called more than once.
	release()
	// quiesce blocks, after release, until nothing touches a buffer of a request any more.
	quiesce()
	// leave tells every rank that this one sends no more operations, and blocks until all that it
	// has sent is read or a bound has passed.
	leave()
	// nudge tells another rank that the group's engine begins a cycle. It does not block for long,
	// and an error does no harm.
	nudge(to int, cycle uint64)
}

// Group is the connected ranks of one generation, or some of them ([Group.Subset]). Its operations
// are the functions of this package; they and its methods on a nil Group return errors or zero
// values, Rank −1.
type Group struct {
	rank, size int
	generation uint64
	lane       uint64    // what tells it from the other groups of the generation; 0 for that of all ranks
	members    []int     // by rank: the ranks in the group of all; nil where these are the same
	family     *family   // the groups of the generation in this process
	strict     bool      // every AllReduce is Strict, whatever the family's are
	path       transport // nil for a group of one
	tcp        *tcpPath  // path, where operations may drive it themselves
	boxes      []inbox   // by rank; the own one is unused

	host  atomic.Pointer[host] // the ranks that share memory with this one; nil: none. Set before the group is handed out
	hosts [][]int              // the ranks by host, where those of each host share memory; nil: some do not, or there is one host

	state    atomic.Uint64 // see claim
	closing  atomic.Bool
	finished atomic.Uint64 // operations that went well
	wake     chan struct{} // one token: something has changed for the operation under way
	failed   chan struct{} // closed once the group has failed and every rank has been told

	mu       sync.Mutex
	failure  error
	notice   notice   // as failAs has got it
	children []*Group // subsets made from this group, not closed
	subsets  uint64   // how many have been agreed on

	asyncMu sync.Mutex
	async   *engine       // of asynchronous operations; nil until the first one
	cycle   atomic.Uint64 // of an engine's own group: the highest one that this rank has been told of
	parted  atomic.Bool   // a rank has left
	bell    chan struct{} // one token: one of these has changed

	call call // of the operation under way; kept for its buffers
}

func newGroup(f *family, lane uint64, rank, size int, members []int) *Group {
	g := &Group{rank: rank, size: size, generation: f.generation, lane: lane, members: members, family: f,
		bell: make(chan struct{}, 1), wake: make(chan struct{}, 1), failed: make(chan struct{}), boxes: make([]inbox, size)}
	for i := range g.boxes {
		g.boxes[i] = inbox{g: g, from: i, last: math.MaxUint64, ready: make(chan struct{}, 1)}
	}
	g.call.g = g
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

// Failed returns a channel that is closed once the group has failed, also while none of its
// operations is under way: then every later one returns an error. It is for those who wait for
// something else that needs the other ranks. That of a nil Group is never closed.
func (g *Group) Failed() <-chan struct{} {
	if g == nil {
		return nil
	}
	return g.failed
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
	g.eachChild(func(child *Group) { child.Close() })
	if g.claim(closing) {
		if g.path != nil && g.err() == nil {
			g.path.leave()
		}
	} else {
		g.fail(gone(ErrClosed, g.rank))
	}
	g.giveUp()
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
	n := gone(cause, g.rank)
	var a *AbortedError
	if errors.As(cause, &a) && len(a.Dead) > 0 {
		n.dead = a.Dead
	}
	g.fail(n)
	<-g.failed
	g.giveUp()
	g.stopEngine()
	g.eachChild(func(child *Group) { child.Abort(cause) })
}

// giveUp ends all movement and blocks until nothing of the group is left.
func (g *Group) giveUp() {
	if g.path != nil {
		g.path.release()
		g.path.quiesce()
	}
	g.host.Load().close()
}

// fail ends the group and all other groups of the generation, and tells every rank why. The first
// reason stays. The notice names ranks as the group numbers them.
func (g *Group) fail(n notice) { g.failAs(g.outward(n)) }

// failAs is fail with a notice that names ranks as the group of all ranks numbers them, as all do
// that go to others: a rank that is not in this group may be in other groups of those who hear of
// it.
func (g *Group) failAs(n notice) {
	inside := g.inward(n)
	g.mu.Lock()
	if g.failure != nil {
		g.mu.Unlock()
		return
	}
	g.failure, g.notice = inside.error(g.generation), n
	g.mu.Unlock()
	if h := g.host.Load(); h != nil {
		h.member.Abort()
	}
	if g.path != nil && !g.family.dead.Load() {
		g.path.flood(&n) // before this rank's operation can return, and its process end
	}
	g.family.spread(g, n)
	close(g.failed)
	if g.path != nil {
		g.path.release()
	}
}

func (g *Group) err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failure
}

// poke makes the operation under way look at its requests again.
func (g *Group) poke() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
	if g.tcp != nil {
		g.tcp.poke()
	}
}

// survive ends the calling goroutine where its worker is one and has been killed. The engine's own
// does not call it, for it has operations to end.
func (g *Group) survive() {
	if g != nil && g.family.dead.Load() {
		runtime.Goexit()
	}
}

// run runs one operation.
func (g *Group) run(ctx context.Context, d descriptor, invalid error, body func(*call) error) error {
	err := g.operate(ctx, d, invalid, body)
	if g != nil && !g.strict {
		g.survive()
	}
	return err
}

// operate does so. With invalid arguments the ranks still agree that all of them have called it so,
// since the others would wait for ever otherwise.
func (g *Group) operate(ctx context.Context, d descriptor, invalid error, body func(*call) error) error {
	d = d.judged(invalid)
	if err := g.enter(d.action); err != nil {
		return err
	}
	defer g.free()
	if g.family.timeline != nil {
		defer g.record(d, time.Now())
	}
	if h := g.host.Load(); h != nil && (d.action != allReduce || invalid != nil || !g.tiered(d.reduce)) {
		if err := h.arrive(ctx, d); err != nil {
			return err
		}
	}
	c := &g.call
	if err := c.begin(ctx, d); err != nil {
		return c.end(err)
	}
	var err error
	if invalid != nil {
		err = c.agree()
	} else {
		err = body(c)
	}
	if err == nil {
		err = c.flush()
	}
	if err = c.end(err); err == nil && invalid != nil {
		return d.refuse(invalid)
	}
	return err
}

// judged is the call as the others are told of it: one that is refused on this rank fits no valid
// one, nor one that another rank refuses with other arguments as far as the descriptor tells.
func (a descriptor) judged(invalid error) descriptor {
	if invalid != nil {
		a.algorithm |= refusedCall
	}
	return a
}

// refuse is the error of invalid arguments.
func (a descriptor) refuse(invalid error) error {
	return fmt.Errorf("collective: %s: %w", actionNames[a.action], invalid)
}

// enter begins an operation, or returns why there cannot be one. The caller makes the group free
// again.
func (g *Group) enter(a action) error {
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
	if g.err() != nil {
		g.free()
		return g.lost()
	}
	return nil
}

// lost is the error of an operation whose group has failed.
func (g *Group) lost() error {
	if g.host.Load() != nil {
		g.linger()
	}
	<-g.failed
	return g.err()
}

// linger waits for some microseconds until all have been told, without giving up this thread: where
// a death is the reason, the tripwire is about to be done, and another thread would have to find a
// core.
func (g *Group) linger() {
	for range lingers {
		select {
		case <-g.failed:
			return
		default:
			runtime.Gosched()
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
}

// call is an operation under way on one rank.
type call struct {
	g    *Group
	ctx  context.Context
	desc descriptor
	seq  uint64

	outs    []*outgoing // used ones first, in the order of their sends
	outUsed int
	ins     []*incoming
	inUsed  int
	buffer  []byte
	owners  []int

	segment    int // most bytes of a frame
	sentBefore []int
	posted     []*incoming
}

func (c *call) begin(ctx context.Context, d descriptor) error {
	c.ctx, c.desc = ctx, d
	c.seq++
	c.outUsed, c.inUsed = 0, 0
	if c.segment = c.g.family.segment; c.segment == 0 {
		c.segment = segment
	}
	if ctx.Err() != nil {
		return c.cancelled()
	}
	if c.g.tcp != nil && !c.g.tcp.start() {
		return c.lost()
	}
	for i := range c.g.boxes {
		if i == c.g.rank {
			continue
		}
		if n, ok := c.g.boxes[i].enter(c.seq, d); !ok {
			c.g.fail(n)
			return c.lost()
		}
	}
	return nil
}

// end makes sure that nothing touches the caller's buffers after an error, and drops references to
// them.
func (c *call) end(err error) error {
	if err != nil && c.g.path != nil {
		c.g.path.release()
		c.g.path.quiesce()
	}
	for _, o := range c.outs[:c.outUsed] {
		o.data = nil
	}
	for _, r := range c.ins[:c.inUsed] {
		r.buf = nil
	}
	c.ctx, c.outUsed, c.inUsed = nil, 0, 0
	if err == nil {
		c.g.finished.Store(c.seq)
	}
	if c.g.tcp != nil {
		c.g.tcp.finish()
		c.g.tcp.concluded()
	}
	return err
}

// cancelled ends the group because this rank no longer takes part in the operation.
func (c *call) cancelled() error {
	err := c.ctx.Err()
	c.g.fail(gone(err, c.g.rank))
	<-c.g.failed
	return fmt.Errorf("collective: %s: %w", actionNames[c.desc.action], err)
}

// lost is the error of an operation whose group has failed.
func (c *call) lost() error { return c.g.lost() }

// send starts to send one frame.
func (c *call) send(to int, step uint32, data []byte) *outgoing {
	return c.sendOf(to, step, c.desc.count, data)
}

// sendOf sends a frame whose header tells a count of its own.
func (c *call) sendOf(to int, step uint32, count uint64, data []byte) *outgoing {
	if c.outUsed == len(c.outs) {
		c.outs = append(c.outs, &outgoing{group: c.g})
	}
	o := c.outs[c.outUsed]
	c.outUsed++
	o.header = header{kind: dataFrame, call: c.desc, step: step, length: uint32(len(data)),
		generation: c.g.generation, seq: c.seq}
	o.header.call.count = count
	o.data = data
	o.done.Store(false)
	c.g.path.send(to, o)
	return o
}

// post asks for the next frame of a rank, which must be of this step and fill buf.
func (c *call) post(from int, step uint32, buf []byte) *incoming {
	if c.inUsed == len(c.ins) {
		c.ins = append(c.ins, new(incoming))
	}
	r := c.ins[c.inUsed]
	c.inUsed++
	r.buf, r.step = buf, step
	r.done.Store(false)
	c.expect(from)
	c.g.boxes[from].post(r)
	return r
}

// expect has a rank connected that is waited for, so that its death is noticed.
func (c *call) expect(from int) {
	if c.g.tcp != nil {
		c.g.tcp.want(from)
	}
}

// receive posts and waits.
func (c *call) receive(from int, step uint32, buf []byte) error {
	return c.wait(&c.post(from, step, buf).done)
}

// peek waits for the header of the next frame of a rank, without taking the frame.
func (c *call) peek(from int) (header, error) {
	c.expect(from)
	for {
		if h, ok := c.g.boxes[from].peek(); ok {
			return h, nil
		}
		if err := c.pause(); err != nil {
			return header{}, err
		}
	}
}

// wait waits for one request.
func (c *call) wait(done *atomic.Bool) error {
	for !done.Load() {
		if err := c.pause(); err != nil {
			return err
		}
	}
	return nil
}

// flush waits for all sends.
func (c *call) flush() error {
	for _, o := range c.outs[:c.outUsed] {
		if err := c.wait(&o.done); err != nil {
			return err
		}
	}
	return nil
}

// pause waits until something has changed.
func (c *call) pause() error {
	if c.g.tcp != nil && c.g.tcp.driven {
		return c.g.tcp.pause(c)
	}
	select {
	case <-c.g.wake:
		return nil
	case <-c.g.failed:
		return c.lost()
	case <-c.ctx.Done():
		return c.cancelled()
	}
}

// scratch returns n bytes for partial results, aligned for every element type. They are valid until
// the next call of it.
func (c *call) scratch(n int) []byte {
	if cap(c.buffer) < n {
		c.buffer = make([]byte, n)
	}
	return c.buffer[:n]
}
