package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
)

// playDeaths makes some workers, but not all, end at some steps in the manner of How.
func playDeaths(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	if t.How == "oom" && t.killer {
		const limit = 64 << 20
		cgroup, err := t.cgroup(memoryCgroups, fmt.Sprintf("prove-%d-%d", os.Getpid(), t.Seed),
			map[string]string{"memory.limit_in_bytes": fmt.Sprint(limit)})
		if err != nil {
			return err
		}
		j.worker("-oom-cgroup", cgroup)
	}
	slots := t.dice.Perm(t.Workers)[:min(t.Times, t.Workers-1)]
	for _, i := range slots {
		j.worker("-exit", fmt.Sprintf("%s@step=%d:%s", t.slot(i), 1+t.dice.IntN(t.Steps-1), t.How))
	}
	if err := j.start(); err != nil {
		return err
	}
	if err := j.end(ctx); err != nil {
		return err
	}
	return j.noticed(len(slots))
}

// noticed measures how long hvdrun takes to report the death of each fault. Each fault creates a
// file when it happens.
func (j *job) noticed(faults int) error {
	for i := range faults {
		fi, err := os.Stat(filepath.Join(j.Dir, fmt.Sprintf("fault.%d", i)))
		if err != nil {
			continue // the slot's worker never reached that step
		}
		at := slices.IndexFunc(j.Events, func(e follow.Event) bool {
			known := e.Name == "worker_exited" && e.Cause == "failed" || e.Name == "excluded" // possibly before its core is written
			return known && e.Time.After(fi.ModTime())
		})
		if at < 0 {
			return fmt.Errorf("no event tells of the death of fault %d", i)
		}
		j.trial.timed(deaths, report.Row{Name: reported, Spread: report.Spread{j.Events[at].Time.Sub(fi.ModTime())}})
	}
	return nil
}

// playState kills a worker, whose replacement receives the state from the others.
func playState(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.begin(ctx)
	if err != nil {
		return err
	}
	if err := t.kills(ctx, j, 1); err != nil {
		return err
	}
	if err := j.full(ctx, j.Generation-1); err != nil {
		return err
	}
	return errors.Join(j.trained(ctx, 3), j.stop(ctx))
}

// playCore lets a worker die first while core dumps are permitted, and then while they are
// requested.
func playCore(ctx context.Context, t *trial) error {
	flag := "--core-limit"
	for _, wanted := range []bool{false, true} {
		if wanted && !t.has(flag) {
			break
		}
		j, err := t.job()
		if err != nil {
			return err
		}
		if wanted {
			j.flag(flag, "unlimited")
			j.again(2)
		}
		j.plan.Wrap = []string{"prlimit", "--core=unlimited:unlimited"}
		j.worker("-exit", fmt.Sprintf("%s@step=5:%s", t.slot(1), t.How))
		if err := j.start(); err != nil {
			return err
		}
		if err := errors.Join(j.end(ctx), j.noticed(1)); err != nil {
			return err
		}
	}
	return nil
}

// playMany makes many workers train to the end, or until one of them is killed and the others have
// continued.
func playMany(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	j.flag("--start-timeout", "120s")
	if err := j.start(); err != nil {
		return err
	}
	began := time.Now()
	if err := j.Until(ctx, "three steps", func() bool { return j.Step >= 3 }); err != nil {
		return err
	}
	t.note("%d workers train after %v", t.Workers, time.Since(began).Round(100*time.Millisecond))
	if n := j.Count("world_published"); n != 1 || j.World.Size != t.Workers {
		return fmt.Errorf("%d worlds were published before the third step, the last of %d workers, want one of %d", n, j.World.Size, t.Workers)
	}
	if j.Exits > 0 {
		return fmt.Errorf("%d workers have ended before the third step", j.Exits)
	}
	if t.Times > 0 {
		members, generation := j.Members(), j.Generation
		pid := members[t.dice.IntN(len(members))]
		if !j.strike(pid, syscall.SIGKILL) {
			return fmt.Errorf("worker %d has ended before it was killed", pid)
		}
		return errors.Join(j.gone(ctx, pid), j.later(ctx, generation), j.stop(ctx))
	}
	return j.end(ctx)
}

// playStopped suspends a process by SIGSTOP: a worker permanently, or another process for a time
// for which the others can wait.
func playStopped(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.begin(ctx, "--stall-warning", "1s", "--stall-timeout", "10s", "--drain-timeout", "2s", "--agent-timeout", "2s")
	if err != nil {
		return err
	}
	var pids []int
	generation := j.Generation
	switch t.How {
	case "agent":
		pids = j.processes(j.trial.programs.Hvdrun, "agent")
	case "hvdrun":
		pids = []int{j.driver()}
	default:
		members := j.Holders()
		pids = []int{members[t.dice.IntN(len(members))]}
	}
	if slices.Contains(pids, 0) || len(pids) == 0 {
		return errors.New("there is no such process")
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			return err
		}
	}
	if t.How == "worker" {
		err = j.later(ctx, generation)
	} else {
		moment := 5 * time.Second
		if t.How == "worker for a moment" {
			moment = 2 * time.Second
		}
		if err = follow.Sleep(ctx, moment); err == nil && t.How != "worker for a moment" {
			err = j.trained(ctx, 1) // training does not need the suspended process
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGCONT) // it may have ended
		}
	}
	if err := errors.Join(err, j.trained(ctx, 10)); err != nil {
		return err
	}
	if t.How != "worker" && j.Exits > 0 {
		return fmt.Errorf("%d workers were ended although none was dead", j.Exits)
	}
	if _, err := j.must(ctx, "status"); err != nil {
		return err
	}
	return j.stop(ctx)
}

// playFrozen freezes a worker so that SIGKILL does not reach it. The others continue and the job
// ends without it.
func playFrozen(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.begin(ctx, "--stall-warning", "1s", "--stall-timeout", "10s", "--drain-timeout", "2s")
	if err != nil {
		return err
	}
	members, generation := j.Holders(), j.Generation
	thaw, err := t.freeze(fmt.Sprintf("prove-%d-%d", os.Getpid(), t.Seed), members[t.dice.IntN(len(members))])
	if err != nil {
		return err
	}
	if err := j.later(ctx, generation); err != nil {
		return err
	}
	if err := j.trained(ctx, 10); err != nil {
		return err
	}
	if _, err := j.must(ctx, "status"); err != nil {
		return err
	}
	j.signal(syscall.SIGINT)
	if err := j.Until(ctx, "the end, with a process that cannot be killed", j.Over); err != nil {
		return err
	}
	if err := thaw(); err != nil {
		return err
	}
	return j.end(ctx, interrupted)
}
