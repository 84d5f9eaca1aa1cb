package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/frame"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/replica/internal/rules"
)

const (
	// callBound bounds one exchange with another node, and retryPause is the pause after a failed
	// one.
	callBound  = 5 * time.Second
	retryPause = 100 * time.Millisecond
	// Failures are logged once they have lasted for tellAfter, and at most every tellEvery.
	tellAfter = 2 * time.Second
	tellEvery = 10 * time.Second
	// beat is how often a message is sent to a node if there is nothing to write, so that its end
	// is noticed.
	beat = time.Second
	// allBound is how long to wait until a record is on all nodes, after which a quorum suffices,
	// and how long to wait for a promise.
	allBound = 2 * time.Second
)

// ErrLost means that another node leads, or may lead.
var ErrLost = errors.New("replica: another node leads the job")

// Config configures a Leader.
type Config struct {
	// Own is this node's copy. Addr is this node's name among the members, by which others reach
	// it; the text after a slash in it distinguishes processes at one address, and is not logged.
	Own  *Node
	Addr string
	// Dial connects to the Serve of another node.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Evidence returns what is known about a member's process, after an error of Dial or of the
	// connection. It must not block.
	Evidence func(addr string, err error) Evidence
	// Log must not be nil.
	Log logrus.FieldLogger
}

// Leader writes the copy to all nodes. Its methods are safe for concurrent use. Do and Put do not
// block.
type Leader struct {
	cfg  Config
	term uint64
	ctx  context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup
	lost chan struct{} // closed when another node leads
	once sync.Once

	mu     sync.Mutex
	tenure *rules.Tenure
	links  map[string]context.CancelFunc // cancel the goroutines that write to the other members
	change chan struct{}                 // closed and replaced at every change of the fields above
}

// Lead makes this node the leader of the members, which must include it, and returns the copy of
// the last leader. It blocks until more than half of the members that are not known to be dead have
// promised to follow, and so have more than half of the last leader's members that are not known to
// be dead. Otherwise it returns the cause of ctx's end. The caller must call Close.
func Lead(ctx context.Context, cfg Config, members []string) (*Leader, Copy, error) {
	cfg.Own.mu.Lock()
	term := cfg.Own.voter.Promised + 1
	cfg.Own.mu.Unlock()
	failures := retry.Row{Least: tellEvery, Quiet: tellAfter}
	for {
		b := canvass(ctx, cfg, members, term)
		if b.Won() {
			l := &Leader{cfg: cfg, term: term, tenure: b.Begin(cfg.Addr), lost: make(chan struct{}),
				links: make(map[string]context.CancelFunc), change: make(chan struct{})}
			l.ctx, l.end = context.WithCancel(context.Background())
			whole := l.tenure.Copy.Clone()
			cfg.Own.answer(rules.Question{Term: term, Whole: &whole})
			l.SetMembers(members)
			return l, b.Best, nil
		}
		failures.Warn(cfg.Log, time.Now(), "replica: leading the job",
			fmt.Errorf("not enough nodes of the round answer; missing: %s", addresses(b.Missing()...)))
		term = max(term+1, b.Later)
		if retry.Pause(ctx, retryPause) != nil {
			return nil, Copy{}, fmt.Errorf("replica: leading the job: %w", context.Cause(ctx))
		}
	}
}

// addresses returns the addresses of members, for the log.
func addresses(members ...string) string {
	for i, member := range members {
		members[i], _, _ = strings.Cut(member, "/")
	}
	return strings.Join(members, ", ")
}

// canvass asks all members for their promises, including members that it learns of from the
// answers.
func canvass(ctx context.Context, cfg Config, members []string, term uint64) *rules.Ballot {
	b := rules.NewBallot(term, cfg.Addr, members)
	var mu sync.Mutex
	heard := func(member string, r rules.Reply, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			b.Answered(member, r)
			return
		}
		b.Dead[member] = cfg.Evidence(member, err).Dead()
		cfg.Log.Debugf("replica: a node is not reached: %v", err)
	}
	heard(cfg.Addr, cfg.Own.answer(b.Question(cfg.Addr)), nil)
	for {
		more := b.Ask()
		if len(more) == 0 {
			return b
		}
		var asking sync.WaitGroup
		for _, member := range more {
			asking.Go(func() {
				bounded, cancel := context.WithTimeout(ctx, allBound)
				defer cancel()
				conn, err := cfg.Dial(bounded, member)
				if err != nil {
					heard(member, rules.Reply{}, err)
					return
				}
				defer conn.Close()
				r, err := call(bounded, conn, b.Question(member))
				heard(member, r, err)
			})
		}
		asking.Wait()
	}
}

// call makes one exchange over a connection. After an error the connection must not be used.
func call(ctx context.Context, conn net.Conn, q rules.Question) (r rules.Reply, err error) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	if err = frame.Write(conn, q, maxFrame); err == nil {
		err = frame.Read(conn, &r, maxFrame)
	}
	if !stop() {
		err = context.Cause(ctx)
	}
	return r, err
}

// SetMembers sets the members, which must include this node. New members get the whole copy. Former
// members count until a quorum of both lists has the change.
func (l *Leader) SetMembers(members []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ch, ok := l.tenure.Reform(members); ok {
		l.make(ch)
	}
	l.changed()
}

