// Package dynamic lets nodes meet without a driver, as PyTorch's elastic launcher does:
// Handler.Next blocks until its node is in a complete round. The nodes share a record in a store,
// which each node changes by compare-and-set. A round is complete when enough nodes have joined it
// and no further node has come for a while, or when it is full. Nodes that come later wait, which
// makes the others begin another round.
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
	// Addr identifies this machine among the nodes. Empty: its host name.
	Addr string
	// Info is data that the other nodes of a round get, for example an address. It has at most 512
	// bytes.
	Info string
	// Log must not be nil.
	Log logrus.FieldLogger
}

// Member is a node of a round.
type Member struct {
	Node NodeDesc
	Info string
}

// Round is a complete round.
type Round struct {
	// Number is the round's number, which increases from round to round.
	Number int
	// Rank is this node's rank; Members are in the order of their ranks.
	Rank    int
	Members []Member
	// Restarts is the number of earlier rounds that have failed. It is the same for all Members.
	Restarts int
	// Store contains only the values of this round.
	Store store.Store
}

// Change is the reason why a round should end.
type Change struct {
	// Waiting is the number of nodes that wait to join.
	Waiting int
	// Lost are members that are dead or have left without being done.
	Lost []NodeDesc
}

// The handlers of this process are numbered from firstNumber on. That number is random, because
// processes in several containers with one host name may have the same process id.
var (
	firstNumber = rand.IntN(1 << 30)
	numbers     atomic.Int64
)

// Handler is one node. Its methods are safe for concurrent use, but only one of Next, Leave and
// Close may run at a time.
type Handler struct {
	cfg     Config
	node    NodeDesc
	store   store.Store // of the run
	mu      sync.Mutex  // held by operations
	holder  *storeHolder
	away    retry.Row // failures to send heartbeats
	round   *Round    // the last round; nil: none yet
	beating sync.WaitGroup
	// silence stops the heartbeats; nil: none are being sent. It is not guarded by mu, because a
	// heartbeat to a slow store holds mu.
	silence atomic.Pointer[context.CancelFunc]
}

// New returns a node that is in no round. It does no I/O. The caller must call Leave or Stop.
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
	return newHolder(h.store, &h.cfg.Settings, cache)
}

// Node returns the description of this node.
func (h *Handler) Node() NodeDesc { return h.node }

// Store returns the store of the run, which all nodes share, in all rounds and after the last. Its
// keys must not contain a slash.
func (h *Handler) Store() store.Store { return h.store }

// do runs an operator. The caller holds the lock.
func (h *Handler) do(ctx context.Context, op operator, o operation) error {
	return run(ctx, h.holder, h.node, h.cfg.Info, &h.cfg.Settings, op, o)
}

// Next leaves the round, if this node is in one, and blocks until the node is in the next complete
// round, but no longer than Settings.Join. It returns ErrClosed, ErrDismissed, a *timeoutError, the
// cause of ctx's end, or an error of the store.
func (h *Handler) Next(ctx context.Context) (Round, error) {
	h.Stop()
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.jitter(ctx); err != nil {
		return Round{}, err
	}
	began := time.Now()
	if err := h.do(ctx, exitOp, operation{what: "leaving the last round", limit: h.cfg.Join - time.Since(began)}); err != nil {
		return Round{}, err
	}
	if err := h.do(ctx, joinOp, operation{"joining a round", h.cfg.Join - time.Since(began), h.waits()}); err != nil {
		return Round{}, err
	}
	round := h.roundOf(h.holder.current())
	h.round = &round
	h.beat()
	return round, nil
}

// errWaits stands for all reasons to wait, so that they count as failures of one kind.
var errWaits = errors.New("waiting")

// waits returns a function for a node that waits in Next. It logs what the node waits for, after a
// while and then less and less often.
func (h *Handler) waits() func(view) string {
	row := retry.Row{Quiet: waitQuiet}
	return func(v view) string {
		why := v.missing()
		if why != "" && row.Failed(v.clock, errWaits) {
			h.cfg.Log.Warnf("rendezvous: waiting for %v: %s", row.For(v.clock).Round(time.Second), why)
		}
		return why
	}
}

