package gradient_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/elastic/gradient"
	"github.com/hvdrun/hvdrun/plan"
)

// job trains with an averager while workers die in their backward passes. All ranks compute the
// same gradients in a step and their averages are exact, so the final weights do not depend on the
// ranks.
type job struct {
	steps  int
	deaths []int // numbers of backward passes, counted over all workers; a worker dies at or after each

	mu    sync.Mutex
	calls int
	lost  uint64 // the last generation in which a worker died; the others must survive in it
	sums  [][]float64
}

// dies reports whether w dies in the backward pass that is about to begin.
func (j *job) dies(w *elastic.Worker) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.calls++
	if len(j.deaths) == 0 || j.calls < j.deaths[0] || w.Size() == 1 || w.Generation() == j.lost {
		return false
	}
	j.deaths, j.lost = j.deaths[1:], w.Generation()
	return true
}

func (j *job) worker(ctx context.Context) error {
	const passes = 2
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	grads := gradient.NewAverager[float64](w, gradient.Options{Passes: passes, Bucket: 64}, lengths...)
	defer grads.Close()
	step, sums, scaling := 0, make([]float64, 0, 100), elastic.NewScaling(elastic.ScalingOptions{Warmup: 3})
	for t := range grads.Len() {
		sums = append(sums, make([]float64, len(grads.Tensor(t)))...)
	}
	state := elastic.NewState(w, elastic.Tensor("sums", sums), elastic.Value("step", &step), scaling)
	backward := func(pass int) error {
		dies := j.dies(w)
		for t := grads.Len() - 1; t >= 0; t-- {
			for i := range grads.Tensor(t) {
				grads.Tensor(t)[i] += element(0, step, pass, t, i)
			}
			grads.Ready(t)
			if dies && t == 3 {
				elastictest.Die(ctx)
			}
		}
		return nil
	}
	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		for step < j.steps {
			averaged := false
			for pass := 0; !averaged; pass++ {
				var err error
				if averaged, err = grads.Pass(ctx, func() error { return backward(pass) }); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
			}
			rest := sums
			for t := range grads.Len() {
				for i, g := range grads.Tensor(t) {
					rest[i] += g
				}
				rest = rest[len(grads.Tensor(t)):]
			}
			step++
			if rate := scaling.Next(); rate < 1 || rate > float64(w.Size()) {
				return fmt.Errorf("step %d: a factor of %v for %d workers", step, rate, w.Size())
			}
			if err := state.Commit(); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.sums = append(j.sums, sums)
	}
	return err
}

func TestJob(t *testing.T) {
	const steps = 16
	var want []float64
	for tensor, n := range lengths {
		for i := range n {
			sum := 0.
			for step := range steps {
				sum += (element(0, step, 0, tensor, i) + element(0, step, 1, tensor, i)) / 2
			}
			want = append(want, sum)
		}
	}
	for seed := range uint64(3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 4))
			j := &job{steps: steps, deaths: []int{1 + r.IntN(20), 25 + r.IntN(20), 50 + r.IntN(20)}}
			running := elastictest.Start(elastictest.Config{Worker: j.worker, Hosts: []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 1}}})
			err := running.Await(elastictest.Commit(5))
			running.AddHost("c", 1)
			if err := errors.Join(err, running.Wait()); err != nil {
				t.Fatal(err)
			}
			if len(j.sums) == 0 {
				t.Error("nobody has come to the end")
			}
			for _, sums := range j.sums {
				if !slices.Equal(sums, want) {
					t.Errorf("%v, want %v", sums, want)
				}
			}
		})
	}
}
