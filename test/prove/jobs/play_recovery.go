package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
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
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/sandbox"
	"github.com/hvdrun/hvdrun/test/steplog"
)

const (
	// perJob is the largest number of disturbances of a job, so that its steplog stays short.
	perJob = 20
	// warmth is the number of steps of a world before it is disturbed.
	warmth = 20
	// unseen is the time after a disturbance in which the job is not observed, so that observation
	// does not affect it.
	unseen = 100 * time.Millisecond
	// rest is the exclusion time of a dead worker's slot, longer than the recovery from the death.
	rest = "0.2,0.2"
)

// playRecovery measures how long training is interrupted when a worker is killed, and when workers
// are added.
//
// A death is timed from right before kill(2) of a worker until every survivor has completed a step
// in a later world. The dead worker's slot returns, and the next worker is killed some time later;
// with Spares, once that number of spares wait again and have followed the others for a while.
//
// Growth is timed by the discovery script, from right before it first prints a second host with as
// many slots as the first, until the first step in the larger world. The pause is the longest time
// in between from one step of an old worker to its next, less a median step. Because a first step
// can be slow for other reasons, the time outside the training function is reported too.
//
// An arrival is timed from right before another `hvdrun agent` is started in the cluster of the
// job, until Commit has returned a HostsUpdatedError in every worker, while a new worker waits to
// join.
func playRecovery(ctx context.Context, t *trial) error {
	if t.Workers < 2 || t.Beside != 0 && t.Spares == 0 {
		return errors.New("it takes at least 2 workers, and tasks beside them spares")
	}
	b := bench{trial: t, steps: make(map[bool]report.Spread)}
	for left := t.Kills; left > 0; left -= perJob {
		n := min(left, perJob)
		if err := b.killSome(ctx, n, false); err != nil {
			return err
		}
		if t.Beside == 0 {
			continue
		}
		if err := b.killSome(ctx, n, true); err != nil {
			return err
		}
	}
	for left := t.Joins; left > 0; left -= perJob {
		if err := b.growSome(ctx, min(left, perJob)); err != nil {
			return err
		}
	}
	if t.Arrivals > 0 {
		if err := b.arriveSome(ctx, t.Arrivals); err != nil {
			return err
		}
	}
	if b.most > 0 {
		state := t.State + int64(t.Ballast)*1e6
		t.note("most memory of a worker %d MB, %.2f bytes for each of the state, %d MB beside twice the state",
			b.most/1e6, float64(b.most)/float64(state), (b.most-2*state)/1e6)
	}
	return b.compare()
}

// bench is the measurements of a case.
type bench struct {
	*trial
	steps map[bool]report.Spread // times of a step, without tasks and with them
	most  int64                  // bytes of a worker
}

// endless returns a job that runs until finish.
func (b *bench) endless(name string) (*job, error) {
	b.Steps = 0
	j, err := b.job()
	if err != nil {
		return nil, err
	}
	j.without("--blacklist-cooldown-range", "--blacklist-cooldown-range", rest, "--log-level", "debug", "--drain-timeout", "2s")
	j.worker("-log-all")
	return j, j.apart(name)
}

// settled blocks until a world of this size with a later generation has completed some steps.
func (j *job) settled(ctx context.Context, size int, after uint64) error {
	return j.Until(ctx, fmt.Sprintf("a world of %d", size), func() bool {
		return j.Generation > after && j.Size == size && len(j.Ranks) == size && j.warm()
	})
}

// warm reports whether rank 0 has completed enough steps in the newest world.
func (j *job) warm() bool {
	steps := 0
	for _, l := range slices.Backward(j.Lines) {
		if l.Generation == j.Generation && l.Rank == 0 && l.Event == steplog.Step {
			steps++
		}
		if steps == warmth || l.Generation < j.Generation {
			break
		}
	}
	return steps == warmth
}

