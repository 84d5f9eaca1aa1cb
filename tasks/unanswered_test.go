package tasks

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
)

// unhearing is a live scheduler that does not read once it has welcomed a peer.
type unhearing struct {
	welcomes bool
	mu       sync.Mutex
	gone     bool
	conns    []net.Conn // the scheduler's ends
}

// dial connects to the scheduler.
func (d *unhearing) dial(context.Context) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone {
		return nil, net.ErrClosed
	}
	near, far := net.Pipe()
	d.conns = append(d.conns, far)
	go func() {
		r, m := link.NewReader(far), &taskspb.ToTasks{}
		if r.Read(m) == nil && d.welcomes {
			_ = d.say(far, &taskspb.FromTasks{Welcome: &taskspb.TasksWelcome{Window: 1000}})
		}
	}()
	return near, nil
}

// say writes a message.
func (d *unhearing) say(to net.Conn, m *taskspb.FromTasks) error {
	b, err := link.Frame(nil, m)
	if err == nil {
		_, err = to.Write(b)
	}
	return err
}

// end closes all connections and refuses new ones.
func (d *unhearing) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gone = true
	for _, c := range d.conns {
		c.Close()
	}
}

// connect returns a client that the scheduler has welcomed.
func (d *unhearing) connect(t *testing.T) *Pool {
	t.Helper()
	d.welcomes = true
	pool, err := Connect(t.Context(), ConnectConfig{Dial: d.dial, Log: quiet(), Patience: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return pool
}

// TestNoHello: a client does not wait indefinitely for a scheduler that does not say hello.
func TestNoHello(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d unhearing
		defer d.end()
		began := time.Now()
		_, err := Connect(t.Context(), ConnectConfig{Dial: d.dial, Log: quiet(), Patience: time.Second})
		if took := time.Since(began); err == nil || took > greetTimeout+time.Second {
			t.Errorf("after %v: %v", took, err)
		}
	})
}

// TestCloseUnheard: Close does not wait indefinitely for a scheduler that does not read.
func TestCloseUnheard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d unhearing
		defer d.end()
		pool := d.connect(t)
		if _, err := double.Submit(t.Context(), pool, 1); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if pool.Close(); time.Since(began) > 10*time.Second {
			t.Errorf("it took %v", time.Since(began))
		}
	})
}

// TestSubmitUnheard: a task that Submit does not return is cancelled.
func TestSubmitUnheard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d unhearing
		defer d.end()
		pool := d.connect(t)
		defer pool.Close()
		now, cancel := context.WithCancel(t.Context())
		cancel()
		arg, n := make([]byte, 100_000), 0
		f, err := bytesOf.Submit(now, pool, arg)
		for ; err == nil; n++ {
			f, err = bytesOf.Submit(now, pool, arg)
		}
		if f != nil || !errors.Is(err, context.Canceled) {
			t.Errorf("Submit returns %v and %v", f, err)
		}
		pool.mu.Lock()
		defer pool.mu.Unlock()
		cancelled := 0
		for _, t := range pool.tasks {
			if t.cancelled {
				cancelled++
			}
		}
		if len(pool.tasks) != n+1 || cancelled != 1 {
			t.Errorf("%d tasks of which %d are cancelled, where Submit has returned %d", len(pool.tasks), cancelled, n)
		}
	})
}

// TestAskInVain: a question to a scheduler that is gone for good returns the pool's error.
func TestAskInVain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d unhearing
		pool := d.connect(t)
		defer pool.Close()
		ask := []func() error{
			func() error { _, err := pool.Status(t.Context()); return err },
			func() error { _, err := pool.Status(t.Context()); return err },
			func() error { _, err := pool.Explain(t.Context(), "f"); return err },
		}
		var asking sync.WaitGroup
		for _, ask := range ask {
			asking.Go(func() {
				if err := ask(); err == nil || !errors.Is(err, pool.Err()) {
					t.Errorf("the answer is the error %v, and that of the pool %v", err, pool.Err())
				}
			})
		}
		synctest.Wait()
		d.end()
		asking.Wait()
	})
}

// TestRefusedLater: a client that the scheduler refuses does not reconnect, and its tasks end.
func TestRefusedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d unhearing
		defer d.end()
		pool := d.connect(t)
		defer pool.Close()
		f, err := double.Submit(t.Context(), pool, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.say(d.conns[0], &taskspb.FromTasks{Refused: "scheduler: too greedy"}); err != nil {
			t.Fatal(err)
		}
		err = f.Err(t.Context())
		if want := (refusedError{"scheduler: too greedy"}); !errors.Is(err, want) || !errors.Is(pool.Err(), want) || len(d.conns) != 1 {
			t.Errorf("the task has ended with %v, the pool with %v, after %d connections", err, pool.Err(), len(d.conns))
		}
	})
}
