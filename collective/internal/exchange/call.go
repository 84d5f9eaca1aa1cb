// Package exchange runs collective operations among ranks that exchange frames. A [Call] is one
// operation on one rank, with the frames that it sends and receives; its methods are the algorithms
// of one level.
package exchange

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// Place is a rank's place in a group. It does not change, except for Contributors.
type Place struct {
	Rank, Size   int
	Generation   uint64
	Strict       bool    // every AllReduce is Strict, whatever algorithm is forced
	Forced       *Forced // for all groups of the generation
	Contributors int     // number of ranks that contribute to an average; 0 stands for all
}

// Forced is what a configuration or a test forces for all operations.
type Forced struct {
	Algorithm operation.Algorithm // of AllReduce
	Segment   int                 // set by tests: largest frame in bytes, instead of the best size
	Shares    []int               // set by tests: the units of a wave before each host's share, instead of shares by speed
}

// Algorithm returns the algorithm that is forced for AllReduces of the group.
func (p *Place) Algorithm() operation.Algorithm {
	if p.Strict {
		return operation.Strict
	}
	return p.Forced.Algorithm
}

// Contributing returns the number of ranks that contribute to an average.
func (p *Place) Contributing() int { return cmp.Or(p.Contributors, p.Size) }

// Group is the group of a call on this rank.
type Group interface {
	frame.Group
	// Lost blocks until every rank has been notified that the group has failed, and returns the
	// error that operations return.
	Lost() error
	// Failure returns the reason why the group has failed, with ranks as numbered in the
	// generation.
	Failure() (n frame.Notice, failed bool)
}

// Links are the means by which a rank reaches the others. They are set before the first call.
type Links struct {
	Path   Transport     // nil for a group of one
	TCP    *sockets.Path // Path, if operations may drive it themselves; otherwise nil
	Boxes  []frame.Inbox // by rank; this rank's is unused
	Group  Group
	Wake   wake.Flag     // something has changed for the operation in progress
	Failed chan struct{} // closed once the group has failed and every rank has been notified
}

// Call is an operation in progress on one rank, with the memory that is kept for the next one.
type Call struct {
	Place
	Links
	Finished atomic.Uint64 // number of successful operations

	Ctx  context.Context
	Desc operation.Descriptor
	seq  uint64

	transfers
	buffer []byte

	late  lateness
	Ready bool // sent in the headers of frames; AllReady reads it

	Method     operation.Method // AloneOnly until By sets it
	segment    int              // largest frame, in bytes
	sentBefore []int
	posted     []*frame.Incoming
	operands   [][]byte
}

// transfers are the frames that a call sends and receives. Those in use come first, in their order.
type transfers struct {
	outs            []*frame.Outgoing
	ins             []*frame.Incoming
	outUsed, inUsed int
	outDone, inDone int
}

// Begin begins an operation. The caller must call [Call.End] before the next one.
func (c *Call) Begin(ctx context.Context, d operation.Descriptor) error {
	c.Ctx, c.Desc, c.Ready, c.Method = ctx, d, false, operation.AloneOnly
	c.seq++
	c.outUsed, c.inUsed, c.outDone, c.inDone = 0, 0, 0, 0
	if c.segment = c.Forced.Segment; c.segment == 0 {
		c.segment = operation.Segment
	}
	if ctx.Err() != nil {
		return c.cancelled()
	}
	if c.TCP != nil && !c.TCP.Start() {
		return c.Lost()
	}
	for i := range c.Boxes {
		if i == c.Rank {
			continue
		}
		if n, ok := c.Boxes[i].Enter(c.seq, d.Call(), d.CountsDiffer()); !ok {
			c.Group.Fail(n)
			return c.Lost()
		}
	}
	return nil
}

// End ensures that nothing accesses the caller's buffers after an error, and drops references to
// them.
func (c *Call) End(err error) error {
	if err != nil && c.Path != nil {
		c.Path.Release()
		c.Path.Quiesce()
	}
	for _, o := range c.outs[:c.outUsed] {
		o.Data = nil
	}
	for _, r := range c.ins[:c.inUsed] {
		r.Buf = nil
	}
	c.Ctx = nil
	c.outUsed, c.inUsed, c.outDone, c.inDone = 0, 0, 0, 0
	if err == nil {
		c.Finished.Store(c.seq)
	}
	if c.TCP != nil {
		c.TCP.Finish()
		c.TCP.Concluded()
	}
	return err
}

