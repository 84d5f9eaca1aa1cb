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
	"github.com/hvdrun/hvdrun/internal/wake"
)

// The engine performs the asynchronous operations of a group on one rank, in cycles that all ranks
// run together, over a separate group. In each cycle:
//
//  1. The ranks vote: each says which of the known names it has submitted, and whether it has
//     something to announce. A name that all ranks have submitted is ready.
//  2. If a rank has something to announce (a new name, another use of a name, or that it has
//     joined), the ranks exchange their announcements, and vote again. All ranks process these in
//     the same order, so names have the same numbers everywhere.
//  3. The ready tensors are reduced, in the order of their numbers, in buckets of one kind.
//
// A rank begins a cycle when an operation has been submitted, and nudges the other ranks if they do
// not begin it by themselves; they take part whatever they have submitted. After the cycle all
// ranks know the same, and the next cycle begins after another submission. So each cycle makes
// progress, and idle ranks send nothing. Horovod's response cache uses the same idea, with cycles
// at fixed intervals.
//
// A goroutine that waits for an operation runs the cycles itself, unless another goroutine does,
// since waking the engine's goroutine takes longer than a cycle.
type engine struct {
	g      *Group
	tuning tuning
	ended  chan struct{} // closed when the engine's goroutine ends
	woken  wake.Flag     // set when there may be a reason for a cycle
	submissions

	turn   sync.Mutex  // held by the goroutine that runs cycles, which owns the fields below
	wanted atomic.Bool // the engine's goroutine found turn taken, and must be woken

	lane  *Group
	timer *time.Timer
	cycles
	agreed agreement.Table[*Handle]
	reduction
}

// cycles is the state of the cycles so far, and of the current one.
type cycles struct {
	met      bool          // the lane is connected, and the ranks have agreed on the fusion threshold
	halted   error         // the error that ended a cycle
	number   uint64        // of the cycle
	called   uint64        // the last cycle to which other ranks have called this rank …
	calledAt time.Time     // … and when this rank noticed it
	usual    time.Duration // usual duration of the first operation of a cycle
	warn     time.Time     // when to ask which ranks are missing; zero if no operation is pending
}

// submissions are the operations submitted to the engine.
type submissions struct {
	mu        sync.Mutex
	fresh     []*Handle // submitted, but not yet collected by a cycle
	bytes     int       // of fresh
	urgent    bool      // a goroutine waits for an operation
	due       time.Time // when the timer fires; zero if it is not set
	vain      int       // consecutive times that the timer fired without need, up to mostVain
	names     map[string]*Handle
	joining   *Handle
	submitted uint64 // since the last time that all ranks joined
	stopping  bool
	err       error // set when the engine has ended
	watches   watches
}

// reduction is the engine's buffer, and the state of the current bucket.
type reduction struct {
	fused  []byte
	broken error        // the error of this rank's own Work
	marks  [3]time.Time // when the copy in, the reduction and the copy out of a bucket began
}

// tuning is the part of [Config] about asynchronous operations.
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
		g: g, tuning: t, ended: make(chan struct{}), woken: wake.New(), timer: time.NewTimer(time.Hour),
		submissions: submissions{names: map[string]*Handle{}, watches: watches{g: g}},
		agreed:      agreement.NewTable[*Handle](g.rank, g.size),
	}
}

const (
	defaultFusion = 64 << 20
	defaultCycle  = time.Millisecond
	defaultStall  = 5 * time.Second

	fewVain     = 3 // times that the timer fires without need before it is set to later
	mostVain    = fewVain + 4
	longestRest = 16 * time.Millisecond
)

var (
	errUnderWay = errors.New("is in progress already")
	errJoined   = errors.New("collective: this rank has joined")
)

// submit accepts all of the operations, or none.
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
			return h.request.Action().Wrap(fmt.Errorf("%q %w", h.name, errUnderWay))
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
		e.woken.Set()
	}
	return nil
}

// flushNow begins a cycle early, because a goroutine waits for an operation.
func (e *engine) flushNow() {
	e.mu.Lock()
	if len(e.fresh) > 0 && !e.urgent {
		e.urgent = true
		e.woken.Set()
	}
	e.mu.Unlock()
}

// help runs cycles on behalf of a goroutine that waits for an operation, as long as there is a
// reason for a cycle. If another goroutine runs them, help makes it begin the next cycle at once.
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

// giveTurn ends the turn of a goroutine that waits for operations. It wakes the engine's goroutine
// if there is a reason for a cycle. A failed attempt to take the turn alone is not a reason for a
// cycle: if the engine's goroutine woke up after each operation, it would find the turn taken by
// the next one again.
func (e *engine) giveTurn() {
	e.wanted.Store(false)
	reason := !e.met || e.halted != nil || e.look()
	e.turn.Unlock()
	if e.wanted.Swap(false) || reason {
		e.woken.Set()
	}
}

// halt records that a cycle has failed. A nil err has no effect.
func (e *engine) halt(err error) {
	if err != nil {
		e.halted = err
	}
}

// stop ends the engine and waits for it. If operations are in progress, the group ends.
func (e *engine) stop() {
	e.mu.Lock()
	e.stopping = true
	idle := len(e.names) == 0
	e.mu.Unlock()
	e.woken.Set()
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
	e.turn.Lock() // waiting goroutines have released it
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

// connect connects the engine's lane with the other ranks' engines, and starts these.
func (e *engine) connect() error {
	l := lane{Lane: sockets.Lane{ID: laneID(e.g.lane, asyncLane, 0), Rank: e.g.rank, Size: e.g.size, Members: e.g.members}, strict: true, carries: true}
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

// await blocks until there is a reason for a cycle, and runs the cycle.
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
		case <-e.woken:
		case <-e.lane.changed:
		case <-e.timer.C:
			e.rang()
		case <-e.lane.call.Failed:
			return e.lane.err()
		}
	}
}

