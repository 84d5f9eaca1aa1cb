// Package carry carries the calls that the workers of a host make to the driver: the agent of the
// host takes them by the workers' sockets, and makes all of them by one stream to the driver, which
// answers there. So the driver has one connection and one stream for each host, and sends once what
// is the same for many workers.
package carry

import (
	"context"
	"net"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/carrypb"
)

const (
	// maxPause bounds the pause between two attempts, so that a new driver is found soon.
	maxPause = 500 * time.Millisecond
	// retryPause is the pause before a stream is opened again that has broken. It doubles up to
	// maxPause as long as streams break before a reply.
	retryPause = 20 * time.Millisecond
	// mostCalls bounds the calls of one message to the driver, in bytes.
	mostCalls = wire.MaxMessage / 2
	// callSize is what a call takes besides its request, with a method of maxMethod bytes at most.
	callSize  = 256
	maxMethod = 128
	// mostGivenUp bounds the numbers of one message.
	mostGivenUp = 10000
)

// Carrier is the agent's end. A call waits until the driver has answered it, which may be one that
// takes over from the one that it was made at; only a check of gRPC's health service is answered by
// the agent itself. Its methods are safe for concurrent use.
type Carrier struct {
	sockets *wire.Known   // whose clients are incarnations
	wake    chan struct{} // capacity 1: there is something to send

	mu      sync.Mutex
	closed  bool
	to      string
	conn    *grpc.ClientConn // nil: no driver was set
	aimed   chan struct{}    // closed and replaced by Aim
	last    uint64           // number of a call
	waiting map[uint64]*call
	unsent  map[uint64]bool // of those, the ones that this stream has not sent
	givenUp []uint64        // calls that this stream has sent, and that were given up: not sent yet
}

// call is a call of a worker that waits.
type call struct {
	carried *carrypb.CarriedCall
	since   time.Time
	reply   chan reply // capacity 1
}

type reply struct {
	encoded mem.BufferSlice
	err     error
}

// NewCarrier returns a Carrier of no driver. It starts nothing.
func NewCarrier() *Carrier {
	return &Carrier{
		sockets: wire.NewKnown(), wake: make(chan struct{}, 1), aimed: make(chan struct{}),
		waiting: make(map[uint64]*call), unsent: make(map[uint64]bool),
	}
}

// Take takes the calls of a worker by the launcher's end of its socket, and closes that. It blocks
// until the socket is closed, and until Run has begun.
func (c *Carrier) Take(conn net.Conn, incarnation string) { c.sockets.Take(conn, incarnation) }

// Run carries calls until ctx ends, and then fails all as unavailable; it must be called once.
func (c *Carrier) Run(ctx context.Context) {
	var carrying sync.WaitGroup
	defer carrying.Wait()
	carrying.Go(func() { c.carry(ctx) })
	nothing := func(grpc.ServiceRegistrar) {}
	_ = c.sockets.Serve(ctx, nothing, c.close, wire.TakeCalls(c.call)...) // nil: ctx has ended
}

// Aim has calls made at the driver at that address, with the credentials, encoded, of the agent of
// the workers' host in the job, and connects to it by dial. Without credentials, Aim does nothing.
func (c *Carrier) Aim(to, credentials string, dial func(ctx context.Context, addr string) (net.Conn, error)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credentials == "" || c.closed || c.conn != nil && c.to == to {
		return nil
	}
	own, err := identity.Decode(credentials)
	if err != nil {
		return err
	}
	conn, err := wire.NewClientBy(dial, to, own.ClientTLS(identity.Subject{Role: identity.Driver}), maxPause)
	if err != nil {
		return err
	}
	if c.conn != nil {
		_ = c.conn.Close()
	}
	c.to, c.conn = to, conn
	close(c.aimed)
	c.aimed = make(chan struct{})
	conn.Connect() // before the first worker calls
	return nil
}

// Aimed returns whether Aim has set a driver.
func (c *Carrier) Aimed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn != nil
}

// health answers a check of health: the agent serves where it is connected to the driver.
func (c *Carrier) health() (mem.BufferSlice, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	is := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if c.conn != nil && c.conn.GetState() == connectivity.Ready {
		is = grpc_health_v1.HealthCheckResponse_SERVING
	}
	encoded, err := proto.Marshal(&grpc_health_v1.HealthCheckResponse{Status: is})
	return mem.BufferSlice{mem.SliceBuffer(encoded)}, err
}

