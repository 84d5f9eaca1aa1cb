package safefile

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// peerPatience is how long openPipe waits for the process at the other end of a named pipe, which a
// shell may start at the same time as this one. peerPause is the pause between two checks. Tests
// change peerPatience.
var peerPatience = 5 * time.Second

const peerPause = 10 * time.Millisecond

// openPipe is like unix.Open, for a named pipe, with flags that include O_NONBLOCK. It returns an
// error if no process opens the other end within peerPatience; without O_NONBLOCK, unix.Open would
// block.
func openPipe(path string, flags int, mode uint32) (int, error) {
	fd := -1
	defer func() { _ = unix.Close(fd) }()
	missing, met := "reader", false
	if flags&unix.O_ACCMODE == unix.O_RDONLY {
		missing = "writer"
	}
	for begin := time.Now(); ; time.Sleep(peerPause) {
		var err error
		if fd < 0 { // keep it open: a writer needs a reader
			fd, err = unix.Open(path, flags, mode)
		}
		if err == nil {
			met = missing == "reader"
			if !met {
				met, err = hasWriter(fd)
			}
		}
		switch {
		case err != nil && !errors.Is(err, unix.ENXIO):
			return -1, err
		case met:
			opened := fd
			fd = -1
			return opened, nil
		case time.Since(begin) >= peerPatience:
			return -1, fmt.Errorf("no process has the named pipe open as its %s: start that first, or name a regular file", missing)
		}
	}
}

// hasWriter reports whether a process has a pipe open for writing, or has left data in it. It reads
// nothing from the pipe.
func hasWriter(fd int) (bool, error) {
	var probe [2]int
	if err := unix.Pipe2(probe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return false, err
	}
	defer unix.Close(probe[0])
	defer unix.Close(probe[1])
	n, err := unix.Tee(fd, probe[1], 1, unix.SPLICE_F_NONBLOCK)
	if errors.Is(err, unix.EAGAIN) {
		return true, nil
	}
	return n > 0, err
}
