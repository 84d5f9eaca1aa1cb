package torchrun

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

const (
	// movePatience is how long nodes look for the one that takes over the store, probeTimeout how
	// long for one of them, and movePause how long they wait between two attempts.
	movePatience = 30 * time.Second
	probeTimeout = 3 * time.Second
	movePause    = 50 * time.Millisecond
	// versionsOfMove are skipped by each move, so that no version names two values: the copy may
	// lack the last changes.
	versionsOfMove = 1 << 32
	// leaderIs is the number under which an agent at the endpoint is told who has the store, and
	// tellEvery how often that one tries to.
	leaderIs  = 1<<64 - 3
	tellEvery = 250 * time.Millisecond
	// mostCopied bounds how many values a node copies.
	mostCopied = 1 << 10
)

// movingStore is the store of a dynamic rendezvous in the agent of one node, whom all ask. When
// that agent is gone, the first member of the last round that lives goes on with its copy, and the
// others ask it. What the lost agent alone knew is lost: members find themselves in another state
// and decide anew, as after a change by another node.
//
// So that two parts of a network that do not reach each other do not both go on, a member takes
// over only where it reaches more than half of the members that are not known to be dead, as
// replica.Evidence proves it.
//
// An agent that is started at the endpoint after that has a store of its own. The one that has
// taken over tells it so, and it asks that one like all others.
type movingStore struct {
	peers    *Peers
	endpoint string
	over     context.Context
	end      context.CancelFunc
	telling  sync.WaitGroup

	mu      sync.Mutex
	at      store.Store // a *remoteStore, or a *store.Memory of this node
	moves   uint64
	copied  map[string]store.Entry
	ahead   time.Duration                       // of the store's clock, before this process's
	looking *search                             // under way, for all calls; nil: none is
	members []string                            // names of the last round's, by rank; nil: there was none yet
	drop    func(ctx context.Context, rank int) // says that one of them is dead
	closed  bool
}

func newMovingStore(p *Peers, endpoint string, at store.Store) *movingStore {
	s := &movingStore{peers: p, endpoint: endpoint, at: at, copied: make(map[string]store.Entry)}
	s.over, s.end = context.WithCancel(context.Background())
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moving = s
	return s
}

// tellMembers says who may take over the store. drop is called with those that are found dead then.
func (p *Peers) tellMembers(members []dynamic.Member, drop func(ctx context.Context, rank int)) {
	p.mu.Lock()
	s := p.moving
	p.mu.Unlock()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.members, s.drop = namesOf(members), drop
}

// Get implements store.Store.
func (s *movingStore) Get(ctx context.Context, key string) (e store.Entry, err error) {
	err = s.ask(ctx, key, func(at store.Store) (store.Entry, error) {
		e, err = at.Get(ctx, key)
		return e, err
	})
	return e, err
}

// CompareAndSet implements store.Store.
func (s *movingStore) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (e store.Entry, set bool, err error) {
	err = s.ask(ctx, key, func(at store.Store) (store.Entry, error) {
		e, set, err = at.CompareAndSet(ctx, key, version, value)
		return e, err
	})
	return e, set, err
}

// Wait implements store.Store.
func (s *movingStore) Wait(ctx context.Context, key string, version uint64) (e store.Entry, err error) {
	err = s.ask(ctx, key, func(at store.Store) (store.Entry, error) {
		e, err = at.Wait(ctx, key, version)
		return e, err
	})
	return e, err
}

// ask asks the store, wherever it is or will be, and keeps a copy of what it says.
func (s *movingStore) ask(ctx context.Context, key string, call func(store.Store) (store.Entry, error)) error {
	for {
		s.mu.Lock()
		at, moves := s.at, s.moves
		s.mu.Unlock()
		e, err := call(at)
		if err == nil {
			s.copy(key, e)
			return nil
		}
		if errors.Is(err, store.ErrClosed) && s.movedFrom(moves) {
			continue
		}
		var lost *lostError
		if !errors.As(err, &lost) || ctx.Err() != nil {
			return err
		}
		if merr := s.move(ctx, lost.addr, moves); merr != nil {
			return fmt.Errorf("%w; %w", err, merr)
		}
	}
}

// movedFrom returns whether the store has moved since there were so many moves.
func (s *movingStore) movedFrom(moves uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.moves != moves && !s.closed
}

func (s *movingStore) copy(key string, e store.Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.Now.IsZero() {
		s.ahead = time.Until(e.Now)
	}
	if e.Version == 0 {
		return
	}
	e.Value = slices.Clone(e.Value)
	s.copied[key] = e
	for old := range s.copied {
		if len(s.copied) <= mostCopied {
			break
		}
		if old != key && strings.Contains(old, "/") && !strings.HasSuffix(old, "/record") { // of a round that is over, most likely
			delete(s.copied, old)
		}
	}
}

// search is one for the store that was lost.
type search struct {
	done chan struct{}
	err  error // once it is done
}

