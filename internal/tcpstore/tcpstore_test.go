package tcpstore

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// pair returns a client of a store, and a function that closes the client and returns the result of
// Serve.
func pair(t *testing.T, store *Store, older bool) (*Client, func() error) {
	t.Helper()
	near, far := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(far, store) }()
	c, err := NewClient(near, older)
	if err != nil {
		t.Fatal(err)
	}
	return c, func() error {
		c.Close()
		return <-served
	}
}

func TestQueries(t *testing.T) {
	for name, older := range map[string]bool{"older": true, "newer": false} {
		t.Run(name, func(t *testing.T) {
			c, end := pair(t, new(Store), older)
			ctx := t.Context()
			if err := c.Set(ctx, "a", []byte("one")); err != nil {
				t.Fatal(err)
			}
			value, err := c.Get(ctx, "a")
			same(t, string(value), "one", err)
			sum, err := c.Add(ctx, "n", 5)
			same(t, sum, 5, err)
			sum, err = c.Add(ctx, "n", -7)
			same(t, sum, -2, err)
			value, err = c.Get(ctx, "n")
			same(t, string(value), "-2", err)
			for _, step := range [][4]string{
				{"c", "", "first", "first"}, {"c", "other", "second", "first"}, {"c", "first", "second", "second"},
				{"none", "expected", "new", "expected"},
			} {
				value, err = c.CompareSet(ctx, step[0], []byte(step[1]), []byte(step[2]))
				same(t, string(value), step[3], err)
			}
			large := make([]byte, 3*smallValue)
			if err := c.Set(ctx, "large", large); err != nil {
				t.Error(err)
			}
			if value, err := c.Get(ctx, "large"); err != nil || !bytes.Equal(value, large) {
				t.Errorf("%d bytes of %d, %v", len(value), len(large), err)
			}
			gone, err := c.Delete(ctx, "large")
			same(t, gone, true, err)
			all, err := c.Check(ctx, "a", "n")
			same(t, all, true, err)
			all, err = c.Check(ctx, "a", "none")
			same(t, all, false, err)
			was, err := c.Delete(ctx, "a")
			same(t, was, true, err)
			was, err = c.Delete(ctx, "a")
			same(t, was, false, err)
			n, err := c.Len(ctx)
			same(t, n, 2, err)
			if err := c.Append(ctx, "n", []byte("0")); err != nil {
				t.Fatal(err)
			}
			if err := c.MultiSet(ctx, []string{"x", "y"}, [][]byte{[]byte("1"), {}}); err != nil {
				t.Fatal(err)
			}
			values, err := c.MultiGet(ctx, "n", "x", "y")
			same(t, string(bytes.Join(values, []byte("|"))), "-20|1|", err)
			if !older {
				queues(t, c)
			} else if err := c.Ping(ctx); !errors.Is(err, errOlder) {
				t.Errorf("ping in the older form: %v", err)
			}
			if err := end(); err != nil {
				t.Error(err)
			}
		})
	}
}

func queues(t *testing.T, c *Client) {
	t.Helper()
	ctx := t.Context()
	if err := c.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"first", "second"} {
		if err := c.Push(ctx, "q", []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	n, err := c.QueueLen(ctx, "q")
	same(t, n, 2, err)
	if err := c.Wait(ctx, "q"); err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"first", "second"} {
		value, was, err := c.Pop(ctx, "q")
		same(t, was && string(value) == v, true, err)
	}
	_, was, err := c.Pop(ctx, "q")
	same(t, was, false, err)
}

func same[T comparable](t *testing.T, got, want T, err error) {
	t.Helper()
	if err != nil || got != want {
		t.Fatalf("got %v, want %v; error: %v", got, want, err)
	}
}

// TestWait: a wait ends when the last of its keys is set, whichever query sets it.
func TestWait(t *testing.T) {
	bring := map[string]func(s *Store) error{
		"set":         func(s *Store) error { return s.Set("k", nil) },
		"add":         func(s *Store) error { _, err := s.Add("k", 1); return err },
		"compare-set": func(s *Store) error { _, err := s.CompareSet("k", nil, []byte("v")); return err },
		"append":      func(s *Store) error { return s.Append("k", []byte("v")) },
		"push":        func(s *Store) error { return s.Push("k", []byte("v")) },
	}
	for name, f := range bring {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := new(Store)
				c, end := pair(t, store, false)
				done := make(chan error, 1)
				go func() { done <- c.Wait(t.Context(), "k", "other", "k") }()
				synctest.Wait()
				if err := f(store); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if len(done) > 0 {
					t.Fatal("the wait ended although a key was missing")
				}
				if err := store.Set("other", nil); err != nil {
					t.Fatal(err)
				}
				if err := <-done; err != nil {
					t.Error(err)
				}
				if len(store.waiters) > 0 {
					t.Errorf("%d waits are left", len(store.waiters))
				}
				if err := end(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestCancelWait: a newer client cancels a wait with a special query, an older one with the next
// query.
func TestCancelWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := new(Store)
		near, far := net.Pipe()
		served := make(chan error, 1)
		go func() { served <- Serve(far, store) }()
		text := append(binary.NativeEndian.AppendUint32([]byte{byte(validate)}, magic), byte(wait))
		text = append(appendKeys([]string{"k"})(text), byte(cancelWait))
		if _, err := near.Write(text); err != nil {
			t.Fatal(err)
		}
		var answer [1]byte
		if _, err := io.ReadFull(near, answer[:]); err != nil || answer[0] != waitCancel {
			t.Fatalf("%v, %v", answer, err)
		}
		if err := store.Set("k", nil); err != nil {
			t.Fatal(err)
		}
		if _, err := near.Write(appendKeys([]string{"k"})([]byte{byte(check)})); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(near, answer[:]); err != nil || answer[0] != ready {
			t.Fatalf("%v, %v", answer, err)
		}
		near.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}

// TestClientContext: the end of a context ends the call, and closes the connection.
func TestClientContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, end := pair(t, new(Store), false)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Get(ctx, "never"); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if err := c.Set(t.Context(), "k", nil); err == nil || !strings.Contains(err.Error(), "earlier call") {
			t.Error(err)
		}
		_ = end()
	})
}

