package elastictest_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/plan"
)

// TestReplay: newcomers and spares of a job of which each step changes all of the state come to the
// state of the others by the averages of the others' steps, and the weights at the end are the same
// bits as those of one worker that nothing disturbs, whoever dies meanwhile.
func TestReplay(t *testing.T) {
	total := map[string]int{}
	for i := range *stepSchedules {
		seed := *firstSeed + uint64(i)
		s := newReplaySchedule(seed)
		want := s.undisturbed(t)
		log, lines := logtest.NewNullLogger()
		log.SetLevel(logrus.DebugLevel)
		s.log = log
		s.run(t)
		for _, got := range s.ends {
			if !slices.Equal(bitsOf(got.weights), bitsOf(want.weights)) || !slices.Equal(got.used, want.used) {
				t.Error("other weights than those of an undisturbed run")
			}
		}
		if len(s.ends) == 0 {
			t.Error("no worker has come to the end")
		}
		for _, e := range lines.AllEntries() {
			switch {
			case strings.Contains(e.Message, "following a worker from commit"):
				s.happened["taken"]++
			case strings.Contains(e.Message, "by applying the steps of others"):
				s.happened["entered"]++
			case strings.Contains(e.Message, "differ"): // of the comparison after a sync
				t.Errorf("%s", e.Message)
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d: %+v", seed, s.stepPlan)
		}
		for what, n := range s.happened {
			total[what] += n
		}
	}
	t.Log(total)
	if *stepSchedules >= 12 && min(total["died"], total["replayed"], total["taken"], total["entered"]) == 0 {
		t.Errorf("in %d schedules nobody has died, applied the steps of others, or entered by them: %v", *stepSchedules, total)
	}
}

// newReplaySchedule returns a random job that grows, or has spares, and whose workers die.
func newReplaySchedule(seed uint64) *stepSchedule {
	dice := rand.New(rand.NewPCG(seed, 12))
	s := newStepSchedule(seed)
	s.epochs, s.samples, s.batch, s.microbatches = 2, 120, 1, 1+dice.IntN(4)
	s.width, s.spares = 5_000+dice.IntN(20_000), dice.IntN(3)
	s.stepPlan.hosts = nil
	clear(s.hosts)
	for i := range 1 + min(1, s.spares) + dice.IntN(2) {
		s.stepPlan.hosts = append(s.stepPlan.hosts, plan.Host{Name: hostName(i), Slots: 2})
		s.hosts[hostName(i)] = true
	}
	s.acts = append(s.acts, act{uint64(1 + dice.IntN(20)), "add", 2}, act{uint64(20 + dice.IntN(20)), "add", 3})
	slices.SortStableFunc(s.acts, func(a, b act) int { return int(a.at) - int(b.at) })
	return s
}