// move finds the store that was lost, unless another call has since. All calls share one search,
// which goes on where ctx ends before: calls may have less time than it takes.
func (s *movingStore) move(ctx context.Context, lost string, moves uint64) error {
	s.mu.Lock()
	if s.closed || s.moves != moves {
		defer s.mu.Unlock()
		if s.closed {
			return store.ErrClosed
		}
		return nil
	}
	one := s.looking
	if one == nil {
		one = &search{done: make(chan struct{})}
		s.looking = one
		members := s.members
		s.telling.Go(func() {
			defer close(one.done)
			one.err = s.search(s.over, lost, members)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.looking = nil
		})
	}
	s.mu.Unlock()
	select {
	case <-one.done:
		return one.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// search is move for as long as it takes.
func (s *movingStore) search(ctx context.Context, lost string, members []string) error {
	if len(members) == 0 {
		return errors.New("torchrun: no round is known whose members could go on with it")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, movePatience, errors.New("torchrun: no other node has taken it over"))
	defer cancel()
	for {
		if s.find(ctx, lost, members) {
			return nil
		}
		if err := pause(ctx, movePause); err != nil {
			return context.Cause(ctx)
		}
	}
}

// find asks where the store was, and then the members in the order of their ranks, which all have,
// until one has the store or it is this node's turn to have it.
func (s *movingStore) find(ctx context.Context, lost string, members []string) bool {
	own := s.peers.Member()
	order := append([]string{lost}, slices.DeleteFunc(slices.Clone(members), func(member string) bool {
		addr, _ := addrOf(member)
		return addr == lost
	})...)
	for _, member := range order {
		if member == own {
			missing, may := s.mayHave(ctx, members)
			if may {
				s.have(ctx, missing)
			}
			return may
		}
		addr, _ := addrOf(member)
		at := &remoteStore{peers: s.peers, addr: addr}
		bounded, cancel := context.WithTimeout(ctx, probeTimeout)
		_, err := at.Get(bounded, "hello")
		silent := bounded.Err() != nil || errors.Is(err, errSilentStore)
		cancel()
		if err == nil {
			s.set(at)
			return true
		}
		at.close()
		if !silent && !isRefused(err) && addr != lost {
			return false // it lives, and will have the store
		}
	}
	return false
}

// mayHave returns whether this node reaches more than half of the members that are not known to be
// dead, and the ranks of those that it does not reach, dead or silent.
func (s *movingStore) mayHave(ctx context.Context, members []string) (missing []int, may bool) {
	own := s.peers.Member()
	var mu sync.Mutex
	reached, dead := 1, 0
	var probes sync.WaitGroup
	for rank, member := range members {
		if member == own {
			continue
		}
		probes.Go(func() {
			bounded, cancel := context.WithTimeout(ctx, probeTimeout)
			defer cancel()
			conn, err := s.peers.greet(bounded, member)
			if err == nil {
				conn.Close()
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				reached++
				return
			}
			missing = append(missing, rank)
			if s.peers.evidence(member, err).Dead() {
				dead++
			}
		})
	}
	probes.Wait()
	return missing, 2*reached > len(members)-dead
}

// have has this node's agent serve its copy to all, without the members that are missing: they do
// not reach it either.
func (s *movingStore) have(ctx context.Context, missing []int) {
	s.mu.Lock()
	var last uint64
	for _, e := range s.copied {
		last = max(last, e.Version)
	}
	own := store.NewMemory(s.copied, (last/versionsOfMove+1)*versionsOfMove)
	own.Ahead = s.ahead
	drop := s.drop
	s.mu.Unlock()
	s.peers.haveVersions(own)
	s.set(own)
	s.peers.log.Info("torchrun: this node keeps what the nodes share: the node that did is gone")
	for _, rank := range missing {
		drop(ctx, rank)
	}
	s.telling.Go(s.tell)
}

// tell tells whoever comes to listen at the endpoint that this node has the store.
func (s *movingStore) tell() {
	for pause(s.over, tellEvery) == nil {
		s.tellOnce()
	}
}

func (s *movingStore) tellOnce() {
	ctx, cancel := context.WithTimeout(s.over, probeTimeout)
	defer cancel()
	conn, err := s.peers.dial(ctx, s.endpoint, leaderIs)
	if err != nil {
		return // nobody is there yet
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	own := s.peers.Addr()
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(own))), own...)); err == nil {
		_, _ = io.ReadFull(conn, make([]byte, 1)) // it has understood, or it is an agent that leaves
	}
}

// told is called in an agent at the endpoint by one that says it has the store.
func (s *movingStore) told(conn net.Conn) {
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return
	}
	addr := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(conn, addr); err != nil {
		return
	}
	defer func() { _, _ = conn.Write([]byte{0}) }()
	s.mu.Lock()
	r, is := s.at.(*remoteStore)
	s.mu.Unlock()
	if is && r.addr == string(addr) {
		return
	}
	ctx, cancel := context.WithTimeout(s.over, probeTimeout)
	defer cancel()
	at := &remoteStore{peers: s.peers, addr: string(addr)}
	if _, err := at.Get(ctx, "hello"); err != nil {
		at.close()
		return
	}
	s.peers.log.Infof("torchrun: the job runs already: the node at %s keeps what the nodes share", addr)
	s.set(at)
}

func (s *movingStore) set(at store.Store) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r, is := s.at.(*remoteStore); is {
		r.close()
	}
	s.at = at
	s.moves++
	if r, is := at.(*remoteStore); is && s.closed {
		r.close()
	}
}

// close ends all calls of other nodes' stores.
func (s *movingStore) close() {
	s.end()
	s.mu.Lock()
	s.closed = true
	if r, is := s.at.(*remoteStore); is {
		r.close()
	}
	s.mu.Unlock()
	s.telling.Wait()
}
