package scaler

import (
	"context"
	"slices"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

// Socket is a connection of a worker to a scheduler: a DEALER of ZeroMQ, on one connection.
type Socket interface {
	// Send blocks until a message of at least one frame is sent. One goroutine at a time calls it;
	// another may call Recv at the same time.
	Send(frames [][]byte) error
	// Recv blocks until there is a message. The caller owns its frames.
	Recv() ([][]byte, error)
	// Identity is the name by which the scheduler knows the worker.
	Identity() []byte
	// Close ends Send and Recv, which then return errors. It may be called by any goroutine.
	Close() error
}

type dealer struct {
	*zmtp.Conn
	identity []byte
}

// dial connects to an address of ZeroMQ. Messages of more than limit bytes are dropped.
func dial(ctx context.Context, address string, identity []byte, limit int64) (Socket, error) {
	conn, err := zmtp.Dial(ctx, address, zmtp.Config{Role: zmtp.Dealer, Identity: identity, Limits: zmtp.Limits{Message: limit}})
	if err != nil {
		return nil, err
	}
	return &dealer{conn, identity}, nil
}

func (d *dealer) Send(frames [][]byte) error { return d.Write(frames) }
func (d *dealer) Recv() ([][]byte, error)    { return d.Read() }
func (d *dealer) Identity() []byte           { return slices.Clone(d.identity) }
