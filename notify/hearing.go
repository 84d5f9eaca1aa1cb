package notify

import (
	"context"
	"io"
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/plan"
)

// Callers says who makes a call of a service of the driver. Its methods return an error, a status
// of gRPC, for one that may not.
type Callers interface {
	// Worker returns the worker that makes a call.
	Worker(ctx context.Context) (identity.Subject, error)
	// Speaks returns the worker with that incarnation, for which the agent speaks that makes a
	// call.
	Speaks(ctx context.Context, incarnation string) (identity.Subject, error)
}

// Register adds the service by which targets hear from the pusher to a server of the driver.
func (p *Pusher) Register(r grpc.ServiceRegistrar, who Callers) {
	notifypb.RegisterHearingServer(r, hearing{p: p, who: who})
}

type hearing struct {
	notifypb.UnimplementedHearingServer
	p   *Pusher
	who Callers
}

// waitingCall is one of a target that waits for what the target does not know. At most one of its
// functions is called, once. They must not block.
type waitingCall struct {
	answer func(state)
	end    func() // without an answer: another call takes its place, or the target is forgotten
}

func (h hearing) Hear(ctx context.Context, req *notifypb.HearRequest) (*notifypb.HostsUpdatedRequest, error) {
	from, err := h.who.Worker(ctx)
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

// HearForAll serves an agent.
func (h hearing) HearForAll(stream grpc.BidiStreamingServer[notifypb.WaitingWorkers, notifypb.News]) error {
	a := newAgentCall()
	defer a.end(h.p)
	ended := make(chan error, 1)
	go func() { ended <- h.listen(stream, a) }() // until this returns, which ends the stream
	for {
		select {
		case <-a.wake:
			for _, n := range a.take() {
				if err := stream.Send(n); err != nil {
					return err
				}
			}
		case err := <-ended:
			return err
		case <-h.p.done:
			return errStopping
		}
	}
}

// listen takes what an agent says until the stream ends.
func (h hearing) listen(stream grpc.BidiStreamingServer[notifypb.WaitingWorkers, notifypb.News], a *agentCall) error {
	for {
		said, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, incarnation := range said.GetEnd() {
			if c := a.remove(incarnation); c != nil {
				h.p.hangUp(incarnation, c)
			}
		}
		if a.isFull() {
			return status.Error(codes.ResourceExhausted, "the agent does not read what its workers are told")
		}
		for _, w := range said.GetBegin() {
			from, err := h.who.Speaks(stream.Context(), w.GetIncarnation())
			if err != nil {
				a.say(newsKey{refused: true}, w.GetIncarnation(), nil)
			} else if c := a.add(from.Incarnation); c != nil {
				h.p.hear(from, w.GetKnows(), c)
			}
		}
	}
}

// agentCall is a HearForAll. Its lock is taken while those of a Pusher and a target are held.
type agentCall struct {
	wake chan struct{} // capacity 1: there are news

	mu      sync.Mutex
	ended   bool
	waiting map[string]*waitingCall    // by incarnation
	news    map[newsKey]*notifypb.News // not sent yet
	unsent  int                        // workers of news
}

// mostUnsent bounds the workers that an agent is to be told of. Each waits again once it was told.
const mostUnsent = 4 * plan.MaxSlots

func (a *agentCall) isFull() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.unsent > mostUnsent
}

func newAgentCall() *agentCall {
	return &agentCall{waiting: make(map[string]*waitingCall), news: make(map[newsKey]*notifypb.News), wake: make(chan struct{}, 1)}
}

// newsKey distinguishes news. What becomes known at about the same time goes in one message to all
// workers to which it is the same.
type newsKey struct {
	refused bool
	update  Update
	lost    uint64 // generation
	ranks   int
	first   *int // of the ranks, which those that were told of together share
}

// add begins the call of a worker; nil: the stream has ended.
func (a *agentCall) add(incarnation string) *waitingCall {
	c := &waitingCall{}
	c.answer = func(w state) {
		key := newsKey{update: w.update, lost: w.loss.Generation, ranks: len(w.loss.Ranks)}
		if key.ranks > 0 {
			key.first = &w.loss.Ranks[0]
		}
		if a.removeCall(incarnation, c) {
			a.say(key, incarnation, &w)
		}
	}
	c.end = func() {
		if a.removeCall(incarnation, c) {
			a.say(newsKey{}, incarnation, nil)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		return nil
	}
	a.waiting[incarnation] = c
	return c
}

// remove ends the call of a worker, and returns it; nil: there is none.
func (a *agentCall) remove(incarnation string) *waitingCall {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.waiting[incarnation]
	delete(a.waiting, incarnation)
	return c
}

// removeCall ends a call, and returns whether it was not over.
func (a *agentCall) removeCall(incarnation string, c *waitingCall) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	is := a.waiting[incarnation] == c
	if is {
		delete(a.waiting, incarnation)
	}
	return is
}

// say has a worker told; of nothing if what is nil.
func (a *agentCall) say(key newsKey, incarnation string, what *state) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.news[key]
	if n == nil {
		n = &notifypb.News{Refused: key.refused}
		if what != nil {
			n.What, _ = proto.Marshal(what.request()) // numbers can be encoded
		}
		a.news[key] = n
	}
	n.Incarnations = append(n.Incarnations, incarnation)
	a.unsent++
	signal(a.wake)
}

// take returns what is to be sent.
func (a *agentCall) take() (all []*notifypb.News) {
	a.mu.Lock()
	defer a.mu.Unlock()
	all = slices.Collect(maps.Values(a.news))
	clear(a.news)
	a.unsent = 0
	return all
}

// end ends all calls.
func (a *agentCall) end(p *Pusher) {
	a.mu.Lock()
	a.ended = true
	waiting := a.waiting
	a.waiting = make(map[string]*waitingCall)
	a.mu.Unlock()
	for incarnation, c := range waiting {
		p.hangUp(incarnation, c)
	}
}

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
	t.hears = true
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
