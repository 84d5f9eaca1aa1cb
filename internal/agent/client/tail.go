package client

import (
	"sync"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// tail is a writer that keeps the end of what a process writes, and the line that gives the reason
// of its failure.
type tail struct {
	mu    sync.Mutex
	text  []byte
	words proc.LastWords
}

const tailSize = 8 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.words.Write(b)
	t.text = append(t.text, b...)
	if n := len(t.text) - tailSize; n > 0 {
		t.text = t.text[n:]
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// why returns the line that gives the reason of the process's failure, or "".
func (t *tail) why() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.words.Why()
}
