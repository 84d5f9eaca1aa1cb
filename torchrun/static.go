package torchrun

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// ErrClosed is wrapped by an error of Static.Next after a node has closed the rendezvous.
var ErrClosed = errors.New("another node has ended the job")

// Static is the rendezvous of a fixed number of nodes, each of which knows its rank. The agent with
// rank 0 has the store. A round begins when all nodes have arrived. The first node that arrives for
// the next round makes the others leave the current round. A node that is gone may come back.
type Static struct {
	// Node is the rank of this node, and Nodes the number of nodes.
	Node, Nodes int
	// Addr is the address, host:port, of the node with rank 0.
	Addr string
	// Peers connects to that node. On that node, Peers must already be listening there.
	Peers *Peers
	// Timeout is how long Next waits for the other nodes. Zero: 900 s.
	Timeout time.Duration
	Log     logrus.FieldLogger

	own     *tcpstore.Store // on the node with rank 0
	client  *tcpstore.Client
	kv      nodesKV
	watcher context.CancelFunc // cancels the watch of the round
	wg      sync.WaitGroup
	closed  bool // the watcher has found that a node has ended the job
	round   int
	done    bool // the workers of this node have succeeded

	mu      sync.Mutex
	watched staticWatch
}

// nodesKV is the store that the nodes of a Static share.
type nodesKV interface {
	KV
	// Check returns whether all keys have values.
	Check(ctx context.Context, keys ...string) (bool, error)
}

// staticWatch is the state of the round that is being watched.
type staticWatch struct {
	number  int
	changed chan struct{} // closed when the nodes have changed; nil: there was no round yet
	fired   bool
	conns   map[int]int // on the node with rank 0: how many connections to it each node has
}

// Next implements Rendezvous.
func (s *Static) Next(ctx context.Context, failed bool) (Round, error) {
	s.endWatch()
	if s.closed {
		return Round{}, ErrClosed // whether or not the node with rank 0 still answers
	}
	timeout := s.Timeout
	if timeout == 0 {
		timeout = 900 * time.Second
	}
	late := fmt.Errorf("not all of %d nodes have come within %v (rdzv_conf timeout)", s.Nodes, timeout)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, late)
	defer cancel()
	if failed {
		// If the store is lost, the next one starts to count from zero, for all nodes.
		if err := s.fail(ctx); err != nil {
			s.Log.Debugf("torchrun: %v", err)
		}
	}
	var r Round
	enter := func() (err error) {
		if r, err = s.arrive(ctx); err != nil && !errors.Is(err, ErrClosed) && ctx.Err() == nil {
			s.disconnect()
		}
		return err
	}
	var err error
	if s.Node == 0 {
		err = enter()
	} else { // the node with rank 0 may have been restarted
		err = s.Peers.reach(ctx, s.Addr, "the node with rank 0", enter)
	}
	if err != nil {
		return Round{}, err
	}
	s.watch()
	return r, nil
}

// connect connects to the store.
func (s *Static) connect(ctx context.Context) error {
	if s.kv != nil {
		return nil
	}
	if s.Node == 0 {
		s.own, s.watched.conns = new(tcpstore.Store), map[int]int{}
		serve := func(conn net.Conn) error { return tcpstore.Serve(conn, s.own) }
		for node := range s.Nodes {
			s.Peers.answer(agentsStore.of(node), func(conn net.Conn) error {
				s.count(node, 1)
				defer s.gone(node)
				return serve(conn)
			})
		}
		s.Peers.answer(agentsWatch.of(0), serve)
		s.kv = memoryKV{s.own}
		return nil
	}
	c, err := s.dial(ctx, agentsStore.of(s.Node))
	if err != nil {
		return err
	}
	s.client, s.kv = c, c
	hello, cancel := context.WithTimeoutCause(ctx, helloTimeout, errOtherProgram)
	defer cancel()
	if _, err = c.Check(hello, endedKey); err != nil && hello.Err() != nil {
		return context.Cause(hello)
	}
	return err
}

