package torchrun

import (
	"context"
	"sync"

	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// Rendezvous is where agents meet. Its methods are called by one goroutine at a time.
type Rendezvous interface {
	// Next leaves the current round, and blocks until the node has a place in another one. failed
	// says that workers of this node have failed in the current round. Its error is final.
	Next(ctx context.Context, failed bool) (Round, error)
	// Changed returns a channel that is closed when nodes wait to join the current round, or when a
	// node of it has gone that was not done.
	Changed() <-chan struct{}
	// Done says that the workers of this node have succeeded: when it calls Close and Leave then,
	// the round of the others goes on.
	Done(ctx context.Context) error
	// Close ends the job: no round follows. It may be called again.
	Close(ctx context.Context) error
	// Leave makes the node leave, so that the others continue without it, and frees its resources.
	// It is the last call.
	Leave(ctx context.Context) error
}

// Round is a node's place among the nodes of a round.
type Round struct {
	// Number grows with each round.
	Number int
	// Rank is from 0 to World-1.
	Rank, World int
	// Restarts is the number of earlier rounds that have failed, on any node: all nodes of the
	// round have the same number, because the keys of programs in the store may contain it.
	Restarts int
	// Store is shared by the nodes of the round, and by no others.
	Store KV
	// Agents are the names of the agents of a dynamic rendezvous (Peers.Member), by rank; nil:
	// unknown.
	Agents []string
}

// KV is a store that the agents of a round share. A tcpstore.Client is one.
type KV interface {
	Set(ctx context.Context, key string, value []byte) error
	// Get blocks until there is a value.
	Get(ctx context.Context, key string) ([]byte, error)
	// Add adds to a number, which is 0 if it does not exist, and returns the sum.
	Add(ctx context.Context, key string, n int64) (int64, error)
}

// memoryKV is a store of agents in one process.
type memoryKV struct{ store *tcpstore.Store }

func (m memoryKV) Set(_ context.Context, key string, value []byte) error {
	return m.store.Set(key, value)
}

func (m memoryKV) Get(ctx context.Context, key string) ([]byte, error) {
	ready, cancel := m.store.Await(key)
	defer cancel()
	select {
	case <-ready:
		value, _ := m.store.Get(key)
		return value, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (m memoryKV) Add(_ context.Context, key string, n int64) (int64, error) {
	return m.store.Add(key, n)
}

// within is a part of a store, whose keys begin with a prefix.
type within struct {
	KV
	prefix string
}

func (w within) Set(ctx context.Context, key string, value []byte) error {
	return w.KV.Set(ctx, w.prefix+key, value)
}

func (w within) Get(ctx context.Context, key string) ([]byte, error) {
	return w.KV.Get(ctx, w.prefix+key)
}

func (w within) Add(ctx context.Context, key string, n int64) (int64, error) {
	return w.KV.Add(ctx, w.prefix+key, n)
}

// Single is the rendezvous of a job of one node. The zero value is ready.
type Single struct {
	mu              sync.Mutex
	round, restarts int
}

// Next implements Rendezvous.
func (s *Single) Next(ctx context.Context, failed bool) (Round, error) {
	if err := context.Cause(ctx); err != nil {
		return Round{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if failed {
		s.restarts++
	}
	r := Round{Number: s.round, World: 1, Restarts: s.restarts, Store: memoryKV{new(tcpstore.Store)}}
	s.round++
	return r, nil
}

// Changed implements Rendezvous: nothing ever changes.
func (*Single) Changed() <-chan struct{} { return nil }

// Done implements Rendezvous.
func (*Single) Done(context.Context) error { return nil }

// Close implements Rendezvous.
func (*Single) Close(context.Context) error { return nil }

// Leave implements Rendezvous.
func (*Single) Leave(context.Context) error { return nil }
