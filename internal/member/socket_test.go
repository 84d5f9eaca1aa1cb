package member

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSocketOf: a descriptor is taken if it is the socket, and stays open otherwise.
func TestSocketOf(t *testing.T) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ends[1])
	var is unix.Stat_t
	if err := unix.Fstat(ends[0], &is); err != nil {
		t.Fatal(err)
	}
	other, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for name, of := range map[string]struct {
		fd    int
		inode uint64
	}{
		"no calls": {ends[0], 0}, "another socket": {ends[1], is.Ino}, "a file": {int(other.Fd()), is.Ino}, "no descriptor": {-1, is.Ino},
	} {
		if conn := socketOf(of.fd, of.inode); conn != nil {
			t.Errorf("%s: taken", name)
		}
	}
	conn := socketOf(ends[0], is.Ino)
	if conn == nil {
		t.Fatal("the socket is not taken")
	}
	defer conn.Close()
	if unix.Fstat(ends[0], &is) == nil {
		t.Error("the inherited descriptor is open")
	}
	if _, err := unix.Write(ends[1], []byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 2)); n != 1 || err != nil {
		t.Error(n, err)
	}
}
