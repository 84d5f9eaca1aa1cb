package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/frame"
	"github.com/hvdrun/hvdrun/internal/retry"
)

const (
	// callBound is how long one exchange with another node may take, and retryPause the pause after
	// one that has failed.
	callBound  = 5 * time.Second
	retryPause = 100 * time.Millisecond
	// Failures are told from tellAfter on, and every tellEvery at most.
	tellAfter = 2 * time.Second
	tellEvery = 10 * time.Second
	// beat is how often a node is written to where there is nothing to write: its end shows then.
	beat = time.Second
	// allBound is how long a record is waited for on all nodes, and after that on most of them; and
	// how long a promise is.
	allBound = 2 * time.Second
)

// ErrLost: another node leads, or may.
var ErrLost = errors.New("replica: another node leads the job")

// Config configures a Leader.
type Config struct {
	// Own is this node's copy, and Addr this node's address among the nodes'.
	Own  *Node
	Addr string
	// Dial connects to the Serve of another node.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Dead returns whether an error of Dial proves that the node is gone for good. Other nodes that
	// are not reached may live.
	Dead func(err error) bool
	// Log must not be nil.
	Log logrus.FieldLogger
}

// Leader writes to all nodes. Its methods may be called by many goroutines. Append, Replace,
// SetBehind and Put do not block, and keep nothing of their arguments that changes.
type Leader struct {
	cfg  Config
	term uint64
	ctx  context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup
	lost chan struct{} // closed when another node leads
	once sync.Once

	mu      sync.Mutex
	copy    Copy
	changes []Change // the last ones, after the first base of the term
	base    uint64
	links   map[string]*link // of the other members
	change  chan struct{}    // closed at the next change of any of this, or of a link
}

// link is what the leader knows of another node; the leader's lock guards it.
type link struct {
	end   context.CancelFunc
	acked uint64 // the node has so many changes of the term
	whole bool   // the node needs the whole copy first
	dead  bool
}

// Lead makes this node the leader of the members, of whom it is one, and returns what the last
// leader has written. It blocks until more than half of the members that are not known to be dead
// have promised to follow, and returns the cause of ctx's end otherwise. The caller must call
// Close.
func Lead(ctx context.Context, cfg Config, members []string) (*Leader, Copy, error) {
	cfg.Own.mu.Lock()
	term := cfg.Own.promised + 1
	cfg.Own.mu.Unlock()
	failures := retry.Row{Least: tellEvery, Quiet: tellAfter}
	for {
		best, later, enough := canvass(ctx, cfg, members, term)
		if enough && later == 0 {
			l := &Leader{cfg: cfg, term: term, copy: best.clone(), lost: make(chan struct{}),
				links: make(map[string]*link), change: make(chan struct{})}
			l.copy.Term, l.copy.Count = term, 0
			l.ctx, l.end = context.WithCancel(context.Background())
			whole := l.copy.clone()
			cfg.Own.answer(question{Term: term, Whole: &whole})
			l.SetMembers(members)
			return l, best, nil
		}
		failures.Warn(cfg.Log, time.Now(), "replica: leading the job", errors.New("not enough nodes of the round answer"))
		term = max(term+1, later)
		if !pause(ctx, retryPause) {
			return nil, Copy{}, fmt.Errorf("replica: leading the job: %w", context.Cause(ctx))
		}
	}
}

// canvass asks all members to promise. It returns the newest copy, a term that is late enough for
// one that has refused, and whether enough of them have answered.
func canvass(ctx context.Context, cfg Config, members []string, term uint64) (best Copy, later uint64, enough bool) {
	var mu sync.Mutex
	reached, dead := 0, 0
	heard := func(r reply, err error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil && cfg.Dead(err):
			dead++
		case err != nil:
			cfg.Log.Debugf("replica: a node is not reached: %v", err)
		case r.Promised > term || r.Copy == nil:
			later = max(later, r.Promised+1)
		default:
			reached++
			if r.Copy.newer(best) {
				best = *r.Copy
			}
		}
	}
	q := question{Term: term, Lead: true}
	heard(cfg.Own.answer(q), nil)
	var asking sync.WaitGroup
	for _, addr := range others(members, cfg.Addr) {
		asking.Go(func() {
			bounded, cancel := context.WithTimeout(ctx, allBound)
			defer cancel()
			conn, err := cfg.Dial(bounded, addr)
			if err != nil {
				heard(reply{}, err)
				return
			}
			defer conn.Close()
			heard(call(bounded, conn, q))
		})
	}
	asking.Wait()
	return best, later, 2*reached > len(others(members, cfg.Addr))+1-dead
}

// others returns the members but this one.
func others(members []string, own string) []string {
	return slices.DeleteFunc(slices.Clone(members), func(addr string) bool { return addr == own })
}

// call is one exchange over a connection, which is useless after an error.
func call(ctx context.Context, conn net.Conn, q question) (r reply, err error) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	if err = frame.Write(conn, q, maxFrame); err == nil {
		err = frame.Read(conn, &r, maxFrame)
	}
	if !stop() {
		err = context.Cause(ctx)
	}
	return r, err
}