// TestOtherAnswers: an answer that no store gives is an error.
func TestOtherAnswers(t *testing.T) {
	for name, ask := range map[string]func(c *Client) error{
		"check": func(c *Client) error { _, err := c.Check(t.Context(), "key"); return err },
		"wait":  func(c *Client) error { return c.Wait(t.Context(), "key") },
	} {
		here, there := net.Pipe()
		var serving sync.WaitGroup
		serving.Go(func() { _, _ = io.Copy(io.Discard, there) })
		serving.Go(func() { _, _ = there.Write([]byte("S")) })
		c, err := NewClient(here, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := ask(c); err == nil {
			t.Errorf("%s: no error", name)
		}
		c.Close()
		there.Close()
		serving.Wait()
	}
}

// TestBounds: lengths that are too large end the connection before memory is allocated.
func TestBounds(t *testing.T) {
	length := func(b []byte, n uint64) []byte { return appendUint64(b, n) }
	key := appendKey(nil, "k")
	for name, c := range map[string]struct {
		text []byte
		want string
	}{
		"key":     {length([]byte{byte(get)}, maxKey+1), "a key has 8193 bytes"},
		"value":   {length(append([]byte{byte(set)}, key...), 1<<62), "a value has"},
		"keys":    {length([]byte{byte(wait)}, maxKeys+1), "a query has 131073 keys"},
		"query":   {[]byte{77}, "number 77 is not known"},
		"again":   {[]byte{byte(validate)}, "number 0 is not known"},
		"cut":     {length(append([]byte{byte(set)}, key...), 40<<20), "unexpected EOF"},
		"no int":  {length(append([]byte{byte(add)}, appendKey(nil, "text")...), 1), "not a number"},
		"too big": {append(append([]byte{byte(set)}, key...), appendBytes(nil, make([]byte, 2000))...), "full"},
	} {
		t.Run(name, func(t *testing.T) {
			store := &Store{MaxBytes: 1000}
			if err := store.Set("text", []byte("text")); err != nil {
				t.Fatal(err)
			}
			near, far := net.Pipe()
			served := make(chan error, 1)
			go func() { served <- Serve(far, store) }()
			go func() {
				_, _ = near.Write(append(binary.NativeEndian.AppendUint32([]byte{byte(validate)}, magic), c.text...))
				near.Close()
			}()
			if err := <-served; err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			near.Close()
		})
	}
}

// TestBytesAreCounted: the bytes that a store has counted are released again.
func TestBytesAreCounted(t *testing.T) {
	s := new(Store)
	for range 1000 {
		key := string(rune('a' + rand.N(5)))
		value := make([]byte, rand.N(50))
		switch rand.N(6) {
		case 0:
			s.Delete(key)
		case 1:
			s.Pop(key)
		case 2:
			_ = s.Push(key, value)
		case 3:
			_ = s.Append(key, value)
		default:
			_ = s.Set(key, value)
		}
	}
	want := 0
	for key, value := range s.values {
		want += len(key) + len(value) + keyCost
	}
	for key, queue := range s.queues {
		for _, value := range queue {
			want += len(key) + len(value) + keyCost
		}
	}
	if s.bytes != want {
		t.Errorf("%d bytes are counted; there are %d", s.bytes, want)
	}
}

// TestManyClients tests waits and sums over many connections.
func TestManyClients(t *testing.T) {
	store := new(Store)
	const n = 20
	var wg sync.WaitGroup
	for i := range n {
		c, end := pair(t, store, i%2 == 0)
		wg.Go(func() {
			defer end()
			if _, err := c.Add(t.Context(), "arrived", 1); err != nil {
				t.Error(err)
			}
			if err := c.Set(t.Context(), string(rune('a'+i)), nil); err != nil {
				t.Error(err)
			}
			keys := make([]string, n)
			for j := range keys {
				keys[j] = string(rune('a' + j))
			}
			if err := c.Wait(t.Context(), keys...); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if v, _ := store.Get("arrived"); string(v) != "20" {
		t.Errorf("%s arrived", v)
	}
}

// FuzzServe: whatever bytes a client sends, the server fails only with an error, and stores no more
// than it may.
func FuzzServe(f *testing.F) {
	f.Add(slices.Concat([]byte{0}, binary.NativeEndian.AppendUint32(nil, magic), []byte{byte(set)}, appendKey(nil, "k"), appendKey(nil, "v")))
	f.Add(slices.Concat([]byte{0}, appendKey(nil, "k"), appendKey(nil, "v")))
	f.Add(slices.Concat([]byte{5}, appendKeys([]string{"a", "b"})(nil), []byte{8}, appendKey(nil, "k")))
	f.Fuzz(func(t *testing.T, text []byte) {
		store := &Store{MaxBytes: 1 << 10}
		near, far := net.Pipe()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = io.Copy(io.Discard, near) })
		wg.Go(func() {
			_, _ = near.Write(text)
			near.Close()
		})
		_ = Serve(far, store)
		wg.Wait()
		if store.bytes > store.MaxBytes || len(store.waiters) > 0 {
			t.Errorf("%d bytes, %d waits", store.bytes, len(store.waiters))
		}
	})
}

// TestNextWorld: the keys of one world are removed with it, and others stay.
func TestNextWorld(t *testing.T) {
	s := new(Store)
	passing := []string{"g4/a", "/g12/default_pg/0/b", "reconfigure/7/x", "/default_pg/0//reconfigure/9/y"}
	staying := []string{"a", "g4", "/g/a", "gx/a", "/g4x/a", "/my/reconfigured/x"}
	for _, key := range append(passing, staying...) {
		if err := s.Set(key, []byte("v")); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Push("g4/q", []byte("v")); err != nil {
		t.Fatal(err)
	}
	s.Set("g4/deleted", nil)
	s.Delete("g4/deleted")
	s.NextWorld()
	for _, key := range staying {
		if !s.Has(key) {
			t.Errorf("%s is gone", key)
		}
	}
	if s.Len() != len(staying) || s.QueueLen("g4/q") != 0 {
		t.Errorf("%d keys are left", s.Len())
	}
	for _, key := range staying {
		s.Delete(key)
	}
	if s.bytes != 0 {
		t.Errorf("an empty store counts %d bytes", s.bytes)
	}
}

// beginSet sends a set of a value of n bytes, except its last byte, and returns its connection and
// a channel with the result of Serve.
func beginSet(t *testing.T, store *Store, n int) (net.Conn, <-chan error) {
	near, far := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(far, store) }()
	head := binary.NativeEndian.AppendUint32([]byte{byte(validate)}, magic)
	head = appendUint64(appendBytes(append(head, byte(set)), []byte("key")), uint64(n))
	if _, err := near.Write(head); err != nil {
		t.Error(err)
	}
	return near, served
}

// TestReadingIsBounded: the bytes that all connections together are reading are bounded; small
// values are still accepted meanwhile; and nothing is counted any more once the connections have
// ended.
func TestReadingIsBounded(t *testing.T) {
	store := new(Store)
	const size = 60 << 20
	var wg sync.WaitGroup
	failed := make(chan error, 8)
	var conns []net.Conn
	for range maxReading/size + 1 {
		conn, served := beginSet(t, store, size)
		conns = append(conns, conn)
		value := make([]byte, size-1)
		wg.Go(func() {
			_, _ = conn.Write(value) // it can be refused
		})
		go func() { failed <- <-served }()
	}
	if err := <-failed; !errors.Is(err, ErrFull) {
		t.Errorf("one too many ends with %v", err)
	}
	wg.Wait()
	if n := store.reading.Load(); n > maxReading {
		t.Errorf("%d bytes are being read, at most %d", n, maxReading)
	}
	c, end := pair(t, store, false)
	if err := c.Set(t.Context(), "small", make([]byte, smallValue)); err != nil {
		t.Errorf("a small value meanwhile: %v", err)
	}
	if err := end(); err != nil {
		t.Error(err)
	}
	for _, conn := range conns {
		conn.Close()
	}
	for range len(conns) - 1 {
		<-failed
	}
	if n := store.reading.Load(); n != 0 {
		t.Errorf("%d bytes count as being read when nothing is", n)
	}
}

// TestBegunQueryEnds: a query that has begun completes in time, or its connection is closed.
func TestBegunQueryEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		conn, served := beginSet(t, new(Store), 100)
		if err := <-served; time.Since(began) != queryTime {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		conn.Close()
		store := new(Store)
		c, end := pair(t, store, false)
		<-time.After(10 * queryTime) // the time between two queries is not bounded
		if err := c.Set(t.Context(), "a", nil); err != nil {
			t.Error(err)
		}
		if err := end(); err != nil {
			t.Error(err)
		}
	})
}
