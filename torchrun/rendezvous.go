package torchrun

import (
	"context"

	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// Rendezvous is how agents meet. Its methods are called by one goroutine at a time.
type Rendezvous interface {
	// Next leaves the current round, and blocks until the node has a place in another one. failed
	// means that workers of this node have failed in the current round. An error is final.
	Next(ctx context.Context, failed bool) (Round, error)
	// Changed returns a channel that is closed when nodes wait to join the current round, or when a
	// node that was not done has left it.
	Changed() <-chan struct{}
	// Done records that the workers of this node have succeeded, so that the others' round
	// continues when this node then calls Close and Leave.
	Done(ctx context.Context) error
	// Close ends the job: no further round follows. It may be called again.
	Close(ctx context.Context) error
	// Leave makes the node leave, so that the others continue without it, and frees its resources.
	// It must be the last call.
	Leave(ctx context.Context) error
}

// Round is a node's place among the nodes of a round.
type Round struct {
	// Number increases from round to round.
	Number int
	// Rank is from 0 to World-1.
	Rank, World int
	// Restarts is the number of earlier rounds that have failed, on any node. It is the same for
	// all nodes of the round, because programs may use it in the keys of the store.
	Restarts int
	// Store is shared by the nodes of the round, and only by them.
	Store KV
	// Agents are the names of the agents of a dynamic rendezvous (Peers.Member), by rank; nil:
	// unknown.
	Agents []string
}

// KV is a store that the agents of a round share. A tcpstore.Client is one.
type KV interface {
	Set(ctx context.Context, key string, value []byte) error
	// Get blocks until the key has a value, and returns it.
	Get(ctx context.Context, key string) ([]byte, error)
	// Add adds n to a number, which starts at 0, and returns the sum.
	Add(ctx context.Context, key string, n int64) (int64, error)
}

// memoryKV is a store for agents in one process.
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

func (m memoryKV) Check(_ context.Context, keys ...string) (bool, error) {
	return m.store.Has(keys...), nil
}

// within is the part of a store whose keys begin with a prefix.
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

// Single is the rendezvous of a job with one node. The zero value is ready to use.
type Single struct{ round, restarts int }

// Next implements Rendezvous.
func (s *Single) Next(ctx context.Context, failed bool) (Round, error) {
	if err := context.Cause(ctx); err != nil {
		return Round{}, err
	}
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
