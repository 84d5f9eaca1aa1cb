package collective

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/internal/retry"
)

// The engine does the asynchronous operations of a group on one rank, in cycles that all ranks go
// through together, over a group of its own. Cycle after cycle:
//
//  1. Every rank says which of the names that all know it has submitted. What all have is ready.
//  2. A rank that has something to say about names says so first: a name that is new, or is used
//     otherwise than the last time, and that the rank has joined. All receive it in the same order,
//     so that the numbers of names are the same everywhere.
//  3. What is ready is reduced, in the order of the numbers, in buckets of tensors of one kind.
//
// A rank begins a cycle when it has submitted something, and nudges the others if they do not come
// of themselves, who join in whatever they have to say. After the cycle the ranks know all there is
// to know; the next one begins when there is news. So each cycle does something, and idle ranks
// send nothing. See Horovod's response cache for the same idea, with cycles by the clock.
//
// A goroutine that waits for an operation does the cycles itself, if no other does, since to wake
// the engine's own takes longer than a cycle.
type engine struct {
	g      *Group
	tuning tuning
	ended  chan struct{}
	kick   chan struct{} // one token: look again
	submissions

	turn   sync.Mutex  // held by the goroutine that does cycles, which owns what follows
	wanted atomic.Bool // the engine's goroutine has found it taken, and is to be poked

	lane  *Group
	timer *time.Timer
	cycles
	agreed agreement.Table[*Handle]
	reduction
}

// cycles are the cycles so far, and the one under way.
type cycles struct {
	met      bool          // the lane is connected, and the ranks have agreed on what is to be agreed on first
	halted   error         // what has ended a cycle
	number   uint64        // of the cycle
	called   uint64        // the cycle that others have called this rank to last …
	calledAt time.Time     // … and when that was noticed
	usual    time.Duration // that the first operation of a cycle waits
	warn     time.Time     // when to ask which ranks are waited for; zero while nothing is
}

// submissions are what operations give to their engine, and wait for.
type submissions struct {
	mu        sync.Mutex
	fresh     []*Handle // submitted, not collected
	bytes     int       // of fresh
	urgent    bool      // an operation is waited for
	due       time.Time // when the timer goes off; zero: it is not set
	vain      int       // times in a row that it has gone off for nothing, up to mostVain
	names     map[string]*Handle
	joining   *Handle
	submitted uint64 // since all ranks joined last
	stopping  bool
	err       error // the engine has ended
	watches   watches
}

// reduction is what the engine reduces in, and the bucket under way.
type reduction struct {
	fused  []byte
	broken error        // what this rank's own work elsewhere has failed with
	marks  [3]time.Time // when the copy in, the reduction and the copy out of a bucket began
}

// tuning is what [Config] says about asynchronous operations.
type tuning struct {
	fusion       int
	cycle, stall time.Duration
	log          func(tensor string, missing []int, waited time.Duration)
}

func newEngine(g *Group) *engine {
	t := g.family.tuning
	if t.fusion == 0 {
		t.fusion = defaultFusion
	}
	if t.cycle == 0 {
		t.cycle = defaultCycle
	}
	if t.stall == 0 {
		t.stall = defaultStall
	}
	return &engine{
		g: g, tuning: t, ended: make(chan struct{}), kick: make(chan struct{}, 1), timer: time.NewTimer(time.Hour),
		submissions: submissions{names: map[string]*Handle{}, watches: watches{g: g}},
		agreed:      agreement.NewTable[*Handle](g.rank, g.size),
	}
}

const (
	defaultFusion = 64 << 20
	defaultCycle  = time.Millisecond
	defaultStall  = 5 * time.Second

	fewVain     = 3 // times that the timer goes off for nothing before it is set to later
	mostVain    = fewVain + 4
	longestRest = 16 * time.Millisecond
)

var (
	errUnderWay = errors.New("is under way already")
	errJoined   = errors.New("collective: this rank has joined")
)

