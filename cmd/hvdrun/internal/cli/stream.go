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

// Stream is stdout or stderr: several goroutines may write, and when its reader has gone the job is
// stopped as if by the signal that says so, and what is written later is lost.
type Stream struct {
	mu     sync.Mutex
	W      io.Writer
	Cancel context.CancelCauseFunc
}

// WhenClosed has f called when the reader has gone, in place of what stops the job.
func (s *Stream) WhenClosed(f context.CancelCauseFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Cancel = f
}

// Write passes b on at once. Its error is a RunError: the command line was right.
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

// Terminal returns the file that is written to, and whether that is a terminal.
func (s *Stream) Terminal() (*os.File, bool) {
	f, ok := s.W.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}