// errOtherProgram is the error for a program that accepts a connection and does not answer.
var errOtherProgram = errors.New("it accepts connections, but does not answer as an agent of hvdrun torchrun: another program may use the port")

func (s *Static) dial(ctx context.Context, of service) (*tcpstore.Client, error) {
	conn, err := s.Peers.dial(ctx, s.Addr, of)
	if err != nil {
		return nil, err
	}
	return tcpstore.NewClient(conn, false)
}

func (s *Static) disconnect() {
	if s.client != nil {
		s.client.Close()
		s.client, s.kv = nil, nil
	}
}

// arrive enters this node's next round, and waits for the other nodes.
func (s *Static) arrive(ctx context.Context) (r Round, err error) {
	if err = s.connect(ctx); err != nil {
		return r, err
	}
	ended, err := s.kv.Check(ctx, endedKey)
	if ended {
		return r, ErrClosed
	}
	var arrivals int64
	if err == nil {
		arrivals, err = s.kv.Add(ctx, "arrivals/"+strconv.Itoa(s.Node), 1)
	}
	s.round = int(arrivals) - 1
	if err == nil {
		err = s.kv.Set(ctx, s.began(s.round), nil)
	}
	if err == nil {
		err = s.kv.Set(ctx, s.here(s.round, s.Node), nil)
	}
	if err == nil {
		err = s.awaitAll(ctx)
	}
	r = Round{Number: s.round, Rank: s.Node, World: s.Nodes, Store: within{s.kv, "round/" + strconv.Itoa(s.round) + "/"}}
	if err == nil {
		r.Restarts, err = s.restarts(ctx, r.Store)
	}
	return r, err
}

