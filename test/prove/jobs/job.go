package main

import (
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
	"github.com/hvdrun/hvdrun/test/steplog"
)

const (
	// quiet is the time without a step, an event or output after which a job counts as hung.
	quiet = 60 * time.Second
	// barren is the time without a step, while steps are awaited, after which it counts as hung.
	barren = 150 * time.Second
	// patience is how long an endless job may train while something else is awaited.
	patience = 120 * time.Second
	// answer is the time limit of a command.
	answer = 30 * time.Second
	// lingering is how long a process may exist after the end of hvdrun: the kernel needs time to
	// free much memory.
	lingering = 10 * time.Second
)

// job is a job of a case. Its plan may be changed until start.
type job struct {
	setup
	*follow.Running // nil until start
	plan            follow.Job
	trial           *trial
	counted         atomic.Int64   // bytes of output that was read
	before          []steplog.Line // lines of the case's first job, whose checkpoints this one resumes
}

// job returns a job of the case; its plan may be changed until start.
func (t *trial) job() (*job, error) {
	s := t.setup
	number, err := rand.Int(rand.Reader, big.NewInt(1e15))
	if err != nil {
		return nil, err
	}
	j := &job{setup: s, trial: t}
	j.plan = follow.Job{
		Dir: t.dir, Env: []string{"GOTRACEBACK=all"}, Marks: []string{fmt.Sprintf("0.%015d", number), "PROVE_JOB=" + rand.Text()}, Still: quiet, Progress: j.output,
		Flags: []string{"-np", strconv.Itoa(s.Workers), "--min-np", "1", "--blacklist-cooldown-range", "0.1,0.4",
			"--log-level", "info", "-H", s.hostList()},
	}
	weights, ballast := s.State/4, int64(0)
	if s.State >= 32<<20 { // checking weights bit by bit is slow
		weights, ballast = 1<<18, s.State/1e6
	}
	j.plan.Trainer = []string{"-log-all=" + strconv.FormatBool(s.Workers <= 16), "-steps", strconv.Itoa(j.steps()), "-size",
		strconv.FormatInt(max(16, weights), 10), "-ballast", strconv.FormatInt(ballast, 10), "-step-time", s.Pause.String(),
		"-print", strconv.Itoa(s.Print), "-async=" + strconv.FormatBool(s.Async)}
	return j, nil
}

// output returns the bytes of hvdrun's output.
func (j *job) output() int64 {
	n := j.counted.Load()
	if fi, err := os.Stat(j.plan.OutputPath()); err == nil {
		n += fi.Size()
	}
	return n
}

// flag adds flags of hvdrun.
func (j *job) flag(words ...string) { j.plan.Flags = append(j.plan.Flags, words...) }

// source adds flags of hvdrun in place of -H.
func (j *job) source(words ...string) {
	at := slices.Index(j.plan.Flags, "-H")
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

// start starts hvdrun, which the case ends.
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

// until waits until a condition holds. It fails if hvdrun ends or the job makes no progress.
func (j *job) until(ctx context.Context, what string, holds func() bool) error {
	began := time.Now()
	var late error
	err := j.Until(ctx, what, func() bool {
		switch {
		case holds():
			return true
		case min(time.Since(j.Stepped), time.Since(began)) > barren:
			late = fmt.Errorf("waiting for %s: the job hangs: no step for %v", what, barren)
		case j.Steps == 0 && time.Since(began) > patience:
			late = fmt.Errorf("waiting for %s: in vain for %v, while steps were made", what, patience)
		}
		return late != nil
	})
	return errors.Join(err, late)
}

// trained waits until n more steps have been completed in the newest world.
func (j *job) trained(ctx context.Context, n int) error {
	if err := j.Look(); err != nil {
		return err
	}
	want := j.Step + n
	return j.until(ctx, fmt.Sprintf("step %d", want), func() bool { return j.Step >= want })
}

// later waits until a world after the generation has completed a step.
func (j *job) later(ctx context.Context, generation uint64) error {
	return j.until(ctx, fmt.Sprintf("a step after generation %d", generation), func() bool {
		return slices.ContainsFunc(j.Lines, func(l steplog.Line) bool { return l.Generation > generation && l.Event == steplog.Step })
	})
}

// gone waits until hvdrun has reported the ends of these workers. More than limit is an error.
func (j *job) gone(ctx context.Context, limit time.Duration, pids ...int) error {
	began := time.Now()
	err := j.until(ctx, fmt.Sprintf("the ends of workers %v", pids), func() bool {
		return !slices.ContainsFunc(pids, func(pid int) bool { return slices.Contains(j.Alive, pid) })
	})
	if took := time.Since(began); err == nil && took > limit {
		err = fmt.Errorf("the deaths of workers %v were noticed after %v, more than %v", pids, took.Round(time.Millisecond), limit)
	}
	return err
}

// name returns what subcommands call the job: others of the user may run.
func (j *job) name() (string, error) {
	if id := j.RunID(); id != "" {
		return id, nil
	}
	return j.Folder() // no worker has started yet
}

// ask runs a subcommand of hvdrun for this job, which it names after the first word. It must return
// in time, successfully or not.
func (j *job) ask(ctx context.Context, args ...string) (string, int, error) {
	if args[0] != "jobs" {
		name, err := j.name()
		if err != nil {
			return "", -1, err
		}
		args = slices.Insert(slices.Clone(args), 1, name)
	}
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	out, err := j.Subcommand(ctx, args...).CombinedOutput()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return string(out), -1, fmt.Errorf("hvdrun %s has not answered within %v", strings.Join(args, " "), answer)
	case errors.As(err, &exit):
		return string(out), exit.ExitCode(), nil
	}
	return string(out), 0, err
}

// must is ask for a subcommand that must succeed.
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

// end waits for hvdrun's end and checks the conditions that must hold then. The exit status must be
// one of these; if there are none, 0.
func (j *job) end(ctx context.Context, statuses ...int) error {
	if len(statuses) == 0 {
		statuses = []int{0}
	}
	if err := j.until(ctx, "the end", j.Over); err != nil {
		return err
	}
	var errs []error
	if !slices.Contains(statuses, j.Status()) {
		errs = append(errs, fmt.Errorf("exit status %d, want one of %v", j.Status(), statuses))
	}
	if left := j.AwaitGone(lingering); len(left) > 0 {
		errs = append(errs, fmt.Errorf("processes are left: %q", left))
	}
	return errors.Join(append(errs, j.Look(), j.checkStepLog())...)
}

// beyond exceeds the generations of a case's first job.
const beyond = 1 << 20

// checkStepLog checks with steplog.Check that no commit is lost and no step is left out.
func (j *job) checkStepLog() error {
	at := slices.Index(j.Trainer, "-size")
	n, err := strconv.Atoi(j.Trainer[at+1])
	if err != nil {
		return err
	}
	lines := slices.Clone(j.before)
	for _, l := range j.Lines {
		if len(j.before) > 0 {
			l.Generation += beyond
		}
		lines = append(lines, l)
	}
	return steplog.Check(lines, j.steps(), n)
}
