package torchrun

import (
	"context"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// WorkerStore is the store of torch.distributed that the programs of a round share, as those that
// this process has started reach it: at a port of loopback, which lets in them and what they start.
type WorkerStore struct{ store roundStore }

// OpenStore opens the store of a round. It is in the process of rank 0, which tells the others
// where by the key "store" of round.Store; they forward their programs to it, by peers, which must
// listen in the process of rank 0 where there are others. The caller must call Close.
func OpenStore(ctx context.Context, round Round, peers *Peers, log logrus.FieldLogger) (*WorkerStore, error) {
	store, err := openStore(ctx, round, peers, proc.OwnPeer, log)
	if err != nil {
		return nil, err
	}
	return &WorkerStore{store}, nil
}

// Addr returns where programs reach the store, host:port.
func (s *WorkerStore) Addr() string { return s.store.addr() }

// Close ends all connections of programs.
func (s *WorkerStore) Close() { s.store.close() }
