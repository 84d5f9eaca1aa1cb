package tasks

import (
	"context"
	"net"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// bounded is a connection that closes if too many bytes are written before the peer has sent any,
// as an agent closes the connections that it carries.
type bounded struct {
	net.Conn
	mu      sync.Mutex
	written int64
	spoken  bool
}

// Read implements net.Conn.
func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.Conn.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spoken = b.spoken || n > 0
	return n, err
}

// Write implements net.Conn.
func (b *bounded) Write(p []byte) (int, error) {
	b.mu.Lock()
	if !b.spoken {
		b.written += int64(len(p))
	}
	tooMuch := b.written > identity.Door.Bytes/2
	b.mu.Unlock()
	if tooMuch {
		b.Close()
		return 0, net.ErrClosed
	}
	return b.Conn.Write(p)
}

// TestHelloOfManyTasks: a worker that holds many tasks reaches the scheduler through an agent,
// which closes connections that send much before their peer has proven its identity.
func TestHelloOfManyTasks(t *testing.T) {
	s := scheduler.New(scheduler.Config{Log: quiet()})
	defer s.Close()
	var handling sync.WaitGroup
	defer handling.Wait()
	w, err := newWorker(ServeConfig{Host: "a", Log: quiet(), root: t.TempDir(), run: "run", Dial: func(context.Context) (net.Conn, error) {
		near, far := net.Pipe()
		handling.Go(func() { _ = s.Handle(context.Background(), far, identity.Subject{Role: identity.Worker}) })
		return &bounded{Conn: near}, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	w.hostStore = openHostStore(t.Context(), &w.cfg)
	defer w.hostStore.close()
	for i := range uint64(10_000) {
		w.held = append(w.held, &attempt{push: &taskspb.PushTask{Of: &taskspb.Attempt{Client: 1, N: i, Attempt: 1}}})
	}
	if _, err := w.hello(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.link.Close()
}
