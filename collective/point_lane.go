package collective

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
)

// points are the lanes of a group's messages: one for each rank to which this rank has sent, and
// one for each rank from which it has received.
type points struct {
	mu     sync.Mutex
	all    map[pointKey]*point
	byLane map[uint64]pointKey // all possible lanes; set when a peer first asks for one, then immutable
	closed bool
}

// pointKey is the peer of a lane, and whether this rank is its sender.
type pointKey struct {
	peer int
	out  bool
}

// point is a lane of messages: a group of the sender and the receiver, in which each message is an
// operation. Messages wait in a queue. A goroutine that calls or waits performs the operations
// itself, unless another goroutine does, since waking another goroutine takes longer than a small
// message.
type point struct {
	g   *Group
	key pointKey
	met chan struct{} // closed when lane or err is set

	mu       sync.Mutex
	queue    []*Handle
	busy     bool // an operation is in progress …
	own      bool // … and it uses a caller's memory
	ahead    int  // bytes of messages in the queue that Send has copied
	started  bool // the lane is being connected, or is connected
	stopping bool // no further message is accepted
	stopped  bool // the lane is closed, or about to be closed

	lane    *Group
	err     error
	running sync.WaitGroup // goroutines
	watches watches
}

// pointOf returns the lane of a message, or an error if the message is invalid.
func (g *Group) pointOf(m *message) (*point, error) {
	switch {
	case g == nil:
		return nil, errNoGroup
	case m.peer < 0 || m.peer >= g.size:
		return nil, m.do.Wrap(checkRoot(g, m.peer))
	case m.peer == g.rank:
		return nil, m.do.Wrap(fmt.Errorf("rank %d is this rank", m.peer))
	}
	return g.point(pointKey{m.peer, m.do == operation.Send})
}

// point returns the lane of messages with a peer, which it makes at the first call.
func (g *Group) point(key pointKey) (*point, error) {
	if g.closing.Load() {
		return nil, ErrClosed
	}
	if g.err() != nil {
		return nil, g.lost()
	}
	g.points.mu.Lock()
	defer g.points.mu.Unlock()
	if g.points.closed {
		return nil, ErrClosed
	}
	p := g.points.all[key]
	if p == nil {
		if g.points.all == nil {
			g.points.all = map[pointKey]*point{}
		}
		p = &point{g: g, key: key, met: make(chan struct{}), watches: watches{g: g}}
		g.points.all[key] = p
	}
	return p, nil
}

// laneOf returns the description of the lane of messages with another rank.
func (g *Group) laneOf(key pointKey) lane {
	from, to, me := g.rank, key.peer, exchange.Sender
	if !key.out {
		from, to, me = key.peer, g.rank, 1-exchange.Sender
	}
	l := sockets.Lane{ID: laneID(g.lane, pointLane, uint64(from)*uint64(g.size)+uint64(to)), Rank: me, Size: 2, Members: []int{g.original(from), g.original(to)}}
	return lane{Lane: l, strict: true, oneWay: true}
}

// pointFor returns the peer and the direction of a lane, if it is a lane of the group's messages.
func (g *Group) pointFor(lane uint64) (pointKey, bool) {
	g.points.mu.Lock()
	defer g.points.mu.Unlock()
	if g.points.byLane == nil {
		g.points.byLane = make(map[uint64]pointKey, 2*g.size)
		for peer := range g.size {
			for _, out := range []bool{true, false} {
				if key := (pointKey{peer, out}); peer != g.rank {
					g.points.byLane[g.laneOf(key).ID] = key
				}
			}
		}
	}
	key, ok := g.points.byLane[lane]
	return key, ok
}

