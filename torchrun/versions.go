package torchrun

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/frame"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

// maxFrame is the largest size of a question to a store with versions, or of an answer, in bytes.
const maxFrame = 8 << 20

// question is one call of a store.Store or, with the word members, of movingStore.setMembers. A
// Wait blocks the connection until it is answered.
type question struct {
	Do      string   `json:"do"` // get, set, wait or members
	Key     string   `json:"key,omitempty"`
	Version uint64   `json:"version,omitempty"`
	Value   []byte   `json:"value,omitempty"`
	Round   int      `json:"round,omitempty"`
	Members []string `json:"members,omitempty"`
}

type reply struct {
	Value   []byte    `json:"value,omitempty"`
	Version uint64    `json:"version,omitempty"`
	Now     time.Time `json:"now"`
	Set     bool      `json:"set,omitempty"`
	Error   string    `json:"error,omitempty"`
}

// serveVersions answers the questions on one connection until the connection is closed, which also
// ends a wait.
func serveVersions(conn net.Conn, s store.Store) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	questions := make(chan question)
	failed := make(chan error, 1)
	var reading sync.WaitGroup
	defer reading.Wait()
	defer conn.Close()
	reading.Go(func() {
		in := bufio.NewReader(conn)
		for {
			var q question
			err := frame.Read(in, &q, maxFrame)
			if err == nil {
				select {
				case questions <- q:
					continue
				case <-ctx.Done():
					err = ctx.Err()
				}
			}
			failed <- err
			cancel()
			return
		}
	})
	for {
		select {
		case q := <-questions:
			if err := frame.Write(conn, ask(ctx, s, q), maxFrame); err != nil {
				return err
			}
		case <-ctx.Done():
			err := <-failed
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

func ask(ctx context.Context, s store.Store, q question) (r reply) {
	var e store.Entry
	var err error
	switch q.Do {
	case "get":
		e, err = s.Get(ctx, q.Key)
	case "set":
		e, r.Set, err = s.CompareAndSet(ctx, q.Key, q.Version, q.Value)
	case "wait":
		e, err = s.Wait(ctx, q.Key, q.Version)
	case "members":
		if moving, is := s.(*movingStore); is && len(q.Members) > 0 {
			err = moving.setMembers(ctx, q.Round, q.Members)
		}
	default:
		err = fmt.Errorf("torchrun: the store does not support the request %.20q", q.Do)
	}
	if err != nil {
		r.Error = err.Error()
	}
	r.Value, r.Version, r.Now = e.Value, e.Version, e.Now
	return r
}

// remoteStore is a store in another agent.
type remoteStore struct {
	peers *Peers
	addr  string

	mu   sync.Mutex
	idle []net.Conn
	all  map[net.Conn]bool
	shut bool
}

// maxIdle is the largest number of idle connections kept for later calls.
const maxIdle = 4

// Get implements store.Store.
func (r *remoteStore) Get(ctx context.Context, key string) (store.Entry, error) {
	e, _, err := r.call(ctx, question{Do: "get", Key: key})
	return e, err
}

// CompareAndSet implements store.Store.
func (r *remoteStore) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	if err := store.Check(key, value); err != nil {
		return store.Entry{}, false, err
	}
	return r.call(ctx, question{Do: "set", Key: key, Version: version, Value: value})
}

// Wait implements store.Store.
func (r *remoteStore) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	e, _, err := r.call(ctx, question{Do: "wait", Key: key, Version: version})
	return e, err
}

// call sends a question over a connection that no other call uses meanwhile, and returns the
// answer. If ctx ends, the connection is closed.
func (r *remoteStore) call(ctx context.Context, q question) (e store.Entry, set bool, err error) {
	if ctx.Err() != nil {
		return e, false, context.Cause(ctx)
	}
	conn, err := r.take(ctx)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return e, false, err
	}
	bounded, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(bounded, func() { conn.Close() })
	watched := r.watch(bounded, cancel, q.Do == "wait")
	var a reply
	if err = frame.Write(conn, q, maxFrame); err == nil {
		err = frame.Read(conn, &a, maxFrame)
	}
	switch ended := !stop(); {
	case ctx.Err() != nil && ended:
		err = context.Cause(ctx)
	case ended:
		err = &lostError{r.addr, context.Cause(bounded)}
	case err != nil:
		err = &lostError{r.addr, err}
	}
	cancel(nil)
	<-watched
	r.give(conn, err == nil)
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	return store.Entry{Value: a.Value, Version: a.Version, Now: a.Now}, a.Set, err
}

