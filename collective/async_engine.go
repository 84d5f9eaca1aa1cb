package collective

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/kernel"
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
// A rank begins a cycle when it has submitted something, and nudges the others, who join in
// whatever they have to say. After the cycle the ranks know all there is to know; the next one
// begins when there is news. So no cycle is in vain, and idle ranks send nothing. See Horovod's
// response cache for the same idea, with cycles by the clock.
type engine struct {
	g      *Group
	tuning tuning
	ended  chan struct{}
	kick   chan struct{} // one token: look again
	submissions

	// What follows belongs to the engine's goroutine.
	lane   *Group
	number uint64    // of the cycle
	warn   time.Time // when to ask which ranks are waited for; zero while nothing is
	timer  *time.Timer
	agreement
	reduction
}

// submissions are what operations give to their engine, and wait for.
type submissions struct {
	mu        sync.Mutex
	fresh     []*Handle // submitted, not collected
	bytes     int       // of fresh
	urgent    bool      // an operation is waited for
	names     map[string]*Handle
	joining   *Handle
	submitted uint64 // since all ranks joined last
	stopping  bool
	err       error // the engine has ended
	watching  sync.WaitGroup
}

// agreement is what the ranks know of each other's submissions, and what this rank has yet to say.
type agreement struct {
	ids        map[string]int
	table      []entry // by id, equal on all ranks but for mine
	pending    int     // entries with mine
	joined     []bool  // by rank
	contribute int     // ranks that have not joined
	fusion     int     // smallest threshold of all ranks
	votes      []uint8

	unannounced   []*Handle
	joinAnnounced bool // this rank's joining
	statement     []uint8
}

// reduction is what the engine reduces in, and the bucket under way.
type reduction struct {
	buckets []bucket
	fused   []byte
	broken  error        // what this rank's own work elsewhere has failed with
	marks   [3]time.Time // when the copy in, the reduction and the copy out of a bucket began
}

// entry is a name that all ranks know.
type entry struct {
	name    string
	request request
	mine    *Handle // what this rank has submitted; nil: nothing
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
		submissions: submissions{names: map[string]*Handle{}},
		agreement:   agreement{ids: map[string]int{}, joined: make([]bool, g.size), contribute: g.size},
	}
}

const (
	defaultFusion = 64 << 20
	defaultCycle  = time.Millisecond
	defaultStall  = 5 * time.Second
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
		return ErrClosed
	case e.joining != nil:
		return errJoined
	}
	for i, h := range handles {
		if e.names[h.name] != nil {
			for _, taken := range handles[:i] {
				delete(e.names, taken.name)
			}
			return fmt.Errorf("collective: AllReduceAsync: %q %w", h.name, errUnderWay)
		}
		e.names[h.name] = h
	}
	now := time.Now()
	for _, h := range handles {
		h.engine, h.since = e, now
		if ctx.Done() != nil {
			e.watching.Add(1)
			h.unwatch = context.AfterFunc(ctx, func() {
				defer e.watching.Done()
				e.cancel(h, ctx.Err())
			})
		}
		if h.name == joinName {
			e.joining = h
			continue
		}
		e.submitted++
		e.bytes += h.request.bytes()
		e.fresh = append(e.fresh, h)
	}
	e.urgent = e.urgent || len(handles) > 1
	e.poke()
	return nil
}

// cancel ends the group because the context of an operation has ended.
func (e *engine) cancel(h *Handle, err error) {
	e.mu.Lock()
	h.gaveUp = fmt.Errorf("collective: AllReduceAsync: %w", err)
	e.mu.Unlock()
	e.g.fail(gone(err, e.g.rank))
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
		bound := time.NewTimer(leaveBound)
		defer bound.Stop()
		select {
		case <-e.ended:
			return
		case <-bound.C:
		}
	}
	e.g.fail(gone(ErrClosed, e.g.rank))
	<-e.ended
}

// run is the engine's goroutine.
func (e *engine) run() {
	defer close(e.ended)
	defer e.timer.Stop()
	err := e.connect()
	for err == nil {
		if err = e.await(); err == nil {
			err = e.cycle()
		}
	}
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
	e.watching.Wait()
}

// connect makes the engine's lane with the other ranks' engines, which it starts.
func (e *engine) connect() error {
	l := lane{id: laneID(e.g.lane, asyncLane, 0), rank: e.g.rank, size: e.g.size, members: e.g.members, strict: true}
	var err error
	if e.lane, err = e.g.family.connect(context.Background(), l); err != nil {
		return err
	}
	if e.g.family.startEngines != nil {
		e.g.family.startEngines(e.g, e.lane)
	}
	smallest := [1]uint64{uint64(max(0, e.tuning.fusion))}
	if err := AllReduce(context.Background(), e.lane, smallest[:], Min); err != nil {
		return err
	}
	e.fusion = int(smallest[0])
	return nil
}

