// Package exchange computes among ranks that reach each other by frames: a [Call] is what one rank
// sends and receives in one operation, and its methods are the algorithms of one level.
package exchange

import (
	"cmp"
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
)

// Place is one rank of a group. It does not change, but for Contributors.
type Place struct {
	Rank, Size   int
	Generation   uint64
	Strict       bool    // every AllReduce is Strict, whatever is forced
	Forced       *Forced // of all groups of the generation
	Contributors int     // ranks that an average is of; 0: all
}

// Forced is what a configuration or a test says about all operations.
type Forced struct {
	Algorithm operation.Algorithm // of AllReduce
	Segment   int                 // most bytes of a frame, for tests; 0: as is best
	Shares    []int               // of waves between hosts, for tests: the units before each host's; nil: by speed
}

// Algorithm is that of every AllReduce of the group.
func (p *Place) Algorithm() operation.Algorithm {
	if p.Strict {
		return operation.Strict
	}
	return p.Forced.Algorithm
}

// Contributing is the number of ranks that an average is of.
func (p *Place) Contributing() int { return cmp.Or(p.Contributors, p.Size) }

// Group is the group of a call on this rank.
type Group interface {
	frame.Group
	// Lost waits until every rank has been told that the group has failed, and returns why, as
	// operations do.
	Lost() error
	// Failure is why the group has failed, as the generation numbers ranks.
	Failure() (n frame.Notice, failed bool)
}

// Links are how a rank reaches the others. They are set before the first call.
type Links struct {
	Path   Transport     // nil for a group of one
	TCP    *sockets.Path // Path, where operations may drive it themselves
	Boxes  []frame.Inbox // by rank; the own one is unused
	Group  Group
	Wake   chan struct{} // one token: something has changed for the operation under way
	Failed chan struct{} // closed once the group has failed and every rank has been told
}

// Call is an operation under way on one rank, and what is kept for the next one.
type Call struct {
	Place
	Links
	Finished atomic.Uint64 // operations that went well

	Ctx  context.Context
	Desc operation.Descriptor
	seq  uint64

	transfers
	buffer []byte

	late  lateness
	Ready bool // what frames say, which AllReady hears

	Method     operation.Method // AloneOnly: not set
	segment    int              // most bytes of a frame
	sentBefore []int
	posted     []*frame.Incoming
	operands   [][]byte
}

// transfers are what a call sends and receives. Those in use come first, in their order, and so
// many of them are known to be done.
type transfers struct {
	outs            []*frame.Outgoing
	ins             []*frame.Incoming
	outUsed, inUsed int
	outDone, inDone int
}

// Begin begins an operation. The next one begins after [Call.End] of it.
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

// End ensures that nothing touches the caller's buffers after an error, and drops references to
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

// cancelled ends the group because this rank does not take part in the operation any more.
func (c *Call) cancelled() error {
	err := c.Ctx.Err()
	c.Group.Fail(frame.Gone(err, c.Rank))
	<-c.Failed
	return fmt.Errorf("collective: %s: %w", c.Desc.Action, err)
}

// Lost is the error of an operation whose group has failed.
func (c *Call) Lost() error { return c.Group.Lost() }

// Send starts to send one frame.
func (c *Call) Send(to int, step uint32, data []byte) *frame.Outgoing {
	return c.SendOf(to, step, c.Desc.Count, data)
}

// SendOf sends a frame with a count of its own in the header.
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

// Post asks for the next frame of a rank, which must be of this step and fill buf.
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

// expect connects a rank that is waited for, so that its death is noticed.
func (c *Call) expect(from int) {
	if c.TCP != nil {
		c.TCP.Want(from)
	}
}

// Receive posts and waits.
func (c *Call) Receive(from int, step uint32, buf []byte) error {
	return c.wait(&c.Post(from, step, buf).Done)
}

// peek waits for the header of the next frame of a rank, without taking the frame.
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

// Receives is how many receives there are so far. Those of this operation are numbered from 0.
func (c *Call) Receives() int { return c.inUsed }

// Sends is how many sends there are so far, which are numbered likewise.
func (c *Call) Sends() int { return c.outUsed }

// WaitFor waits for the receives of these numbers.
func (c *Call) WaitFor(first, end int) error {
	for _, r := range c.ins[first:end] {
		if err := c.wait(&r.Done); err != nil {
			return err
		}
	}
	return nil
}

// WaitSent waits for the sends of these numbers.
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

// AllReady waits for the receives of these numbers, and reports whether the senders of all were
// ready.
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

// lateness is what an engine's operation does once it has waited for long: the others may not know
// yet that a cycle has begun.
type lateness struct {
	cycle uint64        // to tell of; 0: none
	since time.Time     // when it began to wait; zero: it has not waited
	bound time.Duration // when it is time

	inTime bool          // all have begun the cycle, and nobody had to be told …
	waited time.Duration // … and so long this rank has waited for them
}

// start is when this process began; see instant.
var start = time.Now()

// Instant is time.Now for what is only compared: it asks one clock instead of two.
func Instant() time.Time { return start.Add(time.Since(start)) }

// nudgeIfLate tells the others of the cycle if it is time; otherwise it returns how long that takes
// yet. 0: nothing is to be told any more.
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

// Suit has the operation cut data into segments as is best where its parts have so many bytes.
func (c *Call) Suit(part int) {
	if c.Forced.Segment == 0 {
		c.segment = operation.SegmentFor(part)
	}
}

// Kept is what Scratch returns without taking more memory.
func (c *Call) Kept() []byte { return c.buffer[:cap(c.buffer)] }

// Scratch returns n bytes for partial results, aligned for every element type. They are valid until
// the next call of it.
func (c *Call) Scratch(n int) []byte {
	if cap(c.buffer) < n {
		c.buffer = make([]byte, n)
	}
	return c.buffer[:n]
}

// frameNap is how long a rank sleeps at most that waits in memory while it has frames under way.
const frameNap = 100 * time.Microsecond

// Meanwhile moves frames of the operation while it waits for ranks of this host in memory.
func (c *Call) Meanwhile() (moved, due bool, within time.Duration) {
	if c.TCP == nil || !c.TCP.Driven() { // then others move them
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

// Nudge tells other ranks that this one begins a cycle of its engine. Each passes it on as it
// begins the cycle itself, so that all are told after log2(n) steps.
func (c *Call) Nudge(cycle uint64) {
	for distance := 1; distance < c.Size; distance *= 2 {
		c.Path.Nudge((c.Rank+distance)%c.Size, cycle)
	}
}

// TellIfLate makes the next operation tell the others of a cycle once it has waited for so long.
func (c *Call) TellIfLate(cycle uint64, bound time.Duration) {
	c.late = lateness{cycle: cycle, bound: bound}
}

// Met ends what TellIfLate has begun: all ranks have begun the cycle.
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

// InTime reports whether nobody had to be told of the cycle, whose first operation has ended, and
// how long this rank has waited for the others.
func (c *Call) InTime() (waited time.Duration, ok bool) {
	c.Met()
	ok, c.late.inTime = c.late.inTime, false
	return c.late.waited, ok
}

// By sets the method of the operation, unless it has one: an algorithm between hosts runs others
// among some ranks.
func (c *Call) By(m operation.Method) {
	if c.Method == operation.AloneOnly {
		c.Method = m
	}
}

// Sent is what a connection has sent.
type Sent = sockets.Sent