// submit accepts operations, all or none.
func (e *engine) submit(ctx context.Context, handles []*Handle) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.err != nil:
		return e.err
	case e.stopping:
		return cmp.Or(e.g.err(), ErrClosed)
	case e.joining != nil:
		return errJoined
	}
	for i, h := range handles {
		if e.names[h.name] != nil {
			for _, taken := range handles[:i] {
				delete(e.names, taken.name)
			}
			return h.request.Wrong(fmt.Errorf("%q %w", h.name, errUnderWay))
		}
		e.names[h.name] = h
	}
	now := exchange.Instant()
	if e.g.family.timeline != nil {
		now = time.Now()
	}
	for _, h := range handles {
		h.engine, h.since = e, now
		h.watch = e.watches.begin(ctx, &e.mu)
		if h.name == joinName {
			e.joining = h
			continue
		}
		e.submitted++
		if e.bytes += h.request.Bytes(); len(e.fresh) == 0 {
			e.wakeBy(now, now.Add(e.rest()))
		}
		e.fresh = append(e.fresh, h)
	}
	if e.bytes >= e.agreed.Fusion || e.joining != nil {
		e.poke()
	}
	return nil
}

// flushNow begins a cycle early, because an operation is waited for.
func (e *engine) flushNow() {
	e.mu.Lock()
	if len(e.fresh) > 0 && !e.urgent {
		e.urgent = true
		e.poke()
	}
	e.mu.Unlock()
}

// help does cycles on behalf of a goroutine that waits for an operation, for as long as there is a
// reason for one. Where another goroutine is at it, that one is told to make haste.
func (e *engine) help(h *Handle) {
	if !e.turn.TryLock() {
		e.flushNow()
		return
	}
	defer e.giveTurn()
	if !e.met {
		e.flushNow()
		return
	}
	for urgent := true; !h.done.Load() && e.halted == nil; urgent = false {
		if !e.cycleIfDue(urgent) {
			break
		}
	}
}

// giveTurn ends the turn of a goroutine that waits for operations. The engine's own goes on if
// there is a reason. A failed attempt to take the turn is not a reason: if the engine woke for it
// at the end of each operation, the next one would have the turn again.
func (e *engine) giveTurn() {
	e.wanted.Store(false)
	reason := !e.met || e.halted != nil || e.look()
	e.turn.Unlock()
	if e.wanted.Swap(false) || reason {
		e.poke()
	}
}

// halt notes that a cycle has failed.
func (e *engine) halt(err error) {
	if err != nil {
		e.halted = err
	}
}

func (e *engine) poke() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// stop ends the engine and waits for it. Operations that are under way end the group.
func (e *engine) stop() {
	e.mu.Lock()
	e.stopping = true
	idle := len(e.names) == 0
	e.mu.Unlock()
	e.poke()
	if idle {
		bound := time.NewTimer(sockets.LeaveBound)
		defer bound.Stop()
		select {
		case <-e.ended:
			return
		case <-bound.C:
		}
	}
	e.g.fail(frame.Gone(ErrClosed, e.g.rank))
	<-e.ended
}

// run is the engine's goroutine.
func (e *engine) run() {
	defer close(e.ended)
	defer e.timer.Stop()
	e.turn.Lock()
	err := e.connect()
	e.met = err == nil
	e.turn.Unlock()
	for err == nil {
		err = e.await()
	}
	e.turn.Lock() // whoever has waited has given up
	defer e.turn.Unlock()
	e.halt(err)
	e.mu.Lock()
	if failure := e.g.err(); failure != nil {
		err = failure
	}
	e.err = err
	left := e.names
	e.mu.Unlock()
	if e.lane != nil {
		e.lane.Close()
	}
	Free(e.fused[:cap(e.fused)])
	e.fused = nil
	for _, h := range left {
		if h.work != nil && e.broken != nil {
			e.complete(h, e.broken)
			continue
		}
		e.complete(h, err)
	}
	e.watches.close(&e.mu)
}

// connect makes the engine's lane with the other ranks' engines, which it starts.
func (e *engine) connect() error {
	l := lane{id: laneID(e.g.lane, asyncLane, 0), rank: e.g.rank, size: e.g.size, members: e.g.members, strict: true, carries: true}
	var err error
	if e.lane, err = e.g.family.connect(context.Background(), l); err != nil {
		return err
	}
	if start := e.g.family.startPeers; start != nil {
		start(e.g, e.lane, func(peer *Group) error { _, err := peer.engine(); return err })
	}
	smallest := [1]uint64{uint64(max(0, e.tuning.fusion))}
	if err := AllReduce(context.Background(), e.lane, smallest[:], Min); err != nil {
		return err
	}
	e.mu.Lock()
	e.agreed.Fusion = int(smallest[0])
	if e.lane.inMemory() != nil {
		e.agreed.Alone = agreement.AloneInMemory
	}
	e.mu.Unlock()
	return nil
}

