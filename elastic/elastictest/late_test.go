package elastictest_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/plan"
)

// trainLarge trains a state of 2 MB, of which each step changes a little, and returns the state.
// Halfway through the steps it waits until the size of the world is no longer first.
func trainLarge(ctx context.Context, steps, first int) ([]int64, error) {
	w, err := elastic.Init(ctx)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	switch {
	case w.Host() == "a": // has joined the first world, unless it replaces another
		if w.Size() < first || w.Generation() == 1 && w.Size() != first || w.Rank() < 0 || w.Rank() >= w.Size() {
			return nil, fmt.Errorf("before Run: rank %d of %d on %q", w.Rank(), w.Size(), w.Host())
		}
	case w.Generation() != 0 || w.Size() <= first || w.Rank() != first+w.Slot() || w.LocalRank() != w.Slot():
		return nil, fmt.Errorf("a newcomer before Run: rank %d of %d in generation %d", w.Rank(), w.Size(), w.Generation())
	}
	weights, step := make([]int64, 1<<18), 0
	at := func(i int) *int64 { return &weights[i*len(weights)/steps] }
	state := elastic.NewState(w, elastic.Tensor("weights", weights), elastic.Value("step", &step))
	return weights, elastic.Run(ctx, state, func(ctx context.Context) error {
		for i := range steps {
			if done := *at(i) == 1; done != (i < step) {
				return fmt.Errorf("before step %d weight %d is %d", step, i, *at(i))
			}
		}
		for step < steps {
			one := []int64{1}
			if err := collective.AllReduce(ctx, w.Group(), one, collective.Average); err != nil {
				return err
			}
			*at(step) += one[0]
			step++
			if err := state.Commit(); err != nil {
				return err
			}
			for step == steps/2 && w.Size() == first { // until the world changes
				if err := state.Commit(); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Newcomers have the state before they join, even if workers die meanwhile, and no step is lost.
func TestNewcomersFetch(t *testing.T) {
	const steps, first, newcomers = 30, 2, 2
	for _, c := range []struct {
		name  string
		death elastictest.Moment // of the first world's ranks, or of a new worker
	}{
		{name: "undisturbed"},
		{"newcomer fetches", elastictest.Moment{Rank: -1, Phase: elastictest.Fetching}},
		{"newcomer joins", elastictest.Moment{Rank: -1, Phase: elastictest.Joining}},
		{"newcomer syncs", elastictest.Moment{Rank: 2, Phase: elastictest.Syncing}},
		{"source saves", elastictest.Moment{Rank: 0, Phase: elastictest.Saving}},
		{"source syncs", elastictest.Moment{Rank: 1, Phase: elastictest.Syncing}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				log, lines := logtest.NewNullLogger()
				log.SetLevel(logrus.DebugLevel)
				var mu sync.Mutex
				sums := map[int64]int{}
				fetching, joined := 0, 0
				died := c.death == elastictest.Moment{}
				grown, waiting := make(chan struct{}), make(chan struct{})
				var once sync.Once
				job := begin(elastictest.Config{
					Hosts:  []plan.Host{{Name: "a", Slots: first}},
					Driver: driver.Config{Log: log},
					Worker: func(ctx context.Context) error {
						weights, err := trainLarge(ctx, steps, first)
						if err == nil {
							mu.Lock()
							defer mu.Unlock()
							sum := int64(0)
							for _, v := range weights {
								sum += v
							}
							sums[sum]++
						}
						return err
					},
					At: func(m elastictest.Moment) bool {
						if m.Rank == 0 && m.Phase == elastictest.Saving && m.Commit == 10 {
							once.Do(func() { close(grown) })
							<-waiting // until new workers have fetched the state
						}
						mu.Lock()
						defer mu.Unlock()
						switch {
						case m.Rank == -1 && m.Phase == elastictest.Fetching:
							fetching++
						case m.Rank == -1 && m.Phase == elastictest.Joining:
							if joined++; joined == first+newcomers {
								close(waiting)
							}
						}
						if died || fetching == 0 || m.Rank != c.death.Rank || m.Phase != c.death.Phase {
							return false
						}
						died = true
						return true
					},
				})
				<-grown
				job.AddHost("b", newcomers)
				if err := job.Wait(); err != nil {
					t.Error(err)
				}
				if !died || len(sums) != 1 || sums[steps] == 0 {
					t.Errorf("died: %v, sums: %v", died, sums)
				}
				fetched := 0
				for _, e := range lines.AllEntries() {
					if strings.Contains(e.Message, "fetched commit ") {
						fetched++
					}
				}
				if fetched < newcomers {
					t.Errorf("%d of %d newcomers fetched the state", fetched, newcomers)
				}
			})
		})
	}
}

// A newcomer that uses the group before Run enters the world for that, as workers of a job's first
// world do.
func TestGroupBeforeRun(t *testing.T) {
	inTime(t, func(t *testing.T) {
		const first = 2
		var mu sync.Mutex
		sizes := map[int]int{}
		job := begin(elastictest.Config{
			Hosts: []plan.Host{{Name: "a", Slots: first}},
			Worker: func(ctx context.Context) error {
				w, err := elastic.Init(ctx)
				if err != nil {
					return err
				}
				defer w.Close()
				if w.Host() == "b" {
					before, g := w.Generation(), w.Group()
					if before != 0 || g.Size() != first+1 || w.Generation() == 0 || w.Group() != g {
						return fmt.Errorf("generation %d, a group of %d in %d", before, g.Size(), w.Generation())
					}
				} else if err := collective.Barrier(ctx, w.Group()); err != nil {
					return err
				}
				step := 0
				state := elastic.NewState(w, elastic.Value("step", &step))
				return elastic.Run(ctx, state, func(context.Context) error {
					for ; step < 10 || w.Size() == first; step++ {
						if err := state.Commit(); err != nil {
							return err
						}
					}
					mu.Lock()
					defer mu.Unlock()
					sizes[w.Size()]++
					return nil
				})
			},
		})
		if err := job.Await(elastictest.Commit(3)); err != nil {
			t.Fatal(err)
		}
		job.AddHost("b", 1)
		if err := job.Wait(); err != nil {
			t.Error(err)
		}
		if sizes[first+1] != first+1 {
			t.Errorf("sizes: %v", sizes)
		}
	})
}
