package elastictest_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

var stepSchedules = flag.Int("step-schedules", 12, "random jobs of TestSteps")

// TestSteps: whichever workers die, come or leave, the final weights are bit-identical to those of
// a single undisturbed worker, every sample is used once per epoch, and no worker applies a step
// twice or skips one.
func TestSteps(t *testing.T) {
	total := map[string]int{}
	for i := range *stepSchedules {
		seed := *firstSeed + uint64(i)
		s := newStepSchedule(seed)
		want := s.both(t)
		for _, got := range s.ends {
			if !slices.Equal(bitsOf(got.weights), bitsOf(want.weights)) {
				t.Errorf("other weights than those of an undisturbed run")
			}
			for sample, n := range got.used {
				if n != float32(s.epochs) {
					t.Errorf("sample %d was used %v times in %d epochs", sample, n, s.epochs)
					break
				}
			}
		}
		if len(s.ends) == 0 {
			t.Error("no worker has come to the end")
		}
		if t.Failed() {
			t.Fatalf("seed %d: %+v", seed, s.stepPlan)
		}
		for what, n := range s.happened {
			total[what] += n
		}
	}
	t.Log(total)
	if *stepSchedules >= 12 && min(total["died"], total["changed"], total["retried"]) == 0 {
		t.Errorf("%d schedules have no death, no change of hosts or no step that was retried: %v", *stepSchedules, total)
	}
}

// stepPlan is a random job.
type stepPlan struct {
	seed                   uint64
	epochs, samples, batch int
	microbatches, width    int
	balance                bool
	spares                 int
	hosts                  []plan.Host
	deaths                 []death
	acts                   []act
}

type stepSchedule struct {
	stepPlan
	job     *elastictest.Job
	log     logrus.FieldLogger                                                      // nil: the standard one
	network *elastictest.Network                                                    // nil: that of timed
	passes  func(ctx context.Context, w *elastic.Worker, where string, step uint64) // called in a step; nil: not at all

	mu       sync.Mutex
	hosts    map[string]bool
	holders  map[plan.SlotID]bool
	moments  map[string]int
	ends     []stepModel
	happened map[string]int
}

// stepModel is the model that is trained.
type stepModel struct {
	weights []float32
	used    []float32 // how often each sample was used
}

// stepPlaces are the places where workers die. At most twice the value visits pass before a death
// is due.
var stepPlaces = map[string]int{"backward": 60, "apply": 15, "applied": 15, "saving": 15, "saved": 15, "committed": 15, "connecting": 2, "syncing": 2,
	"synced": 2, "training": 1}

func newStepSchedule(seed uint64) *stepSchedule {
	dice := rand.New(rand.NewPCG(seed, 11))
	s := &stepSchedule{hosts: map[string]bool{}, holders: map[plan.SlotID]bool{}, moments: map[string]int{}, happened: map[string]int{}}
	s.stepPlan = stepPlan{seed: seed, epochs: 1 + dice.IntN(2), samples: 100 + dice.IntN(200), batch: 1 + dice.IntN(3),
		microbatches: 1 + dice.IntN(12), width: []int{1, 30, 5000}[dice.IntN(3)], balance: dice.IntN(3) == 0}
	for i := range 1 + dice.IntN(3) {
		s.stepPlan.hosts = append(s.stepPlan.hosts, plan.Host{Name: hostName(i), Slots: 1 + dice.IntN(2)})
		s.hosts[hostName(i)] = true
	}
	var all []string
	for where := range stepPlaces {
		all = append(all, where)
	}
	slices.Sort(all)
	for range dice.IntN(9) {
		where := all[dice.IntN(len(all))]
		s.deaths = append(s.deaths, death{where, dice.IntN(2 * stepPlaces[where])})
	}
	for range dice.IntN(5) {
		s.acts = append(s.acts, act{uint64(1 + dice.IntN(20)), []string{"add", "remove", "drain"}[dice.IntN(3)], dice.IntN(4)})
	}
	slices.SortStableFunc(s.acts, func(a, b act) int { return int(a.at) - int(b.at) })
	return s
}