// await blocks until there is a reason for a cycle, and does it.
func (e *engine) await() error {
	for {
		if worked, err := e.work(); worked {
			return err
		}
		e.mu.Lock()
		stopping := e.stopping
		e.mu.Unlock()
		if stopping {
			return ErrClosed
		}
		select {
		case <-e.kick:
		case <-e.lane.changed:
		case <-e.timer.C:
			e.rang()
		case <-e.lane.call.Failed:
			return e.lane.err()
		}
	}
}

// rang notes that the timer has gone off. It has no effect if goroutines that wait for operations
// have begun all cycles since it was set.
func (e *engine) rang() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.due = time.Time{}
	e.vain = min(e.vain+1, mostVain)
	if len(e.fresh) > 0 && time.Since(e.fresh[0].since) >= e.tuning.cycle {
		e.vain = 0
	}
}

// rest is how long submissions wait at most for one that is waited for: a cycle, or longer where
// that has mostly come before.
func (e *engine) rest() time.Duration {
	rests := retry.Backoff{First: e.tuning.cycle, Most: max(e.tuning.cycle, longestRest)}
	return rests.After(1 + max(0, e.vain-fewVain))
}

// wakeBy makes the engine's goroutine look again at some time at the latest. A timer that is set
// already and goes off before stays as it is: to set one earlier wakes a thread of the runtime,
// which costs a small operation more than the rest of it. The caller holds e.mu.
func (e *engine) wakeBy(now, at time.Time) {
	if e.due.IsZero() || at.Before(e.due) {
		e.due = at
		e.timer.Reset(at.Sub(now))
	}
}

// work does a cycle if there is a reason for one, and no other goroutine is at it.
func (e *engine) work() (worked bool, err error) {
	if !e.turn.TryLock() {
		e.wanted.Store(true) // rather than to wait: a mutex that is waited for is not given to others
		if !e.turn.TryLock() {
			return false, nil
		}
	}
	defer e.turn.Unlock()
	if e.halted != nil {
		return true, e.halted
	}
	return e.cycleIfDue(false), e.halted
}

// cycleIfDue does a cycle if there is a reason for one; urgent: a submission is a reason.
func (e *engine) cycleIfDue(urgent bool) (worked bool) {
	e.mu.Lock()
	e.urgent = e.urgent || urgent && len(e.fresh) > 0
	join := false
	if worked = e.reason(); worked {
		join = e.collect()
	}
	e.mu.Unlock()
	if worked {
		e.halt(e.cycle(join))
	}
	return worked
}

// look reports whether there is a reason for a cycle, and if not, makes the engine's goroutine look
// again in time.
func (e *engine) look() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reason()
}

// reason is look, where the caller holds e.mu.
func (e *engine) reason() bool {
	if e.stopping {
		return false
	}
	called := e.lane.cycle.Load() > e.number
	if called && !e.hesitates() || e.agreed.News() || e.joins() ||
		(e.agreed.Pending > 0 || e.agreed.JoinAnnounced) && e.lane.peerLeft.Load() {
		return true
	}
	switch {
	case len(e.fresh) > 0 && (e.urgent || e.bytes >= e.agreed.Fusion):
		return true
	case !called && len(e.fresh) == 0 && e.warn.IsZero():
		return false
	}
	now, pause := exchange.Instant(), time.Hour
	if called {
		if e.called != e.number+1 {
			e.called, e.calledAt = e.number+1, now
		}
		if pause = e.patience() - now.Sub(e.calledAt); pause <= 0 {
			return true
		}
	}
	if len(e.fresh) > 0 {
		waited := now.Sub(e.fresh[0].since)
		if waited >= e.tuning.cycle {
			return true
		}
		pause = min(pause, e.rest()-waited)
	}
	if !e.warn.IsZero() {
		pause = min(pause, e.warn.Sub(now))
		if pause <= 0 {
			return true
		}
	}
	if pause < time.Hour {
		e.wakeBy(now, now.Add(pause))
	}
	return false
}

// hesitates reports whether this rank, which is called to a cycle, waits for a while for what it is
// expected to submit: it would make the others' guess wrong otherwise, and they would reduce all
// twice. The caller holds e.mu.
func (e *engine) hesitates() bool {
	return e.agreed.Expects() && e.agreed.Pending == 0 && len(e.fresh) == 0 && !e.lane.peerLeft.Load()
}

// The first operation of a cycle waits for so many times as long as it waits usually until it
// nudges the others, within bounds. If all have begun the cycle of themselves, nudges would only
// keep them from it.
const (
	nudgeFactor = 3
	nudgeLeast  = 500 * time.Microsecond
	nudgeMost   = 5 * time.Millisecond
)

