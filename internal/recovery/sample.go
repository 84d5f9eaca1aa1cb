package main

import (
	"maps"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/e2e"
	"github.com/hvdrun/hvdrun/internal/trainee/diary"
)

// sample is one disturbance. Its times count from at.
type sample struct {
	at         time.Time
	generation uint64 // of the world that was disturbed
	rank, pid  int    // of the worker that was killed

	// What was seen on the way, 0 where it was not: by the driver, and last by all workers.
	found   time.Duration // the driver has the new list of hosts
	started time.Duration // the last newcomer's process is there
	ready   time.Duration // the last newcomer waits for the next world
	exited  time.Duration // the driver knows of the dead worker's exit
	told    time.Duration // the driver tells the workers
	heard   time.Duration // Commit has returned a HostsUpdatedError in all old workers
	left    time.Duration // the first worker has come for a new world
	world   time.Duration // the new world is published
	entered time.Duration // all of its workers have connected and synchronised
	stepped time.Duration // all have completed a step

	pause time.Duration // growth: longest between two steps of an old worker, less a median step
	still time.Duration // growth: longest that an old worker's training function was left, from its last step to the next world
}

// observe notes when the driver's events happened, up to the next world.
func (s *sample) observe(events []e2e.Event) {
	for _, e := range events {
		at := e.Time.Sub(s.at)
		if at < 0 {
			continue
		}
		switch {
		case e.Name == "hosts_found" && s.found == 0:
			s.found = at
		case e.Name == "worker_started":
			s.started = at
		case e.Name == "worker_ready":
			s.ready = at
		case e.Name == "worker_exited" && e.PID == s.pid:
			s.exited = at
		case e.Name == "hosts_updated" && s.told == 0:
			s.told = at
		case e.Name == "reset" && s.left == 0:
			s.left = at
		case e.Name == "world_published":
			s.world = at
			return
		}
	}
}

// next returns when the last of the workers in the first world after the disturbance entered it and
// completed a step, and when the first of them did.
func (s *sample) next(lines []diary.Line) (entered, stepped, firstStep time.Duration) {
	generation := uint64(0)
	ranks := make(map[int]bool)
	for _, l := range lines {
		at := time.Duration(l.Time - s.at.UnixNano())
		if l.Generation <= s.generation || at < 0 {
			continue
		}
		if generation == 0 || l.Generation < generation {
			generation = l.Generation
		}
		switch {
		case l.Generation != generation:
		case l.Event == diary.Enter:
			entered = max(entered, at)
		case l.Event == diary.Step && !ranks[l.Rank]:
			ranks[l.Rank] = true
			stepped = max(stepped, at)
			if firstStep == 0 || at < firstStep {
				firstStep = at
			}
		}
	}
	return entered, stepped, firstStep
}

// death fills in the recovery from a kill.
func (s *sample) death(res e2e.Result) {
	s.observe(res.Events)
	s.entered, s.stepped, _ = s.next(res.Lines)
}

// growth fills in the way into a larger world.
func (s *sample) growth(res e2e.Result) {
	s.observe(res.Events)
	s.entered, _, s.stepped = s.next(res.Lines)

	from, to := s.at.UnixNano(), s.at.Add(s.stepped).UnixNano()
	last := make(map[int]int64) // time of the last step by process, of old workers
	var gaps e2e.Spread
	longest := make(map[int]time.Duration)
	ended := make(map[int]bool)
	for _, l := range res.Lines {
		if at, known := last[l.PID]; known && l.Event == diary.Enter && l.Generation == s.generation+1 {
			s.still = max(s.still, time.Duration(l.Time-at))
		}
		if l.Event != diary.Step {
			continue
		}
		before, known := last[l.PID]
		if l.Generation <= s.generation || known {
			last[l.PID] = l.Time
		}
		if !known || ended[l.PID] || l.Time < from {
			if known && l.Generation == s.generation {
				gaps = append(gaps, time.Duration(l.Time-before))
			}
			continue
		}
		longest[l.PID] = max(longest[l.PID], time.Duration(l.Time-before))
		ended[l.PID] = l.Time >= to && l.Generation > s.generation
	}
	s.pause = slices.Max(append(slices.Collect(maps.Values(longest)), 0)) - gaps.Quantile(0.5)
}

// hear returns when the last of the workers of the disturbed world heard of the change.
func (s *sample) hear(lines []diary.Line) (heard time.Duration) {
	for _, l := range lines {
		if l.Generation == s.generation && l.Outcome == diary.Updated {
			heard = max(heard, time.Duration(l.Time-s.at.UnixNano()))
		}
	}
	return heard
}
