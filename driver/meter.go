package driver

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
)

// Measures holds the numbers of a job at one moment.
type Measures = job.Measures

// Meter measures a job. Set its fields before Run or Resume. A meter serves one such call. The zero
// Meter is ready for use.
type Meter struct {
	// Delivered is called with the time that a worker took to acknowledge a notification, and
	// Synced with the time that a sync of the journal to disk took. They are called concurrently
	// and must not block. Nil: not called.
	Delivered, Synced func(time.Duration)

	loop atomic.Pointer[loop]
}

// ErrNotRunning is returned by Meter.Read if no job runs.
var ErrNotRunning = errors.New("driver: no job runs")

// Read returns the current numbers. It may be called at any time, and blocks until the loop is
// between two events, or until ctx ends.
func (m *Meter) Read(ctx context.Context) (Measures, error) {
	l := m.loop.Load()
	if l == nil {
		return Measures{}, ErrNotRunning
	}
	var now Measures
	err := l.ask(ctx, func() { now = l.measure() })
	if errors.Is(err, errEnded) {
		err = ErrNotRunning
	}
	return now, err
}

// delivered returns the function that the pusher calls when a worker has acknowledged an update;
// nil: none.
func (l *loop) delivered() func(time.Duration) {
	if l.cfg.Meter == nil {
		return nil
	}
	return l.cfg.Meter.Delivered
}

// measure returns the current numbers. Only the loop's goroutine calls it.
func (l *loop) measure() Measures {
	now := l.clock.now()
	m := Measures{
		Status: l.m.Status(now, nil), Resets: l.m.ResetsBy(),
		Discovery: job.Discovery{Stale: l.source.stale()},
		Journal:   l.writer.measure(),
		Workers:   l.stalls.measure(now),
	}
	m.Status.Job, m.Status.Begun = l.cfg.RunID, time.Unix(0, l.job.Begun).UTC()
	m.Status.Journal = l.writer.state()
	slots := l.m.World().Slots
	for r := range m.Workers.Ranks {
		if r < len(slots) {
			m.Workers.Ranks[r].Host, m.Workers.Ranks[r].Slot = slots[r].Host, slots[r].Index
		}
	}
	return m
}

// sourceAge records the age of the list of hosts. It is safe for concurrent use.
type sourceAge struct {
	stood atomic.Int64 // when the source last confirmed its list, in nanoseconds since 1970; 0: the list is current
}

// fails records a failure of the source. age is the time since the source last confirmed its list.
func (s *sourceAge) fails(age time.Duration) { s.stood.Store(time.Now().Add(-age).UnixNano()) }

// stands records that the source confirms its list.
func (s *sourceAge) stands() { s.stood.Store(0) }

// stale returns how long ago the source last confirmed its list; 0: the list is current.
func (s *sourceAge) stale() time.Duration {
	at := s.stood.Load()
	if at == 0 {
		return 0
	}
	return max(0, time.Since(time.Unix(0, at)))
}

func (w *journalWriter) measure() job.Journal {
	m := job.Journal{Behind: w.mirror != nil && w.mirror.State() != ""}
	if w.k != nil {
		m.Bytes, m.Failures, m.Behind = w.k.Size(), w.k.Failures(), m.Behind || w.k.Err() != nil
	}
	return m
}

// synced syncs the journal to disk and measures the time that this takes.
func (w *journalWriter) synced() error {
	begun := time.Now()
	err := w.k.Sync(begun)
	if w.meter != nil && w.meter.Synced != nil {
		w.meter.Synced(time.Since(begun))
	}
	return err
}

// work is the work of workers according to their counters. None of its numbers ever decreases.
type work struct {
	commits, commitBytes uint64
	commitTime           time.Duration
	operations           map[operationKind]operationSum
}

type (
	operationKind struct {
		kind, backend string
		sizeClass     int
	}
	operationSum struct {
		count, bytes uint64
		duration     time.Duration
	}
)

// hear updates w from a worker's counters. It ignores numbers that have decreased.
func (w *work) hear(c *line.Counters) {
	if c == nil {
		return
	}
	w.commits, w.commitBytes = max(w.commits, c.Commits), max(w.commitBytes, c.CommitBytes)
	w.commitTime = max(w.commitTime, c.CommitTime)
	if w.operations == nil {
		w.operations = make(map[operationKind]operationSum, len(c.Operations))
	}
	for _, o := range c.Operations {
		key := operationKind{o.Kind, o.Backend, o.SizeClass}
		was, known := w.operations[key]
		if !known && len(w.operations) >= line.MaxOperations {
			continue // the worker reports too many kinds
		}
		w.operations[key] = operationSum{max(was.count, o.Count), max(was.bytes, o.Bytes), max(was.duration, o.Duration)}
	}
}

// add adds the work of another worker, with at most mostKinds kinds of operations.
func (w *work) add(o *work) {
	w.commits, w.commitBytes, w.commitTime = w.commits+o.commits, w.commitBytes+o.commitBytes, w.commitTime+o.commitTime
	if w.operations == nil {
		w.operations = make(map[operationKind]operationSum, len(o.operations))
	}
	for key, s := range o.operations {
		was, known := w.operations[key]
		if !known && len(w.operations) >= mostKinds {
			key = otherKind
			was = w.operations[key]
		}
		w.operations[key] = operationSum{was.count + s.count, was.bytes + s.bytes, was.duration + s.duration}
	}
}

// mostKinds bounds the kinds of operations of a job: workers of this version have 13 kinds, ten
// size classes and four backends, of which a job uses a few dozen combinations. Kinds beyond the
// bound are counted as otherKind.
const mostKinds = 600

var otherKind = operationKind{kind: "other", backend: "other"}

// inOperations returns the time spent in collective operations.
func (w *work) inOperations() (all time.Duration) {
	for _, s := range w.operations {
		all += s.duration
	}
	return all
}

// measure returns what the workers have reported.
func (s *stalls) measure(now time.Time) job.Workers {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := work{operations: maps.Clone(s.past.operations), commits: s.past.commits, commitBytes: s.past.commitBytes, commitTime: s.past.commitTime}
	for _, w := range s.workers {
		all.add(&w.work)
	}
	m := job.Workers{
		Beats: s.beats, Commits: all.commits, CommitTime: all.commitTime, CommitBytes: all.commitBytes,
		Operations: make([]job.Operations, 0, len(all.operations)), Ranks: make([]job.Rank, len(s.world)),
	}
	for key, o := range all.operations {
		m.Operations = append(m.Operations, job.Operations{
			Kind: key.kind, Backend: key.backend, SizeClass: key.sizeClass, Count: o.count, Duration: o.duration, Bytes: o.bytes,
		})
	}
	slices.SortFunc(m.Operations, func(a, b job.Operations) int {
		if c := strings.Compare(a.Kind+" "+a.Backend, b.Kind+" "+b.Backend); c != 0 {
			return c
		}
		return a.SizeClass - b.SizeClass
	})
	for r, member := range s.world {
		w := s.workers[member.id]
		if w == nil || w.at.IsZero() {
			continue
		}
		m.Ranks[r] = job.Rank{Heard: true, Age: max(0, now.Sub(w.at)), InOperations: w.work.inOperations(), Straggler: s.stragglers.score(now, member.id), Usage: w.usage(), Figures: w.figures()}
		if w.beat.Generation == s.number {
			m.Ranks[r].Commits = w.beat.Commits
		}
	}
	return m
}
