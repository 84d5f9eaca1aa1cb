package line

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/plan"
)

// TestSocketOf: a descriptor is used if it is the socket, and stays open otherwise.
func TestSocketOf(t *testing.T) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ends[1])
	if err := unix.Bind(ends[1], &unix.SockaddrUnix{Name: plan.SocketName("socket-test-1")}); err != nil {
		t.Fatal(err)
	}
	other, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for name, of := range map[string]struct {
		fd     int
		worker string
	}{
		"of another worker": {ends[0], "socket-test-2"}, "the other end": {ends[1], "socket-test-1"},
		"a file": {int(other.Fd()), "socket-test-1"}, "no descriptor": {-1, "socket-test-1"},
	} {
		if conn := socketOf(of.fd, of.worker); conn != nil {
			t.Errorf("%s: taken", name)
		}
	}
	conn := socketOf(ends[0], "socket-test-1")
	if conn == nil {
		t.Fatal("the socket is not taken")
	}
	defer conn.Close()
	if unix.Fstat(ends[0], new(unix.Stat_t)) == nil {
		t.Error("the inherited descriptor is open")
	}
	if _, err := unix.Write(ends[1], []byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 2)); n != 1 || err != nil {
		t.Error(n, err)
	}
}
