package collective

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
)

const (
	eagerFrame = 64 << 10 // frames up to this size are kept until the operation requests them …
	eagerTotal = 1 << 20  // … up to this many bytes from one peer; others wait where they are
)

var (
	errLeft    = errors.New("it has left the group")
	errInvalid = errors.New("sent a frame that is not due")
	errShut    = errors.New("collective: inbox shut")
)

// incoming is a request for the next frame from a peer. The buffer belongs to the transport until
// done.
type incoming struct {
	buf    []byte
	step   uint32
	ready  bool // as the frame says
	shares int  // that have yet to come, where an operation reads them
	done   atomic.Bool
}

// outgoing is a frame on its way to a peer. The data must stay as it is until done.
type outgoing struct {
	header header
	data   []byte
	shares int          // that the kernel has yet to take, where an operation writes them
	left   atomic.Int32 // the same where goroutines do
	done   atomic.Bool
	group  *Group // the sender, told when it is done
}

func (o *outgoing) finish() {
	o.done.Store(true)
	o.group.poke()
}

// early is a frame that came before it was requested.
type early struct {
	header header
	buf    []byte
	full   bool      // buf holds the payload
	ref    *outgoing // Local: the payload is still with its sender
	want   *incoming // TCP: the request that has come meanwhile; the reader still has to fill it
}

// inbox receives the frames of one peer for one group. Frames of a peer keep their order and so do
// requests, so the next frame belongs to the oldest request. The transport delivers, the operation
// of the group posts.
type inbox struct {
	g    *Group
	from int

	mu     sync.Mutex
	seq    uint64     // the operation this rank is in, or was in last
	call   descriptor // what it is
	posted fifo[*incoming]
	early  fifo[*early]
	held   int // bytes in early
	target *incoming
	last   uint64 // the last operation of which the peer is part; all ones while it has not left
	asked  bool   // the next header is waited for
	shut   bool   // the group has failed: nothing is delivered any more
	ready  chan struct{}
	free   [][]byte
}

// check reports an error of a frame as the notice that ends the group. The caller holds b.mu.
func (b *inbox) check(h *header) (notice, bool) {
	switch {
	case h.generation != b.g.generation:
		return gone(fmt.Errorf("%w: it is of generation %d", errInvalid, h.generation), b.from), false
	case h.seq == b.seq && !h.call.matches(b.call):
		return mismatched(b.g.rank, b.call, b.from, h.call), false
	case h.seq < b.seq || h.seq > b.seq+1: // no rank can be two operations ahead: each operation needs all ranks
		return gone(fmt.Errorf("%w: operation %d during %d", errInvalid, h.seq, b.seq), b.from), false
	}
	return notice{}, true
}

// fits checks a frame against the request it is for, which learns what its header says.
func (b *inbox) fits(h *header, r *incoming) (notice, bool) {
	if h.seq != b.seq || h.step != r.step || int(h.length) != len(r.buf) {
		return gone(fmt.Errorf("%w: step %d with %d bytes instead of step %d with %d",
			errInvalid, h.step, h.length, r.step, len(r.buf)), b.from), false
	}
	r.ready = h.ready
	return notice{}, true
}

// enter begins an operation: from here on frames are compared with call, those that are already
// here first.
func (b *inbox) enter(seq uint64, call descriptor) (notice, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seq, b.call = seq, call
	if seq > b.last {
		return gone(errLeft, b.from), false
	}
	for i := range b.early.len() {
		if e := b.early.at(i); e.want == nil {
			if n, ok := b.check(&e.header); !ok {
				return n, false
			}
		}
	}
	return notice{}, true
}

// post requests the next frame that is not requested yet. It does not block.
func (b *inbox) post(r *incoming) {
	b.mu.Lock()
	n, ok := b.postLocked(r)
	b.mu.Unlock()
	if !ok {
		b.g.fail(n)
	}
}

func (b *inbox) postLocked(r *incoming) (notice, bool) {
	if b.shut {
		return notice{}, true
	}
	if b.early.len() == 0 || b.early.at(0).want != nil {
		b.posted.push(r)
		return notice{}, true
	}
	e := b.early.at(0)
	if n, ok := b.fits(&e.header, r); !ok {
		return n, false
	}
	switch {
	case e.full:
		copy(r.buf, e.buf)
		b.recycle(b.early.pop())
		r.done.Store(true)
	case e.ref != nil:
		copy(r.buf, e.ref.data)
		e.ref.finish()
		b.early.pop()
		r.done.Store(true)
	default: // its reader is filling it, or waits for the buffer
		e.want = r
		select {
		case b.ready <- struct{}{}:
		default:
		}
	}
	return notice{}, true
}

// hasEnded reports whether the peer has said that it leaves.
func (b *inbox) hasEnded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.last != math.MaxUint64
}

// peek returns the header of the next frame that is not requested yet.
func (b *inbox) peek() (header, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.early.len() > 0 && b.early.at(0).want == nil {
		return b.early.at(0).header, true
	}
	b.asked = true
	return header{}, false
}

// deliver takes a frame whose bytes are in this process. It does not block: what is not requested
// and not small stays with its sender until it is requested.
func (b *inbox) deliver(o *outgoing) {
	b.mu.Lock()
	n, ok := b.deliverLocked(o)
	b.mu.Unlock()
	if !ok {
		b.g.fail(n)
	}
}

