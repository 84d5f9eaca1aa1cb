package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Stream is stdout or stderr. Several goroutines may write to it. When its reader is gone, the job
// is stopped as by SIGPIPE, and later writes are dropped.
type Stream struct {
	mu     sync.Mutex
	W      io.Writer
	Cancel context.CancelCauseFunc
	failed error
}

// Err returns the first error of Write, or nil. A closed pipe is not an error.
func (s *Stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

// lossy is a Stream whose failures are not kept for Err.
type lossy struct{ *Stream }

func (l lossy) Write(b []byte) (int, error) { return l.write(b, false) }

// Lossy returns a writer to w, a stream of Program, for logs and for the output of workers: if they
// cannot be written, the command still does its work and ends with the status of the work.
func Lossy(w io.Writer) io.Writer {
	if s, is := w.(*Stream); is {
		return lossy{s}
	}
	return w
}

// WhenClosed sets the function that is called when the reader is gone, instead of the one that
// stops the job.
func (s *Stream) WhenClosed(f context.CancelCauseFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Cancel = f
}

// Write writes b without buffering. Its error is a RunError, since the command line was valid.
func (s *Stream) Write(b []byte) (int, error) { return s.write(b, true) }

func (s *Stream) write(b []byte, keep bool) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := safefile.Write(s.W, b)
	if errors.Is(err, syscall.EPIPE) {
		s.Cancel(StopSignal{Signal: syscall.SIGPIPE})
		return len(b), nil
	}
	if err != nil {
		err = Failed(err)
	}
	if err != nil && keep && s.failed == nil {
		s.failed = err
	}
	return n, err
}

// Terminal returns the file of the stream and whether it is a terminal.
func (s *Stream) Terminal() (*os.File, bool) {
	f, ok := s.W.(*os.File)
	return f, ok && IsTerminal(f)
}

// IsTerminal reports whether a file is a terminal.
func IsTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
