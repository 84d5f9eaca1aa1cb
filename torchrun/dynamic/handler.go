// Package dynamic lets nodes meet without a driver, as PyTorch's elastic launcher does: they share
// a record in a store, which each node changes by compare-and-set. A round is complete when enough
// nodes have joined it and no other node came for a while, or when it is full. Nodes that come
// later wait, which makes the others begin another round.
//
// Pure functions of the record, the operators, decide the actions of a node.
package dynamic

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

// Config configures a Handler.
type Config struct {
	Settings
	// Store is shared by the nodes of the run. It must not be nil.
	Store store.Store
	// Addr names this machine among the nodes. Empty: its host name.
	Addr string
	// Info is given to the other nodes of a round, for example an address. It has at most 512
	// bytes.
	Info string
	// Log must not be nil.
	Log logrus.FieldLogger
	// Counted, if not nil, is called at each read or write of the record.
	Counted func()
}

// Member is a node of a round.
type Member struct {
	Node NodeDesc
	Info string
}

// Round is a complete round.
type Round struct {
	// Number is the round's number; it grows.
	Number int
	// Rank is this node's rank; Members are in the order of their ranks.
	Rank    int
	Members []Member
	// Restarts is the number of earlier rounds that have failed. It is the same for all Members.
	Restarts int
	// Store has the values of this round only.
	Store store.Store
}

// Change is the reason why a round should end.
type Change struct {
	// Waiting is the number of nodes that wait for a place.
	Waiting int
	// Lost are members that are dead or have left, and were not done.
	Lost []NodeDesc
}

// numbers are given to the handlers of this process, from firstNumber on. That is random, because
// processes in several containers with one host name may have the same process id.
var (
	firstNumber = rand.IntN(1 << 30)
	numbers     atomic.Int64
)

// Handler is one node. Its methods may be called by many goroutines; only one of Next, Leave, Close
// and Shutdown runs at a time.
type Handler struct {
	cfg     Config
	node    NodeDesc
	store   store.Store // of the run
	mu      sync.Mutex  // held by operations
	holder  *storeHolder
	away    retry.Row // of heartbeats that could not be sent
	round   *Round    // the last one; nil: none yet
	beating sync.WaitGroup
	// silence ends the heartbeats; nil: none are sent. It is not guarded by mu, which a heartbeat
	// to a slow store holds.
	silence atomic.Pointer[context.CancelFunc]
}

// New returns a node that is in no round. It does no I/O. The caller must call Shutdown, Leave or
// Stop.
func New(cfg Config) (*Handler, error) {
	var err error
	if cfg.Settings, err = cfg.Settings.withDefaults(); err != nil {
		return nil, err
	}
	if cfg.Addr == "" {
		if cfg.Addr, err = os.Hostname(); err != nil {
			return nil, fmt.Errorf("dynamic: %w", err)
		}
	}
	if len(cfg.Addr) > maxAddr || len(cfg.Info) > maxInfo {
		return nil, fmt.Errorf("dynamic: a name of %d bytes and an info of %d; at most %d and %d", len(cfg.Addr), len(cfg.Info), maxAddr, maxInfo)
	}
	h := &Handler{cfg: cfg, node: NodeDesc{cfg.Addr, os.Getpid(), firstNumber + int(numbers.Add(1)-1)}}
	h.store = store.WithPrefix(cfg.Store, "torch.rendezvous."+cfg.RunID+"/")
	h.holder = h.newHolder(cached)
	return h, nil
}

func (h *Handler) newHolder(cache time.Duration) *storeHolder {
	holder := newHolder(h.store, &h.cfg.Settings, cache)
	holder.reads = h.cfg.Counted
	return holder
}

// Node identifies this node.
func (h *Handler) Node() NodeDesc { return h.node }

// Store has the values of the run, which all nodes share, in all rounds and after the last. Their
// keys have no slash.
func (h *Handler) Store() store.Store { return h.store }

// do runs an operator; the lock is held.
func (h *Handler) do(ctx context.Context, op operator, o operation) error {
	return run(ctx, h.holder, h.node, h.cfg.Info, &h.cfg.Settings, op, o)
}

