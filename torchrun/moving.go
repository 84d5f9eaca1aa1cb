package torchrun

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/replica"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

const (
	// movePatience is how long nodes look for the node that takes over the store, probeTimeout how
	// long they try to reach one node, and movePause the pause between two rounds of attempts.
	movePatience = 30 * time.Second
	probeTimeout = 3 * time.Second
	movePause    = 50 * time.Millisecond
	// tellEvery is how often the agent that has the store tries to inform an agent at the endpoint.
	tellEvery = 250 * time.Millisecond
)

// movingStore is the store of a dynamic rendezvous. The agent of one node has it, and all nodes
// send their calls to that agent; the first members of the last round keep copies. When that agent
// is gone, the first live member asks the others for permission to take over, by the rules of a
// replica, and from then on all nodes send their calls to it.
//
// An agent that is started at the endpoint later has a separate store at first. The agent that has
// taken over informs it, and from then on it sends its calls to that agent, like all others.
type movingStore struct {
	peers    *Peers
	endpoint string
	host     bool // this agent is at the endpoint
	over     context.Context
	end      context.CancelFunc
	telling  sync.WaitGroup
	node     replica.Node

	mu      sync.Mutex
	at      store.Store // a *remoteStore or a *leadingStore
	moves   uint64
	clock   store.Clock
	looking *search                             // the search in progress, for all calls; nil: none
	members []string                            // names of the members of the last round, by rank; nil: there was none yet
	drop    func(ctx context.Context, rank int) // reports that one of them is dead
	closed  bool
}

func newMovingStore(p *Peers, endpoint string, host bool) *movingStore {
	s := &movingStore{peers: p, endpoint: endpoint, host: host}
	s.over, s.end = context.WithCancel(context.Background())
	p.moving = s
	return s
}

// copies makes this node keep a copy of the store for the leader, which may wait for the copy as
// soon as this node is in a round. The agent must be listening.
func (s *movingStore) copies() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node.Name != "" {
		return
	}
	s.node.Name = s.peers.Member()
	s.peers.answer(storeCopy.of(0), func(conn net.Conn) error {
		defer context.AfterFunc(s.over, func() { conn.Close() })() // so that Peers.Close does not wait for it
		return s.node.Serve(conn)
	})
}

// enter sets the members of a round, which have copies of the store and may take it over. During a
// takeover, drop is called for members that are found dead.
func (s *movingStore) enter(ctx context.Context, r dynamic.Round, drop func(ctx context.Context, rank int)) {
	members := namesOf(r.Members)
	s.mu.Lock()
	s.members, s.drop = members, drop
	s.mu.Unlock()
	if r.Rank != 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dropTimeout)
	defer cancel()
	err := s.setMembers(ctx, r.Number, members)
	if err != nil && ctx.Err() == nil {
		s.peers.log.Warnf("torchrun: the nodes of round %d may not have what they share when this one is gone: %v", r.Number, err)
	}
}

// setMembers makes the agent that has the store keep copies on the members of a round.
func (s *movingStore) setMembers(ctx context.Context, round int, members []string) error {
	return s.ask(ctx, func(at store.Store) (e store.Entry, err error) {
		switch at := at.(type) {
		case *leadingStore:
			at.setMembers(round, members)
		case *remoteStore:
			e, _, err = at.call(ctx, question{Do: "members", Round: round, Members: members})
		}
		return e, err
	})
}

// Get implements store.Store.
func (s *movingStore) Get(ctx context.Context, key string) (e store.Entry, err error) {
	err = s.ask(ctx, func(at store.Store) (store.Entry, error) {
		e, err = at.Get(ctx, key)
		return e, err
	})
	return e, err
}

// CompareAndSet implements store.Store.
func (s *movingStore) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (e store.Entry, set bool, err error) {
	err = s.ask(ctx, func(at store.Store) (store.Entry, error) {
		e, set, err = at.CompareAndSet(ctx, key, version, value)
		return e, err
	})
	return e, set, err
}

// Wait implements store.Store.
func (s *movingStore) Wait(ctx context.Context, key string, version uint64) (e store.Entry, err error) {
	err = s.ask(ctx, func(at store.Store) (store.Entry, error) {
		e, err = at.Wait(ctx, key, version)
		return e, err
	})
	return e, err
}

