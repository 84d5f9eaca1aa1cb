package identity_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

var update = flag.Bool("update", false, "rewrite testdata/listeners.txt")

// TestTableOfListeners: testdata/listeners.txt equals the table that the code produces.
func TestTableOfListeners(t *testing.T) {
	const path = "testdata/listeners.txt"
	table, err := os.ReadFile(path)
	want := boundsText(allBounds())
	switch {
	case string(table) != want && *update:
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	case string(table) != want:
		t.Errorf("%s is not the table of the code (%v): `go test ./internal/identity -run Table -update` rewrites it\n%s", path, err, want)
	}
	for _, b := range allBounds() {
		if b.Name == "" || b.Process == "" || b.Address == "" || b.Admits == "" || b.Unproven <= 0 || b.Bytes <= 0 || b.Deadline <= 0 {
			t.Errorf("a listener without bounds: %+v", b)
		}
	}
}

// bounds returns bounds for connections that a test makes: none of them ends by itself.
func bounds(unproven int) identity.Bounds {
	return identity.Bounds{Unproven: unproven, Bytes: 1 << 10, Deadline: time.Hour}
}

func listen(t *testing.T, b identity.Bounds) *identity.Listener {
	t.Helper()
	ln, err := b.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

// dial connects from an address of this machine, and returns both ends.
func dial(t *testing.T, ln *identity.Listener, from string) (near net.Conn, far *identity.Conn) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	near, err := d.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close() })
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return near, conn.(*identity.Conn)
}

// closed fails the test unless the other end closes the connection.
func closed(t *testing.T, conn net.Conn) {
	t.Helper()
	conn.SetReadDeadline(sandbox.Limit())
	var n net.Error
	if _, err := io.Copy(io.Discard, conn); errors.As(err, &n) && n.Timeout() {
		t.Fatal("the connection stays open")
	}
}

// TestOldestGivesWay: the oldest connection of the source with the most connections is closed, and
// proven ones stay.
func TestOldestGivesWay(t *testing.T) {
	ln := listen(t, bounds(4))
	honest, honestFar := dial(t, ln, "127.0.0.2")
	member, memberFar := dial(t, ln, "127.0.0.1")
	if !memberFar.Proven() || !ln.Proven(memberFar) {
		t.Fatal("a connection is not proven that was")
	}
	var strangers []net.Conn
	var fars []*identity.Conn
	for range 100 {
		near, far := dial(t, ln, "127.0.0.1")
		strangers, fars = append(strangers, near), append(fars, far)
		if n := ln.Unproven(); n > 4 {
			t.Fatalf("%d connections are unproven", n)
		}
	}
	for _, s := range strangers[:97] {
		closed(t, s)
	}
	if fars[0].Proven() {
		t.Error("a connection that has given way is proven")
	}
	if !fars[99].Proven() || !honestFar.Proven() || ln.Unproven() != 2 {
		t.Errorf("the newest and the only one of another address do not stay; %d are left", ln.Unproven())
	}
	for _, pair := range [][2]net.Conn{{honest, honestFar}, {member, memberFar}, {strangers[99], fars[99]}} {
		said := bytes.Repeat([]byte("x"), 3<<10)
		go pair[0].Write(said)
		if _, err := io.ReadFull(pair[1], make([]byte, len(said))); err != nil {
			t.Errorf("a proven connection does not carry more than its bound: %v", err)
		}
	}
}

// TestBytesBeforeProof: the bytes that each connection, and all together, can send are bounded.
func TestBytesBeforeProof(t *testing.T) {
	b := bounds(100)
	b.Total = 3 << 10
	ln := listen(t, b)
	send := func(n int) (net.Conn, *identity.Conn, error) {
		near, far := dial(t, ln, "127.0.0.1")
		go near.Write(make([]byte, n))
		_, err := io.ReadFull(far, make([]byte, n))
		if held := ln.Held(); held > b.Total {
			t.Errorf("%d bytes are held", held)
		}
		return near, far, err
	}
	near, _, err := send(2 << 10)
	if err == nil {
		t.Error("one connection may send twice what it may")
	}
	closed(t, near)
	var all []net.Conn
	for range 10 {
		near, _, err := send(1 << 10)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, near)
	}
	for _, c := range all[:7] {
		closed(t, c)
	}
	if n := ln.Unproven(); n != 3 {
		t.Errorf("%d connections are left", n)
	}
}