// Next leaves the round, if this node is in one, and blocks until the node is in the next complete
// round, at most for Settings.Join. It returns ErrClosed, ErrDismissed, a *TimeoutError, the cause
// of ctx's end, or an error of the store.
func (h *Handler) Next(ctx context.Context) (Round, error) {
	h.Stop()
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.jitter(ctx); err != nil {
		return Round{}, err
	}
	began := time.Now()
	if err := h.do(ctx, exitOp, operation{"leaving the last round", h.cfg.Join - time.Since(began)}); err != nil {
		return Round{}, err
	}
	if err := h.do(ctx, joinOp, operation{"joining a round", h.cfg.Join - time.Since(began)}); err != nil {
		return Round{}, err
	}
	round := h.roundOf(h.holder.current())
	h.round = &round
	h.beat()
	return round, nil
}

// jitter spreads the first joins of a run.
func (h *Handler) jitter(ctx context.Context) error {
	if _, err := h.holder.sync(ctx); err != nil {
		return err
	}
	pause := rand.N(mostJitter)
	h.holder.read = time.Time{} // others may have joined when the pause is over
	if h.holder.current().Round > 0 || pause < leastJitter {
		return nil
	}
	return retry.Pause(ctx, pause)
}

func (h *Handler) roundOf(s *State) Round {
	r := Round{
		Number: s.Round, Rank: s.Participants[h.node], Members: make([]Member, len(s.Participants)), Restarts: s.Restarts,
		Store: store.WithPrefix(h.store, strconv.Itoa(s.Round)+"/"),
	}
	for n, rank := range s.Participants {
		r.Members[rank] = Member{n, s.Infos[n]}
	}
	return r
}

// beat starts the heartbeats; the lock is held.
func (h *Handler) beat() {
	ctx, cancel := context.WithCancel(context.Background())
	h.silence.Store(&cancel)
	h.beating.Go(func() {
		// Twice in an interval: a heartbeat that is due just after one tick must not wait for the
		// next.
		ticker := time.NewTicker(h.cfg.KeepAliveInterval / 2)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			h.keepAlive(ctx)
		}
	})
}

// keepAlive sends a heartbeat. Failures are logged ever more seldom: the next may succeed.
func (h *Handler) keepAlive(ctx context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	bounded, cancel := context.WithTimeoutCause(ctx, h.cfg.Heartbeat, fmt.Errorf("no heartbeat within %v", h.cfg.Heartbeat))
	defer cancel()
	err := h.do(bounded, keepAliveOp, operation{"a heartbeat", h.cfg.Heartbeat})
	now := time.Now()
	switch {
	case ctx.Err() != nil:
	case err == nil:
		if lasted := h.away.For(now); h.away.Ended() > 0 {
			h.cfg.Log.Infof("rendezvous: the store of the nodes is in reach again, after %v", lasted.Round(time.Second))
		}
	case h.away.Failed(now, err):
		h.cfg.Log.Warnf("rendezvous: the store of the nodes is out of reach; the workers go on, but cannot be restarted "+
			"until it is in reach again: %v", err)
	}
}

// Stop ends the heartbeats and waits for that. After a while, the others consider this node dead.
func (h *Handler) Stop() {
	if silence := h.silence.Swap(nil); silence != nil {
		(*silence)()
	}
	h.beating.Wait()
}

// look reads the record anew, with a holder of its own.
func (h *Handler) look(ctx context.Context, holder *storeHolder) (*State, error) {
	_, err := holder.sync(ctx)
	return holder.current(), err
}

// Waiting returns the number of nodes that wait for a place.
func (h *Handler) Waiting(ctx context.Context) (int, error) {
	s, err := h.look(ctx, h.newHolder(0))
	return len(s.WaitList), err
}

// Closed returns whether the run is closed.
func (h *Handler) Closed(ctx context.Context) (bool, error) {
	s, err := h.look(ctx, h.newHolder(0))
	return s.Closed, err
}

