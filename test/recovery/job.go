package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

const (
	// warmth is the number of steps of a world before it is disturbed.
	warmth = 20
	// quiet is the time after a disturbance in which the job is not observed, so that observation
	// does not affect it.
	quiet = 100 * time.Millisecond
	// rest is the exclusion time of a dead worker's slot, longer than the recovery from the death.
	rest = "0.2,0.2"
)

// endless starts a job that runs until finish.
func (b *bench) endless(name string, flags []string, stages []follow.Stage) (*watch, error) {
	dir, err := os.MkdirTemp(b.dir, name)
	if err != nil {
		return nil, err
	}
	r, err := b.programs.Start(follow.Job{
		Dir: dir, Flags: append(flags, "--log-level", "debug"), Stages: stages,
		Trainer: []string{"-steps", "1000000000", "-log-all", "-size", strconv.Itoa(b.size), "-step-time", b.stepTime.String(),
			"-ballast", strconv.Itoa(b.ballast), "-ballast-change", b.change, "-late=" + strconv.FormatBool(b.late),
			"-microbatches", strconv.Itoa(b.microbatches), "-tasks=" + strconv.FormatBool(b.tasks)},
	})
	if err != nil {
		return nil, err
	}
	return &watch{r, b.microbatches > 0}, nil
}

// watch is a running job.
type watch struct {
	*follow.Running
	bySteps bool // workers train by elastic.Steps, and check their steps themselves
}

// settled blocks until a world of that size, later than the generation, has completed some steps.
func (w *watch) settled(ctx context.Context, size int, after uint64) error {
	return w.Until(ctx, fmt.Sprintf("a world of %d", size), func() bool {
		return w.Generation > after && w.Size == size && len(w.Ranks) == size && w.warm()
	})
}

// warm reports whether rank 0 has completed enough steps in the newest world.
func (w *watch) warm() bool {
	steps := 0
	for _, l := range slices.Backward(w.Lines) {
		if l.Generation == w.Generation && l.Rank == 0 && l.Event == steplog.Step {
			steps++
		}
		if steps == warmth || l.Generation < w.Generation {
			break
		}
	}
	return steps == warmth
}

// spared blocks until so many workers wait that are in no world, and some steps more.
func (w *watch) spared(ctx context.Context, spares int) error {
	if spares == 0 {
		return nil
	}
	ready := func() bool {
		waiting := make(map[plan.SlotID]bool)
		for _, e := range w.Events {
			switch e.Name {
			case "worker_ready":
				waiting[plan.SlotID{Host: e.Host, Index: *e.Slot}] = true
			case "worker_exited":
				delete(waiting, plan.SlotID{Host: e.Host, Index: *e.Slot})
			case "world_published":
				for _, s := range e.Slots {
					delete(waiting, plan.SlotID{Host: s.Host, Index: s.Slot})
				}
			}
		}
		return len(waiting) >= spares
	}
	if err := w.Until(ctx, fmt.Sprintf("%d spares", spares), ready); err != nil {
		return err
	}
	from := w.Step
	return w.Until(ctx, "some steps of the members", func() bool { return w.Step >= from+warmth })
}

// finish ends the job and checks its result.
func (w *watch) finish(size int, failed error) (follow.Result, error) {
	_ = syscall.Kill(w.PID, syscall.SIGINT) // fails if it has ended
	res, err := w.Wait()
	switch {
	case failed != nil:
		return res, fmt.Errorf("%w\n%s", failed, res.Output)
	case err != nil:
		return res, err
	case res.Status != 128+int(syscall.SIGINT) || len(res.Left) > 0:
		return res, fmt.Errorf("the job in %s: exit status %d, processes left: %q\n%s", w.Dir, res.Status, res.Left, res.Output)
	case w.bySteps:
		return res, nil
	}
	return res, steplog.Check(res.Lines, w.Step, size)
}

