package frame

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/internal/wake"
)

const (
	eagerFrame = 64 << 10 // frames of up to this number of bytes are kept until the operation requests them …
	eagerTotal = 1 << 20  // … as long as those of one peer have at most this number together; other frames wait at the sender
)

// Reasons why a peer counts as gone, or a frame is not delivered.
var (
	ErrLeft    = errors.New("it has left the group")
	ErrInvalid = errors.New("it has sent an unexpected frame")
	ErrShut    = errors.New("collective: inbox shut")
)

// Group is a rank's group as used by the inboxes of its peers. Its methods do not block.
type Group interface {
	// Fail ends the group. The notice names ranks as numbered in the group.
	Fail(n Notice)
	// Poke wakes the operation in progress.
	Poke()
	// Departed is called when a rank has left the group.
	Departed()
	// Knows reports whether the operation of a call exists.
	Knows(c Call) bool
}

// Incoming is a request for the next frame from a peer. Buf belongs to the transport until Done is
// set.
type Incoming struct {
	Buf    []byte
	Step   uint32
	Ready  bool // the header's Ready
	Shares int  // number of shares still to be read, if an operation reads them
	Done   atomic.Bool
}

// Outgoing is a frame to be sent to a peer. Data must not change until Done is set.
type Outgoing struct {
	Header Header
	Data   []byte
	Shares int          // number of shares still to be written, if an operation writes them
	Left   atomic.Int32 // the same, if goroutines write them
	Done   atomic.Bool
	From   Group // Finish wakes its operation
}

// Finish marks the frame as sent.
func (o *Outgoing) Finish() {
	o.Done.Store(true)
	o.From.Poke()
}

// Early is a frame that arrived before it was requested.
type Early struct {
	header Header
	buf    []byte
	full   bool      // buf holds the payload
	ref    *Outgoing // the frame, if its payload is still with a sender in this process
	want   *Incoming // a later request, which the reader of the connection still has to fill
}

// Inbox receives the frames of one peer for one group. Frames of a peer keep their order, and so do
// requests, so the next frame belongs to the oldest request. The transport delivers frames, and the
// group's operation posts requests.
type Inbox struct {
	pair

	mu     sync.Mutex
	seq    uint64 // the number of this rank's present or last operation
	call   Call   // its call
	differ bool   // its counts may differ between ranks
	posted FIFO[*Incoming]
	early  FIFO[*Early]
	held   int // bytes in early
	target *Incoming
	last   uint64 // the last operation in which the peer takes part; math.MaxUint64 until it announces that it leaves
	asked  bool   // the operation waits for the next header
	shut   bool   // the group has failed: nothing more is delivered
	ready  wake.Flag
	free   [][]byte
}

// pair is the two ranks of an inbox.
type pair struct {
	group      Group
	generation uint64
	rank, from int // this rank, and the peer
}

// Inboxes returns the inboxes of one rank of a group, by peer; the one at rank itself is unused.
func Inboxes(of Group, generation uint64, rank, size int) []Inbox {
	boxes := make([]Inbox, size)
	for i := range boxes {
		boxes[i] = Inbox{pair: pair{of, generation, rank, i}, last: math.MaxUint64, ready: wake.New()}
	}
	return boxes
}

// check reports whether a frame is valid. If not, it returns the notice that ends the group. The
// caller holds b.mu.
func (b *Inbox) check(h *Header) (Notice, bool) {
	switch {
	case h.Generation != b.generation:
		return Gone(fmt.Errorf("%w: it is of generation %d", ErrInvalid, h.Generation), b.from), false
	case h.Seq == b.seq && (h.Call.What != b.call.What || h.Call.Count != b.call.Count && !b.differ):
		if !b.group.Knows(h.Call) {
			return Gone(Err, b.from), false
		}
		return Mismatched(b.rank, b.call, b.from, h.Call), false
	case h.Seq < b.seq || h.Seq > b.seq+1: // no rank can be two operations ahead: each operation needs all ranks
		return Gone(fmt.Errorf("%w: it belongs to operation %d, and this rank is in operation %d", ErrInvalid, h.Seq, b.seq), b.from), false
	}
	return Notice{}, true
}

// fits is like check, for the request that the frame answers. It sets the request's Ready.
func (b *Inbox) fits(h *Header, r *Incoming) (Notice, bool) {
	if h.Seq != b.seq || h.Step != r.Step || int(h.Length) != len(r.Buf) {
		return Gone(fmt.Errorf("%w: it is step %d with %d bytes, and step %d with %d bytes is due",
			ErrInvalid, h.Step, h.Length, r.Step, len(r.Buf)), b.from), false
	}
	r.Ready = h.Ready
	return Notice{}, true
}

