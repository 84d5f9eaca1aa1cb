package safefile_test

import (
	"bytes"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// TestWriteOfSharedFile: Write writes everything to a pipe that another process has made
// non-blocking, even if the pipe cannot hold that much.
func TestWriteOfSharedFile(t *testing.T) {
	for _, late := range []bool{false, true} { // made so after the file was opened here, or before
		r, w := pipe(t, late)
		want := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
		got := make(chan []byte)
		go func() {
			read, err := io.ReadAll(r)
			if err != nil {
				t.Error(err)
			}
			got <- read
		}()
		n, err := safefile.Write(w, want)
		if err != nil || n != len(want) {
			t.Errorf("%d of %d bytes: %v", n, len(want), err)
		}
		w.Close()
		if read := <-got; !bytes.Equal(read, want) {
			t.Errorf("%d of %d bytes arrived", len(read), len(want))
		}
	}
}

// TestWriteWithoutReader: a write ends when the reader closes a full pipe.
func TestWriteWithoutReader(t *testing.T) {
	r, w := pipe(t, true)
	done := make(chan error)
	go func() {
		_, err := safefile.Write(w, make([]byte, 1<<20))
		done <- err
	}()
	if _, err := io.ReadFull(r, make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if err := <-done; err == nil {
		t.Error("a write to a pipe that nobody reads succeeds")
	}
}

// pipe returns a pipe whose end for writing is non-blocking, and has been so before os.NewFile
// unless late is set.
func pipe(t *testing.T, late bool) (r, w *os.File) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	if !late {
		nonblock(t, fds[1])
	}
	r, w = os.NewFile(uintptr(fds[0]), "r"), os.NewFile(uintptr(fds[1]), "w")
	if late {
		nonblock(t, fds[1])
	}
	return r, w
}

func nonblock(t *testing.T, fd int) {
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
}
