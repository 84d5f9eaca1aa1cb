// Package timeline records collective operations as a trace that Perfetto and chrome://tracing
// open.
//
// Each rank writes its own file, in Chrome's JSON array format with one event per line. The end of
// the array is omitted, so that a process that dies leaves a valid file. Times are microseconds
// since 1970 of the clock of rank 0. Merge combines the files of all ranks into one trace.
package timeline

import (
	"context"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/internal/wake"
)

const (
	defaultBytes = 256 << 20              // total size of the files of one rank
	flushEach    = 250 * time.Millisecond // longest time that a span waits to be written
	maxQueued    = 1 << 16                // largest number of queued spans; further ones are dropped
)

// Config configures a Recorder.
type Config struct {
	// Filename is the beginning of the names of the files: rank 3 writes Filename.rank.3.json, and
	// moves it to Filename.rank.3.old.json when it has reached its limit. A .json at the end of
	// Filename is ignored.
	Filename string
	// RunID names the job. Files of another job are overwritten; files of the same job are appended
	// to.
	RunID string
	// Shared lets other users read the files.
	Shared bool
	// MaxBytes bounds the total size of the files of a rank. If it is 0, the bound is 256 MiB.
	MaxBytes int64
	// Log receives one message in each world in which files cannot be written. If it is nil,
	// nothing is logged.
	Log logrus.FieldLogger
}

// Recorder is a collective.Timeline that writes to files. It never fails an operation and never
// makes one wait for a disk: if spans arrive faster than they are written, further spans are
// dropped and counted, and after a failure to write a file nothing is written until the next world.
type Recorder struct {
	cfg   Config
	begun time.Time // the origin of all times, so that later changes of the clock have no effect

	mu      sync.Mutex
	queued  []collective.Span
	lost    int
	muted   bool // while the clocks are compared
	started bool
	closed  bool

	writing sync.Mutex // held while the fields below are used
	file    *rankFile  // nil before the first world, and after a failure
	spare   []collective.Span

	hurry   wake.Flag
	done    chan struct{}
	running sync.WaitGroup
}

// New returns a recorder. It opens no file before Enter.
func New(cfg Config) *Recorder {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = defaultBytes
	}
	return &Recorder{cfg: cfg, begun: time.Now(), hurry: wake.New(), done: make(chan struct{})}
}

// Span implements collective.Timeline. It queues the span, which costs little more than a lock.
func (r *Recorder) Span(s collective.Span) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.muted || r.closed:
	case len(r.queued) >= maxQueued:
		r.lost++
	default:
		r.queued = append(r.queued, s)
		if len(r.queued) == maxQueued/2 {
			r.hurry.Set()
		}
	}
}

// Enter begins a world: the ranks of the group compare their clocks, and from now on spans are
// written to the file of this rank, by a goroutine that Close ends. Every rank of the group must
// call it, before any other operation. It blocks and fails as operations of the group do; a file
// that cannot be written is no error.
func (r *Recorder) Enter(ctx context.Context, g *collective.Group) error {
	r.flush() // to the file of the previous rank
	r.mute(true)
	defer r.mute(false)
	offset, err := clockOffset(ctx, g, func() int64 { return r.nanos(time.Now()) })
	if err != nil {
		return err
	}
	r.writing.Lock()
	defer r.writing.Unlock()
	if r.file != nil {
		r.check(r.file.close())
		r.file = nil
	}
	r.file, err = openRank(r.cfg, g.Rank(), offset)
	r.check(err)
	if r.file != nil {
		r.check(r.file.world(r.nanos(time.Now()), g))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.started && !r.closed {
		r.started = true
		r.running.Go(r.work)
	}
	return nil
}

// Close writes the queued spans and closes the file. It always returns nil: a failure to write has
// been logged.
func (r *Recorder) Close() error {
	r.mu.Lock()
	again := r.closed
	r.closed = true
	r.mu.Unlock()
	if again {
		return nil
	}
	close(r.done)
	r.running.Wait()
	r.flush()
	r.writing.Lock()
	defer r.writing.Unlock()
	if r.file != nil {
		r.check(r.file.close())
	}
	r.file = nil
	return nil
}

// mute makes Span drop spans, or queue them again.
func (r *Recorder) mute(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.muted = on
}

// nanos returns the nanoseconds since 1970 of a time, by the process's clock as it was when the
// recorder was made.
func (r *Recorder) nanos(t time.Time) int64 { return r.begun.UnixNano() + int64(t.Sub(r.begun)) }

// work writes the queued spans periodically, or earlier if many are queued.
func (r *Recorder) work() {
	tick := time.NewTicker(flushEach)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-r.hurry:
		case <-r.done:
			return
		}
		r.flush()
	}
}

// flush writes the queued spans.
func (r *Recorder) flush() {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.mu.Lock()
	spans, lost := r.queued, r.lost
	r.queued, r.lost = r.spare[:0], 0
	r.mu.Unlock()
	if r.file != nil {
		r.check(r.write(spans, lost))
	}
	clear(spans) // drop references to names
	r.spare = spans
}

func (r *Recorder) write(spans []collective.Span, lost int) error {
	for i := range spans {
		if err := r.file.span(r.nanos(spans[i].Start), &spans[i]); err != nil {
			return err
		}
	}
	if lost > 0 {
		r.file.lost(r.nanos(time.Now()), lost)
	}
	return r.file.flush()
}

// check gives up the file after an error. The caller holds writing.
func (r *Recorder) check(err error) {
	if err == nil {
		return
	}
	if r.cfg.Log != nil {
		r.cfg.Log.WithError(safefile.Explain(err)).Warn("the timeline is not written until the next world; training goes on")
	}
	if r.file != nil {
		_ = r.file.file.Close() // writing has failed already
	}
	r.file = nil
}
