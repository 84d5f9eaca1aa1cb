package elastictest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// loop is a training loop that runs until the test stops it.
type loop struct {
	t      *testing.T
	enough atomic.Bool
	steps  int // number of steps; 0: no limit

	mu       sync.Mutex
	returned int // number of functions that have returned
	wrong    []string
}

func (l *loop) worker(ctx context.Context) error {
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if err := w.Close(); err != nil {
			l.t.Error(err)
		}
	}()
	var step, sum int64
	weights := make([]int64, 3000)
	state := elastic.NewState(w, elastic.Value("step", &step), elastic.Value("sum", &sum), elastic.Tensor("weights", weights))
	state.OnReset(func() error { return nil })
	err = elastic.Run(ctx, state, func(ctx context.Context) error {
		for {
			over := []int64{0, 0}
			if l.enough.Load() || step == int64(l.steps) && l.steps > 0 {
				over[0] = 1
			}
			over[1] = step + 1
			if err := collective.AllReduce(ctx, w.Group(), over, collective.Max); err != nil {
				return err
			}
			if over[0] == 1 {
				return nil
			}
			share := []int64{step + 1}
			if err := collective.AllReduceAsync(ctx, w.Group(), "share", share, collective.Average).Wait(); err != nil {
				return err
			}
			step, sum = step+1, sum+share[0]
			for i := range weights {
				weights[i] = sum
			}
			if err := state.Commit(); err != nil {
				return err
			}
		}
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.returned++
	if err == nil && sum != step*(step+1)/2 {
		l.wrong = append(l.wrong, fmt.Sprintf("the sum of %d steps is %d", step, sum))
	}
	for _, x := range weights {
		if err == nil && x != sum {
			l.wrong = append(l.wrong, fmt.Sprintf("a weight is %d, the sum %d", x, sum))
			break
		}
	}
	return err
}

func start(t *testing.T, l *loop, cfg elastictest.Config) *elastictest.Job {
	t.Helper()
	l.t, cfg.Worker = t, l.worker
	job := begin(cfg)
	t.Cleanup(func() {
		if err := job.Stop(); err != nil && !t.Failed() {
			t.Error(err)
		}
		for _, wrong := range l.wrong {
			t.Error(wrong)
		}
	})
	return job
}

func await(t *testing.T, job *elastictest.Job, enough func(elastictest.Status) bool) {
	t.Helper()
	if err := job.Await(enough); err != nil {
		t.Fatal(err)
	}
}

func wait(t *testing.T, job *elastictest.Job) {
	t.Helper()
	if err := job.Wait(); err != nil {
		t.Error(err)
	}
}

// Hosts are added, drained and removed, and a new world is published for each change.
func TestHosts(t *testing.T) {
	inTime(t, func(t *testing.T) {
		var l loop
		job := start(t, &l, elastictest.Config{Hosts: []plan.Host{{Name: "a", Slots: 2}}})
		await(t, job, elastictest.Size(2))
		job.AddHost("b", 1)
		await(t, job, elastictest.Size(3))
		job.AddHost("b", 2)
		await(t, job, elastictest.Size(4))
		job.RemoveHost("a")
		await(t, job, func(s elastictest.Status) bool {
			return s.World.Size() == 2 && s.Commits > 0 && s.World.Slots[0].Host == "b"
		})
		job.AddHost("c", 1)
		await(t, job, elastictest.Size(3))
		job.DrainHost("b")
		await(t, job, func(s elastictest.Status) bool {
			return s.World.Size() == 1 && s.Commits > 0 && s.World.Slots[0].SlotID == plan.SlotID{Host: "c"}
		})
		l.enough.Store(true)
		wait(t, job)
		await(t, job, func(s elastictest.Status) bool { return s.Started == 5 && s.Ended == 5 && s.Killed == 0 })
		if l.returned != 5 {
			t.Errorf("%d functions have returned, want all five", l.returned)
		}
	})
}

// A worker dies at each kind of moment: the job continues, no commit is lost, and the dead worker
// logs nothing.
func TestDeaths(t *testing.T) {
	grows := func(j *elastictest.Job) { j.AddHost("c", 1) }
	for _, c := range []struct {
		death elastictest.Moment
		meet  func(*elastictest.Job) // causes the moment
	}{
		{elastictest.Moment{Rank: -1, Phase: elastictest.Joining}, nil},
		{elastictest.Moment{Rank: -1, Phase: elastictest.Connecting}, nil},
		{elastictest.Moment{Rank: 1, Phase: elastictest.Connected}, nil},
		{elastictest.Moment{Rank: 1, Phase: elastictest.Syncing}, nil},
		{elastictest.Moment{Rank: 0, Phase: elastictest.Synced}, nil},
		{elastictest.Moment{Rank: 1, Phase: elastictest.Training}, nil},
		{elastictest.Moment{Rank: 0, Phase: elastictest.Saving, Commit: 5}, nil},
		{elastictest.Moment{Rank: 1, Phase: elastictest.Saved, Commit: 5}, nil},
		{elastictest.Moment{Rank: 0, Phase: elastictest.Committed, Commit: 5}, nil},
		{elastictest.Moment{Rank: 2, Phase: elastictest.Syncing, Generation: 2}, grows},
		{elastictest.Moment{Rank: 0, Phase: elastictest.Leaving, Commit: 20}, nil},
	} {
		t.Run(c.death.String(), func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				l := loop{steps: 20}
				if c.meet != nil {
					l.steps = 0
				}
				job := start(t, &l, elastictest.Config{
					Hosts: []plan.Host{{Name: "a", Slots: 1}, {Name: "b", Slots: 1}}, Deaths: []elastictest.Moment{c.death},
				})
				if c.meet != nil {
					await(t, job, elastictest.Size(2))
					c.meet(job)
				}
				await(t, job, func(s elastictest.Status) bool { return s.Killed == 1 })
				if c.meet != nil {
					await(t, job, elastictest.Size(3)) // another worker has taken its slot
					l.enough.Store(true)
				}
				wait(t, job)
				await(t, job, func(s elastictest.Status) bool {
					if s.Ended != s.Started {
						t.Errorf("%+v", s)
					}
					if l.returned > s.Started-1 {
						t.Errorf("%d functions of %d have returned, though one was killed", l.returned, s.Started)
					}
					return true
				})
			})
		})
	}
}

