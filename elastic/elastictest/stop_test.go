package elastictest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/elastictest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// endless trains until it is stopped and counts its steps. It writes at most one checkpoint per
// half minute, so only the first and the last are written.
type endless struct {
	dir    string
	local  bool // each rank has a Local piece
	async  bool
	steps  uint64        // 0: no limit
	newest atomic.Uint64 // last commit that has returned on any rank
	fails  atomic.Uint64 // commit after which rank 0 returns an error
}

var errOwn = errors.New("the program's own")

func (e *endless) train(ctx context.Context) error {
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	weights, step, mine := make([]int64, 1000), uint64(0), w.Rank()
	parts := []elastic.Part{elastic.Tensor("weights", weights), elastic.Value("step", &step), elastic.Checkpoint(e.dir)}
	if e.local {
		parts = append(parts, elastic.Local("mine", &mine))
	}
	state := elastic.NewState(w, parts...)
	commit := state.Commit
	if e.async {
		commit = state.CommitAsync
	}
	return elastic.Run(ctx, state, func(ctx context.Context) error {
		for e.steps == 0 || step < e.steps {
			state.Settle()
			one := []int64{1}
			if err := collective.AllReduce(ctx, w.Group(), one, collective.Average); err != nil {
				return err
			}
			weights[step%1000] += one[0]
			step++
			err := commit()
			var updated *elastic.HostsUpdatedError
			if err == nil || errors.As(err, &updated) {
				for was := e.newest.Load(); was < state.Commits() && !e.newest.CompareAndSwap(was, state.Commits()); was = e.newest.Load() {
				}
			}
			if err != nil {
				return err
			}
			if n := e.fails.Load(); n > 0 && state.Commits() >= n && w.Rank() == 0 {
				return errOwn
			}
		}
		return nil
	})
}

// kept checks that the newest checkpoint is intact and contains the newest commit.
func (e *endless) kept(t *testing.T) {
	t.Helper()
	all, err := checkpoint.List(e.dir)
	if err != nil || len(all) == 0 || all[0] != e.newest.Load() {
		t.Fatalf("checkpoints of %v, %v; the newest commit is %d", all, err, e.newest.Load())
	}
	f, err := checkpoint.Open(checkpoint.Path(e.dir, all[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.About.Parts {
		if err := f.Check(p); err != nil {
			t.Error(err)
		}
		if p.Name == "step" && p.Text != fmt.Sprint(all[0]) {
			t.Errorf("step %s of commit %d", p.Text, all[0])
		}
		if p.Name == "mine" && len(p.Tensors) != f.About.Size {
			t.Errorf("pieces of %d ranks of %d", len(p.Tensors), f.About.Size)
		}
	}
}

func hosts(names string) (all []plan.Host) {
	for _, name := range strings.Split(names, "") {
		all = append(all, plan.Host{Name: name, Slots: 1})
	}
	return all
}

// However a job ends, its newest commit is on disk.
func TestStopKeepsTheNewestCommit(t *testing.T) {
	for name, c := range map[string]struct {
		job  func(*endless, *elastictest.Config)
		then func(*endless, *elastictest.Job)
		want error // of the job; nil: stopped without a failure
	}{
		"stop": {job: func(e *endless, _ *elastictest.Config) { e.local, e.async = true, true }},
		"rank 0 has left": {then: func(_ *endless, run *elastictest.Job) {
			run.DrainHost("a")
			await(t, run, elastictest.Size(2))
		}},
		"rank 0 has died": {then: func(_ *endless, run *elastictest.Job) {
			run.RemoveHost("a")
			run.Kill(0)
			await(t, run, elastictest.Size(2))
		}},
		"the last stays": {then: func(_ *endless, run *elastictest.Job) {
			for _, h := range []string{"a", "b", "c"} {
				run.DrainHost(h)
			}
			await(t, run, elastictest.Size(1))
		}},
		"too few": {job: func(_ *endless, c *elastictest.Config) {
			c.Driver.Size = job.Size{Min: 2, Elastic: true}
			c.Driver.Timeouts.Elastic = 10 * time.Millisecond
		}, then: func(_ *endless, run *elastictest.Job) {
			run.RemoveHost("a")
			run.RemoveHost("b")
		}, want: job.ErrNotEnoughSlots},
		"rank 0 fails": {job: func(e *endless, c *elastictest.Config) {
			c.Driver.Size = job.Size{Min: 3}
		}, then: func(e *endless, _ *elastictest.Job) { e.fails.Store(4) }, want: errOwn},
		"an only rank fails": {job: func(e *endless, c *elastictest.Config) {
			c.Hosts = hosts("a")
		}, then: func(e *endless, _ *elastictest.Job) { e.fails.Store(4) }, want: errOwn},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				e := &endless{dir: filepath.Join(t.TempDir(), "kept")}
				cfg := elastictest.Config{Hosts: hosts("abc"), Worker: e.train}
				if c.job != nil {
					c.job(e, &cfg)
				}
				run := begin(cfg)
				await(t, run, elastictest.Commit(3))
				if c.then != nil {
					c.then(e, run)
				}
				end := run.Stop
				if c.want != nil {
					end = run.Wait
				}
				if err := end(); !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				e.kept(t)
			})
		})
	}
}

// A job whose last checkpoint cannot be written has failed.
func TestLastCheckpointCannotBeWritten(t *testing.T) {
	for name, steps := range map[string]uint64{"stopped": 0, "done": 5} {
		inTime(t, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "file")
			e := &endless{dir: filepath.Join(t.TempDir(), "kept"), steps: steps}
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			var cut atomic.Bool
			run := begin(elastictest.Config{
				Hosts: hosts("abc"), Worker: e.train,
				At: func(m elastictest.Moment) bool {
					if m.Phase == elastictest.Committed && m.Commit == 4 && cut.CompareAndSwap(false, true) {
						// A file replaces the folder.
						if err := errors.Join(os.Rename(e.dir, e.dir+".gone"), os.Rename(file, e.dir)); err != nil {
							t.Error(err)
						}
					}
					return false
				},
			})
			await(t, run, elastictest.Commit(5))
			end := run.Wait
			if steps == 0 {
				end = run.Stop
			}
			err := end()
			if !errors.Is(err, job.ErrCheckpoint) || job.ExitStatus(err) != 7 {
				t.Errorf("%s: status %d: %v", name, job.ExitStatus(err), err)
			}
			if stopped := errors.As(err, new(job.StopSignal)); stopped != (steps == 0) {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}
