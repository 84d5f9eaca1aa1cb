package control

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
)

// Listen creates the socket, with mode 0600, at a path of any length. It replaces the socket of a
// dead driver. The caller removes the socket when it is no longer served.
func Listen(path string) (*net.UnixListener, error) { return wire.ListenLocal(path) }

// Serve serves ln until ctx ends, and closes it. Only processes of this process's user and of root
// are served.
func Serve(ctx context.Context, ln *net.UnixListener, h Handler) error {
	return wire.ServeLocal(ctx, identity.Control.Guard(ln), func(r grpc.ServiceRegistrar) {
		wire.RegisterControlServer(r, &server{h: h})
	}, func() {})
}

type server struct {
	wire.UnimplementedControlServer
	h Handler
}

func (s *server) Status(ctx context.Context, _ *wire.StatusRequest) (*wire.StatusReply, error) {
	text, err := s.h.Status(ctx)
	if err != nil {
		return nil, failure(err)
	}
	return &wire.StatusReply{Status: text}, nil
}

func (s *server) Command(ctx context.Context, m *wire.CommandRequest) (*wire.CommandReply, error) {
	c := Command{
		Verb: Verb(m.GetVerb()), Host: m.GetHost(), Slot: number(m.Slot), For: time.Duration(m.GetForNanoseconds()),
		MinNP: number(m.MinNp), MaxNP: number(m.MaxNp), Now: m.GetNow(),
	}
	if err := c.Check(); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	done, err := s.h.Command(ctx, c)
	if err != nil {
		return nil, failure(err)
	}
	return &wire.CommandReply{Done: done}, nil
}

func failure(err error) error {
	if refused, ok := errors.AsType[*RefusedError](err); ok {
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
