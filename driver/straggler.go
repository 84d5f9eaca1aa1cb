package driver

import (
	"math"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
)

const (
	// mostCompared is the largest number of operations that are compared at a time. Each rank sends
	// 64 of them with a heartbeat at most, so an operation stays for several heartbeats.
	mostCompared = 256
	// leastApart is the difference between the longest and the shortest wait of an operation that
	// counts: less is what it takes the ranks to leave it.
	leastApart = time.Millisecond
	// forgetsHalf is the time after which an operation counts half as much.
	forgetsHalf = time.Minute
	// leastWeight is that of the operations of a score that is known.
	leastWeight = 0.5
)

// stragglers finds out which rank comes late to operations, from how long each rank was in them.
// Ranks leave an operation at about the same time, so the rank with the shortest time came last; no
// clock is compared with another. Its caller serialises calls.
type stragglers struct {
	world  []string               // incarnations by rank
	ranks  map[string]int         // of the world
	open   map[uint64]*comparison // operations that some ranks have told
	order  []uint64               // of open, oldest first
	scores map[string]*lateness   // by incarnation
}

// comparison is an operation with the times that are known.
type comparison struct {
	waits []time.Duration // by rank; negative: unknown
	known int
}

// lateness is the score of one worker: sums with weights that decay.
type lateness struct {
	at                   time.Time
	operations, last, by float64
}

func newStragglers() stragglers {
	return stragglers{open: map[uint64]*comparison{}, scores: map[string]*lateness{}}
}

// enter begins a world, whose operations have nothing to do with those of the last. Workers keep
// their scores.
func (s *stragglers) enter(members []string) {
	s.world, s.order = members, nil
	s.ranks = make(map[string]int, len(members))
	for r, id := range members {
		s.ranks[id] = r
	}
	clear(s.open)
}

func (s *stragglers) forget(id string) { delete(s.scores, id) }

// hear takes the waits of a heartbeat from the current world.
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
			continue // it says the same operation twice
		}
		c.waits[rank] = w.For
		if c.known++; c.known == len(s.world) {
			s.count(now, c.waits)
			delete(s.open, w.Operation)
		}
	}
}

// begin returns a new comparison; if there are too many, the oldest is given up.
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

// decay reduces the weights by the time that has passed.
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
