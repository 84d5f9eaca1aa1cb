package dirtypages

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestBypass: Bypass ignores files, sockets, pipes and terminals. While a file that may be a device
// is open, it returns the file's name.
func TestBypass(t *testing.T) {
	is := func(when, want string) {
		t.Helper()
		if got, err := Bypass(); got != want || err != nil {
			t.Errorf("%s: %q, %v", when, got, err)
		}
	}
	is("at first", "")
	shared, err := unix.MemfdCreate("shared", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(shared)
	is("with a memfd", "")
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	empty, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer empty.Close()
	if err := os.Remove(empty.Name()); err != nil {
		t.Fatal(err)
	}
	is("with an empty file that has been removed", "")

	for _, name := range []string{"/dev/fuse", "/dev/net/tun", "/dev/loop-control", "/dev/vhost-net"} {
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Logf("not tried: %s: %v", name, err)
			continue
		}
		is("with a device", name)
		unix.Close(fd)
	}
	var params [120]byte // struct io_uring_params
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&params[0])), 0)
	if errno != 0 {
		t.Logf("not tried: io_uring: %v", errno)
	} else {
		is("with an io_uring", "anon_inode:[io_uring]")
		unix.Close(int(fd))
	}
	is("at last", "")
}

func BenchmarkBypass(b *testing.B) {
	for range 50 {
		null, err := os.Open(os.DevNull)
		if err != nil {
			b.Fatal(err)
		}
		defer null.Close()
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Bypass(); err != nil {
			b.Fatal(err)
		}
	}
}
