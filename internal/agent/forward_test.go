package agent

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// silentAddr returns an address of loopback where a connection is neither made nor refused.
func silentAddr(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddrPort(fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port))
	for range 10 { // until its queue is full
		conn, err := net.DialTimeout("tcp", addr.String(), 200*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { conn.Close() })
	}
	t.Skip("the queue of a listener that accepts nothing is never full here")
	return addr
}

// awaitDial blocks until a connection to the address is being made.
func awaitDial(t *testing.T, to netip.AddrPort) {
	t.Helper()
	far := fmt.Sprintf("0100007F:%04X 02 ", to.Port()) // 127.0.0.1, SYN_SENT
	for limit := sandbox.Limit(); ; <-time.After(time.Millisecond) {
		text, err := os.ReadFile("/proc/self/net/tcp")
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), far) {
			return
		}
		if time.Now().After(limit) {
			t.Fatal("the agent does not connect to the driver")
		}
	}
}

// A connection that is being made to a driver which answers nothing is given up when another driver
// takes over, and not when the dial ends.
func TestForwardToAnotherDriver(t *testing.T) {
	f, err := newForwarder(netip.MustParseAddr("127.0.0.1"), quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	silent := silentAddr(t)
	f.aim(silent)
	worker, err := net.Dial("tcp", f.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(worker, make([]byte, 1))
		ended <- err
	}()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	awaitDial(t, silent)
	f.aim(netip.MustParseAddrPort(ln.Addr().String()))
	ctx, cancel := context.WithTimeout(t.Context(), dialTimeout/2)
	defer cancel()
	select {
	case <-ended:
	case <-ctx.Done():
		t.Error("the worker still waits for the driver before")
	}
}

// Workers of the driver's machine are told where it is itself; those of others are not.
func TestDirect(t *testing.T) {
	f, err := newForwarder(netip.MustParseAddr("127.0.0.1"), quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	for to, want := range map[string]string{"127.0.0.1:7": "127.0.0.1:7", "[::1]:7": "[::1]:7", "192.0.2.1:7": ""} {
		f.aim(netip.MustParseAddrPort(to))
		if got := f.direct(); got != want {
			t.Errorf("a driver at %s: %q, want %q", to, got, want)
		}
	}
}
