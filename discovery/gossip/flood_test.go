package gossip

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"log"
	"net"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// pushState returns the beginning of a stream that announces an encrypted message. A member has to
// read the message before it can find that the key is wrong.
func pushState(label string, length uint32) []byte {
	const hasLabel, encrypted = 244, 10
	words := append([]byte{hasLabel, byte(len(label))}, label...)
	return binary.BigEndian.AppendUint32(append(words, encrypted), length)
}

// flood opens streams that each send as much of such a message as they can, and returns when all
// have ended.
func flood(t *testing.T, addr string, streams int) {
	t.Helper()
	var sending sync.WaitGroup
	body := make([]byte, 19<<20)
	for range streams {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		sending.Go(func() {
			defer c.Close()
			c.SetDeadline(sandbox.Limit())
			c.Write(pushState("test", 2<<20))
			c.Write(body)
			var n net.Error
			if _, err := io.Copy(io.Discard, c); errors.As(err, &n) && n.Timeout() {
				t.Error("a stream without the key stays open")
			}
		})
	}
	sending.Wait()
}

// TestFloodOfState: forty streams of 19 MiB do not fill a member's memory, and another member can
// join meanwhile.
func TestFloodOfState(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	runtime.GC()
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	stop, peak := make(chan struct{}), make(chan uint64)
	go func() {
		var most uint64
		for {
			select {
			case <-stop:
				peak <- most
				return
			case <-time.After(5 * time.Millisecond):
				runtime.ReadMemStats(&now)
				most = max(most, now.HeapAlloc)
			}
		}
	}()
	var flooding sync.WaitGroup
	flooding.Go(func() { flood(t, a.Addr(), 40) })
	b := mustJoin(t, agentConfig("b", 0, a.Addr()))
	flooding.Wait()
	if err := b.Leave(within(t)); err != nil {
		t.Error(err)
	}
	close(stop)
	grown := int64(<-peak) - int64(before.HeapAlloc) - 19<<20 // the body that the strangers send
	t.Logf("the heap grew by %d MiB", grown>>20)
	if grown > 50<<20 { // 760 MiB arrived, and the race detector needs some
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}

// TestTooLong: a member refuses states beyond its bound, and reports the first.
func TestTooLong(t *testing.T) {
	keys, err := memberlist.NewKeyring(nil, bytes.Repeat([]byte{1}, keyLen))
	if err != nil {
		t.Fatal(err)
	}
	who := newMembers("test", keys)
	var told []int64
	who.long = func(_ net.Addr, bytes, _ int64) { told = append(told, bytes) }
	for _, length := range []uint32{uint32(identity.Gossip.Bytes) + 1, 1<<32 - 1} {
		near, far := net.Pipe()
		go far.Write(pushState("test", length))
		if who.admit(near, nil) != nil {
			t.Error("it was taken")
		}
		near.Close()
		far.Close()
	}
	if len(told) != 1 || told[0] != identity.Gossip.Bytes+1 {
		t.Errorf("told of %v", told)
	}
}

// TestShutdownWithPackets: packets that nobody receives do not delay the shutdown.
func TestShutdownWithPackets(t *testing.T) {
	keys, err := memberlist.NewKeyring(nil, bytes.Repeat([]byte{1}, keyLen))
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		tr, err := listen("127.0.0.1:0", newMembers("test", keys), log.New(io.Discard, "", 0))
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("udp", net.JoinHostPort("127.0.0.1", strconv.Itoa(tr.Transport.(*memberlist.NetTransport).GetAutoBindPort())))
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			c.Write([]byte("a stranger's"))
		}
		c.Close()
		if err := tr.Shutdown(); err != nil {
			t.Error(err)
		}
	}
}

// TestStreamsAreBounded: however many streams connect, the numbers of open streams and of bytes
// that they hold stay within the bounds.
func TestStreamsAreBounded(t *testing.T) {
	keys, err := memberlist.NewKeyring(nil, bytes.Repeat([]byte{1}, keyLen))
	if err != nil {
		t.Fatal(err)
	}
	tr, err := listen("127.0.0.1:0", newMembers("test", keys), log.New(io.Discard, "", 0))
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Shutdown()
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(tr.Transport.(*memberlist.NetTransport).GetAutoBindPort()))
	var reading sync.WaitGroup
	defer reading.Wait()
	const streams = 400
	for i := range streams {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i%4 == 0 {
			reading.Go(func() { c.Write(append(pushState("test", 2<<20), make([]byte, 1<<20)...)) })
		}
		if n, held := tr.pending.Unproven(), tr.pending.Held(); n > identity.Gossip.Unproven || held > identity.Gossip.Total {
			t.Fatalf("%d streams hold %d bytes", n, held)
		}
	}
}
