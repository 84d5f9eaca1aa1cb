package carry

import (
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/carrypb"
)

// Method begins a call of a worker. It must not block. It calls answer once, at once or later; then
// it returns what gives the call up, which may be called once answer was, or at the same time. Of
// the calls of a worker at a method, only the last one waits: it has the method answer those before
// it.
type Method func(from identity.Subject, request []byte, answer func(Reply)) (giveUp func())

// Reply is the answer to a call.
type Reply struct {
	// Own and Shared together are the encoded message. Calls that are answered with the same slice
	// Shared at about the same time are sent it once. It must not change.
	Own, Shared []byte
	// Err is a status of gRPC; nil: there is a message.
	Err error
}

// NewReply returns the reply that is a message, or an error.
func NewReply(m proto.Message, err error) Reply {
	if err != nil {
		return Reply{Err: err}
	}
	var r Reply
	if s, is := m.(wire.Sharer); is {
		r.Own, r.Shared, err = s.MarshalShared()
	}
	if err == nil && len(r.Shared) == 0 {
		r.Own, err = proto.Marshal(m)
	}
	if err != nil {
		return Reply{Err: status.Error(codes.Internal, err.Error())}
	}
	return r
}

// Later returns a Method whose requests are messages Q.
func Later[Q any, M interface {
	*Q
	proto.Message
}](begin func(from identity.Subject, request M, answer func(Reply)) (giveUp func())) Method {
	return func(from identity.Subject, request []byte, answer func(Reply)) func() {
		m := M(new(Q))
		if err := proto.Unmarshal(request, m); err != nil {
			answer(Reply{Err: status.Error(codes.Internal, err.Error())}) // as gRPC does
			return nil
		}
		return begin(from, m, answer)
	}
}

// AtOnce returns a Method that answers at once.
func AtOnce[Q any, M interface {
	*Q
	proto.Message
}, R proto.Message](do func(from identity.Subject, request M) (R, error)) Method {
	return Later(func(from identity.Subject, request M, answer func(Reply)) func() {
		reply, err := do(from, request)
		answer(NewReply(reply, err))
		return nil
	})
}

// ServerConfig configures a Server.
type ServerConfig struct {
	// Worker returns the worker with that incarnation, or a status of gRPC where the agent does not
	// speak for it.
	Worker func(agent identity.Subject, incarnation string) (identity.Subject, error)
	// Methods are those that agents may call, by their names in gRPC.
	Methods map[string]Method
	// Done is closed when the server stops.
	Done <-chan struct{}
}

// Register adds the service by which agents carry calls to a server of wire.Known, which knows
// agents by identity.Subject.
func Register(r grpc.ServiceRegistrar, cfg ServerConfig) {
	carrypb.RegisterCarryingServer(r, service{cfg: cfg})
}

type service struct {
	carrypb.UnimplementedCarryingServer
	cfg ServerConfig
}

// Carry serves an agent.
func (s service) Carry(stream grpc.BidiStreamingServer[carrypb.CarriedCalls, carrypb.CarriedReplies]) error {
	agent, _ := wire.KnownCaller(stream.Context()).(identity.Subject)
	if agent.Role != identity.Agent {
		return status.Error(codes.PermissionDenied, "only an agent carries calls of workers")
	}
	a := newAgentCalls(s.cfg, agent)
	defer a.end()
	ended := make(chan error, 1)
	go func() { ended <- a.listen(stream) }() // until this returns, which ends the stream
	for stopping := false; ; {
		for _, r := range a.take() {
			if err := stream.Send(r); err != nil {
				return err
			}
		}
		if stopping {
			return status.Error(codes.Unavailable, "the driver is stopping")
		}
		select {
		case <-a.wake:
		case err := <-ended:
			return err
		case <-s.cfg.Done:
			stopping = true // and the last answers are sent
		}
	}
}

// Replies that are not sent yet are bounded: then no more calls are taken.
const (
	mostUnsent      = 1 << 16 // replies
	mostUnsentBytes = 16 << 20
	// mostReplies bounds the replies of one message, in bytes without what is shared.
	mostReplies = 1 << 20
	// replySize is what a reply takes besides its own bytes.
	replySize = 64
)

// agentCalls are the calls of one stream. Its lock is taken while locks of methods are held, never
// the other way round.
type agentCalls struct {
	cfg   ServerConfig
	agent identity.Subject
	wake  chan struct{} // capacity 1: there are replies
	room  chan struct{} // capacity 1: replies were taken, or the stream has ended

	mu      sync.Mutex
	ended   bool
	waiting map[uint64]func() // what gives each call up; nil: it is beginning
	unsent  []*carrypb.CarriedReplies
	open    map[*byte]*batch // of unsent, those that take more replies, by what is shared
	count   int              // of unsent replies
	bytes   int
}

