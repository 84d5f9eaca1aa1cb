package notify

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/carry"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
)

// Register adds the service by which targets hear from the pusher to a server of the driver. caller
// returns the worker that makes a call, or a status of gRPC for one that may not.
func (p *Pusher) Register(r grpc.ServiceRegistrar, caller func(context.Context) (identity.Subject, error)) {
	notifypb.RegisterHearingServer(r, hearing{p: p, caller: caller})
}

// Carried returns the methods of that service for workers whose calls their agent carries.
func (p *Pusher) Carried() map[string]carry.Method {
	return map[string]carry.Method{notifypb.Hearing_Hear_FullMethodName: carry.Encoded(p.hearCarried)}
}

func (p *Pusher) hearCarried(from identity.Subject, req *notifypb.HearRequest, answer func(carry.Reply)) (giveUp func()) {
	c := &waitingCall{
		answer: func(w state) { answer(carry.Reply{Shared: p.last.of(w)}) },
		end:    func() { answer(carry.Reply{Err: errCalledAgain}) },
	}
	p.hear(from, req, c)
	return func() { p.hangUp(from.Incarnation, c) }
}

// encodedState is the last state that a target was told, encoded. Targets that are told the same at
// about the same time share its bytes.
type encodedState struct {
	mu   sync.Mutex
	what told
	as   []byte
}

// told distinguishes what targets are told.
type told struct {
	update Update
	lost   uint64 // generation
	ranks  int
	first  *int // of the ranks, which those that are told of together share
}

// of returns w, encoded.
func (e *encodedState) of(w state) []byte {
	what := told{update: w.update, lost: w.loss.Generation, ranks: len(w.loss.Ranks)}
	if what.ranks > 0 {
		what.first = &w.loss.Ranks[0]
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.as == nil || e.what != what {
		e.what = what
		e.as, _ = proto.Marshal(w.request()) // numbers can be encoded
	}
	return e.as
}

type hearing struct {
	notifypb.UnimplementedHearingServer
	p      *Pusher
	caller func(context.Context) (identity.Subject, error)
}

// waitingCall is one of a target that waits for what the target does not know. At most one of its
// functions is called, once. They must not block.
type waitingCall struct {
	answer func(state)
	end    func() // without an answer: another call takes its place, or the target is forgotten
}

func (h hearing) Hear(ctx context.Context, req *notifypb.HearRequest) (*notifypb.HostsUpdatedRequest, error) {
	from, err := h.caller(ctx)
	if err != nil {
		return nil, err
	}
	answer := make(chan state, 1)
	c := &waitingCall{answer: func(w state) { answer <- w }, end: func() { close(answer) }}
	h.p.hear(from, req, c)
	select {
	case w, ok := <-answer:
		if !ok {
			return nil, errCalledAgain
		}
		return w.request(), nil
	case <-ctx.Done():
		h.p.hangUp(from.Incarnation, c)
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-h.p.done:
		return nil, errStopping
	}
}

var errStopping = status.Error(codes.Unavailable, "the driver is stopping")

var errCalledAgain = status.Error(codes.Aborted, "the worker has called again, has joined with another address, or has ended")

// hear has a call of a target, which may be new, wait for what the target does not know, by what it
// says. It takes the place of the target's last call.
func (p *Pusher) hear(from identity.Subject, req *notifypb.HearRequest, c *waitingCall) {
	t := p.hearer(from)
	w, known := t.hear(p, req, c)
	if !known {
		c.answer(w)
		return
	}
	p.acknowledge(t, w)
	if p.waits != nil {
		p.waits(from.Incarnation)
	}
}

// hearer returns the target that calls, which may be new.
func (p *Pusher) hearer(from identity.Subject) *target {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.targets[from.Incarnation]; t != nil {
		return t
	}
	return p.add(Target{Subject: from})
}

// hear begins to wait, unless there is something that the target does not know. It returns what the
// target must know.
func (t *target) hear(p *Pusher, req *notifypb.HearRequest, c *waitingCall) (w state, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endCall()
	t.expectNothing()
	if t.silent {
		t.silent = false
		signal(t.wake) // its goroutine may end
	}
	switch w = t.want; {
	case t.ctx.Err() != nil: // it was forgotten meanwhile: what is told now has the worker call again
	case !w.knownTo(req):
		p.expect(t)
	default:
		t.call, known = c, true
	}
	return w, known
}

// endCall ends a call that waits, without an answer; the target's lock is held.
func (t *target) endCall() {
	if t.call != nil {
		t.call.end()
		t.call = nil
	}
}

// knownTo reports whether a worker knows all of w, by what it says.
func (w state) knownTo(req *notifypb.HearRequest) bool {
	lost := w.loss.Generation > req.GetLostGeneration() ||
		w.loss.Generation == req.GetLostGeneration() && uint64(len(w.loss.Ranks)) > uint64(req.GetLostRanks())
	return w.update.Seq <= req.GetSeq() && !lost
}

// hangUp takes that the caller has given up a call that waits. A target that has only ever called
// is forgotten.
func (p *Pusher) hangUp(incarnation string, c *waitingCall) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.targets[incarnation]
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.call != c {
		return
	}
	t.call = nil
	if t.Addr == "" {
		delete(p.targets, incarnation)
		t.forget()
	}
}