// SetMembers says which nodes there are, of whom this is one. New ones get the whole copy.
func (l *Leader) SetMembers(members []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := others(members, l.cfg.Addr)
	for addr, k := range l.links {
		if !slices.Contains(now, addr) {
			k.end()
			delete(l.links, addr)
		}
	}
	for _, addr := range now {
		if l.links[addr] == nil && l.ctx.Err() == nil {
			k := &link{whole: true}
			var ctx context.Context
			ctx, k.end = context.WithCancel(l.ctx)
			l.links[addr] = k
			l.wg.Go(func() { l.serve(ctx, addr, k) })
		}
	}
	l.changed()
}

// changed tells those that wait; the lock is held.
func (l *Leader) changed() {
	close(l.change)
	l.change = make(chan struct{})
}

// do makes a change here, and has it written to all.
func (l *Leader) do(ch Change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	from := l.copy.Count
	l.copy.apply(ch)
	if ch.Replace { // those that lack what was before get the whole copy, which is not longer
		l.changes, l.base = nil, l.copy.Count
	} else {
		l.changes = append(l.changes, ch)
	}
	if r := l.cfg.Own.answer(question{Term: l.term, From: from, Changes: []Change{ch}}); r.Promised > l.term {
		l.lose()
	}
	l.changed()
}

// Do makes a change. It keeps the slices of ch, which nobody may change later.
func (l *Leader) Do(ch Change) { l.do(ch) }

// Put sets the content of a file.
func (l *Leader) Put(name string, value []byte) {
	l.do(Change{File: name, Value: bytes.Clone(value)})
}

// Lost is closed when another node leads.
func (l *Leader) Lost() <-chan struct{} { return l.lost }

func (l *Leader) lose() { l.once.Do(func() { close(l.lost) }) }

// serve writes to one node until ctx ends.
func (l *Leader) serve(ctx context.Context, addr string, k *link) {
	failures := retry.Row{Least: tellEvery, Quiet: tellAfter}
	for ctx.Err() == nil {
		conn, err := l.dial(ctx, addr)
		if err == nil {
			failures.Ended()
			err = l.write(ctx, conn, k)
			conn.Close()
		}
		dead := l.cfg.Dead(err)
		if !dead && ctx.Err() == nil {
			failures.Warn(l.cfg.Log, time.Now(), "replica: the node at "+addr+" is not reached", err)
		}
		l.mu.Lock()
		if dead != k.dead {
			k.dead = dead
			l.changed()
		}
		k.whole = true // what was written last may not have arrived
		l.mu.Unlock()
		if !pause(ctx, retryPause) {
			return
		}
	}
}

func (l *Leader) dial(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	return l.cfg.Dial(ctx, addr)
}

// write writes to a node over one connection, until that breaks.
func (l *Leader) write(ctx context.Context, conn net.Conn, k *link) error {
	for {
		q, upTo, change := l.next(k)
		if q == nil {
			due := time.NewTimer(beat)
			select {
			case <-change:
				due.Stop()
				continue
			case <-due.C:
				q = &question{Term: l.term, From: upTo}
			case <-ctx.Done():
				due.Stop()
				return context.Cause(ctx)
			}
		}
		bounded, cancel := context.WithTimeout(ctx, callBound)
		r, err := call(bounded, conn, *q)
		cancel()
		if err != nil {
			return err
		}
		if r.Promised > l.term {
			l.lose()
			return ErrLost
		}
		l.mu.Lock()
		k.whole, k.dead = r.Gap, false
		if !r.Gap {
			k.acked = upTo
		}
		l.changed()
		l.mu.Unlock()
	}
}

// next returns what a node lacks, and how many changes it has after that; nil: nothing, until
// change is closed.
func (l *Leader) next(k *link) (q *question, upTo uint64, change <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case k.whole || k.acked < l.base:
		whole := l.copy.clone()
		q = &question{Term: l.term, Whole: &whole}
	case k.acked < l.copy.Count:
		q = &question{Term: l.term, From: k.acked, Changes: slices.Clone(l.changes[k.acked-l.base:])}
	}
	return q, l.copy.Count, l.change
}

// Sync blocks until all changes so far are on all nodes, but those that are known to be dead; and
// where others are not reached for two seconds, until they are on more than half of the nodes. It
// returns ErrLost after another node has begun to lead, and after Close.
func (l *Leader) Sync() error {
	l.mu.Lock()
	upTo := l.copy.Count
	l.mu.Unlock()
	patience := time.NewTimer(allBound)
	defer patience.Stop()
	late := false
	for {
		l.mu.Lock()
		have, living := 1, 1
		for _, k := range l.links {
			if !k.dead {
				living++
			}
			if !k.dead && !k.whole && k.acked >= upTo {
				have++
			}
		}
		change := l.change
		l.mu.Unlock()
		if have == living || late && 2*have > living {
			return nil
		}
		select {
		case <-change:
		case <-patience.C:
			late = true
		case <-l.lost:
			return ErrLost
		case <-l.ctx.Done():
			return ErrLost
		}
	}
}

// AwaitAlone blocks until all other nodes are known to be dead, which is seen within a second, or
// are no members. It returns the cause of ctx's end otherwise.
func (l *Leader) AwaitAlone(ctx context.Context) error {
	for {
		l.mu.Lock()
		alone := true
		for _, k := range l.links {
			alone = alone && k.dead
		}
		change := l.change
		l.mu.Unlock()
		if alone {
			return nil
		}
		select {
		case <-change:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Close ends the writing, and blocks until it has.
func (l *Leader) Close() {
	l.end()
	l.wg.Wait()
}

// pause returns false when ctx has ended before.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