func (b *inbox) deliverLocked(o *outgoing) (notice, bool) {
	if b.shut {
		return notice{}, true // the sender learns of the group's end itself
	}
	if n, ok := b.check(&o.header); !ok {
		return n, false
	}
	if b.posted.len() > 0 {
		r := b.posted.pop()
		if n, ok := b.fits(&o.header, r); !ok {
			return n, false
		}
		copy(r.buf, o.data)
		r.done.Store(true)
		o.finish()
	} else if e := (&early{header: o.header}); b.keeps(e) {
		copy(e.buf, o.data)
		e.full = true
		b.early.push(e)
		o.finish()
	} else {
		e.ref = o
		b.early.push(e)
	}
	b.g.poke()
	return notice{}, true
}

// place returns where a reader must put the payload of its current frame; the reader then fills it
// and calls placed. It blocks while a frame that is too large to keep is not requested, until stop.
// One reader per inbox.
func (b *inbox) place(h *header, stop <-chan struct{}) ([]byte, error) {
	b.mu.Lock()
	n, ok := b.check(h)
	if ok && b.posted.len() > 0 && !b.shut {
		r := b.posted.pop()
		if n, ok = b.fits(h, r); ok {
			b.target = r
			b.mu.Unlock()
			return r.buf, nil
		}
	}
	if !ok || b.shut {
		b.mu.Unlock()
		if !ok {
			b.g.fail(n)
		}
		return nil, errShut
	}
	e := &early{header: *h}
	kept := b.keeps(e)
	b.early.push(e)
	b.mu.Unlock()
	b.g.poke()
	if kept {
		return e.buf, nil
	}
	for {
		select {
		case <-b.ready:
		case <-stop:
			return nil, errShut
		}
		b.mu.Lock()
		want := e.want // a token may be left from an earlier frame
		if want != nil && !b.shut {
			b.early.pop()
			b.target = want
		}
		shut := b.shut
		b.mu.Unlock()
		if shut {
			return nil, errShut
		}
		if want != nil {
			return want.buf, nil
		}
	}
}

// placed says that the payload of the frame is where place wanted it.
func (b *inbox) placed() {
	b.mu.Lock()
	if r := b.target; r != nil {
		b.target = nil
		r.done.Store(true)
	} else if b.early.len() > 0 {
		e := b.early.at(b.early.len() - 1)
		e.full = true
		if r := e.want; r != nil { // then it is the only one: requests take the oldest
			copy(r.buf, e.buf)
			b.recycle(b.early.pop())
			r.done.Store(true)
		}
	}
	b.mu.Unlock()
	b.g.poke()
}

// expectsFrame reports whether the operation waits for something of this peer.
func (b *inbox) expectsFrame() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.asked || b.posted.len() > 0 || b.early.len() > 0 && b.early.at(0).want != nil
}

// announce takes the header of a frame whose payload the operation itself will read, and returns
// the request for it. Where there is none yet, e stands for the frame until wanted says so.
func (b *inbox) announce(h *header, e *early) (*incoming, error) {
	b.mu.Lock()
	n, ok := b.check(h)
	b.asked = false
	if ok && !b.shut {
		if b.posted.len() == 0 {
			*e = early{header: *h}
			b.early.push(e)
			b.mu.Unlock()
			return nil, nil
		}
		r := b.posted.pop()
		if n, ok = b.fits(h, r); ok {
			b.mu.Unlock()
			return r, nil
		}
	}
	b.mu.Unlock()
	if !ok {
		b.g.fail(n)
	}
	return nil, errShut
}

// wanted returns the request for the frame that e stands for; nil while there is none.
func (b *inbox) wanted(e *early) *incoming {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e.want == nil || b.shut {
		return nil
	}
	b.early.pop()
	return e.want
}

// end says that the peer leaves after the operation of number last. Every operation needs every
// rank.
func (b *inbox) end(last uint64) {
	b.mu.Lock()
	b.last = last
	missing := b.seq > last && !b.shut
	b.mu.Unlock()
	b.g.departed()
	if missing {
		b.g.fail(gone(errLeft, b.from))
	}
}

// done reports whether a rank that has finished so many operations has finished all of which the
// peer was part.
func (b *inbox) done(finished uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return finished >= b.last
}

// close drops every request and frame; nothing is delivered any more.
func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shut = true
	b.posted, b.early = fifo[*incoming]{}, fifo[*early]{}
}

// keeps gives e a buffer if the frame may be kept.
func (b *inbox) keeps(e *early) bool {
	n := int(e.header.length)
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

// recycle takes back the buffer of an early frame that is used up.
func (b *inbox) recycle(e *early) {
	b.held -= len(e.buf)
	if len(b.free) < 4 && cap(e.buf) > 0 {
		b.free = append(b.free, e.buf)
	}
}

// fifo is a queue that reuses its memory.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int   { return len(q.items) - q.head }
func (q *fifo[T]) at(i int) T { return q.items[q.head+i] }

func (q *fifo[T]) push(v T) {
	if q.head > len(q.items)/2 && len(q.items) == cap(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
}

func (q *fifo[T]) pop() T {
	var none T
	v := q.items[q.head]
	q.items[q.head] = none
	q.head++
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
	return v
}
