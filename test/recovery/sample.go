package main

import (
	"maps"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// sample is a disturbance. Its times are relative to at.
type sample struct {
	at         time.Time
	generation uint64 // of the world that was disturbed
	rank, pid  int    // of the worker that was killed

	// Times of intermediate events, 0 if not seen: of the driver, and of the last of all workers.
	found   time.Duration // the driver has the new list of hosts
	started time.Duration // the last new worker's process is started
	ready   time.Duration // the last new worker waits for the next world
	exited  time.Duration // the driver has reported the dead worker's exit, or that it is being killed
	told    time.Duration // the driver notifies the workers
	heard   time.Duration // Commit has returned a HostsUpdatedError in all old workers
	left    time.Duration // the first worker has joined
	world   time.Duration // the new world is published
	entered time.Duration // all of its workers have connected and synchronised
	stepped time.Duration // all have completed a step

	pause time.Duration // growth: longest between two steps of an old worker, less a median step
	usual time.Duration // growth: median step of the old workers before
	step  time.Duration // growth: median step of the old workers while newcomers prepare
	still time.Duration // growth: longest time of an old worker outside its training function, from its last step to the next world
}

// observe records the times of the driver's events up to the next world.
func (s *sample) observe(events []follow.Event) {
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
		case (e.Name == "worker_exited" || e.Name == "worker_dying") && e.PID == s.pid && s.exited == 0:
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

// next returns when the last and when the first worker of the first world after the disturbance had
// entered it and completed a step.
func (s *sample) next(lines []steplog.Line) (entered, stepped, firstStep time.Duration) {
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
		case l.Event == steplog.Enter:
			entered = max(entered, at)
		case l.Event == steplog.Step && !ranks[l.Rank]:
			ranks[l.Rank] = true
			stepped = max(stepped, at)
			if firstStep == 0 || at < firstStep {
				firstStep = at
			}
		}
	}
	return entered, stepped, firstStep
}

// death computes the recovery from a kill.
func (s *sample) death(res follow.Result) {
	s.observe(res.Events)
	s.entered, s.stepped, _ = s.next(res.Lines)
}

// growth computes the transition to a larger world.
func (s *sample) growth(res follow.Result) {
	s.observe(res.Events)
	s.entered, _, s.stepped = s.next(res.Lines)

	from, to := s.at.UnixNano(), s.at.Add(s.stepped).UnixNano()
	last := make(map[int]int64) // time of the last step of each old worker
	var gaps, meanwhile report.Spread
	longest := make(map[int]time.Duration)
	ended := make(map[int]bool)
	for _, l := range res.Lines {
		if at, known := last[l.PID]; known && l.Event == steplog.Enter && l.Generation == s.generation+1 {
			s.still = max(s.still, time.Duration(l.Time-at))
		}
		if l.Event != steplog.Step {
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
		if l.Generation == s.generation && l.Time < s.at.Add(s.told).UnixNano() {
			meanwhile = append(meanwhile, time.Duration(l.Time-before))
		}
		longest[l.PID] = max(longest[l.PID], time.Duration(l.Time-before))
		ended[l.PID] = l.Time >= to && l.Generation > s.generation
	}
	s.usual, s.step = gaps.Quantile(0.5), meanwhile.Quantile(0.5)
	s.pause = slices.Max(append(slices.Collect(maps.Values(longest)), 0)) - gaps.Quantile(0.5)
}

// hear returns when the last worker of the disturbed world received the update.
func (s *sample) hear(lines []steplog.Line) (heard time.Duration) {
	for _, l := range lines {
		if l.Generation == s.generation && l.Outcome == steplog.Updated {
			heard = max(heard, time.Duration(l.Time-s.at.UnixNano()))
		}
	}
	return heard
}
