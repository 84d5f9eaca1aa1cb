package control

import (
	"context"
	"errors"
	"net"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/controlpb"
	"github.com/hvdrun/hvdrun/job"
)

// Listen creates the socket, with mode 0600, at a path of any length. It replaces the socket of a
// dead driver. The caller removes the socket when it is no longer served.
func Listen(path string) (*net.UnixListener, error) { return wire.ListenLocal(path) }

// Serve serves ln until ctx ends, and closes it. It accepts only connections of processes of root
// and of this process's user. record, if not nil, is called, possibly concurrently, for each
// connection of another user and for each invalid command; neither reaches the handler. The handler
// itself records valid commands; their Command.By names the user.
func Serve(ctx context.Context, ln *net.UnixListener, h Handler, record func(audit.Record)) error {
	if record == nil {
		record = func(audit.Record) {}
	}
	guarded := identity.Control.Guard(ln)
	guarded.OnRefused(func(_ net.Addr, why error) {
		r := audit.Record{What: "connect", Outcome: audit.Refused(why)}
		if other, ok := errors.AsType[*wire.UserError](why); ok {
			r.Who = who(other.LocalPeer)
		}
		record(r)
	})
	return wire.ServeLocal(ctx, guarded, func(r grpc.ServiceRegistrar) {
		controlpb.RegisterControlServer(r, &server{h: h, record: record})
	})
}

func who(peer wire.LocalPeer) audit.Who {
	return audit.Who{UID: strconv.Itoa(peer.UID), PID: peer.PID}
}

type server struct {
	controlpb.UnimplementedControlServer
	h      Handler
	record func(audit.Record)
}

func (s *server) Status(ctx context.Context, _ *controlpb.StatusRequest) (*controlpb.StatusReply, error) {
	text, err := s.h.Status(ctx)
	if err != nil {
		return nil, failure(err)
	}
	return &controlpb.StatusReply{Status: text}, nil
}

func (s *server) Command(ctx context.Context, m *controlpb.CommandRequest) (*controlpb.CommandReply, error) {
	c := job.Command{
		Verb: job.Verb(m.GetVerb()), Host: m.GetHost(), Slot: number(m.Slot), For: time.Duration(m.GetForNanoseconds()),
		MinNP: number(m.MinNp), MaxNP: number(m.MaxNp), Now: m.GetNow(), By: who(wire.LocalCaller(ctx)),
	}
	if err := c.Check(); err != nil {
		s.record(c.Record(audit.Refused(err)))
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	done, err := s.h.Command(ctx, c)
	if err != nil {
		return nil, failure(err)
	}
	return &controlpb.CommandReply{Done: done}, nil
}

// mostRanks is the largest number of ranks in a request. To ask about more workers, a request names
// no rank, which selects all.
const mostRanks = 4096

func (s *server) Stacks(ctx context.Context, m *controlpb.StacksRequest) (*controlpb.StacksReply, error) {
	if n := len(m.GetRanks()); n > mostRanks {
		return nil, status.Errorf(codes.InvalidArgument, "control: %d ranks; at most %d", n, mostRanks)
	}
	ranks := make([]int, len(m.GetRanks()))
	for i, r := range m.GetRanks() {
		ranks[i] = int(r)
	}
	text, err := s.h.Stacks(ctx, ranks, m.GetAll())
	if err != nil {
		return nil, failure(err)
	}
	return &controlpb.StacksReply{Stacks: text}, nil
}

func failure(err error) error {
	if refused, ok := errors.AsType[*job.RefusedError](err); ok {
		return status.Error(codes.FailedPrecondition, refused.Reason)
	}
	return status.Error(codes.Unavailable, err.Error())
}

func number(n *uint32) *int {
	if n == nil {
		return nil
	}
	return new(int(*n))
}
