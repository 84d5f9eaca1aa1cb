package torchrun

import (
	"context"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// WorkerStore is the torch.distributed store that the programs of a round share. Programs that this
// process has started reach it at a loopback port, which admits only them and their children.
type WorkerStore struct{ store roundStore }

// OpenStore opens the store of a round. The store is in the process of rank 0, which publishes its
// address under the key "store" of round.Store. The others forward their programs to it by peers;
// if there are others, peers must be listening in the process of rank 0. The caller must call
// Close.
func OpenStore(ctx context.Context, round Round, peers *Peers, log logrus.FieldLogger) (*WorkerStore, error) {
	store, err := openStore(ctx, round, peers, proc.OwnPeer, log)
	if err != nil {
		return nil, err
	}
	return &WorkerStore{store}, nil
}

// Addr returns the address at which programs reach the store, host:port.
func (s *WorkerStore) Addr() string { return s.store.addr() }

// Close ends all connections of programs.
func (s *WorkerStore) Close() { s.store.close() }
