package collective

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// AsyncOptions are the options of an asynchronous operation. The zero value changes nothing: data
// is neither compressed nor scaled, as in [AllReduceAsync].
type AsyncOptions struct {
	Compression Compression // format of float32 elements between ranks
	Prescale    float64     // factor applied to data before it is combined; 0 stands for 1
	Postscale   float64     // factor applied to the result; 0 stands for 1
}

// Handle is an asynchronous operation in progress, or one that has ended. Its methods may be called
// by several goroutines.
type Handle struct {
	engine  *engine
	point   *point  // instead of engine, if the operation is a message
	message message // of point
	ahead   bool    // Send has copied the message
	name    string
	request agreement.Request
	data    []byte
	result  []byte // for operations that are not in place
	work    Work   // instead of data, for vectors outside the memory of this process
	since   time.Time
	watch   *watch // of the context; nil if the context cannot end
	done    atomic.Bool
	wake    atomic.Pointer[chan struct{}] // closed when the operation is done; nil until a goroutine sleeps
	refusal error                         // reason why this rank refuses the request, or nil
	err     error
}

// refuse makes the engine report to the other ranks that this rank refuses the operation. If all
// ranks refuse the same request, the operation ends with the reason on each, and the group remains
// usable.
func (h *Handle) refuse(reason error) {
	h.refusal, h.request.Refused = reason, true
	h.request.Prescale, h.request.Postscale = 1, 1 // NaN is not equal to itself
	h.data, h.result = nil, nil
}

// Wait blocks until the operation has ended and returns its error. Until then the data belongs to
// the operation; after an error the data is undefined. Once a goroutine waits for an operation, the
// operation is no longer delayed to be fused with later ones.
func (h *Handle) Wait() error {
	if !h.done.Load() {
		switch {
		case h.engine != nil:
			h.engine.help(h)
		case h.point != nil:
			h.point.help(h)
		}
	}
	h.sleep()
	if h.engine != nil {
		h.engine.g.exitIfKilled()
	}
	if h.point != nil {
		h.point.g.exitIfKilled()
	}
	return h.err
}

// sleep blocks until the operation is done.
func (h *Handle) sleep() {
	if h.done.Load() {
		return
	}
	wake := make(chan struct{})
	if !h.wake.CompareAndSwap(nil, &wake) {
		wake = *h.wake.Load()
	}
	if !h.done.Load() { // finish sets done before it reads wake
		<-wake
	}
}

// Done reports whether Wait would return at once.
func (h *Handle) Done() bool { return h.done.Load() }

// AllReduceAsync is [AllReduce] in the background: it returns at once, and the operation is done
// when every rank has called it with the same name. Ranks may call it in different orders, and
// concurrently with any other operation of the group. Tensors that are ready at the same time are
// reduced together. This changes no bit of a result, because every element is combined in a fixed
// order: first the ranks of each host, then the hosts, in the order of their first ranks. With
// [Strict], or if ranks of a host share no memory, it is the order of the ranks. Tensors of
// [Adasum] are reduced one by one.
//
// A name is a text of 1 to 255 bytes and may be used again once its operation is done. It is
// fastest to use the same names in every step. If the arguments of two ranks differ under the same
// name, every rank gets a [*MismatchError]. Wait returns the errors of AllReduce. If ctx ends
// before the operation is done, the group ends.
func AllReduceAsync[T Element](ctx context.Context, g *Group, name string, data []T, op Op) *Handle {
	return AllReduceAsyncWith(ctx, g, name, data, op, AsyncOptions{})
}

// AllReduceAsyncWith is like AllReduceAsync, with options.
func AllReduceAsyncWith[T Element](ctx context.Context, g *Group, name string, data []T, op Op, o AsyncOptions) *Handle {
	h := newHandle(name, data, op, o)
	return g.submit(ctx, h)[0]
}

// GroupedAllReduce reduces several slices, together if they fit the fusion threshold. name is the
// name of the whole group of slices, as in [AllReduceAsync]. It blocks until all slices are
// reduced.
func GroupedAllReduce[T Element](ctx context.Context, g *Group, name string, tensors [][]T, op Op) error {
	handles := make([]*Handle, len(tensors))
	for i, data := range tensors {
		handles[i] = newHandle(fmt.Sprintf("%s.%d", name, i), data, op, AsyncOptions{})
	}
	var first error
	for _, h := range g.submit(ctx, handles...) {
		if err := h.Wait(); first == nil {
			first = err
		}
	}
	return first
}

