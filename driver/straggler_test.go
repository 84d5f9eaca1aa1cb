package driver

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
)

const ms = time.Millisecond

func lateWorld(n int) *stragglers {
	s := newStragglers()
	s.enter(idsOf(n))
	return &s
}

func idsOf(n int) []string {
	all := make([]string, n)
	for r := range all {
		all[r] = fmt.Sprint("w", r)
	}
	return all
}

// operation makes each rank report how long it was in an operation.
func (s *stragglers) operation(now time.Time, n uint64, waits ...time.Duration) {
	for r, w := range waits {
		s.hear(now, s.world[r], []line.Wait{{Operation: n, For: w}})
	}
}

// TestStraggler: the rank with the shortest wait came last, by as much as the median rank waited
// longer.
func TestStraggler(t *testing.T) {
	s, now := lateWorld(4), time.Unix(1000, 0)
	for n := range uint64(10) {
		late := 1 * ms
		if n%5 == 0 {
			late = 41 * ms // rank 1 is last in the others
		}
		s.operation(now, n, 41*ms, 40*ms-late, late, 41*ms)
	}
	for r, want := range []struct{ last, by float64 }{{0, 0}, {0.2, 0.8*0.002 + 0.2*0.042}, {0.8, 0.8 * 0.040}, {0, 0}} {
		got := s.score(now, fmt.Sprint("w", r))
		if got == nil || math.Abs(got.Last-want.last) > 1e-9 || got.Operations != 10 {
			t.Errorf("rank %d: %+v, want %+v", r, got, want)
		}
		if math.Abs(got.By-want.by) > 1e-9 && r != 1 {
			t.Errorf("rank %d: by %v, want %v", r, got.By, want.by)
		}
	}
	if s.score(now, "w9") != nil {
		t.Error("a worker that is not there has a score")
	}
}

// TestStragglerOfTwo: of two ranks the one that waits less is the late one, by the difference.
func TestStragglerOfTwo(t *testing.T) {
	s, now := lateWorld(2), time.Unix(1000, 0)
	s.operation(now, 1, 30*ms, 5*ms)
	if a, b := s.score(now, "w0"), s.score(now, "w1"); a.Last != 0 || a.By != 0 || b.Last != 1 || math.Abs(b.By-0.025) > 1e-9 {
		t.Errorf("%+v %+v", a, b)
	}
}

// TestStragglerNoise: operations that all ranks begin together do not count, whichever leaves
// first, nor do operations that a rank does not report.
func TestStragglerNoise(t *testing.T) {
	s, now := lateWorld(3), time.Unix(1000, 0)
	for n := range uint64(100) {
		s.operation(now, n, ms/2, ms/3, ms/4)
	}
	s.operation(now, 200, 50*ms, 60*ms)
	s.hear(now, "w7", []line.Wait{{Operation: 200, For: ms}})
	s.hear(now, "w0", []line.Wait{{Operation: 200, For: ms}}) // a second time
	if got := s.score(now, "w0"); got != nil {
		t.Errorf("%+v", got)
	}
}

// TestStragglerDecays: an operation of a minute ago counts half, and in the end it is forgotten.
func TestStragglerDecays(t *testing.T) {
	s, now := lateWorld(2), time.Unix(1000, 0)
	for n := range uint64(8) {
		s.operation(now, n, 9*ms, 5*ms)
	}
	now = now.Add(2 * time.Minute)
	for n := range uint64(6) {
		s.operation(now, 100+n, 5*ms, 9*ms)
	}
	if got := s.score(now, "w1"); math.Abs(got.Last-0.25) > 1e-9 || got.Operations != 8 {
		t.Errorf("%+v", got)
	}
	s.enter([]string{"w1", "w0", "w2"}) // in another world, with another rank, it is the same worker
	if got := s.score(now, "w0"); math.Abs(got.Last-0.75) > 1e-9 {
		t.Errorf("%+v", got)
	}
	if got := s.score(now.Add(time.Hour), "w1"); got != nil {
		t.Errorf("after an hour: %+v", got)
	}
	s.forget("w0")
	if s.score(now, "w0") != nil {
		t.Error("it was forgotten")
	}
}

// TestStragglerBounds: whatever workers report, memory is bounded and scores are finite.
func TestStragglerBounds(t *testing.T) {
	s, now := lateWorld(3), time.Unix(1000, 0)
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		now = now.Add(time.Duration(r.IntN(3)) * ms)
		w := line.Wait{Operation: r.Uint64N(600), For: time.Duration(r.Int64())}
		if r.IntN(3) == 0 {
			w.Operation = r.Uint64()
		}
		s.hear(now, fmt.Sprint("w", r.IntN(4)), []line.Wait{w})
		if len(s.open) > mostCompared || len(s.order) > 4*mostCompared || len(s.scores) > 3 {
			t.Fatalf("%d open, %d in order, %d scores", len(s.open), len(s.order), len(s.scores))
		}
	}
	for _, id := range s.world {
		got := s.score(now, id)
		if got == nil || !(got.Last >= 0 && got.Last <= 1 && got.By >= 0) || math.IsInf(got.By, 0) {
			t.Errorf("%+v", got)
		}
	}
}

// BenchmarkStraggler measures a heartbeat of each of 1,000 workers with 32 operations.
func BenchmarkStraggler(b *testing.B) {
	s, now := lateWorld(1000), time.Unix(1000, 0)
	n := uint64(0)
	for b.Loop() {
		waits := make([]line.Wait, 32)
		for i := range waits {
			n++
			waits[i] = line.Wait{Operation: n, For: time.Duration(n%100) * ms}
		}
		for r, id := range s.world {
			waits[0].For = time.Duration(r) * ms
			s.hear(now, id, waits)
		}
	}
}
