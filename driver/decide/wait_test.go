package decide

import (
	"testing"
	"time"
)

// waitKey identifies a wait.
type waitKey struct {
	kind waitKind
	id   string
}

func waitsOf(m *Machine) map[waitKey]time.Time {
	all := map[waitKey]time.Time{}
	m.waits(func(w wait) {
		key := waitKey{kind: w.kind}
		if w.who != nil {
			key.id = w.who.id
		}
		all[key] = w.until
	})
	return all
}

// TestWaitsHaveEnds: in every state of random jobs, there is a wait with a deadline, or the world
// trains, or the job has ended.
func TestWaitsHaveEnds(t *testing.T) {
	seen := map[waitKind]bool{}
	for seed := range rounds(200) {
		s := newSim(t, seed)
		s.stepped = func() {
			waits := waitsOf(s.m)
			for key := range waits {
				seen[key.kind] = true
			}
			delete(waits, waitKey{kind: forReturn}) // the host may not come back
			trains := s.m.any(training) && s.m.ResetFrom.IsZero() && s.m.DoneFrom.IsZero() && !s.m.Decided
			if len(waits) == 0 && !trains && !s.m.Over {
				t.Errorf("seed %d: the job is %s, and nothing has an end:\n%s", seed, s.m.doing(), s.tail())
			}
		}
		for range 120 {
			s.trouble()
		}
		s.calm()
		if t.Failed() {
			return
		}
	}
	for kind := forSlots; kind <= forProcess; kind++ {
		if !seen[kind] {
			t.Errorf("no job waits for kind %d", kind)
		}
	}
}

// TestResumeShiftsWaits: the driver's absence does not shorten any wait.
func TestResumeShiftsWaits(t *testing.T) {
	const away = 20 * time.Second
	compared := map[waitKind]bool{}
	for seed := range rounds(60) {
		s := newSim(t, seed)
		n := 0
		s.stepped = func() {
			if n++; n%5 != 0 || s.m.Over {
				return
			}
			before, next := waitsOf(s.m), again(t, s.m)
			next.Step(next.Stepped.Add(away), Resumed{})
			for key, until := range waitsOf(next) {
				was, is := before[key]
				switch key.kind {
				case forReturn: // exclusions end when they would have ended
				case forLoss: // the next driver reports it to all again
				case forRamp: // each step finds it again
				default:
					if is && !until.Equal(was.Add(away)) {
						t.Errorf("seed %d: %v ended at %v, and ends at %v", seed, key, was, until)
					}
					compared[key.kind] = compared[key.kind] || is
				}
			}
		}
		for range 100 {
			s.trouble()
		}
		s.calm()
		if t.Failed() {
			return
		}
	}
	if len(compared) < 7 {
		t.Errorf("only the kinds %v were compared", compared)
	}
}