// meet starts to connect a lane that the peer wants. A lane that this rank has started is connected
// even while the group is being closed.
func (g *Group) meet(key pointKey) error {
	g.points.mu.Lock()
	p := g.points.all[key]
	g.points.mu.Unlock()
	if p == nil {
		var err error
		if p, err = g.point(key); err != nil {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped || p.stopping && !p.started {
		return ErrClosed
	}
	p.start()
	return nil
}

// start connects the lane in the background, once. The caller holds p.mu.
func (p *point) start() {
	if p.started {
		return
	}
	p.started = true
	p.running.Go(func() {
		defer close(p.met)
		l := p.g.laneOf(p.key)
		if p.lane, p.err = p.g.family.connect(context.Background(), l); p.err != nil || p.g.family.startPeers == nil {
			return
		}
		peer := pointKey{peer: p.g.rank, out: !p.key.out}
		p.g.family.startPeers(p.g, p.lane, func(g *Group) error {
			if g == p.g {
				return nil
			}
			return g.meet(peer)
		})
	})
}

// connected returns the lane once it is connected. If ctx ends before, the group ends.
func (p *point) connected(ctx context.Context) (*Group, error) {
	select {
	case <-p.met:
		return p.lane, p.err
	default:
	}
	select {
	case <-p.met:
		return p.lane, p.err
	case <-ctx.Done():
		p.g.fail(frame.Gone(ctx.Err(), p.g.rank))
		return nil, ctx.Err()
	}
}

// perform sends or receives a message as an operation of the lane.
func (p *point) perform(ctx context.Context, m *message) error {
	lane, err := p.connected(ctx)
	if err == nil {
		d := m.shared()
		if lane.inMemory() != nil {
			err = lane.do(ctx, d, nil, func(member *shm.Member, call shm.Desc) error {
				return member.Broadcast(ctx, call, m.data, exchange.Sender)
			})
		} else {
			err = lane.operate(ctx, d, nil, func(c *levels.Call) error { return c.PassSockets(m.data) })
		}
	}
	return p.outcome(ctx, m, err)
}

// outcome returns an error of the lane as an error of the group.
func (p *point) outcome(ctx context.Context, m *message, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && errors.Is(err, ctx.Err()) && !errors.Is(err, ErrAborted):
		return m.do.Wrap(ctx.Err())
	case p.g.err() != nil:
		return p.g.lost() // with the ranks as numbered in the group
	}
	return m.do.Wrap(err)
}

// pass sends or receives a message. It blocks until that is done, or until a small message is
// copied.
func (p *point) pass(ctx context.Context, m message) error {
	small := m.do == operation.Send && len(m.data) <= sentAhead
	idle, err := p.begin()
	if err != nil {
		return err
	}
	switch {
	case idle && p.posts(&m):
		err = p.post(ctx, &m)
	case idle && (!small || p.awaited()):
		err = p.perform(ctx, &m)
	case small && p.sendAhead(m):
	default: // other messages are in progress or waiting
		if idle {
			p.release()
		}
		h, err := p.submit(ctx, m)
		if err != nil {
			return err
		}
		return h.Wait()
	}
	if idle {
		p.release()
	}
	return err
}

// passAsync is like pass, in the background.
func (p *point) passAsync(ctx context.Context, m message) (*Handle, error) {
	idle, err := p.begin()
	if err != nil {
		return nil, err
	}
	if idle {
		defer p.release()
		if p.posts(&m) {
			return done(p.post(ctx, &m)), nil
		}
	}
	return p.submit(ctx, m)
}

// begin takes the lane for a message of the caller if no other message is in progress or waiting.
func (p *point) begin() (idle bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopping {
		return false, ErrClosed
	}
	p.start()
	if idle = !p.busy && len(p.queue) == 0; idle {
		p.busy, p.own = true, true
	}
	return idle, nil
}

// memory returns the host of a connected lane in shared memory, and nil for other lanes.
func (p *point) memory() *levels.Host {
	select {
	case <-p.met:
		return p.lane.inMemory()
	default:
		return nil
	}
}

// posts reports whether a message can be posted, that is stored in shared memory without waiting
// for the receiver. The caller has made p busy.
func (p *point) posts(m *message) bool {
	h := p.memory()
	if h == nil || m.do != operation.Send {
		return false
	}
	return h.Posts(len(m.data))
}

// post posts a message.
func (p *point) post(ctx context.Context, m *message) error {
	return p.outcome(ctx, m, p.lane.do(ctx, m.shared(), nil, func(member *shm.Member, call shm.Desc) error {
		return member.Post(ctx, call, m.data)
	}))
}

// awaited reports whether the receiver already waits for the message, so that Send need not wait
// for the receiver. The caller has made p busy.
func (p *point) awaited() bool {
	h := p.memory()
	if h == nil {
		return false
	}
	return h.Awaits(1 - exchange.Sender)
}

// sendAhead sends a copy of a small message in the background. It returns false if too many bytes
// are copied already.
func (p *point) sendAhead(m message) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ahead+len(m.data) > mostAhead {
		return false
	}
	m.data = slices.Clone(m.data)
	p.ahead += len(m.data)
	h := &Handle{point: p, message: m, ahead: true}
	p.queue = append(p.queue, h)
	p.kickLocked()
	return true
}

