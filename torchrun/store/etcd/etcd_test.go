package etcd

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/hvdrun/hvdrun/test/etcdserver"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

func serve(t *testing.T) *etcdserver.Server {
	t.Helper()
	s, err := etcdserver.Start(t.Context(), t.TempDir(), "127.0.0.1")
	if errors.Is(err, etcdserver.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func open(t *testing.T, s *etcdserver.Server) *Store {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return New(Config{Client: client, Prefix: "/tests/"})
}

func TestStore(t *testing.T) {
	t.Parallel()
	s := serve(t)
	storetest.Run(t, func(t *testing.T) store.Store { return open(t, s) })
}

// started records the revisions from which a client watches.
type started struct {
	grpc.ClientStream
	from chan<- int64
}

func (s started) SendMsg(m any) error {
	if r, is := m.(*etcdserverpb.WatchRequest); is && r.GetCreateRequest() != nil {
		s.from <- r.GetCreateRequest().StartRevision
	}
	return s.ClientStream.SendMsg(m)
}

// TestWaitAfterCompaction: Wait for a key that does not exist does not watch from a compacted
// revision, which etcd would refuse each time.
func TestWaitAfterCompaction(t *testing.T) {
	t.Parallel()
	from := make(chan int64, 16)
	watch := func(ctx context.Context, d *grpc.StreamDesc, c *grpc.ClientConn, method string, open grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
		s, err := open(ctx, d, c, method, o...)
		return started{s, from}, err
	}
	server := serve(t)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{server.Endpoint}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithStreamInterceptor(watch)}})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var compacted int64
	for range 2 {
		r, err := client.Put(t.Context(), "other", "")
		if err != nil {
			t.Fatal(err)
		}
		compacted = r.Header.Revision
	}
	if _, err := client.Compact(t.Context(), compacted); err != nil {
		t.Fatal(err)
	}
	s := New(Config{Client: client, Prefix: "/tests/"})
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if e, err := s.Wait(t.Context(), "new", 0); err != nil || string(e.Value) != "value" {
			t.Errorf("%+v, %v", e, err)
		}
	})
	if at := <-from; at <= compacted {
		t.Errorf("it watches from revision %d, and up to %d all is compacted", at, compacted)
	}
	if _, _, err := s.CompareAndSet(t.Context(), "new", 0, []byte("value")); err != nil {
		t.Fatal(err)
	}
	waiting.Wait()
}

// TestEtcdIsAway: a round survives the time in which etcd is down, and the next one forms once etcd
// is up again.
func TestEtcdIsAway(t *testing.T) {
	t.Parallel()
	server := serve(t)
	log := logrus.New()
	log.SetOutput(io.Discard)
	var nodes []*dynamic.Handler
	for range 2 {
		h, err := dynamic.New(dynamic.Config{
			Settings: dynamic.Settings{RunID: "run", MinNodes: 2, MaxNodes: 2, KeepAliveInterval: time.Second, KeepAliveAttempts: 20},
			Store:    open(t, server), Log: log,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(h.Stop)
		nodes = append(nodes, h)
	}
	next := func(round int) {
		t.Helper()
		var joining sync.WaitGroup
		for _, h := range nodes {
			joining.Go(func() {
				if r, err := h.Next(t.Context()); err != nil || r.Number != round || len(r.Members) != 2 {
					t.Errorf("%+v, %v", r, err)
				}
			})
		}
		joining.Wait()
	}
	next(0)
	changed := make(chan dynamic.Change, 1)
	go func() {
		c, err := nodes[0].Changed(t.Context(), nil)
		if err != nil {
			t.Error(err)
		}
		changed <- c
	}()
	server.Stop()
	select {
	case c := <-changed:
		t.Errorf("without etcd there is a change: %+v", c)
	case <-time.After(3 * time.Second):
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if closed, err := nodes[1].Closed(t.Context()); closed || err != nil {
		t.Errorf("closed: %v, %v", closed, err)
	}
	next(1)
	if c := <-changed; len(c.Lost)+c.Waiting == 0 {
		t.Errorf("the other has left, and comes back: %+v", c)
	}
}