// TestDeadlineBeforeProof: a connection that sends nothing is closed at the deadline, unless it is
// proven.
func TestDeadlineBeforeProof(t *testing.T) {
	ln := listen(t, identity.Bounds{Unproven: 9, Bytes: 1, Deadline: time.Hour})
	_, member := dial(t, ln, "127.0.0.1")
	member.Proven()
	ln.Resize(9, time.Millisecond)
	near, far := dial(t, ln, "127.0.0.1")
	closed(t, near)
	if far.Proven() || ln.Unproven() != 0 {
		t.Error("a connection is proven after its deadline")
	}
	if !member.Proven() {
		t.Error("a proven connection was closed")
	}
}

// TestDescriptorsAreLeft: strangers can use at most a quarter of the descriptors.
func TestDescriptorsAreLeft(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	ln := listen(t, bounds(1<<30))
	low := limit
	low.Cur = 64
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	ln.Resize(1<<30, time.Hour)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		dial(t, ln, "127.0.0.1")
	}
	if n := ln.Unproven(); n != 16 {
		t.Errorf("%d connections of 64 descriptors", n)
	}
}

// TestListenerOfSeveral: one listener can have several addresses with one bound, and Close closes
// all.
func TestListenerOfSeveral(t *testing.T) {
	ln := listen(t, bounds(2))
	second, err := ln.Open("127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ln.Open("192.0.2.1:0"); err == nil {
		t.Error("listens on an address that is not this machine's")
	}
	var nears []net.Conn
	for _, addr := range []string{ln.Addr().String(), second.String(), second.String()} {
		near, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer near.Close()
		nears = append(nears, near)
		if _, err := ln.Accept(); err != nil {
			t.Fatal(err)
		}
	}
	closed(t, nears[0])
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept after Close: %v", err)
		}
	})
	if err := errors.Join(ln.Close(), ln.Close()); err != nil {
		t.Error(err)
	}
	waiting.Wait()
	closed(t, nears[1])
	closed(t, nears[2])
	for _, addr := range []string{ln.Addr().String(), second.String()} {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			t.Errorf("%s still listens", addr)
		}
	}
	if _, err := ln.Open("127.0.0.1:0"); err == nil {
		t.Error("a closed listener opens another address")
	}
}

// TestFloodOfEach: of hundreds of connections that send nothing, or begin to send much, no more
// stay than each kind of listener permits.
func TestFloodOfEach(t *testing.T) {
	for _, b := range allBounds() {
		t.Run(b.Name, func(t *testing.T) {
			t.Parallel()
			b.Unproven /= 8 // hundreds would take half of all ports and of the test's time
			ln := listen(t, b)
			var serving sync.WaitGroup
			serving.Go(func() {
				for {
					conn, err := ln.Accept()
					if err != nil {
						return
					}
					serving.Go(func() {
						io.Copy(io.Discard, conn)
						conn.Close()
					})
				}
			})
			words := make([]byte, 8<<10)
			total := b.Total
			if total == 0 {
				total = int64(b.Unproven) * b.Bytes
			}
			for i := range 200 {
				near, err := net.Dial("tcp", ln.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				defer near.Close()
				if i%2 == 0 {
					near.Write(words)
				}
				if n, held := ln.Unproven(), ln.Held(); n > b.Unproven || held > total {
					t.Fatalf("%d unproven connections hold %d bytes; there may be %d and %d", n, held, b.Unproven, total)
				}
			}
			ln.Close()
			serving.Wait()
		})
	}
}

// allBounds returns the bounds of all listeners.
func allBounds() []identity.Bounds {
	return []identity.Bounds{identity.Control, identity.TaskClients, identity.TaskGateway, identity.Drivers, identity.Door, identity.Gossip, identity.Enrollment, identity.Data, identity.Values, identity.WorkerStore, identity.TorchWorkers, identity.TorchPeers, identity.TorchHealth, identity.Metrics, identity.Dashboard}
}

// boundsText returns the bounds as text, with one paragraph for each listener.
func boundsText(all []identity.Bounds) string {
	var b strings.Builder
	for i, l := range all {
		if i > 0 {
			b.WriteString("\n")
		}
		total := l.Total
		if total == 0 {
			total = int64(l.Unproven) * l.Bytes
		}
		fmt.Fprintf(&b, "%s\n", l.Name)
		for _, row := range [][2]string{
			{"process", l.Process}, {"address", l.Address}, {"admits", l.Admits},
			{"unproven", fmt.Sprintf("%d connections, %s each, %s in all, %v", l.Unproven, size(l.Bytes), size(total), l.Deadline)},
		} {
			fmt.Fprintf(&b, "    %-9s %s\n", row[0], row[1])
		}
	}
	return b.String()
}

func size(n int64) string {
	if n >= 1<<20 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}
