package main

import (
	"fmt"
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
	pid        int    // of the worker that was killed

	// Times of intermediate events, from the driver's events or of the last of all workers; 0 if
	// not seen.
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

	pause  time.Duration // growth: longest time between two steps of an old worker, minus a median step
	usual  time.Duration // growth: median step of the old workers before
	step   time.Duration // growth: median step of the old workers while newcomers prepare
	beside time.Duration // growth: like pause, but only within the old world
	across time.Duration // growth: like pause, but only from one world to the next
	still  time.Duration // growth: longest time of an old worker outside its training function, from its last step to the next world
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

// next returns when the last worker of the first world after the disturbance had entered it, when
// the last and when the first had completed a step there.
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
func (s *sample) death(j *job) {
	s.observe(j.Events)
	s.entered, s.stepped, _ = s.next(j.Lines)
}

// growth computes the transition to a larger world.
func (s *sample) growth(j *job) {
	s.observe(j.Events)
	s.entered, _, s.stepped = s.next(j.Lines)

	from, to := s.at.UnixNano(), s.at.Add(s.stepped).UnixNano()
	last := make(map[int]int64) // time of the last step of each old worker
	var gaps, meanwhile report.Spread
	longest := make(map[int]time.Duration)
	ended, crossed := make(map[int]bool), make(map[int]bool)
	for _, l := range j.Lines {
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
		gap := time.Duration(l.Time - before)
		longest[l.PID] = max(longest[l.PID], gap)
		if l.Generation == s.generation {
			s.beside = max(s.beside, gap)
		} else if !crossed[l.PID] {
			crossed[l.PID], s.across = true, max(s.across, gap)
		}
		ended[l.PID] = l.Time >= to && l.Generation > s.generation
	}
	s.usual, s.step = gaps.Quantile(0.5), meanwhile.Quantile(0.5)
	s.pause = slices.Max(append(slices.Collect(maps.Values(longest)), 0)) - s.usual
	s.beside, s.across = max(0, s.beside-s.usual), max(0, s.across-s.usual)
}

// hear computes when the last worker of the disturbed world received the update.
func (s *sample) hear(j *job) {
	for _, l := range j.Lines {
		if l.Generation == s.generation && l.Outcome == steplog.Updated {
			s.heard = max(s.heard, time.Duration(l.Time-s.at.UnixNano()))
		}
	}
}

// rows collects each of the times from all samples that have it. The last row is the whole time,
// the others its parts.
func rows(samples []sample, times []stage) (rows []report.Row) {
	for i, at := range times {
		r := report.Row{Name: at.name}
		if i < len(times)-1 {
			r.Name = "  " + r.Name
		}
		for _, x := range samples {
			if d := at.of(x); d != 0 {
				r.Spread = append(r.Spread, d)
			}
		}
		rows = append(rows, r)
	}
	return rows
}

// stage is one of the times of a sample.
type stage struct {
	name string
	of   func(sample) time.Duration
}

func (t *trial) tellDeaths(samples []sample, tasks bool) {
	title := "From SIGKILL of one worker (a killer reads the clock right before kill(2)) to"
	if tasks {
		title = fmt.Sprintf("The same while spares run tasks of %v", t.Beside)
	}
	t.timed(title, rows(samples, []stage{
		{"driver knows of the death", func(s sample) time.Duration { return s.exited }},
		{"first survivor has come, or exit", func(s sample) time.Duration { return s.left }},
		{"new world published", func(s sample) time.Duration { return s.world }},
		{"all connected and synchronised", func(s sample) time.Duration { return s.entered }},
		{"next step completed by all survivors", func(s sample) time.Duration { return s.stepped }},
	})...).targets = []report.Target{
		{Name: "median", Quantile: 0.5, Limit: 25 * time.Millisecond},
		{Name: "p99", Quantile: 0.99, Limit: 150 * time.Millisecond},
	}
}

func (t *trial) tellGrowths(from int, samples []sample) {
	title := fmt.Sprintf("Growth from %d to %d workers: from the host's appearance in the script's output to", from, t.Workers)
	t.timed(title, rows(samples, []stage{
		{"driver has the new list", func(s sample) time.Duration { return s.found }},
		{"newcomers started", func(s sample) time.Duration { return s.started }},
		{"new workers have joined", func(s sample) time.Duration { return s.ready }},
		{"workers notified", func(s sample) time.Duration { return s.told }},
		{"first worker has come", func(s sample) time.Duration { return s.left }},
		{"new world published", func(s sample) time.Duration { return s.world }},
		{"all connected and synchronised", func(s sample) time.Duration { return s.entered }},
		{"first step in the larger world", func(s sample) time.Duration { return s.stepped }},
		{"pause outside of training", func(s sample) time.Duration { return s.still }},
		{"median step before", func(s sample) time.Duration { return s.usual }},
		{"median step while newcomers prepare", func(s sample) time.Duration { return s.step }},
		{"longest step before, beyond a median", func(s sample) time.Duration { return s.beside }},
		{"step into the world, beyond a median", func(s sample) time.Duration { return s.across }},
		{"pause of the old workers", func(s sample) time.Duration { return s.pause }},
	})...).targets = []report.Target{{Name: "median", Quantile: 0.5, Limit: 20 * time.Millisecond}}
}

func (t *trial) tellArrivals(samples []sample) {
	title := fmt.Sprintf("From the start of another agent, to %d workers over gossip, to", t.Workers)
	t.timed(title, rows(samples, []stage{
		{"driver has the new list", func(s sample) time.Duration { return s.found }},
		{"newcomer started", func(s sample) time.Duration { return s.started }},
		{"new worker has joined, workers notified", func(s sample) time.Duration { return s.told }},
		{"first step in the larger world", func(s sample) time.Duration { return s.stepped }},
		{"Commit has told all old workers", func(s sample) time.Duration { return s.heard }},
	})...).targets = []report.Target{{Name: "median", Quantile: 0.5, Limit: time.Second}}
}
