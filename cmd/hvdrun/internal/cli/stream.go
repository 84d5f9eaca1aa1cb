package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/term"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Stream is stdout or stderr. Several goroutines may write to it. When its reader is gone, the job
// is stopped as by SIGPIPE, and later writes are dropped.
type Stream struct {
	mu     sync.Mutex
	W      io.Writer
	Cancel context.CancelCauseFunc
}

// WhenClosed sets the function that is called when the reader is gone, instead of the one that
// stops the job.
func (s *Stream) WhenClosed(f context.CancelCauseFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Cancel = f
}

// Write writes b without buffering. Its error is a RunError, since the command line was valid.
func (s *Stream) Write(b []byte) (int, error) {
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
	return n, err
}

// Terminal returns the file of the stream and whether it is a terminal.
func (s *Stream) Terminal() (*os.File, bool) {
	f, ok := s.W.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}