// cancelled ends the group because this rank leaves the operation.
func (c *Call) cancelled() error {
	err := c.Ctx.Err()
	c.Group.Fail(frame.Gone(err, c.Rank))
	<-c.Failed
	return c.Desc.Action.Wrap(err)
}

// Lost returns the error of an operation whose group has failed.
func (c *Call) Lost() error { return c.Group.Lost() }

// Send starts to send one frame.
func (c *Call) Send(to int, step uint32, data []byte) *frame.Outgoing {
	return c.SendOf(to, step, c.Desc.Count, data)
}

// SendOf starts to send a frame with a separate count in the header.
func (c *Call) SendOf(to int, step uint32, count uint64, data []byte) *frame.Outgoing {
	if c.outUsed == len(c.outs) {
		c.outs = append(c.outs, &frame.Outgoing{From: c.Group})
	}
	o := c.outs[c.outUsed]
	c.outUsed++
	o.Header = frame.Header{Kind: frame.Data, Call: c.Desc.Call(), Step: step, Length: uint32(len(data)),
		Generation: c.Generation, Seq: c.seq, Ready: c.Ready}
	o.Header.Call.Count = count
	o.Data = data
	o.Done.Store(false)
	c.Path.Send(to, o)
	return o
}

// Post posts a receive for the next frame of a rank, which must have the given step and fill buf.
func (c *Call) Post(from int, step uint32, buf []byte) *frame.Incoming {
	if c.inUsed == len(c.ins) {
		c.ins = append(c.ins, new(frame.Incoming))
	}
	r := c.ins[c.inUsed]
	c.inUsed++
	r.Buf, r.Step = buf, step
	r.Done.Store(false)
	c.expect(from)
	c.Boxes[from].Post(r)
	return r
}

// expect connects to a rank for which this one is about to wait, so that its death is noticed.
func (c *Call) expect(from int) {
	if c.TCP != nil {
		c.TCP.Want(from)
	}
}

// Receive posts a receive and waits for it.
func (c *Call) Receive(from int, step uint32, buf []byte) error {
	return c.wait(&c.Post(from, step, buf).Done)
}

// peek waits for the header of the next frame of a rank and returns it without consuming the frame.
func (c *Call) peek(from int) (frame.Header, error) {
	c.expect(from)
	for {
		if h, ok := c.Boxes[from].Peek(); ok {
			return h, nil
		}
		if err := c.pause(); err != nil {
			return frame.Header{}, err
		}
	}
}

// wait waits for one request.
func (c *Call) wait(done *atomic.Bool) error {
	for !done.Load() {
		if err := c.pause(); err != nil {
			return err
		}
	}
	return nil
}

// Receives returns the number of receives of this operation so far. They are numbered from 0.
func (c *Call) Receives() int { return c.inUsed }

// Sends returns the number of sends of this operation so far. They are numbered from 0.
func (c *Call) Sends() int { return c.outUsed }

// WaitFor waits for the receives from first up to, but not including, end.
func (c *Call) WaitFor(first, end int) error {
	for _, r := range c.ins[first:end] {
		if err := c.wait(&r.Done); err != nil {
			return err
		}
	}
	return nil
}

// WaitSent waits for the sends from first up to, but not including, end.
func (c *Call) WaitSent(first, end int) error {
	for _, o := range c.outs[first:end] {
		if err := c.wait(&o.Done); err != nil {
			return err
		}
	}
	return nil
}

// Flush waits for all sends.
func (c *Call) Flush() error { return c.WaitSent(0, c.outUsed) }

// AllReady waits for the receives from first up to, but not including, end, and reports whether all
// their senders were ready.
func (c *Call) AllReady(first, end int) (bool, error) {
	ready := true
	for _, r := range c.ins[first:end] {
		if err := c.wait(&r.Done); err != nil {
			return false, err
		}
		ready = ready && r.Ready
	}
	return ready, nil
}

// pause waits until something has changed.
func (c *Call) pause() error {
	if c.TCP != nil && c.TCP.Driven() {
		switch c.TCP.Pause(c.Ctx, c.nudgeIfLate) {
		case nil:
			return nil
		case sockets.ErrEnded:
			return c.Lost()
		}
		return c.cancelled()
	}
	select {
	case <-c.Wake:
		return nil
	case <-c.Failed:
		return c.Lost()
	case <-c.Ctx.Done():
		return c.cancelled()
	}
}

