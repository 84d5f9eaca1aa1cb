package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// job is a job of a case. Its plan can be changed until start.
type job struct {
	setup
	*follow.Running // nil until start
	plan            follow.Job
	trial           *trial
	counted         atomic.Int64   // bytes of output that was read: progress
	before          []steplog.Line // lines of the case's first job, whose checkpoints this one resumes
}

// job returns a job of the case. Its plan can be changed until start.
func (t *trial) job() (*job, error) {
	s := t.setup
	number, err := rand.Int(rand.Reader, big.NewInt(1e15))
	if err != nil {
		return nil, err
	}
	j := &job{setup: s, trial: t}
	j.plan = follow.Job{
		Dir: t.dir, Env: []string{"GOTRACEBACK=all"}, Marks: []string{fmt.Sprintf("0.%015d", number), "PROVE_JOB=" + rand.Text()}, Progress: j.counted.Load,
		Flags: []string{"-np", strconv.Itoa(s.Workers), "--min-np", "1", "--blacklist-cooldown-range", "0.1,0.4",
			"--log-level", "info", "-H", s.hostList()},
	}
	weights, ballast := s.weights()
	j.plan.Trainer = []string{"-log-all=" + strconv.FormatBool(s.Workers <= 16), "-steps", strconv.Itoa(j.steps()), "-size", strconv.Itoa(weights),
		"-ballast", strconv.Itoa(ballast), "-ballast-change", cmp.Or(s.Change, "few"), "-step-time", s.StepTime.String(),
		"-print", strconv.Itoa(s.Print), fmt.Sprintf("-async=%t", s.Async), "-microbatches", strconv.Itoa(s.Microbatches)}
	if s.Spares > 0 {
		j.flag("--max-np", strconv.Itoa(s.Workers), "--spares", strconv.Itoa(s.Spares))
	}
	return j, nil
}

// weights returns the number of weights and the MB of other state.
func (s setup) weights() (n, ballast int) {
	if s.State >= 32<<20 { // checking weights bit by bit is slow
		return 1 << 18, s.Ballast + int(s.State/1e6)
	}
	return int(max(16, s.State/4)), s.Ballast
}

// flag adds flags of hvdrun.
func (j *job) flag(words ...string) { j.plan.Flags = append(j.plan.Flags, words...) }

// source replaces -H by other flags of hvdrun.
func (j *job) source(words ...string) { j.without("-H", words...) }

// without replaces a flag of hvdrun and its value by other flags.
func (j *job) without(flag string, words ...string) {
	at := slices.Index(j.plan.Flags, flag)
	j.plan.Flags = append(slices.Delete(j.plan.Flags, at, at+2), words...)
}

// worker adds flags of the workers.
func (j *job) worker(words ...string) { j.plan.Trainer = append(j.plan.Trainer, words...) }

// The exit statuses of a job that a signal has stopped.
const (
	interrupted = 128 + int(syscall.SIGINT)
	terminated  = 128 + int(syscall.SIGTERM)
	killed      = 128 + int(syscall.SIGKILL)
)

const endless = 1_000_000 // steps of a job that is stopped

func (s setup) steps() int {
	if s.Steps == 0 {
		return endless
	}
	return s.Steps
}

// again gives the case's n-th job its own files and renews its faults.
func (j *job) again(n int) {
	j.plan.Name = fmt.Sprintf(".%d", n)
	for i := 0; ; i++ { // faults happen again if their marks are removed
		if os.Remove(filepath.Join(j.plan.Dir, fmt.Sprintf("fault.%d", i))) != nil {
			return
		}
	}
}

// apart gives the job its own folder in that of the case.
func (j *job) apart(name string) error {
	dir, err := os.MkdirTemp(j.plan.Dir, name+".")
	j.plan.Dir = dir
	return err
}

// start starts hvdrun. It ends with the case.
func (j *job) start() (err error) {
	if j.Running, err = j.trial.programs.Start(j.plan); err == nil {
		j.trial.jobs = append(j.trial.jobs, j)
	}
	return err
}

// train starts hvdrun and waits for some steps.
func (j *job) train(ctx context.Context, steps int) error {
	if err := j.start(); err != nil {
		return err
	}
	return j.trained(ctx, steps)
}