// Enter begins an operation: from now on frames are compared with call, including those that have
// already arrived. If one does not match, or the peer has left, Enter returns the notice that ends
// the group, and false.
func (b *Inbox) Enter(seq uint64, call Call, differ bool) (Notice, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seq, b.call, b.differ = seq, call, differ
	if seq > b.last {
		return Gone(ErrLeft, b.from), false
	}
	for i := range b.early.Len() {
		if e := b.early.At(i); e.want == nil {
			if n, ok := b.check(&e.header); !ok {
				return n, false
			}
		}
	}
	return Notice{}, true
}

// Post posts a request for the next frame that is not requested yet. It does not block.
func (b *Inbox) Post(r *Incoming) {
	b.mu.Lock()
	n, ok := b.postLocked(r)
	b.mu.Unlock()
	if !ok {
		b.group.Fail(n)
	}
}

func (b *Inbox) postLocked(r *Incoming) (Notice, bool) {
	if b.shut {
		return Notice{}, true
	}
	if b.early.Len() == 0 || b.early.At(0).want != nil {
		b.posted.Push(r)
		return Notice{}, true
	}
	e := b.early.At(0)
	if n, ok := b.fits(&e.header, r); !ok {
		return n, false
	}
	switch {
	case e.full:
		copy(r.Buf, e.buf)
		b.recycle(b.early.Pop())
		r.Done.Store(true)
	case e.ref != nil:
		copy(r.Buf, e.ref.Data)
		e.ref.Finish()
		b.early.Pop()
		r.Done.Store(true)
	default: // the reader is filling it, or waits for the buffer
		e.want = r
		b.ready.Set()
	}
	return Notice{}, true
}

// HasEnded reports whether the peer has announced that it leaves.
func (b *Inbox) HasEnded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.last != math.MaxUint64
}

// Peek returns the header of the next frame that is not requested yet.
func (b *Inbox) Peek() (Header, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.early.Len() > 0 && b.early.At(0).want == nil {
		return b.early.At(0).header, true
	}
	b.asked = true
	return Header{}, false
}

// Deliver takes a frame whose bytes are in this process. It does not block: a frame that is neither
// requested nor small remains with its sender until it is requested.
func (b *Inbox) Deliver(o *Outgoing) {
	b.mu.Lock()
	n, ok := b.deliverLocked(o)
	b.mu.Unlock()
	if !ok {
		b.group.Fail(n)
	}
}

func (b *Inbox) deliverLocked(o *Outgoing) (Notice, bool) {
	if b.shut {
		return Notice{}, true // the sender learns of the group's end elsewhere
	}
	if n, ok := b.check(&o.Header); !ok {
		return n, false
	}
	if b.posted.Len() > 0 {
		r := b.posted.Pop()
		if n, ok := b.fits(&o.Header, r); !ok {
			return n, false
		}
		copy(r.Buf, o.Data)
		r.Done.Store(true)
		o.Finish()
	} else if e := (&Early{header: o.Header}); b.keeps(e) {
		copy(e.buf, o.Data)
		e.full = true
		b.early.Push(e)
		o.Finish()
	} else {
		e.ref = o
		b.early.Push(e)
	}
	b.group.Poke()
	return Notice{}, true
}

// Place returns the buffer for the payload of the reader's current frame. The reader fills it and
// calls Placed. If the frame is too large to keep, Place blocks until it is requested or stop is
// closed. An inbox has one reader.
func (b *Inbox) Place(h *Header, stop <-chan struct{}) ([]byte, error) {
	b.mu.Lock()
	n, ok := b.check(h)
	if ok && b.posted.Len() > 0 && !b.shut {
		r := b.posted.Pop()
		if n, ok = b.fits(h, r); ok {
			b.target = r
			b.mu.Unlock()
			return r.Buf, nil
		}
	}
	if !ok || b.shut {
		b.mu.Unlock()
		if !ok {
			b.group.Fail(n)
		}
		return nil, ErrShut
	}
	e := &Early{header: *h}
	kept := b.keeps(e)
	b.early.Push(e)
	b.mu.Unlock()
	b.group.Poke()
	if kept {
		return e.buf, nil
	}
	for {
		select {
		case <-b.ready:
		case <-stop:
			return nil, ErrShut
		}
		b.mu.Lock()
		want := e.want // the token may be from an earlier frame
		if want != nil && !b.shut {
			b.early.Pop()
			b.target = want
		}
		shut := b.shut
		b.mu.Unlock()
		if shut {
			return nil, ErrShut
		}
		if want != nil {
			return want.Buf, nil
		}
	}
}