// size limits the worlds of a job with spares to half of the slots of its first hosts.
func (s *stepSchedule) size() job.Size {
	if s.spares == 0 {
		return job.Size{}
	}
	slots := 0
	for _, h := range s.stepPlan.hosts {
		slots += h.Slots
	}
	return job.Size{NP: max(1, slots/2), Min: 1, Max: max(1, slots/2), Spares: s.spares, Elastic: true}
}

func bitsOf(v []float32) (bits []uint32) {
	for _, x := range v {
		bits = append(bits, math.Float32bits(x))
	}
	return bits
}

// both runs the job, and returns what a single undisturbed worker computes.
func (s *stepSchedule) both(t *testing.T) (want stepModel) {
	inTime(t, func(t *testing.T) {
		want = s.alone(t)
		s.run(t)
	})
	return want
}

// alone returns what a single worker computes.
func (s *stepSchedule) alone(t *testing.T) (m stepModel) {
	cfg := elastictest.Config{Hosts: []plan.Host{{Name: "alone", Slots: 1}}, Worker: func(ctx context.Context) (err error) {
		m, err = s.train(ctx, nil)
		return err
	}}
	if err := elastictest.Start(s.timed(cfg)).Wait(); err != nil {
		t.Fatalf("seed %d, undisturbed: %v", s.seed, err)
	}
	return m
}

// timed returns the config for a job of the schedule.
func (s *stepSchedule) timed(cfg elastictest.Config) elastictest.Config {
	if s.network != nil {
		return cfg.On(s.network)
	}
	return timed(s.seed, cfg)
}

func (s *stepSchedule) run(t *testing.T) {
	s.mu.Lock()
	s.job = elastictest.Start(s.timed(elastictest.Config{
		Hosts: s.stepPlan.hosts, At: s.at,
		Driver: driver.Config{Log: s.log, Size: s.size(), Blame: job.Blame{CooldownMin: time.Millisecond, CooldownMax: 20 * time.Millisecond}},
		Worker: func(ctx context.Context) error {
			m, err := s.train(ctx, s)
			if errors.Is(err, elastic.ErrRemoved) || errors.Is(err, elastic.ErrFinished) {
				return err
			}
			if err == nil {
				s.mu.Lock()
				s.ends = append(s.ends, m)
				s.mu.Unlock()
			}
			return err
		},
	}))
	s.mu.Unlock()
	if err := s.job.Wait(); err != nil {
		t.Errorf("the job ended with %v", err)
	}
}

// at is called at every moment of the job and reports whether the worker dies there.
func (s *stepSchedule) at(m elastictest.Moment) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch m.Phase {
	case elastictest.Synced:
		if s.hosts[m.Slot.Host] {
			s.holders[m.Slot] = true
		}
	case elastictest.Leaving:
		delete(s.holders, m.Slot)
	case elastictest.Committed:
		for len(s.acts) > 0 && s.acts[0].at <= m.Commit {
			s.act(s.acts[0])
			s.acts = s.acts[1:]
		}
	}
	return s.dies(m.Slot, m.Phase.String())
}

// dies reports whether the worker of a slot dies here, which is so if a death is due and another
// worker has the state. The caller holds mu.
func (s *stepSchedule) dies(slot plan.SlotID, where string) bool {
	s.moments[where]++
	at := slices.IndexFunc(s.deaths, func(d death) bool { return d.where == where && s.moments[where] > d.after })
	if at < 0 || !s.spare(func(o plan.SlotID) bool { return o == slot }) {
		return false
	}
	s.deaths = slices.Delete(s.deaths, at, at+1)
	delete(s.holders, slot)
	s.happened["died"]++
	s.happened["died: "+where]++
	return true
}

func (s *stepSchedule) spare(these func(plan.SlotID) bool) bool {
	for o := range s.holders {
		if !these(o) {
			return true
		}
	}
	return false
}

