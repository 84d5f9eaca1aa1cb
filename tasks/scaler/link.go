package scaler

import (
	"errors"
	"sync"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

// link reads and writes a socket on behalf of the goroutine that owns it.
type link struct {
	socket Socket
	in     chan received
	out    chan [][]byte
	failed chan error // receives the error of a failed write
	closed chan struct{}
	wg     sync.WaitGroup
}

type received struct {
	frames [][]byte
	err    error
}

func newLink(s Socket) *link {
	l := &link{socket: s, in: make(chan received), out: make(chan [][]byte), failed: make(chan error), closed: make(chan struct{})}
	l.wg.Go(l.read)
	l.wg.Go(l.write)
	return l
}

func (l *link) read() {
	for {
		frames, err := l.socket.Recv()
		select {
		case l.in <- received{frames, err}:
		case <-l.closed:
			return
		}
		var large *zmtp.TooLargeError
		if err != nil && !errors.As(err, &large) {
			return
		}
	}
}

func (l *link) write() {
	for {
		select {
		case frames := <-l.out:
			if err := l.socket.Send(frames); err != nil {
				select {
				case l.failed <- err:
				case <-l.closed:
				}
				return
			}
		case <-l.closed:
			return
		}
	}
}

// close closes the socket and waits for both goroutines.
func (l *link) close() {
	close(l.closed)
	_ = l.socket.Close() // an error would have no consequence
	l.wg.Wait()
}