// Changed blocks until the last round that Next has returned should end: because nodes wait for a
// place, or members are dead or have left that were not done. A closed run is no reason by itself:
// a member that is done closes it, and one that has failed leaves, too. Neither is an unreachable
// store: away, if not nil, is called each time that the store becomes unreachable or reachable. The
// error is the cause of ctx's end, or says that there is no round.
func (h *Handler) Changed(ctx context.Context, away func(is bool)) (Change, error) {
	h.mu.Lock()
	round := h.round
	h.mu.Unlock()
	if round == nil {
		return Change{}, errors.New("dynamic: Changed before Next")
	}
	holder := h.newHolder(0)
	lost, done := false, make(map[NodeDesc]bool)
	for {
		var c Change
		s, err := h.look(ctx, holder)
		if err == nil {
			c, err = round.compare(ctx, s, h.node, done)
		}
		if lost != (err != nil) && ctx.Err() == nil {
			if lost = err != nil; away != nil {
				away(lost)
			}
		}
		if err == nil {
			if c.Waiting > 0 || len(c.Lost) > 0 {
				return c, nil
			}
			err = holder.await(ctx, min(poll, h.cfg.KeepAliveInterval))
		}
		if err != nil {
			err = retry.Pause(ctx, poll) // and look again
		}
		if err != nil {
			return Change{}, err
		}
	}
}

// compare returns how a state differs from the round, apart from this node and the members that are
// done. It adds to these whom it finds to be done; it does not look further after one that is not.
func (r *Round) compare(ctx context.Context, s *State, self NodeDesc, done map[NodeDesc]bool) (c Change, err error) {
	if !s.Closed { // otherwise there is no place for those that wait
		c.Waiting = len(s.WaitList)
	}
	for rank, m := range r.Members {
		if _, is := s.Participants[m.Node]; is && s.Round == r.Number || m.Node == self || done[m.Node] {
			continue
		}
		if len(c.Lost) == 0 {
			e, err := r.Store.Get(ctx, doneKey(rank))
			if err != nil {
				return c, err
			}
			if done[m.Node] = e.Version != 0; done[m.Node] {
				continue
			}
		}
		c.Lost = append(c.Lost, m.Node)
	}
	return c, nil
}

// doneKey is the key of a round's store that says that a member is done.
func doneKey(rank int) string { return "done/" + strconv.Itoa(rank) }

// Done says that this node's part in the last round that Next has returned is done: the round of
// the others goes on when this node leaves or dies.
func (h *Handler) Done(ctx context.Context) error {
	h.mu.Lock()
	round := h.round
	h.mu.Unlock()
	if round == nil {
		return errors.New("dynamic: Done before Next")
	}
	_, _, err := round.Store.CompareAndSet(ctx, doneKey(round.Rank), 0, []byte{})
	return err
}

// Fail says that workers of the last round that Next has returned have failed. If this node is
// still in that round, the next round has one more restart, however many nodes call Fail.
func (h *Handler) Fail(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.do(ctx, failOp, operation{"saying that workers have failed", h.cfg.Close})
}

// Leave removes this node from the run, which continues without it: nobody waits for it.
func (h *Handler) Leave(ctx context.Context) error {
	h.Stop()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.do(ctx, leaveOp, operation{"leaving the run", h.cfg.Close})
}

// Drop removes a member of a round that is known to be dead from the record, so that nobody waits
// for its heartbeats. If the round is over, it does nothing. If the member is alive, it finds
// itself in no round when the next one begins.
func (h *Handler) Drop(ctx context.Context, round int, dead NodeDesc) error {
	holder := h.newHolder(0)
	holder.back = time.Now() // a member whose heartbeats are old is still in the record
	return run(ctx, holder, dead, "", &h.cfg.Settings, dropOp(round), operation{"dropping a dead node", h.cfg.Close})
}

// Close closes the run: no other round follows.
func (h *Handler) Close(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.do(ctx, closeOp, operation{"closing the run", h.cfg.Close})
}

// Shutdown is Stop and Close.
func (h *Handler) Shutdown(ctx context.Context) error {
	h.Stop()
	return h.Close(ctx)
}
