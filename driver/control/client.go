package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/controlpb"
	"github.com/hvdrun/hvdrun/job"
)

// patience is how long the driver may take to answer.
const patience = 10 * time.Second

// stacksPatience is how long the driver may take to return the stacks of a thousand workers.
const stacksPatience = 30 * time.Second

// ErrNoDriver is returned by a Client if no driver answers on the socket.
var ErrNoDriver = errors.New("control: no driver answers")

// Client calls a driver. Its methods are safe for concurrent use; they block for at most 10 s, and
// Stacks for at most 30 s.
type Client struct {
	conn *grpc.ClientConn
	stub controlpb.ControlClient
}

// Dial returns a client of the driver that serves the socket at path, which may have any length. It
// does no I/O. The caller must call Close.
func Dial(path string) (*Client, error) {
	conn, err := wire.NewLocalClient(path)
	if err != nil {
		return nil, fmt.Errorf("control: %w", err)
	}
	return &Client{conn, controlpb.NewControlClient(conn)}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Status returns the job's status.
func (c *Client) Status(ctx context.Context) (job.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var s job.Status
	reply, err := c.stub.Status(ctx, &controlpb.StatusRequest{})
	if err != nil {
		return s, answer(ctx, err, patience)
	}
	if err := json.Unmarshal(reply.GetStatus(), &s); err != nil {
		return s, fmt.Errorf("control: the driver's answer: %w", err)
	}
	return s, nil
}

// Command sends a command and returns a description of what was done. A refusal is a *RefusedError.
func (c *Client) Command(ctx context.Context, what job.Command) (done string, err error) {
	if err := what.Check(); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	reply, err := c.stub.Command(ctx, &controlpb.CommandRequest{
		Verb: string(what.Verb), Host: what.Host, Slot: small(what.Slot), ForNanoseconds: int64(what.For),
		MinNp: small(what.MinNP), MaxNp: small(what.MaxNP), Now: what.Now,
	})
	if err != nil {
		return "", answer(ctx, err, patience)
	}
	return reply.GetDone(), nil
}

// Stacks returns where workers are: those of the given ranks, or all workers if ranks is empty. If
// all is set, the result includes all of their goroutines. A refusal is a *RefusedError.
func (c *Client) Stacks(ctx context.Context, ranks []int, all bool) (found []Stacks, err error) {
	ctx, cancel := context.WithTimeout(ctx, stacksPatience)
	defer cancel()
	req := &controlpb.StacksRequest{All: all}
	for _, r := range ranks {
		req.Ranks = append(req.Ranks, uint32(r))
	}
	reply, err := c.stub.Stacks(ctx, req)
	if err != nil {
		return nil, answer(ctx, err, stacksPatience)
	}
	if err := json.Unmarshal(reply.GetStacks(), &found); err != nil {
		return nil, fmt.Errorf("control: the driver's answer: %w", err)
	}
	return found, nil
}

// answer converts the error of a call whose time limit is bound.
func answer(ctx context.Context, err error, bound time.Duration) error {
	s := status.Convert(err)
	switch {
	case s.Code() == codes.FailedPrecondition, s.Code() == codes.InvalidArgument:
		return &job.RefusedError{Reason: s.Message()}
	case s.Code() == codes.DeadlineExceeded && ctx.Err() != nil:
		return fmt.Errorf("%w within %v", ErrNoDriver, bound)
	case s.Code() == codes.Canceled && ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: %s", ErrNoDriver, s.Message())
}

func small(n *int) *uint32 {
	if n == nil {
		return nil
	}
	return new(uint32(*n))
}
