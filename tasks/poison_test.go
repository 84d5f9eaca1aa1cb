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

// ends tells the test that it runs, which ends its worker then.
var (
	ends    = Register[None]("ends/v1", func(ctx context.Context) error { endings <- ctx; <-ctx.Done(); return ctx.Err() })
	endings = make(chan context.Context)
)

// farConn is a connection whose bytes take a while to come.
type farConn struct{ net.Conn }

// Read implements net.Conn.
func (c farConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	<-time.After(20 * time.Millisecond)
	return n, err
}

// TestPoison: a task that ends its worker three times has failed, and its workers are named. What a
// worker has said of it reaches the scheduler also where the end of its process is known before.
func TestPoison(t *testing.T) {
	s := scheduler.New(scheduler.Config{Log: quiet(), WorkerGrace: time.Minute})
	var handling sync.WaitGroup
	defer handling.Wait()
	defer s.Close()
	dialer := func(from identity.Subject) func(context.Context) (net.Conn, error) {
		return func(context.Context) (net.Conn, error) {
			near, far := net.Pipe()
			handling.Go(func() { _ = s.Handle(context.Background(), farConn{far}, from) })
			return near, nil
		}
	}
	pool, err := Connect(t.Context(), ConnectConfig{Dial: dialer(identity.Subject{Role: identity.Driver}), Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	f, err := ends.Submit(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		name := fmt.Sprint("w", i)
		ctx, end := context.WithCancelCause(context.Background())
		var serving sync.WaitGroup
		serving.Go(func() {
			if err := Serve(ctx, ServeConfig{
				Dial: dialer(identity.Subject{Role: identity.Worker, Incarnation: name}), Name: name, Log: quiet(), root: t.TempDir(), run: "run",
			}); err != nil {
				t.Error(err)
			}
		})
		select {
		case <-endings:
		case <-f.Done():
			t.Errorf("it is over before its worker %d: %v", i, f.Err(t.Context()))
		}
		ran := make(chan []string)
		go func() { ran <- s.Ended(name) }()
		end(ErrVanished)
		if got := <-ran; len(got) != 1 || got[0] != ends.Name() {
			t.Errorf("when it ended, worker %s ran %v", name, got)
		}
		serving.Wait()
	}
	if ran := s.Ended("w0"); ran != nil {
		t.Errorf("a process that has ended before runs %v", ran)
	}
	if err := f.Err(t.Context()); !errors.Is(err, ErrPoison) || !strings.Contains(err.Error(), "[w0 w1 w2]") {
		t.Errorf("%v", err)
	}
}