// call makes the call of a worker.
func (c *Carrier) call(ctx context.Context, method string, request []byte) (mem.BufferSlice, error) {
	if method == grpc_health_v1.Health_Check_FullMethodName {
		return c.health()
	}
	if most := mostCalls - callSize; len(request) > most {
		return nil, status.Errorf(codes.ResourceExhausted, "a request of %d bytes; at most %d", len(request), most)
	}
	if len(method) > maxMethod || !utf8.ValidString(method) { // it must not break the stream
		return nil, status.Errorf(codes.Unimplemented, "the driver does not know the method %.64q", method)
	}
	incarnation, _ := wire.KnownCaller(ctx).(string)
	k := &call{
		carried: &carrypb.CarriedCall{Incarnation: incarnation, Method: method, Request: request},
		since:   time.Now(),
		reply:   make(chan reply, 1),
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, errClosed
	}
	c.last++
	k.carried.Number = c.last
	c.waiting[c.last] = k
	c.unsent[c.last] = true
	c.mu.Unlock()
	signal(c.wake)
	select {
	case r := <-k.reply:
		return r.encoded, r.err
	case <-ctx.Done():
		c.giveUp(k.carried.Number)
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// Unsent returns the workers with calls that no driver has been sent, by incarnation, and since
// when the first of these waits.
func (c *Carrier) Unsent() map[string]time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make(map[string]time.Time)
	for number := range c.unsent {
		k := c.waiting[number]
		if first, is := all[k.carried.GetIncarnation()]; !is || k.since.Before(first) {
			all[k.carried.GetIncarnation()] = k.since
		}
	}
	return all
}

var errClosed = status.Error(codes.Unavailable, "the agent's session is over")

// giveUp takes that a worker has given up a call.
func (c *Carrier) giveUp(number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting[number] == nil {
		return // it was answered at the same time
	}
	if !c.unsent[number] {
		c.givenUp = append(c.givenUp, number)
		signal(c.wake)
	}
	c.remove(number)
}

// remove removes a call, and returns it; nil: it was given up. The lock is held.
func (c *Carrier) remove(number uint64) *call {
	k := c.waiting[number]
	delete(c.waiting, number)
	delete(c.unsent, number)
	return k
}

// close fails all calls, and those that come.
func (c *Carrier) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for number := range c.waiting {
		c.remove(number).reply <- reply{err: errClosed}
	}
	if c.conn != nil {
		_ = c.conn.Close()
	}
}

// carry makes calls, at one driver after another, until ctx ends.
func (c *Carrier) carry(ctx context.Context) {
	pause := retryPause
	for ctx.Err() == nil {
		c.mu.Lock()
		conn, aimed := c.conn, c.aimed
		c.mu.Unlock()
		var again <-chan time.Time // nil: only another driver helps
		if conn != nil {
			if c.carryTo(ctx, conn, aimed) {
				pause = retryPause
			}
			again = time.After(pause)
			pause = min(2*pause, maxPause)
		}
		select {
		case <-again:
		case <-aimed:
			pause = retryPause
		case <-ctx.Done():
		}
	}
}

// carryTo makes calls by a connection until the stream breaks, or ctx ends, or the driver moves.
// It opens the stream once there is a call: an agent whose workers have ended says nothing to a
// driver that is ending. Calls that are not answered then remain for the next stream. It returns
// whether there was a reply.
func (c *Carrier) carryTo(ctx context.Context, conn *grpc.ClientConn, aimed <-chan struct{}) (replied bool) {
	for !c.waits() {
		select {
		case <-c.wake:
		case <-aimed:
			return false
		case <-ctx.Done():
			return false
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel()
	stream, err := carrypb.NewCarryingClient(conn).Carry(ctx, grpc.WaitForReady(true))
	if err != nil {
		return false // there is no connection any more
	}
	c.restart()
	sending.Go(func() { c.send(ctx, stream) })
	for {
		replies, err := stream.Recv()
		if err != nil {
			return replied
		}
		c.answer(replies)
		replied = true
	}
}

func (c *Carrier) waits() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.waiting) > 0
}

// restart has all calls that wait sent by another stream.
func (c *Carrier) restart() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.givenUp = nil
	for number := range c.waiting {
		c.unsent[number] = true
	}
	signal(c.wake)
}

// send sends calls until ctx or the stream ends.
func (c *Carrier) send(ctx context.Context, stream grpc.BidiStreamingClient[carrypb.CarriedCalls, carrypb.CarriedReplies]) {
	for {
		select {
		case <-c.wake:
		case <-ctx.Done():
			return
		}
		for calls := c.next(); calls != nil; calls = c.next() {
			if stream.Send(calls) != nil {
				return // Recv says why
			}
		}
	}
}

// next returns what is to be sent next; nil: nothing.
func (c *Carrier) next() *carrypb.CarriedCalls {
	c.mu.Lock()
	defer c.mu.Unlock()
	most := min(len(c.givenUp), mostGivenUp)
	m := &carrypb.CarriedCalls{GivenUp: c.givenUp[:most:most]}
	c.givenUp = c.givenUp[most:]
	size := 0
	for number := range c.unsent {
		k := c.waiting[number].carried
		if size += len(k.GetRequest()) + callSize; size > mostCalls && len(m.Calls) > 0 {
			break
		}
		delete(c.unsent, number)
		m.Calls = append(m.Calls, k)
	}
	if len(m.Calls)+most == 0 {
		return nil
	}
	return m
}

// answer answers calls of workers.
func (c *Carrier) answer(replies *carrypb.CarriedReplies) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range replies.GetReplies() {
		k := c.remove(r.GetNumber())
		if k == nil {
			continue
		}
		of := reply{err: status.Error(codes.Code(r.GetCode()), r.GetError())} // nil: OK
		if of.err == nil {
			of.encoded = mem.BufferSlice{mem.SliceBuffer(r.GetOwn()), mem.SliceBuffer(replies.GetShared())}
		}
		k.reply <- of
	}
}