// Join reports that this rank has no more data. From then on this rank contributes nothing to
// asynchronous operations and need not call them: the other ranks perform them, and averages are
// over the ranks that contribute. Join first waits for this rank's pending operations, and blocks
// until every rank has joined. It returns the last rank that joined, or the highest if several
// joined at the same time. Afterwards the group is as before. Synchronous operations still need
// every rank.
func Join(ctx context.Context, g *Group) (last int, err error) {
	h := &Handle{name: joinName}
	err = g.submit(ctx, h)[0].Wait()
	return int(h.request.Count), err
}

// joinName is not a valid name of a tensor.
const joinName = ""

func newHandle[T Element](name string, data []T, op Op, o AsyncOptions) *Handle {
	scale := func(f float64) float64 {
		if f == 0 {
			return 1
		}
		return f
	}
	h := &Handle{name: name, data: kernel.Bytes(data), request: agreement.Request{Type: typeOf[T](), Op: operation.Op(op), Compression: operation.Compression(o.Compression),
		Count: uint64(len(data)), Prescale: scale(o.Prescale), Postscale: scale(o.Postscale)}}
	h.err = checkName(name)
	err := cmp.Or(checkReduced[T](), h.request.Op.Check(h.request.Type))
	switch {
	case err != nil:
	case math.IsNaN(o.Prescale) || math.IsNaN(o.Postscale):
		err = errors.New("a scale is not a number")
	default:
		err = h.request.Compression.Check(h.request.Type)
	}
	if err != nil {
		h.refuse(err)
	}
	return h
}

func checkName(name string) error {
	if len(name) == 0 || len(name) > frame.MaxName {
		return fmt.Errorf("a name has 1 to %d bytes, not %d", frame.MaxName, len(name))
	}
	return nil
}

// submit passes operations to the group's engine, all at once, and returns them. Operations that
// are not accepted are done, with an error.
func (g *Group) submit(ctx context.Context, handles ...*Handle) []*Handle {
	var invalid error
	for _, h := range handles {
		if invalid == nil && h.err != nil {
			invalid = h.request.Action().Wrap(h.err)
		}
	}
	err := errNoGroup
	var e *engine
	if g != nil {
		e, err = g.engine()
	}
	switch {
	case err != nil:
	case invalid != nil:
		err = invalid
	default:
		err = e.submit(ctx, handles)
	}
	if err != nil {
		for _, h := range handles {
			h.finish(err)
		}
		g.exitIfKilled()
	}
	return handles
}

// finish ends the operation and wakes the goroutines that wait for it.
func (h *Handle) finish(err error) {
	h.err = err
	if h.work != nil {
		h.work.Ended(err)
	}
	h.done.Store(true)
	if wake := h.wake.Load(); wake != nil {
		close(*wake)
	}
}

// asyncLane is the kind of the lane of a group's engine.
const asyncLane = 'a'

// engine returns the group's engine, which starts with the first asynchronous operation of any
// rank.
func (g *Group) engine() (*engine, error) {
	if e := g.async.Load(); e != nil && !g.closing.Load() {
		return e, nil // a failed group is reported by the engine's operations
	}
	g.asyncMu.Lock()
	defer g.asyncMu.Unlock()
	if g.closing.Load() {
		return nil, ErrClosed
	}
	if err := g.err(); err != nil {
		<-g.call.Failed
		return nil, err
	}
	e := g.async.Load()
	if e == nil {
		e = newEngine(g)
		g.async.Store(e)
		go e.run()
	}
	return e, nil
}

// stopEngine ends the engine, if there is one, and waits for it. The group is closing or has
// failed.
func (g *Group) stopEngine() {
	g.asyncMu.Lock() // wait for an engine that is being started
	e := g.async.Load()
	g.asyncMu.Unlock()
	if e != nil {
		e.stop()
	}
}

// nudged records that another rank has begun a cycle. It does not block.
func (g *Group) nudged(cycle uint64) {
	for {
		was := g.cycle.Load()
		if cycle <= was {
			return
		}
		if g.cycle.CompareAndSwap(was, cycle) {
			break
		}
	}
	if cycle > g.begun.Load() {
		g.changed.Set()
	}
}

// departed records that a rank has left. Without it, no operation of an engine can finish.
func (g *Group) departed() {
	g.peerLeft.Store(true)
	g.changed.Set()
}
