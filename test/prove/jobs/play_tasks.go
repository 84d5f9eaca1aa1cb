package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
)

// orphaned is how long agents wait for another driver.
const orphaned = 30 * time.Second

// playTasks runs a client that submits tasks. Each must return the right result exactly once,
// whatever happens to the workers and to hvdrun meanwhile. In the kind model, tasks depend on each
// other, and some fail or are cancelled.
func playTasks(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	j.flag("--tasks-only", "--orphan-timeout", orphaned.String(), "--drain-timeout", "2s")
	j.plan.Command = []string{t.programs.Tasker}
	if err := j.start(); err != nil {
		return err
	}
	if err := j.Until(ctx, "the socket of tasks", func() bool {
		_, status, err := j.ask(ctx, "tasks")
		return err == nil && status == 0
	}); err != nil {
		return err
	}
	ended, err := j.submit(ctx)
	if err != nil {
		return err
	}
	if err := j.Until(ctx, "the client's first line", func() bool { return j.counted.Load() > 0 || len(ended) > 0 }); err != nil {
		return err
	}
	for range t.Times {
		if j, err = j.disturbTasks(ctx, t); err != nil {
			return err
		}
	}
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	if _, err := j.must(ctx, "stop"); err != nil {
		return err
	}
	if err := j.Until(ctx, "the end", j.Over); err != nil {
		return err
	}
	if j.Status() != terminated {
		return fmt.Errorf("exit status %d, want %d", j.Status(), terminated)
	}
	// If a driver was killed before it had recorded an agent, the agent waits for another driver
	// that never comes, for less than this.
	if left := j.AwaitGone(follow.Patience); len(left) > 0 {
		return fmt.Errorf("processes are left: %q", left)
	}
	return nil
}

// submit starts the client. The channel delivers its result.
func (j *job) submit(ctx context.Context) (<-chan error, error) {
	n, how := j.trial.Steps, "-submit"
	if j.trial.Kind == "model" {
		how = "-model"
	}
	name, err := j.name()
	if err != nil {
		return nil, err
	}
	cmd := j.Subcommand(ctx, "tasks", "run", "--job", name, j.trial.programs.Tasker, how, fmt.Sprint(n), "-seed", fmt.Sprint(j.trial.Seed), "-lasts", j.trial.StepTime.String())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() {
		last := ""
		for s := bufio.NewScanner(out); s.Scan(); {
			last = s.Text()
			j.counted.Add(int64(len(last)))
		}
		err := cmd.Wait()
		if err != nil || !strings.HasPrefix(last, fmt.Sprintf("%d right", n)) {
			err = errors.Join(fmt.Errorf("the client's last line is %q: %s", last, stderr.String()), err)
		}
		ended <- err
	}()
	return ended, nil
}

// disturbTasks disturbs the job, and returns the job that continues.
func (j *job) disturbTasks(ctx context.Context, t *trial) (*job, error) {
	if err := follow.Sleep(ctx, time.Duration(100+t.dice.IntN(600))*time.Millisecond); err != nil {
		return j, err
	}
	switch t.dice.IntN(6) {
	case 0:
		j.KillDriver()
		next, err := j.Resume("")
		if err != nil {
			return j, err
		}
		j.Running = next
		return j, j.Until(ctx, "the socket of tasks", func() bool {
			_, status, err := j.ask(ctx, "tasks")
			return err == nil && status == 0
		})
	case 1:
		slot := t.slot(t.dice.IntN(t.Workers))
		if _, _, err := j.ask(ctx, "drain", slot); err != nil { // it can be the last one
			return j, err
		}
		_, _, err := j.ask(ctx, "readmit", slot)
		return j, err
	case 2: // its workers die too, and the results that their host stored are lost
		j.killOne(t, func(line string) bool { return strings.HasSuffix(line, " agent --job") })
		return j, nil
	}
	j.killOne(t, func(line string) bool { return line == t.programs.Tasker })
	return j, nil
}

// killOne kills one of the job's processes for whose command line is returns true.
func (j *job) killOne(t *trial, is func(line string) bool) {
	pids := slices.DeleteFunc(j.Processes(), func(pid int) bool { return !is(follow.CommandLine(pid)) })
	if len(pids) > 0 {
		_ = syscall.Kill(pids[t.dice.IntN(len(pids))], syscall.SIGKILL) // it may have ended
	}
}
