package driver

import (
	"math"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
)

const (
	// mostCompared is the largest number of operations compared at a time. Each rank sends at most
	// 64 of them with a heartbeat, so an operation is kept for several heartbeats.
	mostCompared = 256
	// leastApart is the smallest difference between the longest and the shortest wait in an
	// operation that counts. Smaller differences arise while the ranks leave the operation.
	leastApart = time.Millisecond
	// forgetsHalf is the time after which the weight of an operation has halved.
	forgetsHalf = time.Minute
	// leastWeight is the smallest total weight of operations for which a score is known.
	leastWeight = 0.5
)

// stragglers determines which rank arrives late at operations, from the time that each rank spent
// in them. Ranks leave an operation at about the same time, so the rank with the shortest time
// arrived last. No clocks are compared. Callers serialise calls.
type stragglers struct {
	world  []string               // incarnations by rank
	ranks  map[string]int         // of the world
	open   map[uint64]*comparison // operations that only some ranks have reported
	order  []uint64               // keys of open, oldest first
	scores map[string]*lateness   // by incarnation
}

// comparison is an operation with the times that are known so far.
type comparison struct {
	waits []time.Duration // by rank; negative: unknown
	known int
}

// lateness is the score of one worker, as sums with decaying weights.
type lateness struct {
	at                   time.Time
	operations, last, by float64
}

func newStragglers() stragglers {
	return stragglers{open: map[uint64]*comparison{}, scores: map[string]*lateness{}}
}

// enter begins a world, whose operations are unrelated to those of the last one. Workers keep their
// scores.
func (s *stragglers) enter(members []string) {
	s.world, s.order = members, nil
	s.ranks = make(map[string]int, len(members))
	for r, id := range members {
		s.ranks[id] = r
	}
	clear(s.open)
}

func (s *stragglers) forget(id string) { delete(s.scores, id) }

// hear records the waits from a heartbeat of a worker in the current world.
func (s *stragglers) hear(now time.Time, id string, waits []line.Wait) {
	rank, member := s.ranks[id]
	if !member || len(s.world) < 2 {
		return
	}
	for _, w := range waits {
		c := s.open[w.Operation]
		if c == nil {
			c = s.begin(w.Operation)
		}
		if c.waits[rank] >= 0 {
			continue // the worker reports the same operation twice
		}
		c.waits[rank] = w.For
		if c.known++; c.known == len(s.world) {
			s.count(now, c.waits)
			delete(s.open, w.Operation)
		}
	}
}

// begin returns a new comparison. If there are too many, it drops the oldest.
func (s *stragglers) begin(operation uint64) *comparison {
	for len(s.open) >= mostCompared || len(s.order) >= 4*mostCompared {
		delete(s.open, s.order[0])
		s.order = s.order[1:]
	}
	c := &comparison{waits: make([]time.Duration, len(s.world))}
	for r := range c.waits {
		c.waits[r] = -1
	}
	s.open[operation] = c
	s.order = append(s.order, operation)
	return c
}

// count adds an operation to the scores of all ranks.
func (s *stragglers) count(now time.Time, waits []time.Duration) {
	sorted := slices.Sorted(slices.Values(waits))
	shortest, median := sorted[0], sorted[len(sorted)/2]
	if sorted[len(sorted)-1]-shortest < leastApart {
		return
	}
	for r, wait := range waits {
		l := s.scores[s.world[r]]
		if l == nil {
			l = &lateness{at: now}
			s.scores[s.world[r]] = l
		}
		l.decay(now)
		l.operations++
		if l.by += max(0, median-wait).Seconds(); wait == shortest {
			l.last++
		}
	}
}

// decay reduces the weights according to the time that has passed.
func (l *lateness) decay(now time.Time) {
	passed := now.Sub(l.at)
	if passed <= 0 {
		return
	}
	f := math.Exp2(-float64(passed) / float64(forgetsHalf))
	l.at, l.operations, l.last, l.by = now, l.operations*f, l.last*f, l.by*f
}

// score returns the score of a worker; nil: unknown.
func (s *stragglers) score(now time.Time, id string) *job.Straggler {
	l := s.scores[id]
	if l == nil {
		return nil
	}
	l.decay(now)
	if l.operations < leastWeight {
		return nil
	}
	return &job.Straggler{Last: l.last / l.operations, By: l.by / l.operations, Operations: int(math.Round(l.operations))}
}