type batch struct {
	replies *carrypb.CarriedReplies
	bytes   int
}

func newAgentCalls(cfg ServerConfig, agent identity.Subject) *agentCalls {
	return &agentCalls{
		cfg: cfg, agent: agent, wake: make(chan struct{}, 1), room: make(chan struct{}, 1),
		waiting: make(map[uint64]func()), open: make(map[*byte]*batch),
	}
}

// listen takes what the agent says until the stream ends.
func (a *agentCalls) listen(stream grpc.BidiStreamingServer[carrypb.CarriedCalls, carrypb.CarriedReplies]) error {
	for {
		said, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, number := range said.GetGivenUp() {
			a.giveUp(number)
		}
		for _, c := range said.GetCalls() {
			for a.isFull() {
				select {
				case <-a.room:
				case <-stream.Context().Done():
					return status.FromContextError(stream.Context().Err()).Err()
				}
			}
			if !a.begin(c) {
				return status.Errorf(codes.InvalidArgument, "there is a call %d already", c.GetNumber())
			}
		}
	}
}

func (a *agentCalls) isFull() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.count > mostUnsent || a.bytes > mostUnsentBytes
}

// begin begins a call. It returns false where there is one of that number.
func (a *agentCalls) begin(c *carrypb.CarriedCall) bool {
	number := c.GetNumber()
	a.mu.Lock()
	_, exists := a.waiting[number]
	if !exists && !a.ended {
		a.waiting[number] = nil
	}
	a.mu.Unlock()
	if exists {
		return false
	}
	answer := func(r Reply) { a.answer(number, r) }
	method, known := a.cfg.Methods[c.GetMethod()]
	from, err := a.cfg.Worker(a.agent, c.GetIncarnation())
	switch {
	case err != nil:
		answer(Reply{Err: err})
		return true
	case !known:
		answer(Reply{Err: status.Errorf(codes.Unimplemented, "this driver does not know the method %.64q", c.GetMethod())})
		return true
	}
	giveUp := method(from, c.GetRequest(), answer)
	a.mu.Lock()
	_, waits := a.waiting[number]
	if waits {
		a.waiting[number] = giveUp
	}
	ended := a.ended
	a.mu.Unlock()
	if ended && giveUp != nil {
		giveUp()
	}
	return true
}

// giveUp ends a call without an answer, if it waits.
func (a *agentCalls) giveUp(number uint64) {
	a.mu.Lock()
	giveUp := a.waiting[number]
	delete(a.waiting, number)
	a.mu.Unlock()
	if giveUp != nil {
		giveUp()
	}
}

// answer has a reply sent, unless the call was given up.
func (a *agentCalls) answer(number uint64, r Reply) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, waits := a.waiting[number]; !waits {
		return
	}
	delete(a.waiting, number)
	reply := &carrypb.CarriedReply{Number: number, Own: r.Own}
	if r.Err != nil {
		s := status.Convert(r.Err)
		reply.Own, reply.Code, reply.Error, r.Shared = nil, uint32(s.Code()), s.Message(), nil
	}
	var key *byte
	if len(r.Shared) > 0 {
		key = &r.Shared[0]
	}
	b := a.open[key]
	if b == nil {
		b = &batch{replies: &carrypb.CarriedReplies{Shared: r.Shared}}
		a.open[key] = b
		a.unsent = append(a.unsent, b.replies)
	}
	size := len(reply.Own) + len(reply.Error) + replySize
	b.replies.Replies = append(b.replies.Replies, reply)
	if b.bytes += size; b.bytes >= mostReplies {
		delete(a.open, key)
	}
	a.count++
	a.bytes += size
	signal(a.wake)
}

// take returns what is to be sent.
func (a *agentCalls) take() []*carrypb.CarriedReplies {
	a.mu.Lock()
	defer a.mu.Unlock()
	unsent := a.unsent
	a.unsent, a.count, a.bytes = nil, 0, 0
	clear(a.open)
	signal(a.room)
	return unsent
}

// end gives all calls up.
func (a *agentCalls) end() {
	a.mu.Lock()
	a.ended = true
	waiting := a.waiting
	a.waiting = nil
	a.mu.Unlock()
	for _, giveUp := range waiting {
		if giveUp != nil {
			giveUp()
		}
	}
}

// signal says on a channel of capacity 1 that something has changed.
func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}
