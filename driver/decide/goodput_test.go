package decide

import (
	"math"
	"testing"

	"github.com/hvdrun/hvdrun/job"
)

// TestGoodputOfRandomJobs: the parts add up whatever happens to random jobs, also across drivers
// that die.
func TestGoodputOfRandomJobs(t *testing.T) {
	seen := map[job.Part]bool{}
	for seed := range rounds(120) {
		s := newSim(t, 7_000+seed)
		begun := s.now
		s.m.Begin(begun)
		s.stepped = func() {
			g := s.m.Goodput(s.now)
			rest := s.now.Sub(begun).Seconds()
			for _, p := range g.Parts {
				rest -= p.Seconds
				seen[p.Part] = seen[p.Part] || p.Seconds > 0
			}
			if math.Abs(rest) > 1e-6*max(1, g.Seconds) {
				t.Fatalf("seed %d: %v s are missing in %+v", 7_000+seed, rest, g)
			}
		}
		for range 120 {
			s.trouble()
		}
		s.calm()
		if t.Failed() {
			t.Fatalf("seed %d:\n%s", 7_000+seed, s.tail())
		}
	}
	for _, p := range job.Parts() {
		if !seen[p] {
			t.Errorf("no job has spent time on %s", p)
		}
	}
}
