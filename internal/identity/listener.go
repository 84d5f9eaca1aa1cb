package identity

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
)

// Listener is a net.Listener that bounds connections until they have proven their identity. It may
// listen on several addresses.
type Listener struct {
	*Pending
	network Network
	conns   chan *Conn
	failed  chan error
	done    chan struct{} // closed by Close
	wg      sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	refused func(from net.Addr, why error) // called with each refused connection; nil: not called
	sockets []net.Listener

	refusals retry.Gate // of the log
}

// acceptPause is the pause after a failure to accept, usually for lack of descriptors.
const acceptPause = 10 * time.Millisecond

// failureEvery is the shortest time between two log lines of Serve about the same failure.
const failureEvery = 10 * time.Second

// Open makes the listener listen on one more TCP address, and returns that address with its port.
func (l *Listener) Open(addr string) (net.Addr, error) {
	listen := l.network.Listen
	if listen == nil {
		listen = listenTCP
	}
	socket, err := listen(addr)
	if err != nil {
		return nil, err
	}
	return socket.Addr(), l.add(socket)
}

func (l *Listener) add(socket net.Listener) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		socket.Close()
		return net.ErrClosed
	}
	l.sockets = append(l.sockets, socket)
	l.wg.Go(func() { l.accept(socket) })
	return nil
}

func (l *Listener) accept(socket net.Listener) {
	for {
		conn, err := socket.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			pause := time.NewTimer(acceptPause)
			select {
			case <-pause.C:
			case <-l.done:
			}
			pause.Stop()
			select {
			case l.failed <- err:
			case <-l.done:
			}
			continue
		}
		c := l.Admit(conn)
		select {
		case l.conns <- c:
		case <-l.done:
			c.Close()
		}
	}
}

// Accept returns the next connection, a *Conn. Its error is net.ErrClosed after Close; any other
// error concerns a single connection, and the next call may succeed.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.conns:
		return c, nil
	case err := <-l.failed:
		return nil, temporary{err}
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Serve calls handle with each connection in a separate goroutine; handle closes the connection.
// It blocks until the listener is closed and all calls have returned. It logs repeated failures to
// accept at growing intervals, in lines that begin with what.
func (l *Listener) Serve(log retry.Logger, what string, handle func(*Conn)) {
	var handling sync.WaitGroup
	defer handling.Wait()
	failures := retry.Row{Least: failureEvery}
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			failures.Warn(log, time.Now(), what+": taking connections", err)
		default:
			failures.Ended()
			handling.Go(func() { handle(conn.(*Conn)) })
		}
	}
}

// temporary marks an error after which servers continue to accept.
type temporary struct{ error }

// Temporary and Timeout make it a net.Error.
func (temporary) Temporary() bool { return true }
func (temporary) Timeout() bool   { return false }
func (t temporary) Unwrap() error { return t.error }

// Addr returns the first address.
func (l *Listener) Addr() net.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sockets[0].Addr()
}

// Proven calls Conn.Proven for a connection that Accept has returned.
func (l *Listener) Proven(conn net.Conn) bool {
	c, ok := conn.(*Conn)
	return ok && c.Proven()
}

// OnRefused sets a function that is called, from several goroutines, with each connection that was
// closed because its handshake failed.
func (l *Listener) OnRefused(refused func(from net.Addr, why error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused = refused
}

// WarnRefused logs that a connection was refused. Since strangers could fill the log, it writes a
// line every few seconds at most, with the number of lines that it has left out.
func (l *Listener) WarnRefused(log retry.Logger, what string, from net.Addr, why error) {
	if more, tell := l.refusals.Pass(time.Now()); tell {
		log.Warnf("%s: a connection from %v is refused: %v%s", what, from, Explain(why, time.Now()), more)
	}
}

// Refused reports that the peer of a connection that Accept has returned did not prove its
// identity. It ignores connections that end because the listener is closed.
func (l *Listener) Refused(conn net.Conn, why error) {
	l.mu.Lock()
	refused := l.refused
	if l.closed {
		refused = nil
	}
	l.mu.Unlock()
	if refused != nil {
		refused(conn.RemoteAddr(), Explain(why, time.Now()))
	}
}

// Close stops listening, and closes the unproven connections. It may be called again.
func (l *Listener) Close() error {
	l.mu.Lock()
	var err error
	if !l.closed {
		l.closed = true
		close(l.done)
		for _, socket := range l.sockets {
			err = errors.Join(err, socket.Close())
		}
	}
	l.mu.Unlock()
	l.wg.Wait()
	l.Pending.Close()
	return err
}
