package notify

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/probe"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/stacks"
)

// mostStacks is the most bytes of an answer with a worker's stacks.
const mostStacks = 256 << 10

// WorkerStacks answers the driver. It needs no lock that the program could hold, and a goroutine
// that the runtime can run.
func (h handler) WorkerStacks(ctx context.Context, req *notifypb.WorkerStacksRequest) (*notifypb.WorkerStacksReply, error) {
	most := min(int(req.GetMostBytes()), mostStacks)
	if h.s.Stacks == nil {
		return &notifypb.WorkerStacksReply{Worker: probe.OwnText(most)}, nil
	}
	text, err := h.s.Stacks(ctx, most)
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &notifypb.WorkerStacksReply{Worker: text}, nil
}

// Stacks asks a worker where its goroutines are, by a connection of its own. The answer is within
// the bounds of the package stacks. An error also means that the worker does not run, or is of an
// older version. It blocks until ctx ends at most.
func Stacks(ctx context.Context, c *identity.Credentials, t Target) (stacks.Worker, error) {
	conn, err := wire.NewClient(t.Addr, c.ClientTLS(t.Subject), time.Second)
	if err != nil {
		return stacks.Worker{}, fmt.Errorf("notify: %w", err)
	}
	defer conn.Close()
	reply, err := notifypb.NewNotificationClient(conn).WorkerStacks(ctx, &notifypb.WorkerStacksRequest{MostBytes: mostStacks},
		grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(mostStacks+1024))
	if err != nil {
		return stacks.Worker{}, fmt.Errorf("notify: asking %v for its stacks: %s", t.Subject, status.Convert(err).Message())
	}
	w, err := stacks.Parse(reply.GetWorker())
	if err != nil {
		return stacks.Worker{}, fmt.Errorf("notify: the stacks of %v: %w", t.Subject, err)
	}
	w.Processes = nil // that is for its agent to say
	return w, nil
}