// await blocks until there is a reason for a cycle.
func (e *engine) await() error {
	for {
		pause, reason := e.look()
		if reason {
			return nil
		}
		e.mu.Lock()
		stopping := e.stopping
		e.mu.Unlock()
		if stopping {
			return ErrClosed
		}
		e.timer.Reset(pause)
		select {
		case <-e.kick:
		case <-e.lane.changed:
		case <-e.timer.C:
		case <-e.lane.failed:
			return e.lane.err()
		}
	}
}

// look reports whether there is a reason for a cycle, and if not, when to look again.
func (e *engine) look() (pause time.Duration, reason bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopping {
		return 0, false
	}
	if e.lane.cycle.Load() > e.number || len(e.unannounced) > 0 || e.joins() ||
		(e.pending > 0 || e.joinAnnounced) && e.lane.peerLeft.Load() {
		return 0, true
	}
	now := time.Now()
	pause = time.Hour
	if len(e.fresh) > 0 {
		pause = e.fresh[0].since.Add(e.tuning.cycle).Sub(now)
		if e.urgent || e.bytes >= e.fusion || pause <= 0 {
			return 0, true
		}
	}
	if !e.warn.IsZero() {
		pause = min(pause, e.warn.Sub(now))
		if pause <= 0 {
			return 0, true
		}
	}
	return pause, false
}

// joins reports whether this rank can announce now that it joins. The caller holds e.mu.
func (e *engine) joins() bool {
	return e.joining != nil && !e.joinAnnounced && len(e.fresh) == 0 && len(e.unannounced) == 0 && e.pending == 0
}

// cycle does one cycle, as all ranks do at the same time.
func (e *engine) cycle() error {
	e.number++
	e.lane.nudge(e.number)
	join := e.collect()
	for {
		asked, err := e.vote(len(e.unannounced) > 0 || join)
		if err != nil {
			return err
		}
		if asked.stall {
			if err := e.report(); err != nil {
				return err
			}
		}
		if !asked.news {
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
	if len(e.table) > maxNames {
		e.forget()
	}
	e.schedule()
	return nil
}

// collect takes what has been submitted.
func (e *engine) collect() (join bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, h := range e.fresh {
		if id, ok := e.ids[h.name]; ok && e.table[id].request == h.request {
			e.hold(id, h)
		} else {
			e.unannounced = append(e.unannounced, h)
		}
		e.fresh[i] = nil
	}
	e.fresh, e.bytes, e.urgent = e.fresh[:0], 0, false
	return e.joins()
}

func (e *engine) hold(id int, h *Handle) {
	e.table[id].mine = h
	e.pending++
}

// asked is what else the ranks want.
type asked struct{ news, stall bool }

// vote finds what all ranks have submitted: the smallest vote of all decides. The first two places
// say whether a rank has news, and whether it asks for a stall report.
func (e *engine) vote(news bool) (asked, error) {
	e.votes = append(e.votes[:0], 1, 1)
	if news {
		e.votes[0] = 0
	}
	if !e.warn.IsZero() && time.Until(e.warn) <= 0 {
		e.votes[1] = 0
	}
	all := e.joined[e.g.rank] && e.contribute > 0
	for i := range e.table {
		v := uint8(0)
		if all || e.table[i].mine != nil {
			v = 1
		}
		e.votes = append(e.votes, v)
	}
	err := e.lane.allReduceBytes(context.Background(), kernel.Uint8, Min, e.votes)
	return asked{news: e.votes[0] == 0, stall: e.votes[1] == 0}, err
}

// forget drops all names, on all ranks in the same cycle, so that unused names do not pile up.
func (e *engine) forget() {
	for i := range e.table {
		if h := e.table[i].mine; h != nil {
			e.unannounced = append(e.unannounced, h)
		}
	}
	e.table, e.pending = e.table[:0], 0
	clear(e.ids)
}

// schedule sets when to ask which ranks are waited for: when the oldest operation is old enough.
func (e *engine) schedule() {
	if e.pending == 0 || e.tuning.stall < 0 {
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
	for i := range e.table {
		if h := e.table[i].mine; h != nil {
			if at := h.since.Add(e.tuning.stall); at.Before(e.warn) {
				e.warn = at
			}
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
	if err != nil && h.gaveUp != nil {
		err = h.gaveUp
	}
	e.mu.Unlock()
	if h.unwatch != nil && h.unwatch() {
		e.watching.Done()
	}
	h.finish(err)
}

// logStall is the stall report of an endpoint.
func (e *Endpoint) logStall(tensor string, missing []int, waited time.Duration) {
	e.cfg.Log.WithField("tensor", tensor).WithField("ranks", fmt.Sprint(missing)).
		Warnf("collective: %q waits for ranks %v for more than %v", tensor, missing, waited)
}