// patience is how long a rank waits for others that have usually come by now.
func (e *engine) patience() time.Duration {
	return max(nudgeLeast, min(nudgeFactor*e.usual, nudgeMost))
}

// joins reports whether this rank can announce now that it joins. The caller holds e.mu.
func (e *engine) joins() bool {
	return e.joining != nil && !e.agreed.JoinAnnounced && len(e.fresh) == 0 && !e.agreed.News() && e.agreed.Pending == 0
}

// cycle does one cycle, as all ranks do at the same time, of what has been collected; join: this
// rank joins.
func (e *engine) cycle(join bool) error {
	e.number++
	e.lane.begun.Store(e.number)
	e.nudge()
	if e.agreed.Expects() {
		ready := !e.agreed.News() && !join && (e.warn.IsZero() || time.Until(e.warn) > 0)
		right, err := e.tryGuess(ready)
		if e.arrived(); err != nil || right {
			e.schedule()
			return err
		}
	}
	for {
		asked, err := e.vote(e.agreed.News() || join)
		e.arrived()
		if err != nil {
			return err
		}
		if asked.Stall {
			if err := e.report(); err != nil {
				return err
			}
		}
		if !asked.News {
			break
		}
		if err := e.exchange(join); err != nil {
			return err
		}
		join = false
	}
	if err := e.execute(); err != nil {
		return err
	}
	if e.agreed.Full() {
		e.agreed.Forget()
	}
	e.schedule()
	return nil
}

// nudge tells the other ranks that a cycle has begun: at once where some wait for it, where this
// rank has been told itself, or where it cannot look again while it waits; otherwise when they are
// late.
func (e *engine) nudge() {
	if e.agreed.Awaited || e.lane.cycle.Load() >= e.number || e.lane.call.TCP == nil || !e.lane.call.TCP.Driven() {
		e.lane.call.Nudge(e.number)
		return
	}
	e.lane.call.TellIfLate(e.number, e.patience())
}

// arrived notes that all ranks have begun the cycle, since its first operation has ended.
func (e *engine) arrived() {
	if waited, ok := e.lane.call.InTime(); ok {
		e.usual += (waited - e.usual) / 8
	}
}

// collect takes what has been submitted, and reports whether this rank joins. The caller holds
// e.mu.
func (e *engine) collect() (join bool) {
	for i, h := range e.fresh {
		e.agreed.Submit(h.name, &h.request, h)
		e.fresh[i] = nil
	}
	e.fresh, e.bytes, e.urgent = e.fresh[:0], 0, false
	return e.joins()
}

// vote finds what all ranks have submitted, and what they want.
func (e *engine) vote(news bool) (agreement.Asked, error) {
	stall := !e.warn.IsZero() && time.Until(e.warn) <= 0
	err := e.lane.allReduceBytes(context.Background(), kernel.Uint8, operation.Min, e.agreed.Vote(agreement.Asked{News: news, Stall: stall}), nil)
	return e.agreed.Voted(), err
}

// schedule sets when to ask which ranks are waited for: when the oldest operation is old enough.
func (e *engine) schedule() {
	if e.agreed.Pending == 0 || e.tuning.stall < 0 {
		e.warn = time.Time{}
		return
	}
	now := time.Now()
	if e.warn.After(now) {
		return
	}
	if !e.warn.IsZero() { // it was asked a moment ago
		e.warn = now.Add(e.tuning.stall)
		return
	}
	e.warn = now.Add(e.tuning.stall)
	for h := range e.agreed.Submitted() {
		if at := h.since.Add(e.tuning.stall); at.Before(e.warn) {
			e.warn = at
		}
	}
}

// complete ends one operation.
func (e *engine) complete(h *Handle, err error) {
	e.mu.Lock()
	if e.names[h.name] == h {
		delete(e.names, h.name)
	}
	if e.joining == h {
		e.joining = nil
	}
	if ended := e.watches.end(h.watch); err != nil && ended != nil {
		err = h.request.Wrong(ended)
	}
	e.mu.Unlock()
	h.finish(err)
}

// logStall is the stall report of an endpoint.
func (e *Endpoint) logStall(tensor string, missing []int, waited time.Duration) {
	e.cfg.Log.WithField("tensor", tensor).WithField("ranks", fmt.Sprint(missing)).
		Warnf("collective: %q waits for ranks %v for more than %v", tensor, missing, waited)
}
