package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// drainFirst is how long the output of a dead process may stay open before its holders are
	// sought and killed.
	drainFirst = 20 * time.Millisecond
	// drainBound is how long the launcher waits for the output after that.
	drainBound = 200 * time.Millisecond
	// pipeSize is the default capacity of a pipe in bytes: the most that may remain in it when the
	// launcher stops waiting.
	pipeSize = 64 << 10
)

// pipes carries the output of one process.
type pipes struct {
	child   []uintptr // stdin, stdout, stderr of the child
	copiers []*copier
	done    chan struct{} // closed when all copiers have ended
}

type copier struct {
	from *os.File
	to   io.Writer
}

// newPipes makes the pipes of a process that runs as the user, who may open them again by their
// paths in /proc; nil: it is this process's.
func newPipes(stdin *os.File, stdout, stderr io.Writer, as *User) (*pipes, error) {
	p := &pipes{done: make(chan struct{})}
	in, err := openStdin(stdin)
	if err != nil {
		return nil, err
	}
	p.child = append(p.child, uintptr(in))
	for _, w := range []io.Writer{stdout, stderr} {
		if w == nil {
			w = io.Discard
		}
		// Not os.Pipe: it makes both ends non-blocking, and the child would inherit that.
		var ends [2]int
		err := unix.Pipe2(ends[:], unix.O_CLOEXEC)
		if err == nil {
			p.child = append(p.child, uintptr(ends[1]))
			if err = unix.SetNonblock(ends[0], true); err == nil && as != nil {
				err = unix.Fchown(ends[1], int(as.UID), int(as.GID))
			}
			p.copiers = append(p.copiers, &copier{os.NewFile(uintptr(ends[0]), "pipe"), w})
		}
		if err != nil {
			p.closeChild()
			p.closeOurs()
			return nil, os.NewSyscallError("pipe", err)
		}
	}
	return p, nil
}

// openStdin returns a new descriptor of a process's standard input. A nil stdin is /dev/null.
func openStdin(stdin *os.File) (fd int, err error) {
	if stdin == nil {
		fd, err = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			err = &os.PathError{Op: "open", Path: os.DevNull, Err: err}
		}
		return fd, err
	}
	raw, err := stdin.SyscallConn()
	if err != nil {
		return -1, err
	}
	var derr error
	err = raw.Control(func(own uintptr) { fd, derr = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, derr); err != nil {
		return -1, fmt.Errorf("stdin: %w", err)
	}
	return fd, nil
}

func (p *pipes) closeChild() {
	for _, fd := range p.child {
		_ = unix.Close(int(fd))
	}
	p.child = nil
}

func (p *pipes) closeOurs() {
	for _, c := range p.copiers {
		_ = c.from.Close()
	}
}

// start starts the copiers; drain waits for them.
func (p *pipes) start() {
	var wg sync.WaitGroup
	for _, c := range p.copiers {
		wg.Go(c.run)
	}
	go func() {
		wg.Wait()
		close(p.done)
	}()
}

// drain blocks until all output has been written, or until drainBound has passed after sweep
// although processes still keep the pipes open.
func (p *pipes) drain(sweep func()) {
	if p.within(drainFirst) {
		return
	}
	sweep()
	if p.within(drainBound) {
		return
	}
	p.abandon()
}

// abandon reads what is in the pipes of a process, without waiting for more output, and blocks
// until that has been written.
func (p *pipes) abandon() {
	for _, c := range p.copiers {
		_ = c.from.SetReadDeadline(time.Now()) // fails only where that copier has ended
	}
	<-p.done
}

func (p *pipes) within(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.done:
		return true
	case <-timer.C:
		return false
	}
}

func (c *copier) run() {
	defer c.from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := c.from.Read(buf)
		c.write(buf[:n])
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				c.rest()
			}
			return
		}
	}
}

// write discards the text once a write has failed: the process must not block.
func (c *copier) write(text []byte) {
	if len(text) == 0 {
		return
	}
	if _, err := c.to.Write(text); err != nil {
		c.to = io.Discard
	}
}

// rest reads what is in the pipe, without waiting for more: a slow destination must not cost the
// last output of a worker.
func (c *copier) rest() {
	_ = c.from.SetReadDeadline(time.Time{})
	raw, err := c.from.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, pipeSize)
	n := 0
	_ = raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), buf)
		return true
	})
	if err == nil {
		c.write(buf[:n])
	}
}