func TestKillRanks(t *testing.T) {
	inTime(t, func(t *testing.T) {
		var l loop
		job := start(t, &l, elastictest.Config{Hosts: []plan.Host{{Name: "a", Slots: 3}}})
		for range 6 {
			await(t, job, elastictest.Size(3))
			if !job.Kill(0) {
				t.Error("there is no rank 0")
			}
		}
		if job.Kill(3) || job.Kill(-1) {
			t.Error("there is such a rank")
		}
		await(t, job, elastictest.Size(3))
		await(t, job, func(s elastictest.Status) bool { return s.Killed == 6 })
		l.enough.Store(true)
		wait(t, job)
	})
}

// Die, called by a worker's own function, kills that worker. At receives all moments.
func TestDie(t *testing.T) {
	inTime(t, func(t *testing.T) {
		var died, seen atomic.Int32
		job := begin(elastictest.Config{
			Hosts: []plan.Host{{Name: "a", Slots: 2}},
			At:    func(m elastictest.Moment) bool { seen.Add(1); return false },
			Worker: func(ctx context.Context) error {
				w, err := elastic.Init(ctx)
				if err != nil {
					return err
				}
				defer w.Close()
				return elastic.Run(ctx, elastic.NewState(w), func(ctx context.Context) error {
					if w.Rank() == 1 && died.Add(1) == 1 {
						elastictest.Die(ctx)
						t.Error("the dead go on")
					}
					return nil
				})
			},
		})
		wait(t, job)
		await(t, job, func(s elastictest.Status) bool { return s.Killed == 1 })
		if died.Load() < 1 || seen.Load() < 10 {
			t.Errorf("%d deaths of rank 1 were tried, %d moments seen", died.Load(), seen.Load())
		}
	})
}

// Stopped workers leave together, and no goroutine remains.
func TestStop(t *testing.T) {
	inTime(t, func(t *testing.T) {
		var l loop
		run := start(t, &l, elastictest.Config{Hosts: []plan.Host{{Name: "a", Slots: 2}}})
		await(t, run, elastictest.Commit(5))
		if err := run.Stop(); err != nil {
			t.Error(err)
		}
		if err := run.Wait(); job.ExitStatus(err) != 128+15 {
			t.Error(err)
		}
		await(t, run, func(s elastictest.Status) bool { return s.Ended == 2 && s.Killed == 0 })
	})
}

// The result of a job includes its failures.
func TestFailures(t *testing.T) {
	broken := errors.New("broken")
	two := []plan.Host{{Name: "a", Slots: 2}}
	hangs := func(ctx context.Context) error {
		w, err := elastic.Init(ctx)
		if err != nil {
			return err
		}
		defer w.Close()
		return elastic.Run(ctx, elastic.NewState(w), func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
	}
	for _, c := range []struct {
		name string
		cfg  elastictest.Config
		is   error
		says []string
	}{
		{"no function", elastictest.Config{Hosts: two}, nil, []string{"a Worker function"}},
		{"no hosts", elastictest.Config{Worker: hangs}, nil, []string{"Hosts"}},
		{"the driver's config", elastictest.Config{Worker: hangs, Hosts: two, Driver: driver.Config{Size: job.Size{NP: -1}}},
			nil, []string{"driver: a job needs at least one worker"}},
		{"the function's error", elastictest.Config{Hosts: two, Driver: driver.Config{Size: job.Size{NP: 2}},
			Worker: func(ctx context.Context) error { return broken }}, broken, []string{"exited with code 1", "worker a:"}},
		{"no Init", elastictest.Config{Hosts: two, Driver: driver.Config{Size: job.Size{NP: 2}},
			Worker: func(ctx context.Context) error { return nil }}, nil, []string{"has not called elastic.Init"}},
		{"the limit", elastictest.Config{Hosts: two, Worker: hangs, Limit: 8 * time.Second,
			Driver: driver.Config{Timeouts: job.Timeouts{Drain: 50 * time.Millisecond}}},
			nil, []string{"limit of 8s", "a:0 is rank 0, training", "a:1 is rank 1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var err error
			synctest.Test(t, func(*testing.T) { err = elastictest.Start(c.cfg.InMemory(*firstSeed)).Wait() })
			if err == nil || c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v", err)
			}
			for _, says := range c.says {
				if !strings.Contains(fmt.Sprint(err), says) {
					t.Errorf("%q is not in %v", says, err)
				}
			}
		})
	}
}
