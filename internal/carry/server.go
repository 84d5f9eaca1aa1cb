package carry

import (
	"io"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/carrypb"
)

// Method begins a call of a worker. It must not block for long. It calls answer exactly once,
// before or after it returns, unless giveUp is called; that may happen even after answer was
// called, or concurrently. A nil giveUp stands for one that does nothing.
type Method func(from identity.Subject, request []byte, answer func(Reply)) (giveUp func())

// Reply is the answer to a call.
type Reply struct {
	// Own and Shared together are the encoded message. Calls that are answered with the same slice
	// Shared at about the same time are sent it once. It must not change.
	Own, Shared []byte
	// Err is a status of gRPC; nil: there is a message.
	Err error
}

// newReply returns the reply that is a message, or an error.
func newReply(m proto.Message, err error) Reply {
	if err != nil {
		return Reply{Err: err}
	}
	own, shared, err := wire.MarshalShared(m)
	if err == nil && len(shared) == 0 {
		own, err = proto.Marshal(m)
	}
	if err != nil {
		return Reply{Err: status.Error(codes.Internal, err.Error())}
	}
	return Reply{Own: own, Shared: shared}
}

// Encoded returns a Method whose requests are messages Q.
func Encoded[Q any, M interface {
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

// Later returns a Method that answers with messages, at once or later.
func Later[Q any, M interface {
	*Q
	proto.Message
}, R proto.Message](begin func(from identity.Subject, request M, answer func(R, error)) (giveUp func())) Method {
	return Encoded(func(from identity.Subject, request M, answer func(Reply)) func() {
		return begin(from, request, func(reply R, err error) { answer(newReply(reply, err)) })
	})
}

// AtOnce returns a Method that answers at once.
func AtOnce[Q any, M interface {
	*Q
	proto.Message
}, R proto.Message](do func(from identity.Subject, request M) (R, error)) Method {
	return Later(func(from identity.Subject, request M, answer func(R, error)) func() {
		answer(do(from, request))
		return nil
	})
}

// ServerConfig configures the driver's end.
type ServerConfig struct {
	// Worker returns the worker with that incarnation, or a status of gRPC where the agent does not
	// speak for it.
	Worker func(agent identity.Subject, incarnation string) (identity.Subject, error)
	// Methods are those that agents may call, by their names in gRPC.
	Methods map[string]Method
	// Done is closed when the server stops.
	Done <-chan struct{}
}

// Register adds, to a server of wire.Known, the service by which agents carry calls. That server
// must know agents by identity.Subject.
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
	said, ended := make(chan *carrypb.CarriedCalls), make(chan error, 1)
	go func() { ended <- receive(stream, said) }() // until this returns, which ends the stream
	return a.serve(stream.Send, said, ended)
}

// receive hands on what the agent says until the stream ends.
func receive(stream grpc.BidiStreamingServer[carrypb.CarriedCalls, carrypb.CarriedReplies], said chan<- *carrypb.CarriedCalls) error {
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case said <- m:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}

const (
	// mostAtOnce bounds the calls that begin before replies are sent: an agent that does not read
	// has no more of them answered at once.
	mostAtOnce = 1 << 10
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

	mu      sync.Mutex
	waiting map[uint64]func() // what gives each call up; nil: nothing
	unsent  []*carrypb.CarriedReplies
	open    map[*byte]*batch // of unsent, those that take more replies, by what is shared
}

type batch struct {
	replies *carrypb.CarriedReplies
	bytes   int
}

func newAgentCalls(cfg ServerConfig, agent identity.Subject) *agentCalls {
	return &agentCalls{
		cfg: cfg, agent: agent, wake: make(chan struct{}, 1), waiting: make(map[uint64]func()), open: make(map[*byte]*batch),
	}
}

// serve begins the calls of what the agent says, and sends their replies, until the stream has
// ended.
func (a *agentCalls) serve(
	send func(*carrypb.CarriedReplies) error, said <-chan *carrypb.CarriedCalls, ended <-chan error,
) error {
	for stopping := false; ; {
		if err := a.send(send); err != nil {
			return err
		}
		if stopping {
			return status.Error(codes.Unavailable, "the driver is stopping")
		}
		select {
		case m := <-said:
			for _, number := range m.GetGivenUp() {
				a.giveUp(number)
			}
			for calls := range slices.Chunk(m.GetCalls(), mostAtOnce) {
				if err := a.begin(calls); err != nil {
					return err
				}
				if err := a.send(send); err != nil {
					return err
				}
			}
		case <-a.wake:
		case err := <-ended:
			return err
		case <-a.cfg.Done:
			stopping = true // and the last answers are sent
		}
	}
}

// send sends the replies that there are.
func (a *agentCalls) send(send func(*carrypb.CarriedReplies) error) error {
	for _, r := range a.take() {
		if err := send(r); err != nil {
			return err
		}
	}
	return nil
}

// begin begins calls. It returns an error where there is one of the same number.
func (a *agentCalls) begin(calls []*carrypb.CarriedCall) error {
	for _, c := range calls {
		number := c.GetNumber()
		a.mu.Lock()
		_, exists := a.waiting[number]
		if !exists {
			a.waiting[number] = nil
		}
		a.mu.Unlock()
		if exists {
			return status.Errorf(codes.InvalidArgument, "there is a call %d already", number)
		}
		giveUp := a.call(c, func(r Reply) { a.answer(number, r) })
		a.mu.Lock()
		if _, waits := a.waiting[number]; waits {
			a.waiting[number] = giveUp
		}
		a.mu.Unlock()
	}
	return nil
}

func (a *agentCalls) call(c *carrypb.CarriedCall, answer func(Reply)) (giveUp func()) {
	method, known := a.cfg.Methods[c.GetMethod()]
	from, err := a.cfg.Worker(a.agent, c.GetIncarnation())
	switch {
	case err != nil:
		answer(Reply{Err: err})
		return nil
	case !known:
		answer(Reply{Err: status.Errorf(codes.Unimplemented, "this driver does not know the method %q", c.GetMethod())})
		return nil
	}
	return method(from, c.GetRequest(), answer)
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
		reply.Own, r.Shared = nil, nil
		reply.Code, reply.Error = uint32(s.Code()), strings.ToValidUTF8(s.Message(), "?")
	}
	b := a.batch(r.Shared)
	b.replies.Replies = append(b.replies.Replies, reply)
	b.bytes += len(reply.Own) + len(reply.Error) + replySize
	signal(a.wake)
}

// batch returns the replies to which one with that end is added; the lock is held.
func (a *agentCalls) batch(shared []byte) *batch {
	var key *byte
	if len(shared) > 0 {
		key = &shared[0]
	}
	b := a.open[key]
	if b == nil || b.bytes >= mostReplies {
		b = &batch{replies: &carrypb.CarriedReplies{Shared: shared}}
		a.open[key] = b
		a.unsent = append(a.unsent, b.replies)
	}
	return b
}

// take returns what is to be sent.
func (a *agentCalls) take() []*carrypb.CarriedReplies {
	a.mu.Lock()
	defer a.mu.Unlock()
	unsent := a.unsent
	a.unsent = nil
	clear(a.open)
	return unsent
}

// end gives all calls up.
func (a *agentCalls) end() {
	a.mu.Lock()
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
