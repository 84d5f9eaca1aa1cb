package driver

import (
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
)

// A worker's heartbeat reports what no other worker can check: for how long the worker has waited,
// and in which operation. The driver trusts it only as far as its own clock and the other workers
// confirm it, so that a false heartbeat cannot make the driver stop other workers.

// beatSlack is the time by which a wait that a worker reports may exceed the time seen by the
// driver, because the worker's clock and the arrival of its heartbeats are not exact.
const beatSlack = time.Second

// trial is the evidence from the heartbeats of one worker after another worker has reported done.
type trial struct {
	untrue  int    // number of heartbeats that imply that its training continues
	commits uint64 // in the last of them, if the worker does not report Trained
	told    bool
}

// doneWatch identifies the generation in which a worker has reported done.
type doneWatch struct {
	doneIn   uint64 // 0: none
	doneFrom time.Time
}

// hearLanes records the earliest time at which the worker can have entered each operation of a
// heartbeat, and limits the waits in the heartbeat to the time since then.
func (s *stalls) hearLanes(now time.Time, w *beating, b *line.Beat) {
	before := w.at // an operation may have begun just after the last heartbeat
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

// still returns for how long the member has made no progress in a lane, as far as the driver knows.
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

// Heartbeats that arrive just after another worker has reported done may have been sent before
// that. beatTakes is the longest time that a heartbeat may be in flight. Of two heartbeats that
// arrive later than that, the second was certainly made after the report.
const (
	beatsToRefute = 2
	beatTakes     = time.Second
)

// watchDone starts to look for members that train although a worker has reported done.
func (s *stalls) watchDone(now time.Time, generation uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doneWatch = doneWatch{generation, now}
	for _, w := range s.workers {
		w.untrue, w.told = 0, false
	}
}

// hearTrained counts the heartbeats that imply that the worker still trains. A heartbeat need not
// say whether it does; then increasing commit numbers show it.
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

// refutals returns inputs for the members that have been found to train since a worker reported
// done.
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