// awaitAll waits until all nodes have entered the round. It logs which one is missing, less and
// less often. If ctx ends, or a node ends the job, the error has the cause and the node.
func (s *Static) awaitAll(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	var missing atomic.Int32
	var wg sync.WaitGroup
	wg.Go(func() {
		var row retry.Row
		for retry.Pause(ctx, retryTell) == nil {
			if row.Failed(time.Now(), errMissing) {
				s.Log.Warnf("torchrun: waiting for node %d of %d (--node-rank %[1]d)", missing.Load(), s.Nodes)
			}
		}
	})
	wg.Go(func() {
		kv, release, err := s.apart(ctx)
		if err != nil {
			return
		}
		defer release()
		if _, err := kv.Get(ctx, endedKey); err == nil {
			end(ErrClosed)
		}
	})
	defer wg.Wait()
	defer end(nil)
	for i := range s.Nodes {
		missing.Store(int32(i))
		_, err := s.kv.Get(ctx, s.here(s.round, i))
		if err != nil && ctx.Err() != nil {
			return fmt.Errorf("%w: node %d is missing", context.Cause(ctx), i)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var errMissing = errors.New("a node is missing")

// restarts returns the number of restarts for the round. The node with rank 0 reads it for all
// nodes, before any of them can fail in this round.
func (s *Static) restarts(ctx context.Context, of KV) (int, error) {
	const key = "restarts"
	if s.Node == 0 {
		n, err := s.kv.Add(ctx, key, 0)
		if err == nil {
			err = of.Set(ctx, key, strconv.AppendInt(nil, n, 10))
		}
		if err != nil {
			return 0, err
		}
	}
	text, err := of.Get(ctx, key)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(text))
}

// fail counts one restart for the last round, unless another node has counted it.
func (s *Static) fail(ctx context.Context) error {
	n, err := s.kv.Add(ctx, "failed/"+strconv.Itoa(s.round), 1)
	if err == nil && n == 1 {
		_, err = s.kv.Add(ctx, "restarts", 1)
	}
	return err
}

func (s *Static) began(round int) string { return "began/" + strconv.Itoa(round) }
func (s *Static) here(round, node int) string {
	return "here/" + strconv.Itoa(round) + "/" + strconv.Itoa(node)
}
func (s *Static) doneIn(round, node int) string {
	return "done/" + strconv.Itoa(round) + "/" + strconv.Itoa(node)
}

// allDone is the value of the next round's key began if no round follows, because the node with
// rank 0 is done and ends the job.
const allDone = "done"

// endedKey is the key that has a value once a node has ended the job.
const endedKey = "ended"

// apart returns the store over a separate connection, for a goroutine that waits: if the wait is
// interrupted, the connection cannot be used any more. The caller must call release.
func (s *Static) apart(ctx context.Context) (kv nodesKV, release func(), err error) {
	if s.Node == 0 {
		return memoryKV{s.own}, func() {}, nil
	}
	c, err := s.dial(ctx, agentsWatch.of(0))
	if err != nil {
		return nil, nil, err
	}
	return c, func() { c.Close() }, nil
}

// watch makes Changed fire when a node has entered the next round or has ended the job, or when the
// store is lost.
func (s *Static) watch() {
	s.mu.Lock()
	w := &s.watched
	w.number, w.changed, w.fired = s.round, make(chan struct{}), false
	conns := maps.Clone(w.conns)
	s.mu.Unlock()
	for node, n := range conns {
		if n == 0 { // it has been lost since it arrived
			s.missing(node)
		}
	}
	var ctx context.Context
	ctx, s.watcher = context.WithCancel(context.Background())
	next := s.began(s.round + 1)
	s.wg.Go(func() {
		kv, release, err := s.apart(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.fire()
			}
			return
		}
		defer release()
		value, err := kv.Get(ctx, next)
		if err == nil {
			s.closed, _ = kv.Check(ctx, endedKey)
		}
		if string(value) != allDone && (err == nil || ctx.Err() == nil) {
			s.fire()
		}
	})
}

// count adds n to the number of connections of a node.
func (s *Static) count(node, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watched.conns[node] += n
}

// gone handles the end of a node's connection to this node, which has the store.
func (s *Static) gone(node int) {
	s.count(node, -1)
	s.missing(node)
}

// missing makes Changed fire unless the node, which has closed a connection, is done.
func (s *Static) missing(node int) {
	s.mu.Lock()
	round := s.watched.number
	s.mu.Unlock()
	if _, done := s.own.Get(s.doneIn(round, node)); !done {
		s.fire()
	}
}

// fire closes the channel of the round.
func (s *Static) fire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := &s.watched; w.changed != nil && !w.fired {
		w.fired = true
		close(w.changed)
	}
}

func (s *Static) endWatch() {
	if s.watcher != nil {
		s.watcher()
		s.watcher = nil
	}
	s.wg.Wait()
}

// Changed implements Rendezvous.
func (s *Static) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watched.changed
}

// Done implements Rendezvous.
func (s *Static) Done(ctx context.Context) error {
	s.done = true
	return s.kv.Set(ctx, s.doneIn(s.round, s.Node), nil)
}

// Close implements Rendezvous.
func (s *Static) Close(ctx context.Context) error {
	if s.kv == nil {
		return nil
	}
	_, err := s.kv.Add(ctx, endedKey, 1)     // unlike Set, it reports that the store has the value
	if err != nil && s.done && s.Node != 0 { // an interrupted wait has closed the connection
		s.disconnect()
		if err = s.connect(ctx); err == nil {
			_, err = s.kv.Add(ctx, endedKey, 1)
		}
	}
	switch {
	case err != nil:
	case !s.done:
		err = s.kv.Set(ctx, s.began(s.round+1), nil) // makes the others look
	case s.Node == 0:
		err = s.kv.Set(ctx, s.began(s.round+1), []byte(allDone))
	}
	if errors.Is(err, net.ErrClosed) || s.Node != 0 && err != nil {
		return nil // the node with rank 0 is gone: nobody can come
	}
	return err
}

// Leave implements Rendezvous. The node with rank 0 waits for the others to leave.
func (s *Static) Leave(ctx context.Context) error {
	s.endWatch()
	s.disconnect()
	s.Peers.Close(ctx)
	return nil
}
