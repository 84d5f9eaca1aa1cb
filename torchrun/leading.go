package torchrun

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/hvdrun/hvdrun/torchrun/replica"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

const (
	// mostCopies is the largest number of nodes that have the store: those with the lowest ranks,
	// and the leader.
	mostCopies = 5
	// mostValues is the largest number of values in the store. Beyond that, the oldest are removed;
	// they belong to rounds that are over.
	mostValues = 1 << 14
	// versionsOfTerm is the number of versions available in the term of a leader.
	versionsOfTerm = 1 << 32
)

// leadingStore is the store of a dynamic rendezvous, in the agent that leads. Its values are the
// files of a replica, each consisting of the version followed by the value. A call returns a result
// only once the result is on a quorum of the members.
type leadingStore struct {
	addr   string // of this agent
	leader *replica.Leader
	node   *replica.Node
	clock  store.Clock
	over   chan struct{} // closed by close
	once   sync.Once

	mu      sync.Mutex
	version uint64
	values  map[string]uint64 // the version of each value
	round   int               // round whose members have the store; -1: none yet
}

// leadStore makes this agent the leader of the store. It continues with the newest copy that a
// member has.
func (p *Peers) leadStore(ctx context.Context, node *replica.Node, members []string, clock store.Clock) (*leadingStore, error) {
	leader, found, err := p.lead(ctx, node, storeCopy, members[:min(len(members), mostCopies)])
	if err != nil {
		return nil, err
	}
	s := &leadingStore{addr: p.Addr(), leader: leader, node: node, clock: clock, version: leader.Term() * versionsOfTerm, over: make(chan struct{}),
		values: make(map[string]uint64), round: -1}
	for key, value := range found.Files {
		s.values[key] = binary.BigEndian.Uint64(value)
	}
	return s, nil
}

func (s *leadingStore) entry(key string) (store.Entry, <-chan struct{}) {
	e := store.Entry{Now: s.clock.Now()}
	value, _, change := s.node.File(key)
	if len(value) >= 8 {
		e.Version, e.Value = binary.BigEndian.Uint64(value), bytes.Clone(value[8:])
	}
	return e, change
}

// kept blocks until the contents of the store are on a quorum of the members.
func (s *leadingStore) kept(ctx context.Context) error {
	err := s.leader.Keep(ctx)
	if errors.Is(err, replica.ErrLost) {
		err = &lostError{s.addr, err}
	}
	return err
}

// Get implements store.Store.
func (s *leadingStore) Get(ctx context.Context, key string) (store.Entry, error) {
	if err := errors.Join(store.Check(key, nil), context.Cause(ctx)); err != nil {
		return store.Entry{}, err
	}
	e, _ := s.entry(key)
	return e, s.kept(ctx)
}

// CompareAndSet implements store.Store. If it returns an error, the value may have been set
// nevertheless.
func (s *leadingStore) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	if err := errors.Join(store.Check(key, value), context.Cause(ctx)); err != nil {
		return store.Entry{}, false, err
	}
	s.mu.Lock()
	e, _ := s.entry(key)
	set := e.Version == version
	if set {
		s.version++
		e.Version, e.Value = s.version, append([]byte{}, value...)
		s.values[key] = s.version
		s.leader.Put(key, append(binary.BigEndian.AppendUint64(nil, e.Version), value...))
		s.forget()
	}
	s.mu.Unlock()
	return e, set, s.kept(ctx)
}

// forget removes the oldest values if there are too many. The caller holds the lock.
func (s *leadingStore) forget() {
	if len(s.values) <= mostValues {
		return
	}
	keys := slices.SortedFunc(maps.Keys(s.values), func(a, b string) int { return cmp.Compare(s.values[a], s.values[b]) })
	keys = slices.DeleteFunc(keys[:mostValues/4], func(key string) bool {
		return strings.HasSuffix(key, "/record") || strings.HasSuffix(key, "/"+statusKey)
	})
	for _, key := range keys {
		delete(s.values, key)
	}
	s.leader.Do(replica.Change{Gone: keys})
}

// Wait implements store.Store.
func (s *leadingStore) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	if err := store.Check(key, nil); err != nil {
		return store.Entry{}, err
	}
	for {
		e, change := s.entry(key)
		if e.Version != version {
			return e, s.kept(ctx)
		}
		select {
		case <-change:
		case <-s.leader.Lost():
			return e, &lostError{s.addr, replica.ErrLost}
		case <-s.over:
			return e, &lostError{s.addr, replica.ErrLost}
		case <-ctx.Done():
			return e, context.Cause(ctx)
		}
	}
}

// setMembers sets the members of a round, the first of which keep copies of the store from now on.
func (s *leadingStore) setMembers(round int, members []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if round > s.round {
		s.round = round
		s.leader.SetMembers(members[:min(len(members), mostCopies)])
	}
}

// close ends all calls, and blocks until nothing is being written.
func (s *leadingStore) close() {
	s.once.Do(func() { close(s.over) })
	s.leader.Close()
}
