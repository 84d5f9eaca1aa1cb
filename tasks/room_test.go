package tasks

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
	"github.com/hvdrun/hvdrun/test/follow"
)

var bytesOf = Register[int]("bytesof/v1", func(_ context.Context, b []byte) (int, error) { return len(b), nil })

// waits blocks until Submit waits for room.
func (p *Pool) waits() {
	follow.Poll(func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.short > 0
	})
}

// TestSubmitWaits: a client that submits endlessly waits while the scheduler has no room for it;
// another client still has room, and all tasks run once there is a worker.
func TestSubmitWaits(t *testing.T) {
	const memory, n = 2 << 20, 300
	p := newPlace(t, scheduler.Config{Memory: memory})
	pool, other := p.connect(ConnectConfig{}), p.connect(ConnectConfig{})
	ctx := t.Context()
	arg := make([]byte, 20_000) // 6 MB in all
	var submitting sync.WaitGroup
	futures := make([]*Future[int], n)
	submitting.Go(func() {
		for i := range futures {
			var err error
			if futures[i], err = bytesOf.Submit(ctx, pool, arg); err != nil {
				t.Error(err)
				return
			}
		}
	})
	pool.waits()
	if s, err := pool.Status(ctx); err != nil || s.Memory.Most != memory || s.Memory.Used < memory/3 || s.Memory.Used > memory/2 ||
		s.Memory.Clients[0].Tasks != s.Ready {
		t.Errorf("%+v, %v", s.Memory, err)
	}
	now, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := bytesOf.Submit(now, pool, arg); !errors.Is(err, ErrQueueFull) || !errors.Is(err, context.Canceled) {
		t.Errorf("where it may not wait, Submit returns %v", err)
	}
	last, err := bytesOf.Submit(ctx, other, arg)
	if err != nil {
		t.Fatal(err)
	}
	p.serve(ServeConfig{})
	submitting.Wait()
	for _, f := range append(futures, last) {
		if got, err := f.Get(ctx); err != nil || got != len(arg) {
			t.Fatalf("a task has become %d, %v", got, err)
		}
	}
}

var large = Register[[]byte]("large/v1", func(_ context.Context, n int) ([]byte, error) { return make([]byte, n), nil })

// TestDeafClient: the tasks of a client that does not read wait, while those of another client run;
// once it reads again, it gets all its results.
func TestDeafClient(t *testing.T) {
	p := newPlace(t, scheduler.Config{Memory: 8 << 20})
	p.serve(ServeConfig{})
	deaf, valve := p.connectBy()
	ctx := t.Context()
	const n, size = 200, 50_000 // 10 MB of results
	valve.deaf.Lock()
	var futures []*Future[[]byte]
	for range n {
		f, err := large.Submit(ctx, deaf, size)
		if err != nil {
			t.Fatal(err)
		}
		futures = append(futures, f)
	}
	other := p.connect(ConnectConfig{})
	if !follow.Await(t, func() bool {
		s, err := other.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return len(s.Memory.Clients) == 1 && s.Memory.Clients[0].Paused && s.Running == 0 && s.Ready >= n/2
	}) {
		t.Error("its tasks do not wait")
	}
	s, err := other.Status(ctx)
	if err != nil || s.Memory.Used > s.Memory.Most/2 {
		t.Errorf("%d of %d tasks wait: %+v, %v", s.Ready, n, s.Memory, err)
	}
	if _, err := Map(ctx, other, double, make([]int, 100)); err != nil {
		t.Error(err)
	}
	valve.deaf.Unlock()
	for _, f := range futures {
		if b, err := f.Get(ctx); err != nil || len(b) != size {
			t.Fatalf("a result of %d bytes, %v", len(b), err)
		}
	}
}