// jitter pauses for a random time, to spread the first joins of a run.
func (h *Handler) jitter(ctx context.Context) error {
	if _, err := h.holder.sync(ctx); err != nil {
		return err
	}
	pause := rand.N(mostJitter)
	h.holder.read = time.Time{} // others may have joined during the pause
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

// beat starts the heartbeats. The caller holds the lock.
func (h *Handler) beat() {
	ctx, cancel := context.WithCancel(context.Background())
	h.silence.Store(&cancel)
	h.beating.Go(func() {
		// The ticks are twice as frequent as heartbeats, because a heartbeat that becomes due just
		// after a tick must not wait for a full interval.
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

// keepAlive sends a heartbeat. It logs repeated failures less and less often, because the next
// heartbeat may succeed.
func (h *Handler) keepAlive(ctx context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	bounded, cancel := context.WithTimeoutCause(ctx, h.cfg.Heartbeat, fmt.Errorf("the store did not take a heartbeat within %v", h.cfg.Heartbeat))
	defer cancel()
	err := h.do(bounded, keepAliveOp, operation{what: "a heartbeat", limit: h.cfg.Heartbeat})
	now := time.Now()
	switch {
	case ctx.Err() != nil:
	case err == nil:
		if lasted := h.away.For(now); h.away.Ended() > 0 {
			h.cfg.Log.Infof("rendezvous: the store of the nodes can be reached again, after %v", lasted.Round(time.Second))
		}
	case h.away.Failed(now, err):
		h.cfg.Log.Warnf("rendezvous: the store of the nodes cannot be reached; the workers continue, but cannot be restarted "+
			"until it is in reach again: %v", err)
	}
}

// Stop stops the heartbeats and waits until they have stopped. After a while, the others consider
// this node dead.
func (h *Handler) Stop() {
	if silence := h.silence.Swap(nil); silence != nil {
		(*silence)()
	}
	h.beating.Wait()
}

// look reads the record with the given holder, and returns it.
func (h *Handler) look(ctx context.Context, holder *storeHolder) (*State, error) {
	_, err := holder.sync(ctx)
	return holder.current(), err
}

// Closed reports whether the run is closed.
func (h *Handler) Closed(ctx context.Context) (bool, error) {
	s, err := h.look(ctx, h.newHolder(0))
	return s.Closed, err
}

// Changed blocks until the last round that Next has returned should end, because nodes wait to
// join, or because members have died or left without being done. A closed run alone is not a
// reason: a member that is done closes the run, and a member that has failed also leaves. An
// unreachable store is not a reason either: away, if not nil, is called each time the store becomes
// unreachable or reachable again. The error is the cause of ctx's end, or says that there is no
// round.
func (h *Handler) Changed(ctx context.Context, away func(is bool)) (Change, error) {
	h.mu.Lock()
	round := h.round
	h.mu.Unlock()
	if round == nil {
		return Change{}, errors.New("dynamic: Changed was called before Next")
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
			err = retry.Pause(ctx, poll) // then look again
		}
		if err != nil {
			return Change{}, err
		}
	}
}

// compare returns how a state differs from the round, ignoring this node and the members in done.
// It adds members that it finds to be done to done, and stops looking for such members after the
// first one that is not.
func (r *Round) compare(ctx context.Context, s *State, self NodeDesc, done map[NodeDesc]bool) (c Change, err error) {
	if !s.Closed { // otherwise waiting nodes cannot join
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

// doneKey returns the key, in a round's store, that marks a member as done.
func doneKey(rank int) string { return "done/" + strconv.Itoa(rank) }

// Done records that this node is done with the last round that Next has returned: when it leaves or
// dies, the round continues for the others.
func (h *Handler) Done(ctx context.Context) error {
	h.mu.Lock()
	round := h.round
	h.mu.Unlock()
	if round == nil {
		return errors.New("dynamic: Done was called before Next")
	}
	_, _, err := round.Store.CompareAndSet(ctx, doneKey(round.Rank), 0, []byte{})
	return err
}

// Fail records that workers failed in the last round that Next has returned. If this node is still
// in that round, the next round has one more restart, however many nodes call Fail.
func (h *Handler) Fail(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.do(ctx, failOp, operation{what: "saying that workers have failed", limit: h.cfg.Close})
}

// Leave removes this node from the run, which continues without it and does not wait for it.
func (h *Handler) Leave(ctx context.Context) error {
	h.Stop()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.do(ctx, leaveOp, operation{what: "leaving the run", limit: h.cfg.Close})
}

// Drop removes a member of a round that is known to be dead from the record, so that nobody waits
// for its heartbeats. If the round is over, Drop does nothing. If the member is alive after all, it
// finds itself in no round when the next round begins.
func (h *Handler) Drop(ctx context.Context, round int, dead NodeDesc) error {
	holder := h.newHolder(0)
	holder.back = time.Now() // so that a member with old heartbeats is still in the record
	return run(ctx, holder, dead, "", &h.cfg.Settings, dropOp(round), operation{what: "dropping a dead node", limit: h.cfg.Close})
}

// Close closes the run: no further round follows.
func (h *Handler) Close(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.do(ctx, closeOp, operation{what: "closing the run", limit: h.cfg.Close})
}
