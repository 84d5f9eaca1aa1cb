package safefile

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Write writes all of b to w. It blocks while a file accepts no bytes, even if another process has
// made it non-blocking: O_NONBLOCK belongs to the open file, which all writers to a terminal or to
// the pipe of a CI runner share. Write calls other writers than an *os.File once.
func Write(w io.Writer, b []byte) (n int, err error) {
	f, ok := w.(*os.File)
	if !ok {
		return w.Write(b)
	}
	for {
		more, err := f.Write(b[n:])
		n += more
		if !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
		if err := awaitRoom(f); err != nil {
			return n, err
		}
	}
}

// awaitRoom blocks until a write to f accepts bytes or fails.
func awaitRoom(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		for {
			_, failed = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, -1)
			if failed != unix.EINTR {
				return
			}
		}
	})
	return errors.Join(err, failed)
}