// trained waits until n more steps have been completed in the newest world.
func (j *job) trained(ctx context.Context, n int) error {
	if err := j.Look(); err != nil {
		return err
	}
	want := j.Step + n
	return j.Until(ctx, fmt.Sprintf("step %d", want), func() bool { return j.Step >= want })
}

// later waits until a world after the generation has completed a step.
func (j *job) later(ctx context.Context, generation uint64) error {
	return j.Until(ctx, fmt.Sprintf("a step after generation %d", generation), func() bool {
		return slices.ContainsFunc(j.Lines, func(l steplog.Line) bool { return l.Generation > generation && l.Event == steplog.Step })
	})
}

// gone waits until hvdrun has reported the end of this worker, which was killed right before.
func (j *job) gone(ctx context.Context, pid int) error {
	began := time.Now()
	err := j.Until(ctx, fmt.Sprintf("the end of worker %d", pid), func() bool { return !slices.Contains(j.Alive, pid) })
	if err == nil {
		j.trial.timed(deaths, report.Row{Name: reported, Spread: report.Spread{time.Since(began)}})
	}
	return err
}

// Names of the times of deaths, which many kinds measure.
const (
	deaths   = "From a worker's death to"
	reported = "hvdrun's report"
)

// name returns the name by which subcommands find the job: the user can have other jobs.
func (j *job) name() (string, error) {
	if id := j.RunID(); id != "" {
		return id, nil
	}
	return j.Folder() // no worker has started yet
}

// ask runs a subcommand of hvdrun for this job, whose name it inserts after the first word. The
// subcommand must end, successfully or not.
func (j *job) ask(ctx context.Context, args ...string) (string, int, error) {
	if args[0] != "jobs" {
		name, err := j.name()
		if err != nil {
			return "", -1, err
		}
		args = slices.Insert(slices.Clone(args), 1, name)
	}
	out, err := j.Subcommand(ctx, args...).CombinedOutput()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() < 0:
		return string(out), -1, fmt.Errorf("hvdrun %s has not answered: %w", strings.Join(args, " "), errors.Join(err, ctx.Err()))
	case errors.As(err, &exit):
		return string(out), exit.ExitCode(), nil
	}
	return string(out), 0, err
}

// must is like ask, for a subcommand that must succeed.
func (j *job) must(ctx context.Context, args ...string) (string, error) {
	out, status, err := j.ask(ctx, args...)
	if err == nil && status != 0 {
		err = fmt.Errorf("hvdrun %s: status %d: %s", strings.Join(args, " "), status, out)
	}
	return out, err
}

// signal sends a signal to hvdrun, also if it is wrapped.
func (j *job) signal(s syscall.Signal) {
	pid := j.PID
	if len(j.Wrap) > 0 {
		if pid = j.driver(); pid == 0 {
			return
		}
	}
	_ = syscall.Kill(pid, s) // it may have ended
}

// end waits for hvdrun's end and checks what must hold then. The exit status must be one of
// statuses, or 0 if statuses is empty.
func (j *job) end(ctx context.Context, statuses ...int) error {
	if len(statuses) == 0 {
		statuses = []int{0}
	}
	if err := j.Until(ctx, "the end", j.Over); err != nil {
		return err
	}
	var errs []error
	if j.Hung() {
		errs = append(errs, fmt.Errorf("it hung: no progress for %v, and it was killed", j.Still))
	}
	if !slices.Contains(statuses, j.Status()) {
		errs = append(errs, fmt.Errorf("exit status %d, want one of %v", j.Status(), statuses))
	} else if left := j.AwaitGone(follow.Patience); len(left) > 0 {
		errs = append(errs, fmt.Errorf("processes are left: %q", left))
	}
	return errors.Join(append(errs, j.Look(), j.checkStepLog())...)
}

// beyond is greater than any generation of a case's first job.
const beyond = 1 << 20

// checkStepLog checks with steplog.Check that no commit is lost and no step is left out. It does
// not check workers that train by microbatches: they check their steps themselves, and enter worlds
// in the middle of a step.
func (j *job) checkStepLog() error {
	if j.Microbatches > 0 {
		return nil
	}
	lines := slices.Clone(j.before)
	for _, l := range j.Lines {
		if len(j.before) > 0 {
			l.Generation += beyond
		}
		lines = append(lines, l)
	}
	weights, _ := j.weights()
	return steplog.Check(lines, j.steps(), weights)
}
