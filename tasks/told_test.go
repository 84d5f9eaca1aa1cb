package tasks

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
	"github.com/hvdrun/hvdrun/test/follow"
)

// valve is a connection that can be stopped in each direction.
type valve struct {
	net.Conn
	deaf sync.Mutex  // while it is held, Read blocks
	mute atomic.Bool // written bytes are discarded
}

// Read implements net.Conn.
func (v *valve) Read(b []byte) (int, error) {
	n, err := v.Conn.Read(b)
	v.deaf.Lock()
	defer v.deaf.Unlock()
	return n, err
}

// Write implements net.Conn.
func (v *valve) Write(b []byte) (int, error) {
	if v.mute.Load() {
		return len(b), nil
	}
	return v.Conn.Write(b)
}

// connectBy is like connect, with a first connection that can be stopped.
func (p *place) connectBy() (*Pool, *valve) {
	p.t.Helper()
	first := &valve{}
	pool, err := Connect(context.Background(), ConnectConfig{Log: quiet(), Dial: func(ctx context.Context) (net.Conn, error) {
		conn, err := p.dial(ctx)
		if err != nil || first.Conn != nil {
			return conn, err
		}
		first.Conn = conn
		return first, nil
	}})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { pool.Close() })
	return pool, first
}

// obeys runs until it is cancelled, and then succeeds.
var (
	obeys = Register[int]("obeys/v1", func(ctx context.Context) (int, error) {
		obeyed.Add(1)
		<-ctx.Done()
		return 1, nil
	})
	obeyed atomic.Int32
)

// TestToldAndForgotten: a scheduler reports that a task was not run because another was cancelled,
// and ends before it gets a third task, which depends on the second. The next scheduler, without
// that state, runs none of them.
func TestToldAndForgotten(t *testing.T) {
	unwritten := scheduler.Config{Repeated: true}
	p := newPlace(t, unwritten)
	p.serve(ServeConfig{})
	pool, conn := p.connectBy()
	other := p.connect(ConnectConfig{})
	ctx := t.Context()
	obeyed.Store(0)
	first, err := obeys.Submit(ctx, pool)
	if err != nil {
		t.Fatal(err)
	}
	second, err := sum.Submit(ctx, pool, first)
	if err != nil {
		t.Fatal(err)
	}
	if !follow.Await(t, func() bool { return obeyed.Load() == 1 }) {
		t.Fatal("the first task does not begin")
	}
	conn.deaf.Lock()
	first.Cancel()
	if !follow.Await(t, func() bool {
		s, err := other.Status(ctx)
		return err == nil && s.Waiting+s.Ready+s.Running == 0
	}) {
		t.Fatal("the first task is not cancelled")
	}
	conn.mute.Store(true)
	third, err := sum.Submit(ctx, pool, second, 1)
	if err != nil {
		t.Fatal(err)
	}
	conn.deaf.Unlock()
	var depends *DependencyError
	if err := first.Err(ctx); !errors.Is(err, ErrCancelled) {
		t.Errorf("the first task: %v", err)
	}
	if err := second.Err(ctx); !errors.As(err, &depends) {
		t.Errorf("the second task: %v", err)
	}
	p.replace(unwritten)
	if err := third.Err(ctx); !errors.As(err, &depends) {
		t.Errorf("the third task: %v, though one that it needs was not run", err)
	}
	if n := obeyed.Load(); n != 1 {
		t.Errorf("the first task has run %d times", n)
	}
}

// TestCancelUnheard: a task is cancelled even if the connection breaks before the scheduler gets
// the cancel.
func TestCancelUnheard(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{})
	pool, conn := p.connectBy()
	waiting.Store(0)
	f, err := waits.Submit(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if !follow.Await(t, func() bool { return waiting.Load() == 1 }) {
		t.Fatal("the task does not begin")
	}
	conn.mute.Store(true)
	f.Cancel()
	p.cut()
	if err := f.Err(t.Context()); !errors.Is(err, ErrCancelled) {
		t.Error(err)
	}
}