// act changes the hosts. The caller holds mu.
func (s *stepSchedule) act(a act) {
	name := hostName(a.host)
	on := func(o plan.SlotID) bool { return o.Host == name }
	if a.what == "add" {
		if s.hosts[name] {
			return
		}
		s.hosts[name] = true
		s.happened["changed"]++
		s.job.RemoveHost(name) // it can be draining
		s.job.AddHost(name, 1+int(a.at)%2)
	} else {
		if !s.hosts[name] || !s.spare(on) {
			return
		}
		s.happened["changed"]++
		delete(s.hosts, name)
		if a.what == "drain" {
			s.job.DrainHost(name)
		} else {
			s.job.RemoveHost(name)
		}
	}
	for o := range s.holders {
		if on(o) && s.spare(on) {
			delete(s.holders, o)
		}
	}
}

// train trains as a worker of the job disturbed, or of an undisturbed job if disturbed is nil.
func (s *stepSchedule) train(ctx context.Context, disturbed *stepSchedule) (stepModel, error) {
	w, err := elastic.Init(ctx)
	if err != nil {
		return stepModel{}, err
	}
	defer w.Close()
	var steps *elastic.Steps[float32]
	mayDie := func(where string) {
		if disturbed == nil {
			return
		}
		if disturbed.passes != nil {
			disturbed.passes(ctx, w, where, steps.Applied())
		}
		disturbed.mu.Lock()
		dies := disturbed.dies(plan.SlotID{Host: w.Host(), Index: w.Slot()}, where)
		disturbed.mu.Unlock()
		if dies {
			elastictest.Die(ctx)
		}
	}
	m := stepModel{weights: make([]float32, s.width), used: make([]float32, s.samples)}
	momentum := make([]float32, s.width)
	steps = elastic.NewSteps[float32](w, elastic.StepsOptions{
		Microbatches: s.microbatches, Balance: s.balance, Seed: int64(s.seed),
		Batches: elastic.NewBatches(s.samples, elastic.SamplerOptions{Batch: s.batch, Shuffle: true, Seed: int64(s.seed)}),
	}, s.width, s.samples)
	state := elastic.NewState(w, elastic.Tensor("weights", m.weights), elastic.Tensor("momentum", momentum), elastic.Tensor("used", m.used), steps)
	var applied, generation uint64 // the steps that this worker knows of, and the world of the last one
	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		if w.Generation() == 0 {
			generation = 1 // the first step of others that it applies can have any number
		}
		for steps.Epoch() < s.epochs {
			leaves := min(s.microbatches, (s.samples+s.batch-1)/s.batch-steps.Position())
			begun := w.Generation()
			err := steps.Step(ctx,
				func(b elastic.Micro[float32]) error {
					mayDie("backward")
					noise := b.Rand()
					for _, sample := range b.Samples {
						b.Gradient[1][sample]++
						for i := range b.Gradient[0] {
							b.Gradient[0][i] += float32(math.Sin(float64(sample+i))) + m.weights[i]*float32(noise.Float64()-0.5)
						}
					}
					return nil
				},
				func(mean [][]float32) error {
					mayDie("apply")
					if n := steps.Applied(); n < applied || n > applied && generation == w.Generation() {
						return fmt.Errorf("step %d follows step %d", n, applied)
					}
					if applied, generation = steps.Applied()+1, w.Generation(); generation == 0 && disturbed != nil {
						disturbed.mu.Lock()
						disturbed.happened["replayed"]++
						disturbed.mu.Unlock()
					}
					for i := range m.weights {
						momentum[i] = 0.9*momentum[i] + mean[0][i]
						m.weights[i] -= 0.1 * momentum[i]
						mean[0][i] = float32(math.NaN())
					}
					for i := range m.used {
						m.used[i] += float32(math.Round(float64(mean[1][i]) * float64(leaves)))
					}
					mayDie("applied")
					return nil
				})
			if disturbed != nil && w.Generation() != begun && err == nil {
				disturbed.mu.Lock()
				disturbed.happened["retried"]++
				disturbed.mu.Unlock()
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return m, err
}
