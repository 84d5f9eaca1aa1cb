package elastictest_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/plan"
)

// TestReplay: in a job in which each step changes the whole state, newcomers and spares reach the
// others' state by applying the averages of the others' steps. Whoever dies meanwhile, the final
// weights are bit-identical to those of a single undisturbed worker.
func TestReplay(t *testing.T) {
	total := map[string]int{}
	for i := range *stepSchedules {
		seed := *firstSeed + uint64(i)
		s := newReplaySchedule(seed)
		log, lines := logtest.NewNullLogger()
		log.SetLevel(logrus.DebugLevel)
		s.log = log
		want := s.both(t)
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
			case strings.Contains(e.Message, "which it has kept"):
				s.happened["entered: by a step that another kept"]++
			case strings.Contains(e.Message, "differ"): // reported by the comparison after a sync
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

// TestLastStep: a member dies while it applies a step whose averages the spare that follows it has
// not received. The spare gets the step from another member, and the weights are bit-identical to
// those of an undisturbed run.
func TestLastStep(t *testing.T) {
	for seed := *firstSeed; seed < *firstSeed+3; seed++ {
		s := newReplaySchedule(seed)
		s.epochs, s.samples, s.microbatches = 8, 12, 2
		s.width = 40_000
		s.spares, s.stepPlan.hosts, s.acts = 1, []plan.Host{{Name: hostName(0), Slots: 2}, {Name: hostName(1), Slots: 2}}, nil
		s.hosts[hostName(1)] = true
		s.deaths = nil
		log, lines := logtest.NewNullLogger()
		log.SetLevel(logrus.DebugLevel)
		s.log = log
		var want stepModel
		synctest.Test(t, func(t *testing.T) {
			s.network = elastictest.NewNetwork(seed)
			s.passes = newLastStep(s.network).passes
			want = s.alone(t)
			s.run(t)
		})
		for _, got := range s.ends {
			if !slices.Equal(bitsOf(got.weights), bitsOf(want.weights)) || !slices.Equal(got.used, want.used) {
				t.Errorf("seed %d: other weights than those of an undisturbed run", seed)
			}
		}
		kept := func(e *logrus.Entry) bool { return strings.Contains(e.Message, "which it has kept") }
		if len(s.ends) == 0 || !slices.ContainsFunc(lines.AllEntries(), kept) {
			t.Errorf("seed %d: %d workers have come to the end, and no spare got a step that another member had kept", seed, len(s.ends))
		}
	}
}

// lastStep kills the member that a spare follows, once another member has applied a step whose
// averages the spare does not receive. The spare has applied all earlier steps.
type lastStep struct {
	network *elastictest.Network

	mu      sync.Mutex
	changed *sync.Cond
	spare   plan.SlotID
	next    uint64         // next step of the spare; 0: it has not applied any
	applied map[int]uint64 // next step of the members, by rank
	cut     bool
}

func newLastStep(n *elastictest.Network) *lastStep {
	l := &lastStep{network: n, applied: map[int]uint64{}}
	l.changed = sync.NewCond(&l.mu)
	return l
}

// passes is called at each place within a step.
func (l *lastStep) passes(ctx context.Context, w *elastic.Worker, where string, step uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.cut:
	case w.Generation() == 0 && where == "applied":
		l.spare, l.next = plan.SlotID{Host: w.Host(), Index: w.Slot()}, step+1
	case w.Generation() == 0:
	case where == "backward":
		for l.next > 0 && l.next < step {
			l.changed.Wait()
		}
	case where == "apply" && l.next == step && l.network.Cut(plan.SlotID{Host: w.Host(), Index: w.Slot()}, l.spare):
		l.cut = true
		for l.applied[1-w.Rank()] <= step {
			l.changed.Wait()
		}
		elastictest.Die(ctx)
	}
	if where == "applied" && w.Generation() != 0 {
		l.applied[w.Rank()] = step + 1
	}
	l.changed.Broadcast()
}

// newReplaySchedule returns a random job that grows or has spares, and in which workers die.
func newReplaySchedule(seed uint64) *stepSchedule {
	dice := rand.New(rand.NewPCG(seed, 12))
	s := newStepSchedule(seed)
	s.epochs, s.samples, s.batch, s.microbatches = 2, 60, 1, 1+dice.IntN(4)
	s.width, s.spares = 5_000+dice.IntN(5_000), dice.IntN(3)
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

// stepLoop is what a training function does besides calling Step.
type stepLoop struct {
	name    string
	replays bool // newcomers can apply the steps of others
	either  bool // newcomers can also be sent the state
	before  func(w *elastic.Worker) error
	between func(ctx context.Context, w *elastic.Worker, s *elastic.State, step uint64) error
	apply   func(w *elastic.Worker) error
	more    func(w *elastic.Worker) []elastic.Part
}

// stepLoops are training functions. A worker that is in no world cannot run some of them.
var stepLoops = []stepLoop{
	{name: "nothing", replays: true},
	{name: "commits", replays: true, between: func(_ context.Context, _ *elastic.Worker, s *elastic.State, _ uint64) error { return s.Commit() }},
	{name: "asks for hosts", replays: true, either: true, between: func(_ context.Context, _ *elastic.Worker, s *elastic.State, _ uint64) error {
		return s.CheckHostUpdates()
	}},
	{name: "computes together", between: func(ctx context.Context, w *elastic.Worker, _ *elastic.State, _ uint64) error {
		return collective.AllReduce(ctx, w.Group(), []int32{1}, collective.Sum)
	}},
	{name: "verifies", between: func(ctx context.Context, _ *elastic.Worker, s *elastic.State, _ uint64) error {
		return s.Verify(ctx) // in each step, because a newcomer may have only one step to apply before it joins
	}},
	{name: "begins together", before: func(w *elastic.Worker) error {
		return collective.Barrier(context.Background(), w.Group())
	}},
	{name: "fails in no world", before: func(w *elastic.Worker) error {
		if w.Generation() == 0 {
			return errOwn
		}
		return nil
	}},
	// A newcomer does not fail if the others wait and it has no step to apply.
	{name: "fails to apply in no world", either: true, apply: func(w *elastic.Worker) error {
		if w.Generation() == 0 {
			return errOwn
		}
		return nil
	}},
	{name: "ends in no world", before: func(w *elastic.Worker) error {
		if w.Generation() == 0 {
			return errEnds
		}
		return nil
	}},
	{name: "depends on the rank", more: func(*elastic.Worker) []elastic.Part {
		return []elastic.Part{elastic.NewSampler(100, elastic.SamplerOptions{})}
	}},
	{name: "has its own", more: func(w *elastic.Worker) []elastic.Part {
		own := w.Rank()
		return []elastic.Part{elastic.Local("own", &own)}
	}},
}

// errEnds makes the training function return nil.
var errEnds = errors.New("the end")

// TestDeathAfterReplay: a newcomer has applied the steps of the only other worker and has saved the
// state. That worker dies before the sync is complete, and the newcomer continues alone.
func TestDeathAfterReplay(t *testing.T) {
	nothing := stepLoops[0]
	inTime(t, func(t *testing.T) {
		saved, joins := make(chan struct{}), make(chan struct{})
		save, joined := sync.OnceFunc(func() { close(saved) }), sync.OnceFunc(func() { close(joins) })
		log, lines := logtest.NewNullLogger()
		log.SetLevel(logrus.DebugLevel)
		err := elastictest.Undisturbed(timed(*firstSeed, elastictest.Config{
			Hosts: []plan.Host{{Name: "a", Slots: 1}}, Driver: driver.Config{Log: log},
			At: func(m elastictest.Moment) bool {
				switch {
				case m.Phase == elastictest.Joining && m.Slot.Host == "b":
					joined()
				case m.Phase != elastictest.Synced || m.Generation != 2:
				case m.Slot.Host == "b":
					save()
				default:
					<-saved
					return true
				}
				return false
			},
		}), func(ctx context.Context) (uint64, error) {
			return nothing.train(ctx, joins)
		}, func(job *elastictest.Job) error {
			if err := job.Await(elastictest.Commit(10)); err != nil {
				return err
			}
			job.AddHost("b", 1)
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if !slices.ContainsFunc(lines.AllEntries(), func(e *logrus.Entry) bool { return strings.Contains(e.Message, "was killed") }) {
			t.Error("no worker has died")
		}
	})
}

// TestReplayOrNot: if the training function allows it, a newcomer reaches the others' state by
// applying their averages, and otherwise by fetching it. The results are bit-identical in both
// cases. Values that the loop derives from the position, inside or outside the state, are correct
// in each replayed step.
func TestReplayOrNot(t *testing.T) {
	for _, c := range stepLoops {
		t.Run(c.name, func(t *testing.T) {
			entered := c.grows(t, *firstSeed)
			// The outcome of one run can vary: several steps can be made between the newcomer's
			// last step and the end of the world. A newcomer that has no step to apply alone makes
			// none of the calls that fail without a world. Up to nine more seeds are tried.
			for i := range uint64(9) {
				if entered == c.replays {
					break
				}
				entered = c.grows(t, *firstSeed+1+i)
			}
			if entered != c.replays && !c.either {
				t.Errorf("a newcomer has come by the steps of others: %v", entered)
			}
		})
	}
}

// grows runs a job that grows, and reports whether a newcomer has entered by applying the steps of
// others.
func (c stepLoop) grows(t *testing.T, seed uint64) (entered bool) {
	inTime(t, func(t *testing.T) {
		log, lines := logtest.NewNullLogger()
		log.SetLevel(logrus.DebugLevel)
		joins := make(chan struct{})
		joined := sync.OnceFunc(func() { close(joins) })
		err := elastictest.Undisturbed(timed(seed, elastictest.Config{
			Hosts: []plan.Host{{Name: "a", Slots: 1}}, Driver: driver.Config{Log: log},
			At: func(m elastictest.Moment) bool {
				if m.Slot.Host == "b" && m.Phase == elastictest.Joining {
					joined()
				}
				return false
			},
		}), func(ctx context.Context) (uint64, error) {
			return c.train(ctx, joins)
		}, func(job *elastictest.Job) error {
			if err := job.Await(elastictest.Commit(10)); err != nil {
				return err
			}
			job.AddHost("b", 1)
			return job.Await(elastictest.Size(2))
		})
		if err != nil {
			t.Fatal(err)
		}
		entered = slices.ContainsFunc(lines.AllEntries(), func(e *logrus.Entry) bool {
			return strings.Contains(e.Message, "by applying the steps of others")
		})
	})
	return entered
}

// train trains by steps, and returns a digest of the result. At step 20 of the worker that is alone
// on host a, it waits for another worker to join.
func (c stepLoop) train(ctx context.Context, joins <-chan struct{}) (uint64, error) {
	const steps, width = 1000, 8192
	w, err := elastic.Init(ctx)
	if err != nil {
		return 0, err
	}
	defer w.Close()
	weights, small, factor := make([]float64, width), make([]float64, 3), 1.
	batch := elastic.NewSteps[float64](w, elastic.StepsOptions{Microbatches: 2, Seed: 3}, width)
	all := []elastic.Part{elastic.Tensor("weights", weights), elastic.Tensor("small", small), elastic.Value("factor", &factor), batch}
	if c.more != nil {
		all = append(all, c.more(w)...)
	}
	state := elastic.NewState(w, all...)
	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		if c.before != nil {
			if err := c.before(w); err == errEnds {
				return nil
			} else if err != nil {
				return err
			}
		}
		for batch.Applied() < steps {
			rate := 1 / float64(1+batch.Applied()%7) // not part of the state
			factor = float64(batch.Applied() % 5)    // part of the state
			err := batch.Step(ctx, func(m elastic.Micro[float64]) error {
				if m.Step == 20 && w.Host() == "a" && w.Size() == 1 {
					<-joins
				}
				noise := m.Rand().Float64()
				for i := range m.Gradient[0] {
					m.Gradient[0][i] += weights[i]*0.1 + noise/float64(i+1)
				}
				return nil
			}, func(mean [][]float64) error {
				if c.apply != nil {
					if err := c.apply(w); err != nil {
						return err
					}
				}
				for i := range weights {
					weights[i] += rate*mean[0][i] - factor*1e-3 - small[0]*1e-6
				}
				small[0] += rate
				return nil
			})
			if err != nil {
				return err
			}
			if c.between != nil {
				if err := c.between(ctx, w, state, batch.Applied()); err != nil {
					return err
				}
			}
		}
		return nil
	})
	h := fnv.New64a()
	for _, v := range append(weights, small...) {
		_, _ = fmt.Fprintf(h, "%x ", math.Float64bits(v)) // writing to a hash cannot fail
	}
	return h.Sum64(), err
}
