// Package timeline records what collective operations do, as a trace that Perfetto and
// chrome://tracing open.
//
// Each rank has a file of its own, in Chrome's JSON array format, an event a line, without the
// array's end, so that a process that dies leaves a valid file. Times are microseconds since 1970
// by the clock of rank 0. Merge makes one file of those of all ranks.
package timeline

import (
	"context"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
)

const (
	defaultBytes = 256 << 20              // of the files of one rank
	flushEach    = 250 * time.Millisecond // spans wait for that long
	maxQueued    = 1 << 16                // spans; more than that in the time above are lost
)

// Config configures a Recorder.
type Config struct {
	// Filename is what files are named after: rank 3 writes Filename.rank.3.json, without a .json
	// that it ends in, and moves that to Filename.rank.3.old.json when it has grown.
	Filename string
	// RunID names the job. Files of another job are overwritten, those of the same job are appended
	// to.
	RunID string
	// Shared lets other users read the files.
	Shared bool
	// MaxBytes bounds the files of a rank together. 0: 256 MiB.
	MaxBytes int64
	// Log takes one message in each world in which files cannot be written. Nil: nothing is logged.
	Log logrus.FieldLogger
}

// Recorder is a collective.Timeline that writes to files. It never fails an operation and never
// waits for a disk: spans that come faster than they are written are counted and lost, and after a
// failure to write a file nothing is written until the next world.
type Recorder struct {
	cfg   Config
	begun time.Time // the origin of all times, so that setting the clock does not matter

	mu      sync.Mutex
	queued  []collective.Span
	lost    int
	muted   bool // while the clocks are compared
	started bool
	closed  bool

	writing sync.Mutex // held while the fields below are used
	file    *rankFile  // nil before the first world, and after a failure
	spare   []collective.Span

	hurry   chan struct{}
	done    chan struct{}
	running sync.WaitGroup
}

// New returns a recorder that has opened nothing yet.
func New(cfg Config) *Recorder {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = defaultBytes
	}
	return &Recorder{cfg: cfg, begun: time.Now(), hurry: make(chan struct{}, 1), done: make(chan struct{})}
}

// Span takes a span. It costs little more than a lock.
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
			select {
			case r.hurry <- struct{}{}:
			default:
			}
		}
	}
}

// Enter begins a world: the ranks of the group compare their clocks, and from now on spans are
// written to the file of this rank. Every rank of the group must call it, before any other
// operation. Its errors are those of the group.
func (r *Recorder) Enter(ctx context.Context, g *collective.Group) error {
	r.flush() // to the file of the rank that this was
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

// Close writes what has not been written and closes the file. It returns nil: a failure to write
// has been logged.
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

func (r *Recorder) mute(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.muted = on
}

// nanos is the time since 1970 by this process's clock as it was at the beginning.
func (r *Recorder) nanos(t time.Time) int64 { return r.begun.UnixNano() + int64(t.Sub(r.begun)) }

// work writes the spans periodically.
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
	clear(spans) // of names
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
		r.cfg.Log.WithError(err).Warn("the timeline is not written until the next world; training goes on")
	}
	if r.file != nil {
		_ = r.file.file.Close() // there is nothing to save any more
	}
	r.file = nil
}
