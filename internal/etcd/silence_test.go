package etcd

import (
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/test/etcdserver"
)

// TestSilence: a connection is closed a second after a write, unless something was received since.
func TestSilence(t *testing.T) {
	for name, story := range map[string]struct {
		answers []time.Duration // after the write
		open    bool
	}{
		"silent":            {nil, false},
		"answers at once":   {[]time.Duration{time.Millisecond}, true},
		"answers when told": {[]time.Duration{900 * time.Millisecond}, true},
		"answers too late":  {[]time.Duration{1100 * time.Millisecond}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ours, server := net.Pipe()
				h := &heard{Conn: ours, watcher: &watcher{count: 1}}
				go func() { _, _ = io.Copy(io.Discard, h) }()
				go func() { _, _ = io.Copy(io.Discard, server) }()
				began := time.Now()
				if _, err := h.Write([]byte("asked")); err != nil {
					t.Fatal(err)
				}
				for _, at := range story.answers {
					<-time.After(at - time.Since(began))
					_, _ = server.Write([]byte("answer")) // fails if it is too late
				}
				<-time.After(time.Hour)
				if h.mu.Lock(); h.closed == story.open {
					t.Errorf("closed: %v", h.closed)
				}
				h.mu.Unlock()
				_ = h.Close()
			})
		})
	}
}

// TestStopped: a process that was stopped itself asks again before it closes a connection.
func TestStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, server := net.Pipe()
		defer server.Close()
		h := &heard{Conn: ours, watcher: &watcher{count: 1}}
		h.mu.Lock()
		h.asked = true
		h.wait(time.Hour)
		h.due = time.Now().Add(-time.Minute)
		h.mu.Unlock()
		h.expire()
		if h.mu.Lock(); h.closed || !h.asked {
			t.Errorf("closed: %v, asked: %v", h.closed, h.asked)
		}
		h.mu.Unlock()
		<-time.After(lostAfter)
		synctest.Wait()
		if h.mu.Lock(); !h.closed {
			t.Error("it is open for ever")
		}
		h.mu.Unlock()
	})
}

// forward forwards connections to an address. When mute is called, existing connections stay open,
// but carry no more data from the server.
type forward struct {
	net.Listener
	to    string
	made  atomic.Int64
	muted atomic.Int64 // of the connections, in their order
}

func (f *forward) mute() { f.muted.Store(f.made.Load()) }

func (f *forward) serve() {
	for {
		client, err := f.Accept()
		if err != nil {
			return
		}
		number := f.made.Add(1)
		server, err := net.Dial("tcp", f.to)
		if err != nil {
			_ = client.Close()
			continue
		}
		pass := func(to, from net.Conn) {
			defer to.Close()
			buf := make([]byte, 32<<10)
			for {
				n, err := from.Read(buf)
				if err != nil {
					return
				}
				if number > f.muted.Load() {
					_, _ = to.Write(buf[:n])
				}
			}
		}
		go pass(server, client)
		go pass(client, server)
	}
}

// TestSilentServer: a request on a connection that has become silent is answered on a new one.
func TestSilentServer(t *testing.T) {
	s, err := etcdserver.Start(t.Context(), t.TempDir(), "127.0.0.1")
	if errors.Is(err, etcdserver.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	f := &forward{Listener: ln, to: s.Endpoint}
	go f.serve()
	client, err := Open(Config{Endpoints: []string{ln.Addr().String()}})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for i := range 3 {
		if _, err := client.Get(context.Background(), "key"); err != nil {
			t.Fatal(err)
		}
		if made := f.made.Load(); made < int64(i+1) {
			t.Errorf("%d connections after %d were silent", made, i)
		}
		f.mute()
	}
}

// TestWebProxy: etcd belongs to the cluster, so the web proxy is not used to reach it.
func TestWebProxy(t *testing.T) {
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"} {
		t.Setenv(name, "http://192.0.2.9:3128")
	}
	called := make(chan string, 100)
	client, err := open(Config{Endpoints: []string{"192.0.2.1:2379"}}, func(_ context.Context, _, addr string) (net.Conn, error) {
		called <- addr
		return nil, errors.New("no network in this test")
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	client.ActiveConnection().Connect()
	if addr := <-called; addr != "192.0.2.1:2379" {
		t.Errorf("called %s", addr)
	}
}
