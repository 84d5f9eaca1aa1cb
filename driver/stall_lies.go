package driver

import (
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
)

// A worker's heartbeat says what no other can check: for how long it has waited, and for which
// operation. It counts only as far as the driver's own clock and the other workers bear it out, so
// that a false one does not make the driver stop others.

// beatSlack is how much longer than seen by the driver a worker may have waited: its clock and the
// arrival of its heartbeats are not exact.
const beatSlack = time.Second

// trial is what the heartbeats of one worker say after another has reported done.
type trial struct {
	untrue  int    // heartbeats from which it follows that its training goes on
	commits uint64 // by the first of them, of a worker that does not say whether it has trained
	told    bool
}

// doneWatch is the generation in which a worker has reported done.
type doneWatch struct {
	doneIn   uint64 // 0: none
	doneFrom time.Time
}

// hearLanes notes since when the worker can be in the operations of a heartbeat, and limits the
// waits that it tells to that.
func (s *stalls) hearLanes(now time.Time, w *beating, b *line.Beat) {
	before := w.at // it may have begun just after its last heartbeat
	if before.Before(w.enteredAt) {
		before = w.enteredAt
	}
	if before.IsZero() || w.beat.Generation != b.Generation {
		w.lanes = nil
	}
	if before.IsZero() {
		before = now
	}
	b.Lanes = slices.Clone(b.Lanes)
	lanes := make(map[uint64]laneFrom, len(b.Lanes))
	for i := range b.Lanes {
		l := &b.Lanes[i]
		from, known := w.lanes[l.ID]
		if !known || from.operation != l.Operation {
			from = laneFrom{operation: l.Operation, at: before}
		}
		switch {
		case !l.Waiting:
			from.waitFrom = time.Time{}
		case from.waitFrom.IsZero():
			from.waitFrom = before
		}
		since := from.at
		if l.Waiting {
			since = from.waitFrom
		}
		l.For = min(l.For, now.Sub(since)+beatSlack)
		lanes[l.ID] = from
	}
	w.lanes = lanes
}

// still returns for how long the member has not moved on in a lane, as far as the driver knows.
func (s *stalls) still(now time.Time, m *member, lane uint64) time.Duration {
	w := s.workers[m.id]
	if w == nil {
		return 0
	}
	if from, known := w.lanes[lane]; known && w.beat.Generation == s.number {
		return now.Sub(from.at) + beatSlack
	}
	return now.Sub(w.enteredAt) + beatSlack
}

// Heartbeats that arrive when another worker has just reported done may have been made before. If
// two arrive later than a heartbeat may take, the second was made after the first had arrived.
const (
	beatsToRefute = 2
	beatTakes     = time.Second
)

// watchDone begins to look for members that train although a worker has reported done.
func (s *stalls) watchDone(now time.Time, generation uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doneWatch = doneWatch{generation, now}
	for _, w := range s.workers {
		w.untrue, w.told = 0, false
	}
}

// hearTrained counts the heartbeats from which it follows that the worker trains. One of an older
// version does not say so: its commits go on.
func (s *stalls) hearTrained(now time.Time, w *beating) {
	b := &w.beat
	if s.doneIn == 0 || b.Generation != s.doneIn || now.Before(s.doneFrom.Add(beatTakes)) {
		return
	}
	switch {
	case b.Trained != nil && *b.Trained:
		w.untrue = 0
	case b.Trained != nil:
		w.untrue++
	case w.untrue == 0 || b.Commits > w.commits:
		w.commits = b.Commits
		w.untrue++
	}
}

// refutals returns the members that have been found to train since a worker reported done.
func (s *stalls) refutals(now time.Time) (changes []decide.Input) {
	if s.doneIn == 0 || s.doneIn != s.number {
		return nil
	}
	for _, m := range s.world {
		if w := s.workers[m.id]; w != nil && !w.told && w.untrue >= beatsToRefute {
			w.told = true
			changes = append(changes, decide.WorkerTrains{ID: m.id, Generation: s.doneIn})
		}
	}
	return changes
}
