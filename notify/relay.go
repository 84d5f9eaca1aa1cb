package notify

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
)

// mostBegun bounds the workers of one message to the driver.
const mostBegun = 1000

// Relay answers the Hear of an agent's workers. It hears for all of them by one call to the driver.
// Its methods are safe for concurrent use.
type Relay struct {
	wake chan struct{} // capacity 1: there is something to tell the driver

	mu      sync.Mutex
	over    error               // what each call is answered with at once; nil: it waits
	waiting map[string]*relayed // by incarnation
	begun   map[string]bool     // of those, the ones of which the driver was not told
	ended   []string            // of which the driver was told, and which wait no longer
}

// relayed is a Hear that waits.
type relayed struct {
	knows  *notifypb.HearRequest
	answer chan answer // capacity 1
}

type answer struct {
	what []byte // a HostsUpdatedRequest, encoded
	err  error
}

// NewRelay returns a relay of no workers. It starts nothing.
func NewRelay() *Relay {
	return &Relay{wake: make(chan struct{}, 1), waiting: make(map[string]*relayed), begun: make(map[string]bool)}
}

// ErrEach: the driver cannot hear for all, as one of an older version. It is to be called for each.
var ErrEach = errors.New("notify: the driver does not hear for all workers of an agent")

// Hear is the call Hear of a worker. It returns an encoded HostsUpdatedRequest, ErrEach, or a
// status of gRPC.
func (r *Relay) Hear(ctx context.Context, incarnation string, knows *notifypb.HearRequest) ([]byte, error) {
	h := &relayed{knows: knows, answer: make(chan answer, 1)}
	r.mu.Lock()
	if err := r.over; err != nil {
		r.mu.Unlock()
		return nil, err
	}
	if before := r.waiting[incarnation]; before != nil {
		before.answer <- answer{err: errCalledAgain}
	}
	r.waiting[incarnation] = h
	r.begun[incarnation] = true
	r.mu.Unlock()
	signal(r.wake)
	select {
	case a := <-h.answer:
		return a.what, a.err
	case <-ctx.Done():
		r.hangUp(incarnation, h)
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

var errClosed = status.Error(codes.Unavailable, "the agent's session is over")

var errCalledAgain = status.Error(codes.Aborted, "the worker has called again, has joined with another address, or has ended")

// hangUp takes that a worker has given up a call.
func (r *Relay) hangUp(incarnation string, h *relayed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting[incarnation] != h {
		return
	}
	if !r.begun[incarnation] {
		r.ended = append(r.ended, incarnation)
		signal(r.wake)
	}
	r.remove(incarnation)
}

// remove removes the call of a worker; the lock is held.
func (r *Relay) remove(incarnation string) {
	delete(r.waiting, incarnation)
	delete(r.begun, incarnation)
}

// Run hears from the driver by a connection until ctx or the call ends, and returns why. It uses
// the connection once a worker waits. Calls of workers wait for the next Run then, unless it
// returns ErrEach.
func (r *Relay) Run(ctx context.Context, conn grpc.ClientConnInterface) error {
	ctx, cancel := context.WithCancel(ctx)
	var telling sync.WaitGroup
	defer telling.Wait()
	defer cancel()
	r.mu.Lock()
	if r.over == ErrEach {
		r.over = nil
	}
	r.mu.Unlock()
	for !r.waits() {
		select {
		case <-r.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	stream, err := notifypb.NewHearingClient(conn).HearForAll(ctx, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	r.begin()
	telling.Go(func() { r.tell(ctx, stream) })
	for {
		n, err := stream.Recv()
		if status.Code(err) == codes.Unimplemented {
			r.giveUp(ErrEach)
			return ErrEach
		}
		if err != nil {
			return err
		}
		r.pass(n)
	}
}

// waits returns whether a worker waits.
func (r *Relay) waits() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waiting) > 0
}

// begin has all calls that wait be told to another driver.
func (r *Relay) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = nil
	for incarnation := range r.waiting {
		r.begun[incarnation] = true
	}
	signal(r.wake)
}

// tell tells the driver who waits, until ctx or the call ends.
func (r *Relay) tell(ctx context.Context, stream grpc.BidiStreamingClient[notifypb.WaitingWorkers, notifypb.News]) {
	for {
		select {
		case <-r.wake:
		case <-ctx.Done():
			return
		}
		for {
			w := r.take()
			if w == nil {
				break
			}
			if stream.Send(w) != nil {
				return // Recv says why
			}
		}
	}
}

// take returns what the driver is to be told next; nil: nothing.
func (r *Relay) take() *notifypb.WaitingWorkers {
	r.mu.Lock()
	defer r.mu.Unlock()
	var w notifypb.WaitingWorkers
	w.End, r.ended = r.ended, nil
	for incarnation := range r.begun {
		if len(w.Begin) == mostBegun {
			break
		}
		delete(r.begun, incarnation)
		w.Begin = append(w.Begin, &notifypb.WaitingWorker{Incarnation: incarnation, Knows: r.waiting[incarnation].knows})
	}
	if len(w.Begin)+len(w.End) == 0 {
		return nil
	}
	return &w
}

// pass answers the calls of workers.
func (r *Relay) pass(n *notifypb.News) {
	a := answer{what: n.GetWhat()}
	switch {
	case n.GetRefused():
		a.err = status.Error(codes.PermissionDenied, "this worker does not belong to the job any more")
	case len(a.what) == 0:
		a.err = errCalledAgain
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, incarnation := range n.GetIncarnations() {
		if h := r.waiting[incarnation]; h != nil {
			r.remove(incarnation)
			h.answer <- a
		}
	}
}

// Close answers all calls, and those that come, as unavailable.
func (r *Relay) Close() { r.giveUp(errClosed) }

// giveUp answers all calls, and those that come, with an error.
func (r *Relay) giveUp(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over != errClosed {
		r.over = err
	}
	for incarnation, h := range r.waiting {
		r.remove(incarnation)
		h.answer <- answer{err: err}
	}
}
