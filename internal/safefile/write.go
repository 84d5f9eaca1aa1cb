package safefile

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Write writes all of b to w. It blocks while a file takes nothing, also one that another process
// has made non-blocking: O_NONBLOCK belongs to the open file, which a terminal, or a pipe of a CI
// runner, shares with all who write to it. Other writers than a *os.File are called once.
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

// awaitRoom blocks until a write to f takes something or fails.
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