// silentAfter is how long an agent may take to answer before it counts as silent.
const silentAfter = 2 * time.Second

// errSilentStore is the reason for the end of a call to an agent that does not answer, for example
// because its machine is gone.
var errSilentStore = errors.New("it does not answer")

// watch ends a call when the agent is silent. If waits is false, the agent is silent when its
// answer takes too long. If waits is true, the call waits for a change, and the agent is silent if
// it does not answer other questions meanwhile. The returned channel is closed when watch has
// ended, at the latest when ctx ends.
func (r *remoteStore) watch(ctx context.Context, end context.CancelCauseFunc, waits bool) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for retry.Pause(ctx, silentAfter) == nil {
			if !waits {
				end(errSilentStore)
				return
			}
			if _, err := r.Get(ctx, "hello"); err != nil {
				end(err) // no effect if ctx has ended before
				return
			}
		}
	}()
	return done
}

func (r *remoteStore) take(ctx context.Context) (net.Conn, error) {
	r.mu.Lock()
	if n := len(r.idle); n > 0 {
		conn := r.idle[n-1]
		r.idle = r.idle[:n-1]
		r.mu.Unlock()
		return conn, nil
	}
	r.mu.Unlock()
	bounded, cancel := context.WithTimeoutCause(ctx, silentAfter, errSilentStore)
	defer cancel()
	conn, err := r.peers.dial(bounded, r.addr, versionStore.of(0))
	if bounded.Err() != nil && err != nil {
		err = errSilentStore
	}
	if err != nil {
		return nil, &lostError{r.addr, err}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.shut {
		conn.Close()
		return nil, store.ErrClosed
	}
	if r.all == nil {
		r.all = make(map[net.Conn]bool)
	}
	r.all[conn] = true
	return conn, nil
}

func (r *remoteStore) give(conn net.Conn, well bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if well && !r.shut && len(r.idle) < maxIdle {
		r.idle = append(r.idle, conn)
		return
	}
	delete(r.all, conn)
	conn.Close()
}

func (r *remoteStore) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shut = true
	for conn := range r.all {
		conn.Close()
	}
	r.idle, r.all = nil, nil
}

// lostError means that the agent that has the store is unreachable.
type lostError struct {
	addr string
	err  error
}

func (e *lostError) Error() string {
	return fmt.Sprintf("torchrun: the store at %s: %v", e.addr, e.err)
}
func (e *lostError) Unwrap() error { return e.err }

// Meet returns the store of a dynamic rendezvous, which is in the agent at addr. If host is set,
// this process is that agent, and it listens there. Other agents try to reach it until ctx ends. If
// that agent is lost later, the members of a round continue with the copy of another agent. The
// returned function frees the store. It waits, until its context ends, for others that still use
// the store.
func (p *Peers) Meet(ctx context.Context, addr string, host bool) (store.Store, func(context.Context), error) {
	var s *movingStore
	end := func(ctx context.Context) {
		s.close()
		p.Close(ctx)
		s.free()
	}
	if host {
		if _, err := p.Listen(addr); err != nil {
			return nil, nil, err // another agent on this machine has the store
		}
		s = newMovingStore(p, addr, true)
		s.copies()
		at, err := p.leadStore(ctx, &s.node, []string{p.Member()}, store.ClockAt(time.Now()))
		if err != nil {
			return nil, nil, err
		}
		s.set(at)
		p.answer(leaderIs.of(0), s.told)
		return s, end, nil
	}
	r := &remoteStore{peers: p, addr: addr}
	err := p.reach(ctx, addr, "the agent that has the store", func() error {
		_, err := r.Get(ctx, "hello")
		return err
	})
	if err != nil {
		r.close()
		return nil, nil, err
	}
	s = newMovingStore(p, addr, false)
	s.set(r)
	return s, end, nil
}
