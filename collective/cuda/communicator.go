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
	formLimit  = 2 * time.Minute        // for a new communicator; until then another backend does its work
	endLimit   = 3 * time.Second        // for the end of what is under way in one, and for each step of that
	closeLimit = 200 * time.Millisecond // for one that is of no use any more; then its end goes on in the background
	grace      = time.Second            // for the group's own report of a failure that NCCL has met
)

// State of a communicator, as the ranks of a group agree on it: the highest of them all counts.
const (
	commReady = iota
	commForming
	commEnding // what was under way is being ended; commReady or commFailed follows
	commFailed
)

var (
	errLimit  = errors.New("cuda: NCCL takes too long")
	errUnused = errors.New("cuda: the communicator is not used any more")
)

// thread is a system thread on which a device's context is current. It does one thing after the
// other.
type thread struct {
	work  chan func()
	over  bool // the thread's: it ends
	ended chan struct{}
}

// newThread starts a thread. It ends when something that it does sets over; Close of the device
// waits for that.
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
	runtime.LockOSThread() // for ever, as the device's own
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

// do has f done and returns its error, or the cause of ctx's end if that comes first; then f may
// still be done.
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

// communicator is NCCL's among the ranks of a group. All calls of NCCL that concern it are made by
// its thread.
type communicator struct {
	device *Device
	lib    *nccl.Library
	thread *thread
	tag    uint64 // the same on all ranks
	lane   uint64 // of the group
	rank   int
	size   int

	ctx    context.Context // ends when nothing may begin in it any more
	cancel context.CancelCauseFunc

	comm    *nccl.Comm    // the thread's; nil: none, yet or any more
	parent  *communicator // the thread's: what it is made from, until it is made
	state   atomic.Int64  // commReady and so on
	reason  error         // why it has failed; set before state is
	broken  atomic.Bool   // something was under way in it when the group failed
	offered uint64        // the generation that it was offered to as a parent; 0: none. Guarded by device.mu
}

// newCommunicator makes one that form forms. It uses its parent's thread, if there is a parent.
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

// form makes the communicator and ends its parent, if there is one. The thread does it.
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
		if err != nil { // what is made from it may be under way still
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

// poll waits until what has begun in a communicator is done. It is called on its thread.
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

// cancelAll ends what is under way, and returns when the device has stopped using memory; it waits
// for endLimit at most. Nothing begins in the communicator any more; where it can be a parent
// afterwards, it is commReady once NCCL has done its part, which takes NCCL half a second. An event
// that has been recorded behind what is under way, if it is not 0, tells of the device before that.
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

// end has NCCL end what is under way: by a revocation, if that is to be had, or else with the
// communicator.
func (c *communicator) end(cause error) error {
	ctx, stop := context.WithTimeoutCause(context.Background(), endLimit, errLimit)
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

// finish gives back what NCCL holds. The thread does it.
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
		ctx, stop := context.WithTimeoutCause(context.Background(), endLimit, errLimit)
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

// close ends the communicator and its thread. What takes longer than closeLimit goes on in the
// background: Close of the device waits for it.
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

// perform begins an operation in a stream, and returns when the event, recorded behind it, has
// occurred; or when ctx ends, or the communicator's. NCCL is polled for errors every askAfter.
// After an error, recorded tells whether the event has been recorded.
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
		if err := poll(ctx, c.comm); err != nil { // it is in the stream only then
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
