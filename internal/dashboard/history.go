package dashboard

import (
	"math"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// World is a generation in a job's history.
type World struct {
	Generation uint64    `json:"generation"`
	Time       time.Time `json:"time"` // when it was published
	Size       int       `json:"size"`
	// Kind and Why are the reason for it.
	Kind job.Kind `json:"kind"`
	Why  string   `json:"why"`
	// First is the time of its first commit, which has number Commits; zero before that.
	First   time.Time `json:"first,omitzero"`
	Commits uint64    `json:"commits"`
	// Lost is the time in seconds from the end of the world before, or the beginning of the job,
	// until First; 0: unknown so far.
	Lost float64 `json:"lost"`
}

// steps are the upper bounds, in seconds, of the bars of Recoveries. A last bar counts longer ones.
var steps = []float64{0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60}

// Recoveries counts resets by the time until training continued, separately for those after a
// failure or a stall and for all others.
type Recoveries struct {
	Steps   []float64 `json:"steps"`
	Failed  []int     `json:"failed"`
	Planned []int     `json:"planned"`
}

// Point is a point of a curve: of the throughput, in commits per second up to Time, or of a number
// that the program reports. Its JSON is [milliseconds since 1970, rate].
type Point struct {
	Time time.Time
	Rate float64
}

const (
	// maxWorlds and maxPoints bound a history. It drops the oldest worlds; if there are too many
	// points, it merges them in pairs.
	maxWorlds = 400
	maxPoints = 480
	// maxFigures bounds the number of names of reported numbers.
	maxFigures = 16
	// maxWhys bounds the reasons that a World gives for a reset.
	maxWhys = 3
)

// history is the history of a job, from its events and its status at different times. It is a pure
// value of bounded size: it takes the time from its input.
type history struct {
	worlds  []World
	dropped int // number of dropped worlds
	counts  Recoveries
	commits uint64 // at the end of the job; 0: it has not ended, or unknown

	reasons job.Reasons // reasons for the next world

	rates   curve
	figures map[string]*curve // what rank 0 reports, by name
	last    Point             // the last call of look: Rate is the number of commits
	average Point             // beginning of the next point: Rate is the number of commits at Time
}

func newHistory() *history {
	return &history{
		counts:  Recoveries{Steps: steps, Failed: make([]int, len(steps)+1), Planned: make([]int, len(steps)+1)},
		rates:   curve{pause: time.Second},
		figures: map[string]*curve{},
	}
}

// gravity orders the kinds of reasons. The gravest kind names the reset.
func gravity(k job.Kind) int {
	return slices.Index([]job.Kind{"", job.KindStart, job.KindChanged, job.KindShrunk, job.KindGrown, job.KindScaled, job.KindDrained, job.KindDriver,
		job.KindExcluded, job.KindStall, job.KindFailure}, k)
}

// gravest returns the gravest kind of the reasons that have a text, and up to maxWhys of its texts.
func gravest(reasons []job.Reason) (kind job.Kind, why string) {
	n := 0
	for _, r := range reasons {
		switch {
		case r.Text == "":
			continue
		case gravity(r.Kind) > gravity(kind):
			kind, why, n = r.Kind, r.Text, 1
		case r.Kind == kind && n < maxWhys:
			why, n = why+"; "+r.Text, n+1
		}
	}
	return kind, why
}

// add adds the next event.
func (h *history) add(f *job.Entry) {
	switch f.Name {
	case job.WorldPublished:
		h.published(f)
	case job.FirstCommit:
		h.trains(f)
	case job.JobDone:
		h.commits = f.Commits
	}
	h.reasons.Add(*f)
}

func (h *history) published(f *job.Entry) {
	w := World{Generation: f.Generation, Time: f.Time, Size: f.Size}
	if n := len(h.worlds); n > 0 && h.worlds[n-1].Generation >= f.Generation {
		return // already known
	}
	w.Kind, w.Why = gravest(h.reasons.Take())
	switch {
	case len(h.worlds) == 0 && h.dropped == 0 && f.Generation <= 1:
		w.Kind, w.Why = job.KindStart, "the job began"
	case w.Kind == "":
		w.Kind = job.KindOther
	}
	if len(h.worlds) == maxWorlds {
		h.worlds = slices.Delete(h.worlds, 0, 1)
		h.dropped++
	}
	h.worlds = append(h.worlds, w)
}

func (h *history) trains(f *job.Entry) {
	n := len(h.worlds)
	if n == 0 || h.worlds[n-1].Generation != f.Generation || !h.worlds[n-1].First.IsZero() {
		return
	}
	w := &h.worlds[n-1]
	w.First, w.Commits = f.Time, f.Commits
	w.Lost = f.Seconds
	if w.Kind != job.KindStart {
		bars := h.counts.Planned
		if w.Kind == job.KindFailure || w.Kind == job.KindStall {
			bars = h.counts.Failed
		}
		i := 0
		for i < len(steps) && w.Lost > steps[i] {
			i++
		}
		bars[i]++
	}
	if n > 1 && h.last.Time.IsZero() { // without calls of look, take the mean over the world before
		if b := h.worlds[n-2]; !b.First.IsZero() && f.Commits >= b.Commits && f.Time.After(b.First) {
			rate := float64(f.Commits-b.Commits) / f.Time.Sub(b.First).Seconds()
			h.rates.add(Point{b.First, rate})
			h.rates.add(Point{f.Time, rate})
		}
	}
}

// look records the number of commits of a training world, and returns the rate since the last call.
func (h *history) look(at time.Time, commits uint64) (rate float64) {
	before := h.last
	h.last = Point{at, float64(commits)}
	if before.Time.IsZero() || !at.After(before.Time) {
		h.average = h.last
		return 0
	}
	if h.last.Rate < before.Rate { // training has gone back to an older commit
		h.average = h.last
		return 0
	}
	rate = (h.last.Rate - before.Rate) / at.Sub(before.Time).Seconds()
	if d := at.Sub(h.average.Time); d >= h.rates.pause {
		h.rates.add(Point{at, (h.last.Rate - h.average.Rate) / d.Seconds()})
		h.average = h.last
	}
	return rate
}

// report records the figures that rank 0 reports.
func (h *history) report(at time.Time, figures []job.Figure) {
	for _, f := range figures {
		c := h.figures[f.Name]
		switch {
		case math.IsNaN(f.Value) || math.IsInf(f.Value, 0):
			continue
		case c == nil && len(h.figures) >= maxFigures:
			continue
		case c == nil:
			c = &curve{pause: time.Second}
			h.figures[f.Name] = c
		case len(c.points) > 0 && at.Sub(c.points[len(c.points)-1].Time) < c.pause:
			continue
		}
		c.add(Point{at, f.Value})
	}
}

// curve holds a bounded number of points, at least pause apart.
type curve struct {
	points []Point
	pause  time.Duration
}

// add adds a point. If there are too many points, it merges them in pairs and doubles the pause.
func (c *curve) add(p Point) {
	c.points = append(c.points, p)
	if len(c.points) <= maxPoints {
		return
	}
	half := c.points[:0]
	for i := 0; i+1 < len(c.points); i += 2 {
		half = append(half, Point{c.points[i+1].Time, (c.points[i].Rate + c.points[i+1].Rate) / 2})
	}
	c.points, c.pause = half, 2*c.pause
}