// submit appends a message to the queue.
func (p *point) submit(ctx context.Context, m message) (*Handle, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopping {
		return nil, ErrClosed
	}
	p.start()
	h := &Handle{point: p, message: m}
	h.watch = p.watches.begin(ctx, &p.mu)
	p.queue = append(p.queue, h)
	p.kickLocked()
	return h, nil
}

// kick starts a goroutine that performs the operations of the queue, unless another goroutine does.
func (p *point) kick() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kickLocked()
}

// kickLocked is like kick, for a caller that holds p.mu.
func (p *point) kickLocked() {
	if !p.busy && len(p.queue) > 0 {
		p.running.Go(func() { p.drive(nil) })
	}
}

// release ends the operation of a caller that begin began.
func (p *point) release() {
	p.mu.Lock()
	p.busy, p.own = false, false
	p.kickLocked()
	p.mu.Unlock()
}

// help performs the operations of the queue up to h, unless another goroutine does.
func (p *point) help(h *Handle) {
	p.drive(h)
	p.kick()
}

// drive performs the operations of the queue, in order, up to last or, if last is nil, all of them.
// It performs none if another goroutine does.
func (p *point) drive(last *Handle) {
	for {
		h := p.next(last)
		if h == nil {
			return
		}
		err := p.perform(context.Background(), &h.message)
		p.mu.Lock()
		p.busy, p.own = false, false
		if ended := p.watches.end(h.watch); err != nil && ended != nil {
			err = h.message.do.Wrap(ended)
		}
		p.mu.Unlock()
		h.message.data = nil
		h.finish(err)
	}
}

// next takes the first operation of the queue, for drive, or returns nil if there is nothing to do.
// The message of the operation no longer counts as copied ahead, since the receiver may have it
// before the sender knows.
func (p *point) next(last *Handle) *Handle {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy || len(p.queue) == 0 || last != nil && last.done.Load() {
		return nil
	}
	h := p.queue[0]
	p.queue[0], p.busy, p.own = nil, true, !h.ahead
	p.queue = p.queue[1:]
	if h.ahead {
		p.ahead -= len(h.message.data)
	}
	return h
}

// stopPoints ends the lanes of messages, and waits for their goroutines. The group is closing or
// has failed.
func (g *Group) stopPoints() {
	g.points.mu.Lock()
	g.points.closed = true
	all := g.points.all
	g.points.mu.Unlock()
	var ending sync.WaitGroup
	for _, p := range all {
		ending.Go(p.stop)
	}
	ending.Wait()
}

// stop ends the lane. It waits for a bounded time until messages that Send has copied are sent.
// Other messages in progress end the group.
func (p *point) stop() {
	p.mu.Lock()
	p.stopping = true
	wanted := p.own || slices.ContainsFunc(p.queue, func(h *Handle) bool { return !h.ahead })
	p.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		p.running.Wait()
		close(ended)
	}()
	if !wanted {
		bound := time.NewTimer(sockets.LeaveBound)
		defer bound.Stop()
		select {
		case <-ended:
		case <-bound.C:
			wanted = true
		}
	}
	if wanted {
		p.g.fail(frame.Gone(ErrClosed, p.g.rank))
	}
	<-ended
	p.watches.close(&p.mu)
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	if p.lane != nil {
		p.lane.Close()
	}
}
