package link

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair returns two ends of a TCP connection.
func pair(t *testing.T) (near, far net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if near, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if far, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

func empty() *taskspb.ToTasks { return &taskspb.ToTasks{} }

// TestOrder: the messages of several senders, small and large, arrive once, and those of each
// sender in order.
func TestOrder(t *testing.T) {
	near, far := pair(t)
	l := New(near, empty)
	const senders, each = 4, 5000
	var sending sync.WaitGroup
	for s := range senders {
		sending.Go(func() {
			large := make([]byte, 100_000)
			for i := range each {
				sub := &taskspb.SubmitTask{N: uint64(i), Group: uint32(s)}
				if i%100 == 99 {
					sub.Args = large
				}
				if err := l.Send(sub, func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, sub) }); err != nil {
					t.Error(err)
				}
				if err := l.Wait(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	go func() {
		sending.Wait()
		l.Flush()
	}()
	r, next := NewReader(far), [senders]uint64{}
	var m taskspb.ToTasks
	for {
		err := r.Read(&m)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range m.GetSubmits() {
			if s.GetN() != next[s.GetGroup()] {
				t.Fatalf("sender %d: %d instead of %d", s.GetGroup(), s.GetN(), next[s.GetGroup()])
			}
			next[s.GetGroup()]++
		}
	}
	if next != [senders]uint64{each, each, each, each} {
		t.Errorf("%v have come", next)
	}
	<-l.done
}

// TestStuckPeer: a peer that does not read does not block senders; closing the link ends calls that
// wait for the peer.
func TestStuckPeer(t *testing.T) {
	near, _ := pair(t)
	l := New(near, empty)
	for range 100 {
		_ = l.Send(&taskspb.ToTasks{Unputs: [][]byte{make([]byte, 1<<20)}}, func(m *taskspb.ToTasks) { m.Unputs = append(m.Unputs, make([]byte, 1<<20)) })
	}
	if l.Pending() == 0 {
		t.Error("nothing is pending")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait returned %v", err)
	}
	if err := l.Written(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Written returned %v", err)
	}
	l.Close()
	if err := l.Written(t.Context()); err != nil { // this does not block
		t.Errorf("of a closed link Written returned %v", err)
	}
	l.Say(func(*taskspb.ToTasks) { t.Error("a closed link takes messages") })
}

// TestWritten: when Written returns, the messages are in the connection, also if another goroutine
// has written them.
func TestWritten(t *testing.T) {
	near, far := net.Pipe()
	l := New(near, empty)
	defer l.Close()
	l.Say(func(m *taskspb.ToTasks) { m.Unputs = append(m.Unputs, make([]byte, 1<<20)) })
	read := make(chan error, 1)
	var came sync.WaitGroup
	came.Go(func() { read <- NewReader(far).Read(empty()) })
	if err := l.Written(t.Context()); err != nil {
		t.Error(err)
	}
	far.Close() // a pipe has no buffer, so the peer has read it all
	came.Wait()
	if err := <-read; err != nil {
		t.Errorf("after Written the peer has read %v", err)
	}
}

// TestLastWords: what a peer sent before it ended is read, even after a write to it has failed.
func TestLastWords(t *testing.T) {
	near, far := pair(t)
	l := New(near, empty)
	defer l.Close()
	frame, err := Frame(nil, &taskspb.ToTasks{Leaving: true})
	if err == nil {
		_, err = far.Write(frame)
	}
	if err != nil {
		t.Fatal(err)
	}
	far.Close()
	for !func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.err != nil }() {
		l.Say(func(m *taskspb.ToTasks) { m.Left = true })
		_ = l.Written(t.Context())
	}
	if m := empty(); NewReader(near).Read(m) != nil || !m.GetLeaving() {
		t.Errorf("after a failed write %v was read", m)
	}
}

// TestLyingPeer: no memory is allocated for an announced length whose bytes do not arrive.
func TestLyingPeer(t *testing.T) {
	near, far := pair(t)
	head := binary.LittleEndian.AppendUint32(nil, MaxFrame+1)
	if _, err := near.Write(head); err != nil {
		t.Fatal(err)
	}
	if err := NewReader(far).Read(empty()); err == nil {
		t.Error("a frame beyond the bound is read")
	}
	near, far = pair(t)
	if _, err := near.Write(binary.LittleEndian.AppendUint32(nil, MaxFrame)); err != nil {
		t.Fatal(err)
	}
	near.Close()
	r := NewReader(far)
	if err := r.Read(empty()); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a frame that is cut: %v", err)
	}
	if cap(r.buf) > 4<<20 {
		t.Errorf("%d bytes were taken", cap(r.buf))
	}
}