// Placed records that the payload of the frame is in the buffer that Place returned.
func (b *Inbox) Placed() {
	b.mu.Lock()
	if r := b.target; r != nil {
		b.target = nil
		r.Done.Store(true)
	} else if b.early.Len() > 0 {
		e := b.early.At(b.early.Len() - 1)
		e.full = true
		if r := e.want; r != nil { // the frame is the only one: requests take the oldest
			copy(r.Buf, e.buf)
			b.recycle(b.early.Pop())
			r.Done.Store(true)
		}
	}
	b.mu.Unlock()
	b.group.Poke()
}

// ExpectsFrame reports whether the operation waits for a frame of this peer.
func (b *Inbox) ExpectsFrame() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.asked || b.posted.Len() > 0 || b.early.Len() > 0 && b.early.At(0).want != nil
}

// Announce takes the header of a frame whose payload the operation itself reads, and returns the
// request for the frame. If there is no request yet, it returns nil, and e stands for the frame
// until it is requested.
func (b *Inbox) Announce(h *Header, e *Early) (*Incoming, error) {
	b.mu.Lock()
	n, ok := b.check(h)
	b.asked = false
	if ok && !b.shut {
		if b.posted.Len() == 0 {
			*e = Early{header: *h}
			b.early.Push(e)
			b.mu.Unlock()
			return nil, nil
		}
		r := b.posted.Pop()
		if n, ok = b.fits(h, r); ok {
			b.mu.Unlock()
			return r, nil
		}
	}
	b.mu.Unlock()
	if !ok {
		b.group.Fail(n)
	}
	return nil, ErrShut
}

// Wanted returns the request for the frame of e, or nil if it is not requested yet.
func (b *Inbox) Wanted(e *Early) *Incoming {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e.want == nil || b.shut {
		return nil
	}
	b.early.Pop()
	return e.want
}

// End records that the peer leaves after the operation with the number last. Every later operation
// fails, since it needs every rank.
func (b *Inbox) End(last uint64) {
	b.mu.Lock()
	b.last = last
	missing := b.seq > last && !b.shut
	b.mu.Unlock()
	b.group.Departed()
	if missing {
		b.group.Fail(Gone(ErrLeft, b.from))
	}
}

// Done reports whether a rank that has finished the given number of operations has finished all
// operations in which the peer took part.
func (b *Inbox) Done(finished uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return finished >= b.last
}

// Close drops every request and frame. Nothing is delivered afterwards.
func (b *Inbox) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shut = true
	b.posted, b.early = FIFO[*Incoming]{}, FIFO[*Early]{}
}

// keeps gives e a buffer if the frame may be kept.
func (b *Inbox) keeps(e *Early) bool {
	n := int(e.header.Length)
	if n > eagerFrame || b.held+n > eagerTotal {
		return false
	}
	b.held += n
	if last := len(b.free) - 1; last >= 0 && cap(b.free[last]) >= n {
		e.buf = b.free[last][:n]
		b.free = b.free[:last]
	} else {
		e.buf = make([]byte, n)
	}
	return true
}

// recycle keeps the buffer of a consumed early frame for reuse.
func (b *Inbox) recycle(e *Early) {
	b.held -= len(e.buf)
	if len(b.free) < 4 && cap(e.buf) > 0 {
		b.free = append(b.free, e.buf)
	}
}

// FIFO is a queue that reuses its memory.
type FIFO[T any] struct {
	items []T
	head  int
}

// Len returns the number of items.
func (q *FIFO[T]) Len() int { return len(q.items) - q.head }

// At returns item i; item 0 is the oldest.
func (q *FIFO[T]) At(i int) T { return q.items[q.head+i] }

// Push adds an item.
func (q *FIFO[T]) Push(v T) {
	if q.head > len(q.items)/2 && len(q.items) == cap(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
}

// Pop removes and returns the oldest item.
func (q *FIFO[T]) Pop() T {
	var none T
	v := q.items[q.head]
	q.items[q.head] = none
	q.head++
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
	return v
}
