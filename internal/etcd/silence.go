package etcd

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

const (
	// askAfter is how long a connection may be silent after a write before its server is asked for
	// an answer, and lostAfter how long the server has to answer. A server answers that request
	// even while etcd waits, for example for a disk or a leader.
	askAfter  = 250 * time.Millisecond
	lostAfter = 750 * time.Millisecond
	// Silence is the time after which a silent connection is closed.
	Silence = askAfter + lostAfter
)

var errSilent = fmt.Errorf("the server has not answered for %v", Silence)

// watcher closes connections to servers that have become silent, so that callers retry on new ones.
// gRPC's own pings are too slow: their shortest interval is ten seconds.
type watcher struct {
	connect func(ctx context.Context, network, addr string) (net.Conn, error)

	mu      sync.Mutex
	ask     *grpc.ClientConn // nil: not set yet
	count   int              // number of connections
	failure string           // why the last attempt did not reach etcd; empty if it did
}

// dial connects to addr. It is a dialer for gRPC.
func (w *watcher) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := w.connect(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.count++
	w.mu.Unlock()
	return &heard{Conn: conn, watcher: w}, nil
}

// asked sends a health check to all connected servers: gRPC's balancer uses them in turn.
func (w *watcher) asked() {
	w.mu.Lock()
	by, count := w.ask, w.count
	w.mu.Unlock()
	if by == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), askAfter+lostAfter)
	var asking sync.WaitGroup
	for range 2 * count { // twice, since other calls may take a turn
		asking.Go(func() { _, _ = healthpb.NewHealthClient(by).Check(ctx, &healthpb.HealthCheckRequest{}) }) // an error is an answer too
	}
	asking.Wait()
	cancel()
}

// heard is a connection that is closed when its server becomes silent.
type heard struct {
	net.Conn
	watcher *watcher

	mu     sync.Mutex
	timer  *time.Timer // runs while an answer is expected
	due    time.Time   // when the timer expires
	asked  bool        // the server was asked and has not answered yet
	closed bool
	silent bool // closed because its server was silent
}

// Write implements net.Conn.
func (h *heard) Write(p []byte) (int, error) {
	h.mu.Lock()
	if h.timer == nil && !h.closed {
		h.wait(askAfter)
	}
	h.mu.Unlock()
	return h.Conn.Write(p)
}

// wait starts the timer for an answer; h.mu is held.
func (h *heard) wait(after time.Duration) {
	h.due = time.Now().Add(after)
	h.timer = time.AfterFunc(after, h.expire)
}

// Read implements net.Conn.
func (h *heard) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	h.mu.Lock()
	defer h.mu.Unlock()
	if n > 0 {
		h.rest()
	}
	if err != nil && h.silent {
		err = errSilent
	}
	return n, err
}

// rest stops the timer for an answer; h.mu is held.
func (h *heard) rest() {
	if h.timer != nil {
		h.timer.Stop()
	}
	h.timer, h.asked = nil, false
}

// Close implements net.Conn.
func (h *heard) Close() error {
	h.mu.Lock()
	if !h.closed {
		h.closed = true
		h.watcher.mu.Lock()
		h.watcher.count--
		h.watcher.mu.Unlock()
	}
	h.rest()
	h.mu.Unlock()
	return h.Conn.Close()
}

// expire asks the server for an answer, or closes the connection if the server was asked before. If
// the timer is late, because this process itself was stopped, it asks again: there may be unread
// answers.
func (h *heard) expire() {
	h.mu.Lock()
	if h.timer == nil { // an answer has arrived
		h.mu.Unlock()
		return
	}
	late := time.Since(h.due) > askAfter
	if h.asked && !late {
		h.silent = true
		h.mu.Unlock()
		_ = h.Close()
		return
	}
	h.asked = true
	h.wait(lostAfter)
	h.mu.Unlock()
	h.watcher.asked()
}
