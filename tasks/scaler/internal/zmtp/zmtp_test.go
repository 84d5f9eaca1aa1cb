package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// pair returns both ends of a connection.
func pair(t *testing.T, limits Limits) (dealer, router *Conn) {
	t.Helper()
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	var wg sync.WaitGroup
	var errDealer error
	wg.Go(func() {
		dealer, errDealer = Handshake(buffered(t, a), Config{Role: Dealer, Identity: []byte("7|worker|ab"), Limits: limits})
	})
	router, err := Handshake(buffered(t, b), Config{Role: Router, Limits: limits})
	wg.Wait()
	if err != nil || errDealer != nil {
		t.Fatal(err, errDealer)
	}
	return dealer, router
}

// buffered returns an end of a pipe whose writes do not wait for reads, like those of a socket.
func buffered(t *testing.T, conn net.Conn) net.Conn {
	r, w := io.Pipe()
	out := make(chan []byte, 1024)
	var wg sync.WaitGroup
	wg.Go(func() {
		for b := range out {
			if _, err := conn.Write(b); err != nil {
				r.CloseWithError(err)
				for range out {
				}
				return
			}
		}
	})
	t.Cleanup(func() { close(out); conn.Close(); wg.Wait(); w.Close() })
	return &bufferedConn{Conn: conn, out: out}
}

type bufferedConn struct {
	net.Conn
	out chan []byte
}

func (c *bufferedConn) Write(b []byte) (int, error) {
	c.out <- bytes.Clone(b)
	return len(b), nil
}

func TestMessages(t *testing.T) {
	dealer, router := pair(t, Limits{})
	if string(router.Peer()) != "7|worker|ab" || len(dealer.Peer()) != 0 {
		t.Errorf("peers %q and %q", router.Peer(), dealer.Peer())
	}
	for _, frames := range [][][]byte{
		{{}},
		{[]byte("HE"), {}},
		{[]byte("TK"), bytes.Repeat([]byte{1}, 255), bytes.Repeat([]byte{2}, 256), {}, bytes.Repeat([]byte{3}, 1<<20)},
	} {
		for _, way := range [][2]*Conn{{dealer, router}, {router, dealer}} {
			if err := way[0].Write(frames); err != nil {
				t.Fatal(err)
			}
			got, err := way[1].Read()
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != len(frames) {
				t.Fatalf("%d frames of %d", len(got), len(frames))
			}
			for i := range got {
				if !bytes.Equal(got[i], frames[i]) {
					t.Errorf("frame %d of %d differs", i, len(frames))
				}
			}
		}
	}
}

// TestTooLarge: a message beyond the limits is dropped, and the next one arrives.
func TestTooLarge(t *testing.T) {
	dealer, router := pair(t, Limits{Message: 1000, Frames: 3})
	for _, c := range []struct {
		frames [][]byte
		first  string
	}{
		{[][]byte{[]byte("OA"), make([]byte, 999)}, "OA"},
		{[][]byte{make([]byte, 1001)}, ""},
		{[][]byte{[]byte("TR"), {}, {}, {}}, "TR"},
	} {
		if err := dealer.Write(c.frames); err != nil {
			t.Fatal(err)
		}
		_, err := router.Read()
		var large *TooLargeError
		if !errors.As(err, &large) || string(large.First) != c.first || large.Frames != len(c.frames) {
			t.Fatalf("read %v, %+v", err, large)
		}
	}
	if err := dealer.Write([][]byte{[]byte("TR"), make([]byte, 998)}); err != nil {
		t.Fatal(err)
	}
	if got, err := router.Read(); err != nil || len(got) != 2 {
		t.Fatalf("%d frames, %v", len(got), err)
	}
}

// lies returns the error of a reader that gets these bytes after a dealer's handshake.
func lies(t *testing.T, after []byte) error {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		said := append(greeting(), 4, byte(len(ready(Config{Role: Dealer}))))
		said = append(append(said, ready(Config{Role: Dealer})...), after...)
		_, _ = a.Write(said)
		a.Close()
	})
	wg.Go(func() { _, _ = io.Copy(io.Discard, a) })
	defer wg.Wait()
	defer b.Close()
	c, err := Handshake(b, Config{Role: Router, Limits: Limits{Message: 1 << 40}})
	if err != nil {
		return err
	}
	_, err = c.Read()
	return err
}

