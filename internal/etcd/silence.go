package etcd

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

const (
	// askAfter is how long after something was written a connection has to be silent before its
	// server is asked, and lostAfter how long it then has to answer. A server answers that question
	// whatever etcd waits for, such as a disk or a leader.
	askAfter  = 250 * time.Millisecond
	lostAfter = 750 * time.Millisecond
	// Silence is after how long a silent connection is given up.
	Silence = askAfter + lostAfter
)

// watcher closes connections whose servers have become silent, so that what was asked there is
// asked again on new ones. gRPC's own pings cannot: it raises their time to ten seconds.
type watcher struct {
	connect func(ctx context.Context, network, addr string) (net.Conn, error)

	mu    sync.Mutex
	ask   *grpc.ClientConn // nil: not yet known
	count int              // connections
}

// dial connects, by gRPC's rules for ctx.
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

// asked asks all servers to which there is a connection: gRPC's balancer takes them in turn.
func (w *watcher) asked() {
	w.mu.Lock()
	by, count := w.ask, w.count
	w.mu.Unlock()
	if by == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), askAfter+lostAfter)
	var asking sync.WaitGroup
	for range 2 * count { // others may call meanwhile
		asking.Go(func() { _, _ = healthpb.NewHealthClient(by).Check(ctx, &healthpb.HealthCheckRequest{}) }) // any answer is one
	}
	asking.Wait()
	cancel()
}

// heard is a connection that is closed when its server becomes silent.
type heard struct {
	net.Conn
	watcher *watcher

	mu     sync.Mutex
	timer  *time.Timer // runs while an answer is due
	due    time.Time   // when it ends
	asked  bool        // the server was asked and has not answered yet
	closed bool
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

// wait sets the time after which the answer is due; h.mu is held.
func (h *heard) wait(after time.Duration) {
	h.due = time.Now().Add(after)
	h.timer = time.AfterFunc(after, h.expire)
}

// Read implements net.Conn.
func (h *heard) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	if n > 0 {
		h.mu.Lock()
		h.rest()
		h.mu.Unlock()
	}
	return n, err
}

// rest ends the wait for an answer; h.mu is held.
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

// expire asks the server, or closes the connection where it was asked. A process that was stopped
// itself, and finds its timers late, asks anew: answers may be there that it has not read.
func (h *heard) expire() {
	h.mu.Lock()
	if h.timer == nil { // an answer has come
		h.mu.Unlock()
		return
	}
	late := time.Since(h.due) > askAfter
	if h.asked && !late {
		h.mu.Unlock()
		_ = h.Close()
		return
	}
	h.asked = true
	h.wait(lostAfter)
	h.mu.Unlock()
	h.watcher.asked()
}