// spared blocks until all spares wait outside the world, and then for some more steps.
func (j *job) spared(ctx context.Context) error {
	if j.Spares == 0 {
		return nil
	}
	if err := j.Until(ctx, fmt.Sprintf("%d spares", j.Spares), func() bool {
		waiting := make(map[plan.SlotID]bool)
		for _, e := range j.Events {
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
		return len(waiting) >= j.Spares
	}); err != nil {
		return err
	}
	return j.trained(ctx, warmth)
}

// weigh updates the largest memory of any member of the newest world.
func (b *bench) weigh(j *job) {
	for pid := range j.Ranks {
		b.most = max(b.most, peak(pid))
	}
}

// killSome runs a job and kills n of its workers, one after the other. tasks says whether its
// spares run tasks meanwhile.
func (b *bench) killSome(ctx context.Context, n int, tasks bool) error {
	j, err := b.endless("kills")
	if err != nil {
		return err
	}
	if b.Spares > 0 { // on a separate host
		members := b.setup
		members.Spares = 0
		j.source("-H", fmt.Sprintf("%s,127.0.1.1:%d", members.hostList(), b.Spares))
	}
	j.flag("--discovery-interval", b.DiscoveryInterval.String())
	j.worker(fmt.Sprintf("-tasks=%t", tasks))
	if err := j.start(); err != nil {
		return err
	}
	var samples []sample
	disturbed, ended := uint64(0), func() {}
	defer func() { ended() }()
	for i := range n {
		if err := j.settled(ctx, b.Workers, disturbed); err != nil {
			return err
		}
		if i == 0 && tasks {
			if ended, err = b.besides(ctx, j); err != nil {
				return err
			}
		}
		if err := j.spared(ctx); err != nil {
			return err
		}
		disturbed = j.Generation
		if err := follow.Sleep(ctx, time.Duration(b.dice.Int64N(int64(20*time.Millisecond)))); err != nil {
			return err
		}
		b.weigh(j)
		pids := slices.Sorted(maps.Keys(j.Ranks))
		pid := pids[b.dice.IntN(len(pids))]
		s := sample{at: time.Now(), generation: j.Generation, pid: pid}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return err
		}
		samples = append(samples, s)
		if err := follow.Sleep(ctx, unseen); err != nil {
			return err
		}
	}
	ended()
	if err := j.stop(ctx); err != nil {
		return err
	}
	for i := range samples {
		samples[i].death(j)
	}
	b.tellDeaths(samples, tasks)
	last := make(map[int]steplog.Line)
	for _, l := range j.Lines {
		if l.Event != steplog.Step {
			continue
		}
		if before, ok := last[l.PID]; ok && before.Generation == l.Generation {
			b.steps[tasks] = append(b.steps[tasks], time.Duration(l.Time-before.Time))
		}
		last[l.PID] = l
	}
	return nil
}

// besides submits tasks to the job until the returned function is called.
func (b *bench) besides(ctx context.Context, j *job) (end func(), err error) {
	end = func() {}
	name, err := j.name()
	if err != nil {
		return end, err
	}
	cmd := j.Subcommand(ctx, "tasks", "run", "--job", name, b.programs.Tasker, "-endless", "-submit", "50", "-lasts", b.Beside.String())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := cmd.Start(); err != nil {
		return end, err
	}
	return sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // its output has the result
		text := strings.TrimSpace(out.String())
		var n int
		_, _ = fmt.Sscanf(text[strings.LastIndex(text, "\n")+1:], "%d tasks", &n) // the last line; those before report how many are left
		b.count("tasks of spares", n)
	}), nil
}

// compare compares the steps of members while spares run tasks with those while spares wait.
func (b *bench) compare() error {
	without, with := b.steps[false], b.steps[true]
	if len(with) == 0 {
		return nil
	}
	b.timed("From one step of a worker to its next", report.Row{Name: "  spares wait", Spread: without}, report.Row{Name: "  spares run tasks", Spread: with})
	ratio := float64(with.Quantile(0.5)) / float64(without.Quantile(0.5))
	b.note("steps with tasks / without: median %.3f, mean %.3f", ratio, float64(with.Mean())/float64(without.Mean()))
	if b.Ratio > 0 && ratio > b.Ratio {
		return fmt.Errorf("a median step with tasks takes %.3f times as long as one without, more than %.3f", ratio, b.Ratio)
	}
	return nil
}

