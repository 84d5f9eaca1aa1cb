package scaler

import (
	"context"
	"slices"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

// Socket is a connection of a worker to a scheduler: a ZeroMQ DEALER with one connection.
type Socket interface {
	// Send blocks until a message of at least one frame is sent. It must be called by one goroutine
	// at a time; another may call Recv concurrently.
	Send(frames [][]byte) error
	// Recv blocks until a message arrives. The caller owns its frames.
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

// dial connects to an address of ZeroMQ. The Socket drops messages of more than limit bytes.
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
