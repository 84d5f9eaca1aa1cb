package tasks

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// ends reports that it runs; the test then ends its worker.
var (
	ends    = Register[None]("ends/v1", func(ctx context.Context) error { endings <- ctx; <-ctx.Done(); return ctx.Err() })
	endings = make(chan context.Context)
)

// farConn is a connection whose bytes arrive late.
type farConn struct{ net.Conn }

// Read implements net.Conn.
func (c farConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	<-time.After(20 * time.Millisecond)
	return n, err
}

// village is a scheduler and a job's workers, which have incarnations.
type village struct {
	t        *testing.T
	s        *scheduler.Scheduler
	pool     *Pool
	handling sync.WaitGroup
}

func newVillage(t *testing.T) *village {
	t.Helper()
	v := &village{t: t, s: scheduler.New(scheduler.Config{Log: quiet(), WorkerGrace: time.Minute})}
	t.Cleanup(func() {
		v.s.Close()
		v.handling.Wait()
	})
	pool, err := Connect(t.Context(), ConnectConfig{Dial: v.dialer(identity.Subject{Role: identity.Driver}), Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	v.pool = pool
	return v
}

func (v *village) dialer(from identity.Subject) func(context.Context) (net.Conn, error) {
	return func(context.Context) (net.Conn, error) {
		near, far := net.Pipe()
		v.handling.Go(func() { _ = v.s.Handle(context.Background(), farConn{far}, from) })
		return near, nil
	}
}

// serve runs a worker until vanish is called, which ends it as if its process were killed.
func (v *village) serve(name string) (vanish func()) {
	ctx, end := context.WithCancelCause(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := Serve(ctx, ServeConfig{
			Dial: v.dialer(identity.Subject{Role: identity.Worker, Incarnation: name}), Name: name, Log: quiet(), root: v.t.TempDir(), run: "run",
		}); err != nil {
			v.t.Error(err)
		}
	})
	return func() {
		end(errVanished)
		serving.Wait()
	}
}

// ended reports the end of a worker to the scheduler while the worker vanishes, and returns the
// tasks that the worker ran.
func (v *village) ended(name string, stopped bool, vanish func()) []string {
	ran := make(chan []string)
	go func() { ran <- v.s.Ended(name, stopped) }()
	vanish()
	return <-ran
}

// TestPoison: a task that ends its worker three times has failed, and its error names the workers.
// What a worker has reported reaches the scheduler even if the end of its process is known first.
func TestPoison(t *testing.T) {
	v := newVillage(t)
	f, err := ends.Submit(t.Context(), v.pool)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		name := fmt.Sprint("w", i)
		vanish := v.serve(name)
		select {
		case <-endings:
		case <-f.Done():
			t.Errorf("it is over before its worker %d: %v", i, f.Err(t.Context()))
		}
		if ran := v.ended(name, false, vanish); len(ran) != 1 || ran[0] != ends.Name() {
			t.Errorf("when it ended, worker %s ran %v", name, ran)
		}
	}
	if ran := v.s.Ended("w0", false); ran != nil {
		t.Errorf("a process that has ended before runs %v", ran)
	}
	if err := f.Err(t.Context()); !errors.Is(err, ErrPoison) || !strings.Contains(err.Error(), "[w0 w1 w2]") {
		t.Errorf("%v", err)
	}
}

// TestStoppedWorkers: the end of a worker that was asked to stop is not counted against its tasks.
func TestStoppedWorkers(t *testing.T) {
	v := newVillage(t)
	f, err := ends.With(Retries(0)).Submit(t.Context(), v.pool)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		name := fmt.Sprint("w", i)
		vanish := v.serve(name)
		<-endings
		if ran := v.ended(name, true, vanish); ran != nil {
			t.Errorf("worker %s is said to have ended because of %v", name, ran)
		}
	}
	vanish := v.serve("last")
	defer vanish()
	<-endings
	f.Cancel()
	if err := f.Err(t.Context()); !errors.Is(err, ErrCancelled) {
		t.Error(err)
	}
	if s, err := v.pool.Status(t.Context()); err != nil || s.Retried > 0 {
		t.Errorf("%d retries are counted, %v", s.Retried, err)
	}
}
