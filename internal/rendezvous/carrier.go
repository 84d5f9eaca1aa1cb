package rendezvous

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/notify"
)

// workerKey is the key of gRPC's metadata with which a Carrier names, by its incarnation, the
// worker whose call it carries.
const workerKey = "hvdrun-worker"

// manyMembers is the length of encoded members, in bytes, from which a Server does not send them to
// each worker of a Carrier.
const manyMembers = 16 << 10

// Carrier carries the calls of workers to the driver: it takes those that they make by their
// sockets, and makes them over one connection for all workers. A call waits until there is a
// connection. Its methods are safe for concurrent use.
type Carrier struct {
	sockets *wire.Known // whose clients are incarnations

	hears *notify.Relay

	mu    sync.Mutex
	to    string
	conn  *grpc.ClientConn // nil: no driver was set
	aimed chan struct{}    // closed and replaced by Aim

	fetching sync.Mutex
	number   uint64 // of members; 0: none
	members  []byte // encoded
}

// NewCarrier returns a Carrier of no driver. It starts nothing.
func NewCarrier() *Carrier {
	return &Carrier{sockets: wire.NewKnown(), hears: notify.NewRelay(), aimed: make(chan struct{})}
}

// Take takes the calls of a worker by the launcher's end of its socket, and closes that. It blocks
// until the socket is closed, and until Run has begun.
func (c *Carrier) Take(conn net.Conn, incarnation string) { c.sockets.Take(conn, incarnation) }

// Run carries calls until ctx ends; it must be called once.
func (c *Carrier) Run(ctx context.Context) {
	var hearing sync.WaitGroup
	defer hearing.Wait()
	hearing.Go(func() { c.hear(ctx) })
	carry := wire.CarryCalls(wire.Carrying{To: c.at, Instead: c.relay, Complete: c.complete})
	nothing := func(grpc.ServiceRegistrar) {}
	_ = c.sockets.Serve(ctx, wire.CallsOfWorker, nothing, c.release, carry...) // nil: ctx has ended
}

// hear hears for all workers until ctx ends.
func (c *Carrier) hear(ctx context.Context) {
	for ctx.Err() == nil {
		c.mu.Lock()
		conn, aimed := c.conn, c.aimed
		c.mu.Unlock()
		var err error
		if conn != nil {
			err = c.hears.Run(ctx, conn)
		}
		var again <-chan time.Time // nil: only another driver helps
		if conn != nil && !errors.Is(err, notify.ErrEach) {
			again = time.After(retryPause)
		}
		select {
		case <-again:
		case <-aimed:
		case <-ctx.Done():
		}
	}
}

// relay answers the Hear of a worker, unless the driver is to.
func (c *Carrier) relay(ctx context.Context, method string, request mem.BufferSlice) (reply []byte, done bool, err error) {
	if method != notifypb.Hearing_Hear_FullMethodName {
		return nil, false, nil
	}
	var knows notifypb.HearRequest
	if proto.Unmarshal(request.Materialize(), &knows) != nil {
		return nil, false, nil // the driver says what is wrong
	}
	incarnation, _ := wire.KnownCaller(ctx).(string)
	reply, err = c.hears.Hear(ctx, incarnation, &knows)
	return reply, !errors.Is(err, notify.ErrEach), err
}

func (c *Carrier) release() {
	c.hears.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		_ = c.conn.Close()
	}
}

// Aim has calls made at the driver at that address, with the credentials, encoded, of the agent of
// the workers' host in the job, and connects to it by dial. Calls that wait for the driver before
// fail: their workers repeat them. Without credentials, Aim does nothing.
func (c *Carrier) Aim(to, credentials string, dial func(ctx context.Context, addr string) (net.Conn, error)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credentials == "" || c.conn != nil && c.to == to {
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

// at returns where to make the call of a worker.
func (c *Carrier) at(ctx context.Context) (context.Context, grpc.ClientConnInterface) {
	c.mu.Lock()
	defer c.mu.Unlock()
	incarnation, _ := wire.KnownCaller(ctx).(string)
	return metadata.NewOutgoingContext(ctx, metadata.Pairs(workerKey, incarnation)), c.conn
}

// complete returns a reply with what the driver has left out of it: many members, which are the
// same for all workers.
func (c *Carrier) complete(ctx context.Context, method string, reply mem.BufferSlice) (mem.BufferSlice, error) {
	if method != rendezvouspb.Rendezvous_Join_FullMethodName || reply.Len() > manyMembers {
		return reply, nil
	}
	var join rendezvouspb.JoinReply
	if err := proto.Unmarshal(reply.Materialize(), &join); err != nil {
		return nil, err
	}
	w := join.GetWorld()
	if w.GetMembersNumber() == 0 || len(w.GetMembers()) > 0 || w.GetDifference() != nil {
		return reply, nil
	}
	var err error
	if w.Members, err = c.fetch(ctx, w.GetMembersNumber()); err != nil {
		return nil, err
	}
	own, shared, err := join.MarshalShared()
	if err != nil {
		return nil, err
	}
	reply.Free()
	return mem.BufferSlice{mem.SliceBuffer(own), mem.SliceBuffer(shared)}, nil
}

// fetch returns the members with that number, as the driver encodes them. It asks the driver once
// for all workers.
func (c *Carrier) fetch(ctx context.Context, number uint64) ([]byte, error) {
	c.fetching.Lock()
	defer c.fetching.Unlock()
	if c.number == number {
		return c.members, nil
	}
	ctx, conn := c.at(ctx)
	w, err := rendezvouspb.NewRendezvousClient(conn).Look(ctx, &rendezvouspb.LookRequest{})
	switch {
	case ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	case err != nil: // this worker was dismissed meanwhile, or the driver is gone: the worker joins again
		return nil, status.Errorf(codes.Unavailable, "asking for the members: %v", plain(err))
	case w.GetMembersNumber() != number:
		return nil, status.Error(codes.Unavailable, "there is a newer world")
	}
	c.number, c.members = number, w.GetMembers()
	return c.members, nil
}

// carried returns the worker whose call an agent carries.
func (s *Server) carried(ctx context.Context, agent identity.Subject) (identity.Subject, error) {
	names := metadata.ValueFromIncomingContext(ctx, workerKey)
	if len(names) != 1 {
		return agent, status.Error(codes.Unauthenticated, "an agent names the worker whose call it carries")
	}
	return s.of(agent, names[0])
}

// of returns the worker with that incarnation, if an agent speaks for it, as for those of its own
// host only.
func (s *Server) of(agent identity.Subject, incarnation string) (identity.Subject, error) {
	s.mu.Lock()
	worker, ok := s.admitted[incarnation]
	s.mu.Unlock()
	if !ok || worker.Host != agent.Host {
		return agent, errExpelled
	}
	return worker, nil
}

// callers are a Server's.
type callers struct{ s *Server }

// Worker implements notify.Callers.
func (c callers) Worker(ctx context.Context) (identity.Subject, error) { return c.s.caller(ctx) }

// Speaks implements notify.Callers.
func (c callers) Speaks(ctx context.Context, incarnation string) (identity.Subject, error) {
	from, _ := wire.KnownCaller(ctx).(identity.Subject)
	if from.Role != identity.Agent {
		return from, status.Error(codes.PermissionDenied, "only an agent speaks for workers")
	}
	return c.s.of(from, incarnation)
}

// isCarried returns whether an agent carries a call.
func isCarried(ctx context.Context) bool {
	from, _ := wire.KnownCaller(ctx).(identity.Subject)
	return from.Role == identity.Agent
}
