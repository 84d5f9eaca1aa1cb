package cuda

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda/nccl"
	"github.com/hvdrun/hvdrun/internal/retry"
)

// Limits of waits for NCCL. Variables for tests.
var (
	formLimit  = 2 * time.Minute        // for a new communicator; meanwhile another backend is used
	endLimit   = 3 * time.Second        // for ending the operations in progress in a communicator, and for each step of that
	closeLimit = 200 * time.Millisecond // for closing an unused communicator; after that, closing continues in the background
	grace      = time.Second            // for the group's own report of a failure that NCCL reported first
)

// States of a communicator. The ranks of a group agree on the highest of their states.
const (
	commReady = iota
	commForming
	commEnding // operations in progress are being ended; commReady or commFailed follows
	commFailed
)

var (
	errLimit  = errors.New("cuda: NCCL takes too long")
	errUnused = errors.New("cuda: the communicator is no longer used")
)

// thread is a system thread on which a device's context is current. It runs one function after
// another.
type thread struct {
	work  chan func()
	over  bool // owned by the thread, which ends after the function that sets it
	ended chan struct{}
}

// newThread starts a thread. It ends after a function that sets over; Close of the device waits for
// that.
func (d *Device) newThread() (*thread, error) {
	t := &thread{work: make(chan func()), ended: make(chan struct{})}
	started := make(chan error, 1)
	d.threads.Go(func() { t.run(d, started) })
	if err := <-started; err != nil {
		<-t.ended
		return nil, err
	}
	return t, nil
}

func (t *thread) run(d *Device, started chan<- error) {
	runtime.LockOSThread() // without an unlock, as in Device.serve
	defer close(t.ended)
	err := d.api.check("cuCtxSetCurrent", d.api.ctxSetCurrent(d.context)) // Close of the device waits for the thread
	started <- err
	if err != nil {
		return
	}
	for !t.over {
		f := <-t.work
		f()
	}
}

