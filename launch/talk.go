package launch

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/plan"
)

// talk is the socket by which a process speaks with the launcher. A nil *talk has none.
type talk struct {
	ours  *nearEnd
	with  func(ctx context.Context, pid int, conn net.Conn) (cleanup func())
	over  sync.WaitGroup // with runs
	clean func()         // the function that with returned; may be nil

	ending sync.Once
}

// nearEnd is the launcher's end of the socket. Where the kernel permits no socket, the process has
// none, and nearEnd is a pipe at its end.
type nearEnd struct {
	net.Conn
	closed chan struct{} // closed when the process has closed its end; nil: it has none
	once   sync.Once
	ended  chan struct{} // closed when the process has ended
}

// Ended returns a channel that is closed when the process has ended, or was not started.
func (e *nearEnd) Ended() <-chan struct{} { return e.ended }

// Read implements net.Conn.
func (e *nearEnd) Read(b []byte) (int, error) {
	n, err := e.Conn.Read(b)
	if err != nil && e.closed != nil {
		e.once.Do(func() { close(e.closed) })
	}
	return n, err
}

// newTalk makes the socket of a process, if s.Talk is set, and appends the process's end to files,
// the descriptors that the process inherits. It returns the environment of the process. If the
// kernel permits no socket, that is not an error: the process has none, and s.Talk gets one that is
// at its end.
func newTalk(s *Spec, files *[]uintptr) (*talk, []string, error) {
	env := slices.DeleteFunc(plan.WithNode(lastOfEach(s.Env), os.Environ(), s.As == nil), func(entry string) bool { // the socket of this process itself
		return strings.HasPrefix(entry, plan.EnvWorkerSocket+"=")
	})
	if s.Prepare != nil {
		env = s.Prepare(env)
	}
	if s.Talk == nil {
		return nil, env, nil
	}
	// The process's end stays a blocking one.
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM):
		ours, theirs := net.Pipe() // in a sandbox, for instance; the worker speaks with its launcher in another way
		_ = theirs.Close()
		return &talk{ours: &nearEnd{Conn: ours, ended: make(chan struct{})}, with: s.Talk}, env, nil
	case err != nil:
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	// By this name the worker sees that the descriptor is this socket. Without it, it does not use
	// the socket.
	_ = unix.Bind(ends[0], &unix.SockaddrUnix{Name: plan.SocketName(s.Incarnation)})
	*files = append(*files, uintptr(ends[1])) // closed with the others
	f := os.NewFile(uintptr(ends[0]), "worker socket")
	defer f.Close()
	conn, err := net.FileConn(f) // a duplicate that does not block
	if err != nil {
		return nil, nil, err
	}
	env = append(env, plan.EnvWorkerSocket+"="+strconv.Itoa(len(*files)-1))
	return &talk{ours: &nearEnd{Conn: conn, closed: make(chan struct{}), ended: make(chan struct{})}, with: s.Talk}, env, nil
}

func (t *talk) start(ctx context.Context, pid int) {
	if t != nil {
		t.over.Go(func() {
			t.clean = t.with(ctx, pid, t.ours)
			_ = t.ours.Close()
		})
	}
}

// closed returns a channel that is closed when the process has closed its end, or when the socket
// is no longer read.
func (t *talk) closed() <-chan struct{} {
	if t == nil {
		return nil
	}
	return t.ours.closed
}

// end blocks until everything that the process sent before it ended has been handled.
func (t *talk) end() {
	if t == nil {
		return
	}
	t.ending.Do(func() { close(t.ours.ended) })
	// What is in the socket can still be read. Children of the process may hold its end. Errors:
	// the talk is over.
	if socket, is := t.ours.Conn.(*net.UnixConn); is {
		_ = socket.CloseRead()
		_ = socket.CloseWrite()
	}
	t.over.Wait()
}

// close ends the talk.
func (t *talk) close() {
	if t == nil {
		return
	}
	t.end()
	_ = t.ours.Close()
	if t.clean != nil {
		t.clean()
	}
}
