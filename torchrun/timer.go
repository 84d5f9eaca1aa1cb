package torchrun

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// timers holds the requests of workers to be sent a signal at a certain time, unless they release
// the timer before that. It is pure.
type timers struct{ of map[timerKey]timerEvent }

type timerKey struct {
	pid   int
	scope string
}

// timerEvent is a request, as one line of JSON.
type timerEvent struct {
	PID    int    `json:"pid"`
	Scope  string `json:"scope_id"`
	Signal int    `json:"signal"`
	// Expiry is in seconds since 1970. A negative value releases the timer.
	Expiry float64 `json:"expiration_time"`
}

const (
	// maxTimers is the largest number of timers of a node, and maxTimerLine the largest size of a
	// request in bytes: a write of more than PIPE_BUF bytes would not be atomic.
	maxTimers    = 1 << 16
	maxTimerLine = 4096
)

// take handles a request, which is one line.
func (t *timers) take(line []byte) error {
	var e timerEvent
	if err := json.Unmarshal(line, &e); err != nil {
		return fmt.Errorf("torchrun: what a worker has written to the timer's FIFO: %w", err)
	}
	key := timerKey{e.PID, e.Scope}
	if e.Expiry < 0 {
		delete(t.of, key)
		return nil
	}
	if len(t.of) >= maxTimers {
		return fmt.Errorf("torchrun: the worker has set more than %d timers", maxTimers)
	}
	if t.of == nil {
		t.of = make(map[timerKey]timerEvent)
	}
	t.of[key] = e
	return nil
}

// next returns the expiry of the timer that expires first, or the zero time if there is no timer.
func (t *timers) next() time.Time {
	var first time.Time
	for _, e := range t.of {
		if at := e.at(); first.IsZero() || at.Before(first) {
			first = at
		}
	}
	return first
}

func (e timerEvent) at() time.Time { return time.UnixMicro(int64(min(e.Expiry, 1<<40) * 1e6)) }

// due removes the expired timers, and returns one signal for each process: that of the timer that
// expired first.
func (t *timers) due(now time.Time) (due []expiry) {
	first := make(map[int]timerEvent)
	for key, e := range t.of {
		if e.at().After(now) {
			continue
		}
		delete(t.of, key)
		if o, is := first[e.PID]; !is || o.Signal <= 0 || e.Signal > 0 && e.Expiry < o.Expiry {
			first[e.PID] = e
		}
	}
	for pid, e := range first {
		due = append(due, expiry{pid, e.Scope, syscall.Signal(max(0, e.Signal))})
	}
	return due
}

// expiry is a process whose timer has expired.
type expiry struct {
	pid    int
	scope  string
	signal syscall.Signal // 0: no signal was requested
}

// kill sends the signal if ours returns true for the process.
func (e expiry) kill(ours func(pid int) bool) {
	if e.signal > 0 && e.pid > 1 && ours(e.pid) {
		_ = syscall.Kill(e.pid, e.signal)
	}
}

// fileTimer reads requests from a FIFO. A nil *fileTimer reads none.
type fileTimer struct {
	path string
	dir  string // folder created for the FIFO; empty: none
	fifo *os.File
	out  chan expiry
	done chan struct{}
	wg   sync.WaitGroup
}

func newFileTimer(path, tempDir string) (*fileTimer, error) {
	f := &fileTimer{path: path, out: make(chan expiry), done: make(chan struct{})}
	var err error
	if path == "" {
		if f.dir, err = os.MkdirTemp(tempDir, "hvdrun_timer_"); err != nil {
			return nil, fmt.Errorf("torchrun: the timer's folder: %w", err)
		}
		f.path = filepath.Join(f.dir, "timer")
	}
	if err = unix.Mkfifo(f.path, 0o600); err == nil {
		// Opening it for writing too prevents the end of the input when the last worker closes it.
		f.fifo, err = os.OpenFile(f.path, os.O_RDWR|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		if f.dir != "" {
			err = errors.Join(err, os.RemoveAll(f.dir))
		}
		return nil, fmt.Errorf("torchrun: the timer's FIFO %s: %w", f.path, err)
	}
	f.wg.Go(f.run)
	return f, nil
}

// expired returns a channel that receives expired timers.
func (f *fileTimer) expired() <-chan expiry {
	if f == nil {
		return nil
	}
	return f.out
}

// run reads requests and sends expired timers until the FIFO is closed.
func (f *fileTimer) run() {
	var t timers
	var line []byte
	in := bufio.NewReaderSize(f.fifo, maxTimerLine)
	for {
		_ = f.fifo.SetReadDeadline(t.next()) // cannot fail: a FIFO has deadlines
		part, err := in.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			_ = t.take(line) // a malformed line is ignored
			line = line[:0]
		case errors.Is(err, bufio.ErrBufferFull):
			line = line[:0] // the rest of it is malformed too
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return
		}
		for _, e := range t.due(time.Now()) {
			select {
			case f.out <- e:
			case <-f.done:
				return
			}
		}
	}
}

func (f *fileTimer) close() error {
	if f == nil {
		return nil
	}
	close(f.done)
	err := f.fifo.Close()
	f.wg.Wait()
	if f.dir != "" {
		return errors.Join(err, os.RemoveAll(f.dir))
	}
	return errors.Join(err, os.Remove(f.path))
}