// growSome runs a job and n times adds a host and removes it.
func (b *bench) growSome(ctx context.Context, n int) error {
	few := (b.Workers + 1) / 2
	small := fmt.Sprintf("127.0.0.1:%d", few)
	large := fmt.Sprintf("%s 127.0.0.2:%d", small, b.Workers-few)
	j, err := b.endless("joins")
	if err != nil {
		return err
	}
	j.without("-np", "-np", strconv.Itoa(few))
	j.source("--discovery-interval", b.DiscoveryInterval.String())
	j.plan.Stages = []follow.Stage{{Hosts: small}}
	for i := range n {
		j.plan.Stages = append(j.plan.Stages,
			follow.Stage{After: fmt.Sprintf("add.%d", i), Hosts: large},
			follow.Stage{After: fmt.Sprintf("remove.%d", i), Hosts: small})
	}
	if err := j.start(); err != nil {
		return err
	}
	mark := func(name string, i int) error {
		return os.WriteFile(filepath.Join(j.Dir, fmt.Sprintf("%s.%d", name, i)), nil, 0o666)
	}
	var samples []sample
	disturbed := uint64(0)
	for i := range n {
		if err := j.settled(ctx, few, disturbed); err != nil {
			return err
		}
		disturbed = j.Generation
		s := sample{generation: j.Generation}
		if err := mark("add", i); err != nil {
			return err
		}
		if err := j.settled(ctx, b.Workers, disturbed); err != nil {
			return err
		}
		if s.at, err = j.shown(2*i + 1); err != nil {
			return err
		}
		samples = append(samples, s)
		b.weigh(j)
		if err := mark("remove", i); err != nil {
			return err
		}
	}
	if err := j.stop(ctx); err != nil {
		return err
	}
	for i := range samples {
		samples[i].growth(j)
	}
	b.tellGrowths(few, samples)
	return nil
}

// shown returns when the script first printed a stage.
func (j *job) shown(stage int) (time.Time, error) {
	b, err := os.ReadFile(filepath.Join(j.Dir, fmt.Sprintf("shown.%d", stage)))
	if err != nil {
		return time.Time{}, err
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return time.Unix(0, ns), err
}

// arriveSome runs a job over a cluster of agents; n times another agent with room for one worker
// starts and leaves again.
func (b *bench) arriveSome(ctx context.Context, n int) error {
	key, err := b.key(ctx)
	if err != nil {
		return err
	}
	net, err := sandbox.Net()
	if err != nil {
		return err
	}
	j, err := b.endless("arrivals")
	if err != nil {
		return err
	}
	agent := func(name string, slots, number int) (stop func() error, err error) {
		return b.background(j, name, []string{b.programs.Hvdrun, "agent", "--key-file", key, "--name", name,
			"--slots", strconv.Itoa(slots), "--join", net + "1", "--bind", fmt.Sprint(net, number)})
	}
	first, err := agent("first", b.Workers, 1)
	if err != nil {
		return err
	}
	j.source("--gossip-join", net+"1", "--gossip-key-file", key, "--gossip-bind", net+"2:0")
	if err := j.start(); err != nil {
		return err
	}
	var samples []sample
	after := uint64(0)
	for i := range n {
		if err := j.settled(ctx, b.Workers, after); err != nil {
			return err
		}
		s := sample{at: time.Now(), generation: j.Generation}
		stop, err := agent(fmt.Sprintf("other-%d", i), 1, 3+i)
		if err != nil {
			return err
		}
		if err := j.settled(ctx, b.Workers+1, s.generation); err != nil {
			return err
		}
		after, samples = j.Generation, append(samples, s)
		if err := stop(); err != nil {
			return err
		}
	}
	j.signal(syscall.SIGINT)
	if err := errors.Join(j.endAmong(ctx, interrupted), first()); err != nil {
		return err
	}
	for i := range samples {
		samples[i].growth(j)
		samples[i].hear(j)
	}
	b.tellArrivals(samples)
	return nil
}