// lateness makes an engine's operation nudge the other ranks once it has waited for long, since
// they may not know yet that a cycle has begun.
type lateness struct {
	cycle uint64        // the cycle of the nudge; 0 if no nudge is due
	since time.Time     // when the operation began to wait; zero if it has not waited
	bound time.Duration // how long it waits before it nudges

	inTime bool          // all ranks have begun the cycle without a nudge …
	waited time.Duration // … and this rank has waited that long for them
}

// start is when this process began; see Instant.
var start = time.Now()

// Instant is like time.Now, for times that are only compared: it reads one clock instead of two.
func Instant() time.Time { return start.Add(time.Since(start)) }

// nudgeIfLate nudges the others if it is time to do so. It returns the time until a nudge is due,
// or 0 if no further one is.
func (c *Call) nudgeIfLate(now time.Time) (in time.Duration) {
	if c.late.cycle == 0 {
		return 0
	}
	if c.late.since.IsZero() {
		c.late.since = now
	}
	if in = c.late.bound - now.Sub(c.late.since); in > 0 {
		return in
	}
	c.Nudge(c.late.cycle)
	c.late.cycle = 0
	return 0
}

// Suit sets the best size of segments for parts with the given number of bytes.
func (c *Call) Suit(part int) {
	if c.Forced.Segment == 0 {
		c.segment = operation.SegmentFor(part)
	}
}

// Kept returns the memory that Scratch can return without an allocation.
func (c *Call) Kept() []byte { return c.buffer[:cap(c.buffer)] }

// Scratch returns n bytes for partial results, aligned for every element type. They are valid until
// the next call of Scratch.
func (c *Call) Scratch(n int) []byte {
	if cap(c.buffer) < n {
		c.buffer = make([]byte, n)
	}
	return c.buffer[:n]
}

// frameNap is the longest sleep of a rank that waits in shared memory while frames are in flight.
const frameNap = 100 * time.Microsecond

// Meanwhile moves frames of the operation while it waits for ranks of this host in shared memory.
// Its results are those of the function of [shm.Member.Meanwhile].
func (c *Call) Meanwhile() (moved, due bool, within time.Duration) {
	if c.TCP == nil || !c.TCP.Driven() { // other goroutines move the frames
		return false, false, 0
	}
	if c.late.cycle != 0 {
		within = c.nudgeIfLate(Instant())
	}
	for c.outDone < c.outUsed && c.outs[c.outDone].Done.Load() {
		c.outDone++
	}
	for c.inDone < c.inUsed && c.ins[c.inDone].Done.Load() {
		c.inDone++
	}
	if c.outDone == c.outUsed && c.inDone == c.inUsed {
		return false, false, within
	}
	return c.TCP.Advance(false), true, frameNap
}

// Nudge notifies other ranks that this one begins a cycle of its engine. Each rank passes the nudge
// on when it begins the cycle itself, so that all are notified after log2(n) steps.
func (c *Call) Nudge(cycle uint64) {
	for distance := 1; distance < c.Size; distance *= 2 {
		c.Path.Nudge((c.Rank+distance)%c.Size, cycle)
	}
}

// TellIfLate makes the next operation nudge the others about a cycle once it has waited for bound.
func (c *Call) TellIfLate(cycle uint64, bound time.Duration) {
	c.late = lateness{cycle: cycle, bound: bound}
}

// Met ends the effect of TellIfLate: all ranks have begun the cycle.
func (c *Call) Met() {
	l := &c.late
	if l.cycle == 0 {
		return
	}
	if !l.since.IsZero() {
		l.waited = time.Since(l.since)
	}
	l.cycle, l.inTime = 0, true
}

// InTime reports whether all ranks began the cycle, whose first operation has ended, without a
// nudge, and how long this rank waited for them.
func (c *Call) InTime() (waited time.Duration, ok bool) {
	c.Met()
	ok, c.late.inTime = c.late.inTime, false
	return c.late.waited, ok
}

// By sets the method of the operation, unless it is set: an algorithm between hosts runs other
// algorithms among some of the ranks.
func (c *Call) By(m operation.Method) {
	if c.Method == operation.AloneOnly {
		c.Method = m
	}
}

// Sent is what a connection has sent.
type Sent = sockets.Sent