// rang records that the timer has fired. It counts the timer as set without need if waiting
// goroutines have begun all cycles since it was set.
func (e *engine) rang() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.due = time.Time{}
	e.vain = min(e.vain+1, mostVain)
	if len(e.fresh) > 0 && time.Since(e.fresh[0].since) >= e.tuning.cycle {
		e.vain = 0
	}
}

// rest returns how long submissions wait at most until a goroutine waits for one: the cycle time,
// or longer if a goroutine has usually come before the timer fired.
func (e *engine) rest() time.Duration {
	rests := retry.Backoff{First: e.tuning.cycle, Most: max(e.tuning.cycle, longestRest)}
	return rests.After(1 + max(0, e.vain-fewVain))
}

// wakeBy makes the engine's goroutine check again for a reason at the time at, or earlier. A timer
// that fires earlier stays as it is. Setting a timer to an earlier time wakes a thread of the
// runtime, which costs more than the whole rest of a small operation. The caller holds e.mu.
func (e *engine) wakeBy(now, at time.Time) {
	if e.due.IsZero() || at.Before(e.due) {
		e.due = at
		e.timer.Reset(at.Sub(now))
	}
}

// work runs a cycle if there is a reason for one and no other goroutine runs cycles.
func (e *engine) work() (worked bool, err error) {
	if !e.turn.TryLock() {
		e.wanted.Store(true) // instead of blocking: a mutex with a waiter goes to the waiter first
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

// cycleIfDue runs a cycle if there is a reason for one. If urgent is true, any submission is a
// reason.
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

// look reports whether there is a reason for a cycle. If not, it makes the engine's goroutine check
// again in time.
func (e *engine) look() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reason()
}

// reason is like look, for a caller that holds e.mu.
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

// hesitates reports whether this rank, which others have called to a cycle, waits for a while for
// the operations that it is expected to submit. Without them the guess of the other ranks would be
// wrong, and they would have to reduce everything twice. The caller holds e.mu.
func (e *engine) hesitates() bool {
	return e.agreed.Expects() && e.agreed.Pending == 0 && len(e.fresh) == 0 && !e.lane.peerLeft.Load()
}

// The first operation of a cycle nudges the other ranks when it has waited for nudgeFactor times
// its usual duration, but at least nudgeLeast and at most nudgeMost. If all ranks have begun the
// cycle by themselves, nudges would only delay them.
const (
	nudgeFactor = 3
	nudgeLeast  = 500 * time.Microsecond
	nudgeMost   = 5 * time.Millisecond
)

// patience returns how long a rank waits for other ranks before it nudges them.
func (e *engine) patience() time.Duration {
	return max(nudgeLeast, min(nudgeFactor*e.usual, nudgeMost))
}

// joins reports whether this rank can now announce that it joins. The caller holds e.mu.
func (e *engine) joins() bool {
	return e.joining != nil && !e.agreed.JoinAnnounced && len(e.fresh) == 0 && !e.agreed.News() && e.agreed.Pending == 0
}

// cycle runs one cycle, as all ranks do at the same time, with the collected operations. If join is
// true, this rank announces that it joins.
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

// nudge notifies the other ranks that a cycle has begun. It does so at once if operations of other
// ranks wait for the cycle, if this rank was itself notified, or if the transport cannot send later
// while it waits; otherwise only when the others are late.
func (e *engine) nudge() {
	if e.agreed.Awaited || e.lane.cycle.Load() >= e.number || e.lane.call.TCP == nil || !e.lane.call.TCP.Driven() {
		e.lane.call.Nudge(e.number)
		return
	}
	e.lane.call.TellIfLate(e.number, e.patience())
}

// arrived records that all ranks have begun the cycle: its first operation has ended.
func (e *engine) arrived() {
	if waited, ok := e.lane.call.InTime(); ok {
		e.usual += (waited - e.usual) / 8
	}
}

// collect takes the submitted operations into the cycle, and reports whether this rank joins. The
// caller holds e.mu.
func (e *engine) collect() (join bool) {
	for i, h := range e.fresh {
		e.agreed.Submit(h.name, &h.request, h)
		e.fresh[i] = nil
	}
	e.fresh, e.bytes, e.urgent = e.fresh[:0], 0, false
	return e.joins()
}

// vote determines which operations all ranks have submitted, and what the ranks request.
func (e *engine) vote(news bool) (agreement.Asked, error) {
	stall := !e.warn.IsZero() && time.Until(e.warn) <= 0
	err := e.lane.allReduceBytes(context.Background(), kernel.Uint8, operation.Min, e.agreed.Vote(agreement.Asked{News: news, Stall: stall}), nil)
	return e.agreed.Voted(), err
}

// schedule sets the time to ask which ranks are missing: when the oldest operation has waited for
// the time of a stall.
func (e *engine) schedule() {
	if e.agreed.Pending == 0 || e.tuning.stall < 0 {
		e.warn = time.Time{}
		return
	}
	now := time.Now()
	if e.warn.After(now) {
		return
	}
	if !e.warn.IsZero() { // the ranks were asked a moment ago
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
		err = h.request.Action().Wrap(ended)
	}
	e.mu.Unlock()
	h.finish(err)
}

// logStall logs an operation that has waited too long, with the missing ranks.
func (e *Endpoint) logStall(tensor string, missing []int, waited time.Duration) {
	e.cfg.Log.WithField("tensor", tensor).WithField("ranks", fmt.Sprint(missing)).
		Warnf("collective: %q has waited for ranks %v for more than %v", tensor, missing, waited)
}