// ask makes a call to the store, wherever it is or moves to.
func (s *movingStore) ask(ctx context.Context, call func(store.Store) (store.Entry, error)) error {
	for {
		s.mu.Lock()
		at, moves := s.at, s.moves
		s.mu.Unlock()
		e, err := call(at)
		if err == nil {
			s.mu.Lock()
			if !e.Now.IsZero() {
				s.clock = store.ClockAt(e.Now)
			}
			s.mu.Unlock()
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

// movedFrom reports whether the store has moved since the number of moves was moves.
func (s *movingStore) movedFrom(moves uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.moves != moves && !s.closed
}

// search is a search for the lost store.
type search struct {
	done chan struct{}
	err  error // valid when done is closed
}

// move finds the lost store, unless it has moved since. All calls share one search, which continues
// after ctx ends, because a call may have less time than the search takes.
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

// search looks for the lost store until it is found or movePatience has passed.
func (s *movingStore) search(ctx context.Context, lost string, members []string) error {
	if len(members) == 0 {
		return s.await(ctx, lost)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, movePatience, errors.New("torchrun: no other node has taken it over"))
	defer cancel()
	for {
		if s.find(ctx, lost, members) {
			return nil
		}
		if err := retry.Pause(ctx, movePause); err != nil {
			return context.Cause(ctx)
		}
	}
}

// await waits until the agent that has the store answers again: before the first round, no other
// has a copy. It returns an error if that agent has ended, or is still silent after movePatience.
func (s *movingStore) await(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, movePatience)
	defer cancel()
	s.peers.log.Warnf("torchrun: the store at %s does not answer: waiting up to %v for it", addr, movePatience)
	at := &remoteStore{peers: s.peers, addr: addr}
	for {
		_, err := at.Get(ctx, "hello") // silent after silentAfter
		if err == nil {
			s.set(at)
			return nil
		}
		if ctx.Err() != nil || !errors.Is(err, errSilentStore) {
			at.close()
			return errors.New("torchrun: it is lost before the first round, and no other node has a copy: start this node again")
		}
	}
}

// find asks the agent that had the store, and then the members in the order of their ranks, which
// is the same on all nodes, until one of them has the store or it is this node's turn to take it
// over.
func (s *movingStore) find(ctx context.Context, lost string, members []string) bool {
	own := s.peers.Member()
	order := append([]string{lost}, slices.DeleteFunc(slices.Clone(members), func(member string) bool {
		addr, _ := addrOf(member)
		return addr == lost && member != own
	})...)
	for _, member := range order {
		if member == own {
			return s.have(ctx, members)
		}
		addr, _ := addrOf(member)
		if addr == s.peers.Addr() {
			continue // this agent itself had it
		}
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
			return false // it is alive, and will take over
		}
	}
	return false
}

// have makes this node's agent the leader, if the others permit it, and then drops the members that
// it cannot reach, because they cannot reach this node either.
func (s *movingStore) have(ctx context.Context, members []string) bool {
	s.mu.Lock()
	clock, drop := s.clock, s.drop
	s.mu.Unlock()
	bounded, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	at, err := s.peers.leadStore(bounded, &s.node, members, clock)
	if err != nil {
		s.peers.log.Debugf("torchrun: taking over the store of the nodes: %v", err)
		return false
	}
	s.set(at)
	s.peers.log.Info("torchrun: this node has taken over the store of the nodes: the node that had it is gone")
	for _, rank := range s.missing(ctx, members) {
		drop(ctx, rank)
	}
	s.telling.Go(func() { s.tell(at) })
	return true
}

// missing returns the ranks of the members that cannot be reached.
func (s *movingStore) missing(ctx context.Context, members []string) (ranks []int) {
	own := s.peers.Member()
	var mu sync.Mutex
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
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ranks = append(ranks, rank)
		})
	}
	probes.Wait()
	return ranks
}

// tell informs any agent that listens at the endpoint that this node has the store, for as long as
// it has.
func (s *movingStore) tell(at store.Store) {
	for retry.Pause(s.over, tellEvery) == nil {
		s.mu.Lock()
		has := s.at == at
		s.mu.Unlock()
		if !has {
			return
		}
		s.tellOnce()
	}
}

func (s *movingStore) tellOnce() {
	ctx, cancel := context.WithTimeout(s.over, probeTimeout)
	defer cancel()
	conn, err := s.peers.dial(ctx, s.endpoint, leaderIs.of(0))
	if err != nil {
		return // nobody listens there yet
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	own := s.peers.Addr()
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(own))), own...)); err == nil {
		_, _ = io.ReadFull(conn, make([]byte, 1)) // it has understood, or it is leaving
	}
}

// told handles, in an agent at the endpoint, a message of an agent that has the store.
func (s *movingStore) told(conn net.Conn) error {
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return err
	}
	addr := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(conn, addr); err != nil {
		return err
	}
	defer func() { _, _ = conn.Write([]byte{0}) }()
	s.mu.Lock()
	r, is := s.at.(*remoteStore)
	s.mu.Unlock()
	if is && r.addr == string(addr) {
		return nil
	}
	ctx, cancel := context.WithTimeout(s.over, probeTimeout)
	defer cancel()
	at := &remoteStore{peers: s.peers, addr: string(addr)}
	if _, err := at.Get(ctx, "hello"); err != nil {
		at.close()
		return nil // the other agent tries again
	}
	s.peers.log.Infof("torchrun: the job runs already: the node at %s has the store of the nodes", addr)
	s.set(at)
	return nil
}

func (s *movingStore) set(at store.Store) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.at
	s.at = at
	s.moves++
	switch before := before.(type) {
	case *remoteStore:
		before.close()
	case *leadingStore:
		s.telling.Go(before.close)
	}
	r, remote := at.(*remoteStore)
	if remote && s.closed {
		r.close()
	}
	if !remote {
		s.peers.answer(versionStore.of(0), func(conn net.Conn) error { return serveVersions(conn, s) })
	} else if !s.host {
		s.peers.refuse(versionStore.of(0))
	}
}

// close ends all calls to stores of other nodes. The store of this node stays available to others
// until free.
func (s *movingStore) close() {
	s.end()
	s.mu.Lock()
	s.closed = true
	if r, is := s.at.(*remoteStore); is {
		r.close()
	}
	s.mu.Unlock()
}

// free closes the store of this node, and blocks until everything that it has started has ended.
func (s *movingStore) free() {
	s.mu.Lock()
	at, is := s.at.(*leadingStore)
	s.mu.Unlock()
	if is {
		at.close()
	}
	s.telling.Wait()
}