// do runs f on the thread and returns its error. If ctx ends first, do returns the cause of that
// end, and f may still run.
func (t *thread) do(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	select {
	case t.work <- func() { done <- f() }:
	case <-t.ended:
		return errUnused
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// communicator is a communicator of NCCL among the ranks of a group. Its thread makes all calls of
// NCCL that concern it.
type communicator struct {
	device *Device
	lib    *nccl.Library
	thread *thread
	tag    uint64 // the same on all ranks
	lane   uint64 // of the group
	rank   int
	size   int

	ctx    context.Context // ends when no further operation may begin
	cancel context.CancelCauseFunc

	comm    *nccl.Comm    // owned by the thread; nil before it is made and after it is closed
	parent  *communicator // owned by the thread: the parent, until the communicator is made
	state   atomic.Int64  // commReady and so on
	reason  error         // why it has failed; set before state
	broken  atomic.Bool   // an operation was in progress when the group failed
	offered uint64        // the generation to which it was offered as a parent, or 0; guarded by device.mu
}

// newCommunicator returns a communicator that form then makes. If it has a parent, it uses the
// parent's thread.
func (d *Device) newCommunicator(lib *nccl.Library, parent *communicator, g *collective.Group) (*communicator, error) {
	c := &communicator{device: d, lib: lib, parent: parent, lane: g.Lane(), rank: g.Rank(), size: g.Size()}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.state.Store(commForming)
	if parent != nil {
		c.thread = parent.thread
		return c, nil
	}
	var err error
	if c.thread, err = d.newThread(); err != nil {
		return nil, err
	}
	return c, nil
}

// form makes the communicator and ends its parent, if there is one. It runs on the thread.
func (c *communicator) form(begin func() (*nccl.Comm, error)) {
	var comm *nccl.Comm
	err := context.Cause(c.ctx)
	if err == nil {
		comm, err = begin()
	}
	if err == nil {
		ctx, stop := context.WithTimeoutCause(c.ctx, formLimit, errLimit)
		err = poll(ctx, comm)
		stop()
	}
	if c.parent != nil {
		if err != nil { // a communicator may still be being made from it
			c.parent.broken.Store(true)
		}
		c.parent.finish()
		c.parent = nil
	}
	if err != nil {
		if comm != nil {
			comm.Abort()
		}
		c.reason = err
		c.state.Store(commFailed)
		return
	}
	c.comm = comm
	c.state.CompareAndSwap(commForming, commReady)
}

// naps are the pauses between polls of NCCL.
var naps = retry.Backoff{First: 10 * time.Microsecond, Most: time.Millisecond}

// poll blocks until the calls begun in a communicator are done. It runs on the communicator's
// thread.
func poll(ctx context.Context, comm *nccl.Comm) error {
	for polls := 1; ; polls++ {
		if err := comm.Poll(); !errors.Is(err, nccl.ErrInProgress) {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		unix.Nanosleep(&unix.Timespec{Nsec: naps.After(polls).Nanoseconds()}, nil)
	}
}

// cancelAll ends the operations in progress, and blocks until the device no longer uses their
// memory, for at most endLimit. No further operation begins in the communicator. Half a second
// later, when NCCL has finished, the state is commReady if the communicator can be a parent. event,
// if not 0, was recorded after the operations in progress; cancelAll also returns when it occurs,
// which may be earlier.
func (c *communicator) cancelAll(cause error, event uintptr) error {
	c.cancel(cause)
	c.state.Store(commEnding)
	c.broken.Store(true)
	ended := make(chan error, 1)
	c.device.threads.Go(func() { ended <- c.end(cause) })
	if event == 0 {
		return <-ended
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	stopped := make(chan error, 1)
	c.device.threads.Go(func() { stopped <- c.device.await(ctx, event) })
	select {
	case err := <-stopped:
		if err != nil {
			err = errors.Join(err, <-ended)
		}
		return err
	case err := <-ended:
		stop()
		<-stopped
		return err
	}
}

// end makes NCCL end the operations in progress: by a revocation if NCCL supports that, or else by
// an abort of the communicator.
func (c *communicator) end(cause error) error {
	ctx, stop := context.WithTimeoutCause(context.Background(), c.device.endLimit, errLimit)
	defer stop()
	defer c.state.CompareAndSwap(commEnding, commFailed)
	return c.thread.do(ctx, func() error {
		if c.comm == nil {
			return nil
		}
		var met *nccl.Error
		if c.lib.CanRevoke() && !errors.As(cause, &met) {
			err := c.comm.Revoke()
			if err == nil {
				err = poll(ctx, c.comm)
			}
			if err == nil {
				c.state.Store(commReady) // as a parent
				return nil
			}
		}
		comm := c.comm
		c.comm = nil
		return comm.Abort()
	})
}

// finish releases what NCCL holds for the communicator and its parent. It runs on the thread.
func (c *communicator) finish() error {
	if c.parent != nil {
		c.parent.finish()
		c.parent = nil
	}
	comm := c.comm
	c.comm = nil
	if comm == nil {
		return nil
	}
	if !c.broken.Load() {
		ctx, stop := context.WithTimeoutCause(context.Background(), c.device.endLimit, errLimit)
		defer stop()
		err := comm.Finalize()
		if err == nil {
			err = poll(ctx, comm)
		}
		if err == nil {
			return comm.Destroy()
		}
	}
	return comm.Abort()
}

// close ends the communicator and its thread. It blocks for at most closeLimit, after which closing
// continues in the background; Close of the device waits for it.
func (c *communicator) close() {
	c.cancel(errUnused)
	c.state.CompareAndSwap(commForming, commFailed)
	done := make(chan struct{})
	c.device.threads.Go(func() {
		defer close(done)
		c.thread.do(context.Background(), func() error {
			c.thread.over = true
			return c.finish()
		})
	})
	limit := time.NewTimer(closeLimit)
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
	}
}

// perform begins an operation in a stream, records the event after it, and blocks until the event
// has occurred or ctx ends. Every askAfter it polls NCCL for errors. After an error, recorded
// reports whether the event was recorded.
func (c *communicator) perform(ctx context.Context, stream, event uintptr, begin func(comm *nccl.Comm) error) (recorded bool, err error) {
	d := c.device
	err = c.thread.do(ctx, func() error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if c.comm == nil {
			return errUnused
		}
		if err := begin(c.comm); err != nil {
			return err
		}
		if err := poll(ctx, c.comm); err != nil { // only then is the operation in the stream
			return err
		}
		return d.api.check("cuEventRecord", d.api.eventRecord(event, stream))
	})
	recorded = err == nil
	for err == nil {
		while, stop := context.WithTimeout(ctx, askAfter)
		err = d.await(while, event)
		stop()
		if err == nil {
			return true, nil
		}
		if ctx.Err() != nil {
			return recorded, context.Cause(ctx)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = c.thread.do(ctx, func() error { return poll(ctx, c.comm) })
		}
	}
	return recorded, err
}

// askAfter is the time between two polls of NCCL for errors during an operation.
const askAfter = 20 * time.Millisecond