// changed applies the consequences of what the leader has learned, and notifies those that wait.
// The caller holds the lock.
func (l *Leader) changed() {
	if ch, ok := l.tenure.Settle(); ok {
		l.make(ch)
	}
	for member, end := range l.links {
		if l.tenure.Others[member] == nil {
			end()
			delete(l.links, member)
		}
	}
	for member := range l.tenure.Others {
		if l.links[member] == nil && l.ctx.Err() == nil {
			ctx, end := context.WithCancel(l.ctx)
			l.links[member] = end
			l.wg.Go(func() { l.serve(ctx, member) })
		}
	}
	close(l.change)
	l.change = make(chan struct{})
}

// make makes a change on this node. The caller holds the lock.
func (l *Leader) make(ch Change) {
	if r := l.cfg.Own.answer(l.tenure.Do(ch)); r.Promised > l.term {
		l.lose() // before anyone considers the change kept
	}
}

// Do makes a change on this node, and starts to send it to the other members. It keeps the slices
// of ch, which must not change later.
func (l *Leader) Do(ch Change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.make(ch)
	l.changed()
}

// Term returns the leader's term, which is later than the terms of all earlier leaders.
func (l *Leader) Term() uint64 { return l.term }

// Put sets the content of a file.
func (l *Leader) Put(name string, value []byte) {
	l.Do(Change{File: name, Value: bytes.Clone(value)})
}

// Lost returns a channel that is closed when another node leads.
func (l *Leader) Lost() <-chan struct{} { return l.lost }

func (l *Leader) lose() { l.once.Do(func() { close(l.lost) }) }

// serve writes to one member until ctx ends.
func (l *Leader) serve(ctx context.Context, member string) {
	failures := retry.Row{Least: tellEvery, Quiet: tellAfter}
	for ctx.Err() == nil {
		conn, err := l.dial(ctx, member)
		if err == nil {
			failures.Ended()
			err = l.write(ctx, conn, member)
			conn.Close()
		}
		l.mu.Lock()
		l.tenure.Unreached(member, l.cfg.Evidence(member, err))
		dead := l.tenure.Dead(member)
		l.changed()
		l.mu.Unlock()
		if !dead && ctx.Err() == nil {
			failures.Warn(l.cfg.Log, time.Now(), "replica: the node at "+addresses(member)+" is not reached", err)
		}
		if retry.Pause(ctx, retryPause) != nil {
			return
		}
	}
}

func (l *Leader) dial(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	return l.cfg.Dial(ctx, addr)
}

// write writes to a member over one connection, until the connection fails.
func (l *Leader) write(ctx context.Context, conn net.Conn, member string) error {
	due := time.NewTimer(beat) // reset only after an exchange, not by changes
	defer due.Stop()
	for ctx.Err() == nil {
		l.mu.Lock()
		if l.tenure.Others[member] == nil {
			l.mu.Unlock()
			break
		}
		q, upTo := l.tenure.Next(member)
		change := l.change
		l.mu.Unlock()
		if q == nil {
			select {
			case <-change:
				continue
			case <-due.C:
				q = &rules.Question{To: member, Term: l.term, From: upTo}
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		bounded, cancel := context.WithTimeout(ctx, callBound)
		r, err := call(bounded, conn, *q)
		cancel()
		if err != nil {
			return err
		}
		due.Reset(beat)
		l.mu.Lock()
		leads := l.tenure.Answered(member, upTo, r)
		l.changed()
		l.mu.Unlock()
		switch {
		case !leads:
			l.lose()
			return ErrLost
		case r.Other:
			return errOther
		}
	}
	return context.Cause(ctx)
}

// errOther means that another process has a member's address.
var errOther = errors.New("another process has its address")

// Sync blocks until all nodes that are not known to be dead have all changes so far or, if some
// nodes are unreachable for two seconds, until the changes are kept. It returns ErrLost after
// another node has begun to lead, and after Close.
func (l *Leader) Sync() error {
	patience := make(chan struct{})
	timer := time.AfterFunc(allBound, func() { close(patience) })
	defer timer.Stop()
	return l.until(context.Background(), patience)
}

// Keep blocks until all changes so far are certain to be in the copy of every later leader. It
// returns the cause of ctx's end, or ErrLost after another node has begun to lead and after Close.
func (l *Leader) Keep(ctx context.Context) error {
	late := make(chan struct{})
	close(late)
	return l.until(ctx, late)
}

// until blocks until all changes so far are on all nodes, or late is closed and the changes are
// kept.
func (l *Leader) until(ctx context.Context, late <-chan struct{}) error {
	l.mu.Lock()
	upTo := l.tenure.Copy.Count
	l.mu.Unlock()
	for isLate := false; ; {
		select {
		case <-late:
			isLate, late = true, nil
		default:
		}
		l.mu.Lock()
		kept := l.tenure.Everywhere(upTo) || isLate && l.tenure.Kept(upTo)
		change := l.change
		l.mu.Unlock()
		select {
		case <-l.lost:
			return ErrLost // this node may lack even what it has written itself
		default:
		}
		if kept {
			return nil
		}
		select {
		case <-change:
		case <-late:
			isLate, late = true, nil
		case <-l.lost:
			return ErrLost
		case <-l.ctx.Done():
			return ErrLost
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// AwaitAlone blocks until all other nodes are no longer members or are known to be dead, which it
// notices within a second. Otherwise it returns the cause of ctx's end.
func (l *Leader) AwaitAlone(ctx context.Context) error {
	for {
		l.mu.Lock()
		alone := l.tenure.Alone()
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

// Close stops writing, and blocks until all goroutines have ended.
func (l *Leader) Close() {
	l.end()
	l.wg.Wait()
}