// TestAnnouncedSizes: no memory is allocated for an announced size.
func TestAnnouncedSizes(t *testing.T) {
	for _, size := range []uint64{1 << 39, 1 << 46, 1 << 62, 1<<64 - 1} {
		if err := lies(t, binary.BigEndian.AppendUint64([]byte{long}, size)); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	sum := append([]byte{long | more, 0, 0, 0, 0, 0, 0, 0, 1, 'a', long}, bytes.Repeat([]byte{0xff}, 8)...)
	if err := lies(t, sum); !errors.Is(err, errProtocol) {
		t.Errorf("a sum over 2^64: %v", err)
	}
}

func TestProtocolErrors(t *testing.T) {
	for name, after := range map[string][]byte{
		"unknown flags":   {0x40, 1},
		"long command":    {command | long, 0, 0, 0, 0, 1, 0, 0, 0},
		"command, more":   {command | more, 1, 0},
		"empty command":   {command, 0},
		"cut-off command": {command, 2, 9, 'P'},
		"short ping":      append([]byte{command, 6, 4}, "PING\x00"...),
	} {
		if err := lies(t, after); !errors.Is(err, errProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := lies(t, append([]byte{command, 9, 5}, "ERROR\x02no"...)); err == nil || !strings.Contains(err.Error(), "no") {
		t.Errorf("an error: %v", err)
	}
}

func TestHandshakeErrors(t *testing.T) {
	said := func(change func(g []byte)) []byte {
		g := greeting()
		change(g)
		return g
	}
	withReady := func(body string) []byte { return append(append(greeting(), 4, byte(len(body))), body...) }
	for name, hello := range map[string][]byte{
		"HTTP":               []byte("GET / HTTP/1.1\r\n"),
		"ZMTP 2":             said(func(g []byte) { g[10] = 1 })[:11],
		"PLAIN":              said(func(g []byte) { copy(g[12:], "PLAIN") }),
		"a router":           withReady("\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"),
		"no type":            withReady("\x05READY"),
		"cut-off name":       withReady("\x05READY\x0bSocket"),
		"cut-off value":      withReady("\x05READY\x0bSocket-Type\xff\xff\xff\xffDEALER"),
		"another command":    withReady("\x05HELLO"),
		"message for READY":  append(greeting(), 0, 1, 'a'),
		"long READY":         append(greeting(), command|long, 0, 0, 0, 0, 0, 1, 0, 0),
		"identity too long":  append(append(greeting(), command|long, 0, 0, 0, 0, 0, 0, 1, 44), long300()...),
		"command of nothing": append(greeting(), command, 0),
	} {
		a, b := net.Pipe()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = a.Write(hello) })
		wg.Go(func() { _, _ = io.Copy(io.Discard, a) })
		if _, err := Handshake(b, Config{Role: Router}); !errors.Is(err, errProtocol) {
			t.Errorf("%s: %v", name, err)
		}
		a.Close()
		b.Close()
		wg.Wait()
	}
	for _, id := range []string{"\x00a", strings.Repeat("a", 256)} {
		if _, err := Handshake(nil, Config{Role: Dealer, Identity: []byte(id)}); err == nil {
			t.Errorf("identity %q is taken", id)
		}
	}
}

// long300 is a READY of 300 bytes with an identity of 258.
func long300() []byte {
	b := []byte("\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")
	n := 300 - len(b)
	binary.BigEndian.PutUint32(b[len(b)-4:], uint32(n))
	return append(b, bytes.Repeat([]byte{'a'}, n)...)
}

func TestPing(t *testing.T) {
	dealer, router := pair(t, Limits{})
	router.mu.Lock()
	err := errors.Join(router.frame(command, []byte("\x04PING\x00\x0acontext")), router.out.Flush())
	router.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if err := router.Write([][]byte{[]byte("HE"), {}}); err != nil {
		t.Fatal(err)
	}
	if got, err := dealer.Read(); err != nil || len(got) != 2 {
		t.Fatal(got, err)
	}
	flags, size, err := router.header()
	if err != nil || flags != command {
		t.Fatal(flags, err)
	}
	if body, err := router.body(size); err != nil || string(body) != "\x04PONGcontext" {
		t.Fatalf("%q, %v", body, err)
	}
}

func TestSplit(t *testing.T) {
	for text, want := range map[string]string{
		"tcp://127.0.0.1:2345": "tcp 127.0.0.1:2345",
		"tcp://*:2345":         "tcp :2345",
		"tcp://[::1]:1":        "tcp [::1]:1",
		"ipc:///tmp/s":         "unix /tmp/s",
	} {
		if network, addr, err := Split(text); network+" "+addr != want || err != nil {
			t.Errorf("%s: %s %s, %v", text, network, addr, err)
		}
	}
	for _, text := range []string{"", "127.0.0.1:1", "tcp://a", "inproc://a", "ipc://"} {
		if _, _, err := Split(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

// TestDialEnds: a handshake with a silent peer ends when ctx ends.
func TestDialEnds(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.ReadFull(conn, make([]byte, 64)) // the dealer waits for an answer from here on
		cancel()
	})
	defer wg.Wait()
	if _, err := Dial(ctx, "tcp://"+ln.Addr().String(), Config{Role: Dealer, Identity: []byte("a")}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// TestDeadline: the deadline of the connection ends a handshake.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		defer b.Close()
		go func() { _, _ = io.Copy(io.Discard, b) }()
		_ = a.SetDeadline(time.Now().Add(time.Second))
		var timeout net.Error
		if _, err := Handshake(a, Config{Role: Router}); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("%v", err)
		}
		a.Close()
	})
}

func FuzzRead(f *testing.F) {
	hello := append(greeting(), 4, byte(len(ready(Config{Role: Dealer}))))
	hello = append(hello, ready(Config{Role: Dealer})...)
	f.Add(append(bytes.Clone(hello), 1, 2, 'H', 'E', 0, 0))
	f.Add(append(bytes.Clone(hello), 2, 0, 0, 0, 0, 0, 0, 1, 0))
	f.Add([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"))
	f.Fuzz(func(t *testing.T, said []byte) {
		limits := Limits{Message: 1 << 10, Frames: 8}
		c, err := Handshake(&scripted{in: bytes.NewReader(said)}, Config{Role: Router, Limits: limits})
		if err != nil {
			return
		}
		for {
			frames, err := c.Read()
			var large *TooLargeError
			if err != nil && !errors.As(err, &large) {
				return
			}
			total := 0
			for _, frame := range frames {
				total += len(frame)
			}
			if int64(total) > limits.Message || len(frames) > limits.Frames {
				t.Fatalf("%d bytes in %d frames", total, len(frames))
			}
		}
	})
}

// scripted is a connection whose peer sends fixed bytes.
type scripted struct {
	net.Conn
	in *bytes.Reader
}

func (s *scripted) Read(b []byte) (int, error)  { return s.in.Read(b) }
func (s *scripted) Write(b []byte) (int, error) { return len(b), nil }