// killSome runs a job and kills n of its workers, one after the other.
func (b *bench) killSome(ctx context.Context, n int) ([]sample, error) {
	hosts := fmt.Sprintf("localhost:%d,127.0.0.1:%d", (b.workers+1)/2, b.workers/2)
	flags := []string{"-np", strconv.Itoa(b.workers), "--min-np", "1",
		"--blacklist-cooldown-range", rest, "--discovery-interval", b.interval.String(), "--drain-timeout", "2s"}
	if b.spares > 0 {
		hosts += fmt.Sprintf(",127.0.0.2:%d", b.spares)
		flags = append(flags, "--max-np", strconv.Itoa(b.workers), "--spares", strconv.Itoa(b.spares))
	}
	w, err := b.endless("kills", append(flags, "-H", hosts), nil)
	if err != nil {
		return nil, err
	}
	ended := func() {}
	defer func() { ended() }()
	b.seed++
	dice := rand.New(rand.NewPCG(b.seed, 0))
	var samples []sample
	disturbed := uint64(0)
	for i := range n {
		if err = w.settled(ctx, b.workers, disturbed); err != nil {
			break
		}
		if i == 0 {
			if ended, err = b.besides(ctx, w); err != nil {
				break
			}
		}
		if err = w.spared(ctx, b.spares); err != nil {
			break
		}
		disturbed = w.Generation
		time.Sleep(time.Duration(dice.Int64N(int64(20 * time.Millisecond))))
		pids := slices.Sorted(maps.Keys(w.Ranks))
		b.weigh("kills", pids)
		pid := pids[dice.IntN(len(pids))]
		s := sample{at: time.Now(), generation: w.Generation, rank: w.Ranks[pid], pid: pid}
		if err = syscall.Kill(pid, syscall.SIGKILL); err != nil {
			break
		}
		samples = append(samples, s)
		time.Sleep(quiet)
	}
	b.weigh("kills", slices.Collect(maps.Keys(w.Ranks)))
	ended()
	res, err := w.finish(b.size, err)
	if err != nil {
		return nil, err
	}
	for i := range samples {
		samples[i].death(res)
	}
	b.stepTimes(res)
	return samples, b.remove(w.Dir)
}

// growSome runs a job and n times adds a host and removes it.
func (b *bench) growSome(ctx context.Context, n int) ([]sample, error) {
	few := (b.workers + 1) / 2
	small := fmt.Sprintf("localhost:%d", few)
	large := fmt.Sprintf("%s 127.0.0.1:%d", small, b.workers-few)
	stages := []follow.Stage{{Hosts: small}}
	for i := range n {
		stages = append(stages,
			follow.Stage{After: fmt.Sprintf("add.%d", i), Hosts: large},
			follow.Stage{After: fmt.Sprintf("remove.%d", i), Hosts: small})
	}
	w, err := b.endless("joins", []string{"-np", strconv.Itoa(few), "--min-np", "1",
		"--discovery-interval", b.interval.String(), "--drain-timeout", "2s"}, stages)
	if err != nil {
		return nil, err
	}
	var samples []sample
	disturbed := uint64(0)
	for i := range n {
		if err = w.settled(ctx, few, disturbed); err != nil {
			break
		}
		disturbed = w.Generation
		s := sample{generation: w.Generation}
		if err = w.mark(fmt.Sprintf("add.%d", i)); err != nil {
			break
		}
		if err = w.settled(ctx, b.workers, disturbed); err != nil {
			break
		}
		if s.at, err = w.shown(2*i + 1); err != nil {
			break
		}
		samples = append(samples, s)
		b.weigh("joins", slices.Collect(maps.Keys(w.Ranks)))
		if err = w.mark(fmt.Sprintf("remove.%d", i)); err != nil {
			break
		}
	}
	res, err := w.finish(b.size, err)
	if err != nil {
		return nil, err
	}
	for i := range samples {
		samples[i].growth(res)
	}
	return samples, b.remove(w.Dir)
}

// mark creates a file that the discovery script waits for.
func (w *watch) mark(name string) error {
	return os.WriteFile(filepath.Join(w.Dir, name), nil, 0o666)
}

// shown returns when the script first printed a stage.
func (w *watch) shown(stage int) (time.Time, error) {
	b, err := os.ReadFile(filepath.Join(w.Dir, fmt.Sprintf("shown.%d", stage)))
	if err != nil {
		return time.Time{}, err
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return time.Unix(0, ns), err
}

// besides submits tasks to the job, if it has them, until the function that it returns is called.
func (b *bench) besides(ctx context.Context, w *watch) (end func(), err error) {
	if !b.tasks {
		return func() {}, nil
	}
	cmd := w.Subcommand(ctx, "tasks", "run", b.programs.Tasker, "-endless", "-submit", "50", "-lasts", b.beside.String())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := cmd.Start(); err != nil {
		return func() {}, err
	}
	return sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // what it has printed counts
		text := strings.TrimSpace(out.String())
		var n int
		_, _ = fmt.Sscanf(text[strings.LastIndex(text, "\n")+1:], "%d tasks", &n) // after lines of how many are left
		b.ran += n
	}), nil
}

// stepTimes collects the times from one step to the next of the same worker in the same world.
func (b *bench) stepTimes(res follow.Result) {
	last := make(map[int]steplog.Line)
	for _, l := range res.Lines {
		if l.Event != steplog.Step {
			continue
		}
		if before, ok := last[l.PID]; ok && before.Generation == l.Generation {
			b.steps[b.tasks] = append(b.steps[b.tasks], time.Duration(l.Time-before.Time))
		}
		last[l.PID] = l
	}
}
