package collective

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
)

// call is an operation under way on one rank.
type call struct {
	g    *Group
	ctx  context.Context
	desc operation.Descriptor
	seq  uint64

	transfers
	buffer    []byte
	crossings [2][]crossing // of the two latest waves

	late  lateness
	ready bool // what frames say, see allReduceIfReady

	method     operation.Method // operation.AloneOnly: not set
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

func (c *call) begin(ctx context.Context, d operation.Descriptor) error {
	c.ctx, c.desc, c.ready, c.method = ctx, d, false, operation.AloneOnly
	c.seq++
	c.outUsed, c.inUsed, c.outDone, c.inDone = 0, 0, 0, 0
	if c.segment = c.g.family.segment; c.segment == 0 {
		c.segment = operation.Segment
	}
	if ctx.Err() != nil {
		return c.cancelled()
	}
	if c.g.tcp != nil && !c.g.tcp.Start() {
		return c.lost()
	}
	for i := range c.g.boxes {
		if i == c.g.rank {
			continue
		}
		if n, ok := c.g.boxes[i].Enter(c.seq, d.Call(), d.CountsDiffer()); !ok {
			c.g.fail(n)
			return c.lost()
		}
	}
	return nil
}

// end ensures that nothing touches the caller's buffers after an error, and drops references to
// them.
func (c *call) end(err error) error {
	if err != nil && c.g.path != nil {
		c.g.path.Release()
		c.g.path.Quiesce()
	}
	for _, o := range c.outs[:c.outUsed] {
		o.Data = nil
	}
	for _, r := range c.ins[:c.inUsed] {
		r.Buf = nil
	}
	c.ctx = nil
	c.outUsed, c.inUsed, c.outDone, c.inDone = 0, 0, 0, 0
	if err == nil {
		c.g.finished.Store(c.seq)
	}
	if c.g.tcp != nil {
		c.g.tcp.Finish()
		c.g.tcp.Concluded()
	}
	return err
}

// cancelled ends the group because this rank does not take part in the operation any more.
func (c *call) cancelled() error {
	err := c.ctx.Err()
	c.g.fail(frame.Gone(err, c.g.rank))
	<-c.g.failed
	return fmt.Errorf("collective: %s: %w", c.desc.Action.String(), err)
}

// lost is the error of an operation whose group has failed.
func (c *call) lost() error { return c.g.lost() }

// send starts to send one frame.
func (c *call) send(to int, step uint32, data []byte) *frame.Outgoing {
	return c.sendOf(to, step, c.desc.Count, data)
}

// sendOf sends a frame with a count of its own in the header.
func (c *call) sendOf(to int, step uint32, count uint64, data []byte) *frame.Outgoing {
	if c.outUsed == len(c.outs) {
		c.outs = append(c.outs, &frame.Outgoing{From: (*inner)(c.g)})
	}
	o := c.outs[c.outUsed]
	c.outUsed++
	o.Header = frame.Header{Kind: frame.Data, Call: c.desc.Call(), Step: step, Length: uint32(len(data)),
		Generation: c.g.generation, Seq: c.seq, Ready: c.ready}
	o.Header.Call.Count = count
	o.Data = data
	o.Done.Store(false)
	c.g.path.Send(to, o)
	return o
}

// post asks for the next frame of a rank, which must be of this step and fill buf.
func (c *call) post(from int, step uint32, buf []byte) *frame.Incoming {
	if c.inUsed == len(c.ins) {
		c.ins = append(c.ins, new(frame.Incoming))
	}
	r := c.ins[c.inUsed]
	c.inUsed++
	r.Buf, r.Step = buf, step
	r.Done.Store(false)
	c.expect(from)
	c.g.boxes[from].Post(r)
	return r
}

// expect connects a rank that is waited for, so that its death is noticed.
func (c *call) expect(from int) {
	if c.g.tcp != nil {
		c.g.tcp.Want(from)
	}
}

// receive posts and waits.
func (c *call) receive(from int, step uint32, buf []byte) error {
	return c.wait(&c.post(from, step, buf).Done)
}

// peek waits for the header of the next frame of a rank, without taking the frame.
func (c *call) peek(from int) (frame.Header, error) {
	c.expect(from)
	for {
		if h, ok := c.g.boxes[from].Peek(); ok {
			return h, nil
		}
		if err := c.pause(); err != nil {
			return frame.Header{}, err
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

// waitFor waits for the receives of these numbers.
func (c *call) waitFor(first, end int) error {
	for _, r := range c.ins[first:end] {
		if err := c.wait(&r.Done); err != nil {
			return err
		}
	}
	return nil
}

// flush waits for all sends.
func (c *call) flush() error {
	for _, o := range c.outs[:c.outUsed] {
		if err := c.wait(&o.Done); err != nil {
			return err
		}
	}
	return nil
}

// pause waits until something has changed.
func (c *call) pause() error {
	if c.g.tcp != nil && c.g.tcp.Driven() {
		switch c.g.tcp.Pause(c.ctx, c.nudgeIfLate) {
		case nil:
			return nil
		case sockets.ErrEnded:
			return c.lost()
		}
		return c.cancelled()
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

// lateness is what an engine's operation does once it has waited for long: the others may not know
// yet that a cycle has begun.
type lateness struct {
	cycle uint64 // to tell of; 0: none
	since time.Time
	bound time.Duration // when it is time
}

// The first operation of a cycle waits for so many times as long as it takes usually until it
// nudges the others, within bounds. If all have begun the cycle of themselves, nudges would only
// keep them from it.
const (
	nudgeFactor = 3
	nudgeLeast  = 500 * time.Microsecond
	nudgeMost   = 5 * time.Millisecond
)

// start is when this process began; see instant.
var start = time.Now()

// instant is time.Now for what is only compared: it asks one clock instead of two.
func instant() time.Time { return start.Add(time.Since(start)) }

// nudgeIfLate tells the others of the cycle if it is time; otherwise it returns how long that takes
// yet. 0: nothing is to be told any more.
func (c *call) nudgeIfLate(now time.Time) (in time.Duration) {
	if c.late.cycle == 0 {
		return 0
	}
	if in = c.late.bound - now.Sub(c.late.since); in > 0 {
		return in
	}
	c.g.nudge(c.late.cycle)
	c.late.cycle = 0
	return 0
}

// scratch returns n bytes for partial results, aligned for every element type. They are valid until
// the next call of it.
func (c *call) scratch(n int) []byte {
	if cap(c.buffer) < n {
		c.buffer = make([]byte, n)
	}
	return c.buffer[:n]
}
