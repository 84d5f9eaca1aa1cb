package transfer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newStore(t testing.TB, root, host string) *blob.Store {
	t.Helper()
	s, err := blob.Open(blob.Config{Root: root, Run: "r", Host: host})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// serving returns a source whose connections are served with cfg.
func serving(t testing.TB, name string, cfg ServeConfig) Source {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close()
				_ = Serve(context.Background(), conn, link.NewReader(conn), cfg)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		all.Wait()
	})
	return Source{Name: name, Dial: func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
	}}
}

func bring(t testing.TB, src Source, value []byte) blob.ID {
	t.Helper()
	conn, err := src.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := NewClient(conn)
	defer c.Close()
	id, err := c.Put(t.Context(), value[:1], value[1:])
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestBadSources: sources that fail midway, refuse, lie or lack the value do not keep another one
// from providing it.
func TestBadSources(t *testing.T) {
	root := t.TempDir()
	has := newStore(t, root, "has")
	good := serving(t, "good", ServeConfig{Read: FromStore(has), Store: has})
	value := bytes.Repeat([]byte("12345"), 6<<20)
	id := bring(t, good, value)
	if id != sha256.Sum256(value) {
		t.Fatal("another name")
	}
	var reads atomic.Int32
	dies := serving(t, "dies", ServeConfig{Read: func(_ context.Context, _ blob.ID, at int64, b []byte) error {
		if copy(b, value[at:]); reads.Add(1)%2 == 0 {
			return errors.New("out of order")
		}
		return nil
	}})
	lies := serving(t, "lies", ServeConfig{Read: func(context.Context, blob.ID, int64, []byte) error { return nil }})
	lacks := serving(t, "lacks", ServeConfig{Read: FromStore(newStore(t, root, "lacks"))})
	gone := Source{Name: "gone", Dial: func(context.Context) (net.Conn, error) { return nil, errors.New("no route") }}
	for name, sources := range map[string][]Source{
		"all": {gone, lies, dies, lacks, good}, "two": {dies, good}, "a liar": {lies, good},
	} {
		to := newStore(t, root, name)
		bad, err := Fetch(t.Context(), to, id, int64(len(value)), sources)
		if err != nil || !to.Has(id) {
			t.Errorf("%s: %v, %v", name, bad, err)
		}
		if err := to.Remove(id); err != nil {
			t.Error(err)
		}
		if taken, _, err := to.Usage(); taken != 0 || err != nil {
			t.Errorf("%s: %d bytes are taken by nothing", name, taken)
		}
	}
	to := newStore(t, root, "none")
	bad, err := Fetch(t.Context(), to, id, int64(len(value)), []Source{gone, lacks})
	if err == nil || len(bad) != 2 || !errors.Is(err, blob.ErrMissing) || !strings.Contains(err.Error(), "gone: no route") {
		t.Errorf("%v, %v", bad, err)
	}
	if _, err := Fetch(t.Context(), to, id, int64(len(value)), []Source{lies}); !errors.Is(err, errOther) {
		t.Errorf("a liar alone: %v", err)
	}
	if _, err := Fetch(t.Context(), to, id, 0, nil); err == nil {
		t.Error("a value of 0 bytes, of nobody")
	}
}

// FuzzServe: whatever a peer sends, the store keeps its bounds, and all replies are parts of stored
// values.
func FuzzServe(f *testing.F) {
	frame := func(all ...*taskspb.ValueRequest) (b []byte) {
		for _, q := range all {
			var err error
			if b, err = link.Frame(b, q); err != nil {
				f.Fatal(err)
			}
		}
		return b
	}
	id := sha256.Sum256([]byte("value"))
	f.Add(frame(&taskspb.ValueRequest{Value: id[:], Length: 5}, &taskspb.ValueRequest{Value: id[:], Offset: 1 << 63, Length: 1 << 31}))
	f.Add(frame(&taskspb.ValueRequest{Put: 5}, &taskspb.ValueRequest{Data: []byte("val")}, &taskspb.ValueRequest{Data: []byte("ue")}, &taskspb.ValueRequest{Value: id[:], Length: 5}))
	f.Add(frame(&taskspb.ValueRequest{Put: 1 << 62}, &taskspb.ValueRequest{Put: 900}, &taskspb.ValueRequest{Put: 3}))
	root := f.TempDir()
	f.Fuzz(func(t *testing.T, said []byte) {
		s, err := blob.Open(blob.Config{Root: root, Run: "r", Most: 1000})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		near, far := net.Pipe()
		var all sync.WaitGroup
		all.Go(func() {
			defer far.Close()
			_ = Serve(t.Context(), far, link.NewReader(far), ServeConfig{Read: FromStore(s), Store: s})
		})
		all.Go(func() {
			r := link.NewReader(near)
			var reply taskspb.ValueReply
			for r.Read(&reply) == nil {
				if len(reply.GetData()) > 1000 {
					t.Errorf("%d bytes of a store of 1000", len(reply.GetData()))
				}
			}
		})
		_, _ = near.Write(said)
		near.Close()
		all.Wait()
		taken, _, err := s.Usage()
		there, lerr := s.List()
		sum := int64(0)
		for _, id := range there {
			file, size, err := s.Open(id)
			if err != nil {
				t.Fatal(err)
			}
			file.Close()
			sum += size
			if err := s.Remove(id); err != nil {
				t.Fatal(err)
			}
		}
		if err != nil || lerr != nil || taken != sum || taken > 1000 {
			t.Fatalf("%d bytes are taken by %d, %v, %v", taken, sum, err, lerr)
		}
	})
}
