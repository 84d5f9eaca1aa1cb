package tasks

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// slowPlace is a scheduler whose connections take long to close, and to open, except the first.
type slowPlace struct {
	s     *scheduler.Scheduler
	wg    sync.WaitGroup
	dials atomic.Int32
}

func newSlowPlace() *slowPlace { return &slowPlace{s: scheduler.New(scheduler.Config{Log: quiet()})} }

func (p *slowPlace) close() {
	<-time.After(2 * time.Second) // until all connections are closed
	p.s.Close()
	p.wg.Wait()
}

// dialer returns the Dial function of one process.
func (p *slowPlace) dialer() func(context.Context) (net.Conn, error) {
	var again atomic.Bool
	return func(context.Context) (net.Conn, error) {
		if again.Swap(true) {
			<-time.After(10 * time.Millisecond)
		}
		p.dials.Add(1)
		near, far := net.Pipe()
		p.wg.Go(func() { _ = p.s.Handle(context.Background(), far, identity.Subject{Role: identity.Worker}) })
		return &slowConn{Conn: near}, nil
	}
}

// slowConn is a connection whose first Close returns long after it has closed the connection.
type slowConn struct {
	net.Conn
	closed atomic.Bool
}

// Close implements net.Conn.
func (c *slowConn) Close() error {
	again, err := c.closed.Swap(true), c.Conn.Close()
	if !again {
		<-time.After(time.Second)
	}
	return err
}

var (
	stays = Register[int]("stays/v1", func(ctx context.Context) (int, error) {
		n := int(stayed.Add(1))
		if n == 1 {
			<-ctx.Done()
		}
		return n, ctx.Err()
	})
	stayed atomic.Int32
)

// TestLeftForGood: a worker that has left does not reconnect; its tasks run elsewhere and do not
// count as lost.
func TestLeftForGood(t *testing.T) {
	root := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		stayed.Store(0)
		p := newSlowPlace()
		defer p.close()
		pool, err := Connect(t.Context(), ConnectConfig{Dial: p.dialer(), Log: quiet()})
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		serve := func() (leave func()) {
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := Serve(ctx, ServeConfig{Dial: p.dialer(), Host: "a", Grace: time.Nanosecond, Log: quiet(), root: root, run: "run"}); err != nil {
					t.Errorf("Serve returned %v", err)
				}
			})
			return func() {
				cancel()
				wg.Wait()
			}
		}
		leave := serve()
		f, err := stays.With(Retries(0)).Submit(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		if synctest.Wait(); stayed.Load() != 1 {
			t.Fatal("the task does not run")
		}
		leave()
		if n := p.dials.Load(); n != 2 {
			t.Errorf("%d connections were made, not 2", n)
		}
		defer serve()()
		if n := get(t, f, nil); n != 2 {
			t.Errorf("it returned %d", n)
		}
	})
}

// TestClosedForGood: a closed client does not reconnect.
func TestClosedForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newSlowPlace()
		defer p.close()
		pool, err := Connect(t.Context(), ConnectConfig{Dial: p.dialer(), Log: quiet()})
		if err != nil {
			t.Fatal(err)
		}
		pool.Close()
		if n := p.dials.Load(); n != 1 {
			t.Errorf("%d connections were made, not 1", n)
		}
	})
}

// TestPushAfterLeaving: a worker that has left does not begin a task that was in flight to it,
// because nobody would end it.
func TestPushAfterLeaving(t *testing.T) {
	w, err := newWorker(ServeConfig{Dial: func(context.Context) (net.Conn, error) { return nil, net.ErrClosed }})
	if err != nil {
		t.Fatal(err)
	}
	w.leave(0)
	w.hear(&taskspb.FromTasks{Pushes: []*taskspb.PushTask{{Of: &taskspb.Attempt{N: 1}}}})
	if w.running.Wait(); len(w.held) > 0 {
		t.Error("it has begun a task")
	}
}
