package e2e

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/testbed/steplog"
)

// Binaries are the programs of a job.
type Binaries struct{ Hvdrun, Trainer string }

// Build compiles them into a directory and blocks until that is done.
func Build(ctx context.Context, dir string, buildFlags ...string) (Binaries, error) {
	args := append([]string{"build"}, buildFlags...)
	args = append(args, "-o", dir+string(filepath.Separator),
		"github.com/hvdrun/hvdrun/cmd/hvdrun", "github.com/hvdrun/hvdrun/internal/testbed/trainer")
	if out, err := exec.CommandContext(ctx, "go", args...).CombinedOutput(); err != nil {
		return Binaries{}, fmt.Errorf("e2e: go build: %w\n%s", err, out)
	}
	return Binaries{filepath.Join(dir, "hvdrun"), filepath.Join(dir, "trainer")}, nil
}

// Job is a job to run.
type Job struct {
	// Dir is the job's own, initially empty directory.
	Dir string
	// Flags are hvdrun's flags; the discovery script and the events file are added.
	Flags []string
	// Stages are the outputs of the discovery script. None: no script. When the script first prints
	// stage N (from 0), it creates a file shown.N with the time in nanoseconds since 1970. When it
	// runs again after that, so that hvdrun has processed the stage, it creates a file polled.N.
	Stages []Stage
	// Trainer are the flags of the workers; the steplog and the job's directory are added.
	Trainer []string
	// Command, if not empty, is run instead of the trainer.
	Command []string
	// Still is the time without progress, neither a step nor an event, after which all processes
	// dump their stacks and are killed. 0: [Patience]. The whole job has no time limit.
	Still time.Duration
}

// Stage is a stage of a discovery script. It begins when training has completed Step steps, the
// previous stage has been printed in Polls runs, the file After (if set) exists in the job's
// directory, and the events report the end of Exits workers.
type Stage struct {
	Step, Polls int
	After       string
	Exits       int
	// Hosts are printed, one word per line; with "!" the script fails.
	Hosts string
}

// StepLogPath returns the path of the workers' steplog.
func (j Job) StepLogPath() string { return filepath.Join(j.Dir, "steplog") }

// EventsPath returns the path of hvdrun's events file.
func (j Job) EventsPath() string { return filepath.Join(j.Dir, "events") }

// OutputPath returns the path of hvdrun's stdout and stderr.
func (j Job) OutputPath() string { return filepath.Join(j.Dir, "output") }

func (j Job) script() string {
	var s strings.Builder
	fmt.Fprintf(&s, `#!/bin/sh
cd '%s' || exit 1
stage=0 polls=0
[ ! -e at ] || read -r stage polls <at
[ "$polls" -lt 1 ] || : >"polled.$stage"
`, j.Dir)
	if slices.ContainsFunc(j.Stages, func(st Stage) bool { return st.Step > 0 }) {
		s.WriteString("step=$(sed -n 's/.*\"step\":\\([0-9]*\\),.*/\\1/p' steplog 2>/dev/null | sort -n | tail -n 1)\n")
	}
	s.WriteString("case $stage in\n")
	for i, st := range j.Stages[1:] {
		test := fmt.Sprintf(`[ "${step:-0}" -ge %d ] && [ "$polls" -ge %d ]`, st.Step, st.Polls)
		if st.After != "" {
			test += fmt.Sprintf(` && [ -e '%s' ]`, st.After)
		}
		if st.Exits > 0 {
			test += fmt.Sprintf(` && [ "$(grep -c '"worker_exited"' '%s')" -ge %d ]`, j.EventsPath(), st.Exits)
		}
		fmt.Fprintf(&s, "%d) if %s; then stage=%d polls=0; fi ;;\n", i, test, i+1)
	}
	s.WriteString("esac\necho \"$stage $((polls + 1))\" >at\n[ \"$polls\" -gt 0 ] || date +%s%N >\"shown.$stage\"\ncase $stage in\n")
	for i, st := range j.Stages {
		what := "printf '%s\\n' " + st.Hosts
		switch st.Hosts {
		case "":
			what = ":"
		case "!":
			what = "echo 'no hosts today' >&2; exit 1"
		}
		fmt.Fprintf(&s, "%d) %s ;;\n", i, what)
	}
	s.WriteString("esac\n")
	return s.String()
}

// args returns hvdrun's arguments.
func (j Job) args(b Binaries) ([]string, error) {
	args := append([]string{"--events-file", j.EventsPath()}, j.Flags...)
	if len(j.Stages) > 0 {
		path := filepath.Join(j.Dir, "discover.sh")
		if err := os.WriteFile(path, []byte(j.script()), 0o700); err != nil {
			return nil, err
		}
		args = append(args, "--host-discovery-script", "exec '"+path+"'")
	}
	if len(j.Command) > 0 {
		return append(append(args, "--"), j.Command...), nil
	}
	args = append(args, "--", b.Trainer, "-log", j.StepLogPath(), "-dir", j.Dir)
	return append(args, j.Trainer...), nil
}

// Running is a job that has been started.
type Running struct {
	Job
	// PID is hvdrun's process id; it leads a process group.
	PID int
	// Mark is an environment entry of all the job's processes.
	Mark string

	hvdrun string
	ended  chan struct{}
	err    error // of Wait
	hung   bool
	wg     sync.WaitGroup
}

// Start starts the job. The caller must call Wait.
func (b Binaries) Start(j Job) (*Running, error) {
	args, err := j.args(b)
	if err != nil {
		return nil, fmt.Errorf("e2e: %w", err)
	}
	if j.Still == 0 {
		j.Still = Patience
	}
	r := &Running{Job: j, Mark: "E2E_JOB=" + rand.Text(), hvdrun: b.Hvdrun}
	return r, r.begin(args)
}

// Folder returns the directory that the job has for another driver.
func (r *Running) Folder() (string, error) {
	found, err := filepath.Glob(filepath.Join(r.stateDir(), "hvdrun", "jobs", "*"))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("e2e: the job's folders are %q, %v", found, err)
	}
	return found[0], nil
}

func (r *Running) stateDir() string   { return filepath.Join(r.Dir, "state") }
func (r *Running) runtimeDir() string { return filepath.Join(r.Dir, "run") }

// KillDriver kills hvdrun only, and returns when it has ended.
func (r *Running) KillDriver() {
	_ = syscall.Kill(r.PID, syscall.SIGKILL)
	<-r.ended
	r.wg.Wait()
}

// Resume starts another hvdrun for a job whose own has ended.
func (r *Running) Resume() (*Running, error) {
	folder, err := r.Folder()
	if err != nil {
		return nil, err
	}
	next := &Running{Job: r.Job, Mark: r.Mark, hvdrun: r.hvdrun}
	return next, next.begin([]string{"resume", folder})
}

func (r *Running) begin(args []string) error {
	r.ended = make(chan struct{})
	out, err := os.OpenFile(r.OutputPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return fmt.Errorf("e2e: %w", err)
	}
	defer out.Close()
	cmd := exec.Command(r.hvdrun, args...)
	if err := os.MkdirAll(r.runtimeDir(), 0o700); err != nil {
		return fmt.Errorf("e2e: %w", err)
	}
	cmd.Env = append(os.Environ(), r.Mark, "XDG_STATE_HOME="+r.stateDir(), "XDG_RUNTIME_DIR="+r.runtimeDir())
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	started := make(chan error, 1)
	r.wg.Go(func() {
		// The parent-death signal is tied to the thread that forks.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(r.ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			r.err = cmd.Wait()
		}
	})
	if err := <-started; err != nil {
		r.wg.Wait()
		return fmt.Errorf("e2e: %w", err)
	}
	r.PID = cmd.Process.Pid
	r.wg.Go(r.watch)
	return nil
}

// watch ends a job that hangs.
func (r *Running) watch() {
	s := stillness{limit: r.Still}
	ticks := time.NewTicker(look / 2)
	defer ticks.Stop()
	for last := time.Now(); ; {
		select {
		case <-r.ended:
			return
		case <-ticks.C:
		}
		now := time.Now()
		if s.hung(r.moved(), now.Sub(last)) {
			break
		}
		last = now
	}
	r.hung = true
	// Go programs dump their stacks on SIGQUIT. The workers go first, because hvdrun forwards their
	// output.
	for _, pid := range Processes(r.Mark) {
		if pid != r.PID {
			_ = syscall.Kill(pid, syscall.SIGQUIT)
		}
	}
	select {
	case <-r.ended:
	case <-time.After(time.Second):
	}
	_ = syscall.Kill(r.PID, syscall.SIGQUIT)
	select {
	case <-r.ended:
	case <-time.After(time.Second):
	}
	r.Kill()
}

// Kill kills all processes of the job, hvdrun first.
func (r *Running) Kill() {
	_ = syscall.Kill(r.PID, syscall.SIGKILL)
	for _, pid := range Processes(r.Mark) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// Ended is closed when hvdrun has ended.
func (r *Running) Ended() <-chan struct{} { return r.ended }

// Result is the result of a job.
type Result struct {
	// Status is hvdrun's exit status; -1 if a signal ended it.
	Status int
	// Hung: the job made no progress for [Job].Still and was killed.
	Hung bool
	// Output is hvdrun's whole output.
	Output string
	// Lines are the steplog, Events the events file.
	Lines  []steplog.Line
	Events []Event
	// Left are the command lines of the job's processes that remained after hvdrun's end. They were
	// killed.
	Left []string
}

// Wait blocks until hvdrun has ended, killing a job that hangs, and collects the result.
func (r *Running) Wait() (Result, error) {
	r.wg.Wait()
	res := Result{Hung: r.hung}
	var exit *exec.ExitError
	switch {
	case errors.As(r.err, &exit):
		res.Status = exit.ExitCode()
	case r.err != nil:
		return res, fmt.Errorf("e2e: %w", r.err)
	}
	out, err := os.ReadFile(r.OutputPath())
	if err != nil {
		return res, fmt.Errorf("e2e: %w", err)
	}
	res.Output = string(out)
	if res.Lines, err = steplog.Follow[steplog.Line](r.StepLogPath()).Next(); err != nil {
		return res, err
	}
	if res.Events, err = steplog.Follow[Event](r.EventsPath()).Next(); err != nil {
		return res, err
	}
	if exit == nil || exit.Exited() {
		r.awaitFarAgents()
		res.Left = r.Remaining()
	}
	return res, nil
}

// awaitFarAgents waits for agents on other machines (which in tests are this one), whose end hvdrun
// cannot await.
func (r *Running) awaitFarAgents() {
	if !slices.Contains(r.Flags, "--ssh-command") {
		return
	}
	Poll(func() bool {
		return !slices.ContainsFunc(Processes(r.marks()...), func(pid int) bool { return strings.HasSuffix(commandLine(pid), " agent --job") })
	})
}

// Story returns everything that the job has written, as text.
func (res Result) Story() string {
	var s strings.Builder
	for _, l := range res.Lines {
		fmt.Fprintf(&s, "%d %-5s step %-3d %-7s generation %d rank %d of %d (first %d) %s pid %d\n",
			l.Time, l.Event, l.Step, l.Outcome, l.Generation, l.Rank, l.Size, l.First, l.Where(), l.PID)
	}
	for _, e := range res.Events {
		fmt.Fprintf(&s, "%d %s\n", e.Time.UnixNano(), e)
	}
	return s.String() + res.Output
}

// Remaining kills the remaining processes of the job and returns their command lines.
func (r *Running) Remaining() []string {
	var left []string
	for _, pid := range Processes(r.marks()...) {
		left = append(left, fmt.Sprintf("%d %s", pid, commandLine(pid)))
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	return left
}

// AwaitGone blocks until no process of the job remains, at most for [Patience], and returns the
// remaining ones. It kills nothing.
func (r *Running) AwaitGone() (left []string) {
	Poll(func() bool {
		left = nil
		for _, pid := range Processes(r.marks()...) {
			left = append(left, fmt.Sprintf("%d %s", pid, commandLine(pid)))
		}
		return len(left) == 0
	})
	return left
}

// marks are the strings that identify the job's processes: the entry in the environment, or the run
// id in the environment or the arguments, as the guard uses it.
func (r *Running) marks() []string {
	marks := []string{r.Mark}
	lines, _ := steplog.Follow[steplog.Line](r.StepLogPath()).Next()
	if len(lines) > 0 {
		marks = append(marks, "HVD_RUN_ID="+lines[0].Run)
	}
	return marks
}

// AwaitLines blocks until enough returns true for the steplog. It returns an error if the job or
// ctx ends first.
func (r *Running) AwaitLines(ctx context.Context, enough func([]steplog.Line) bool) error {
	return await(ctx, r, r.StepLogPath(), enough)
}

// AwaitEvents does the same for the events file.
func (r *Running) AwaitEvents(ctx context.Context, enough func([]Event) bool) error {
	return await(ctx, r, r.EventsPath(), enough)
}

func await[T any](ctx context.Context, r *Running, path string, enough func([]T) bool) error {
	f := steplog.Follow[T](path)
	var all []T
	for ended := false; ; {
		more, err := f.Next()
		if err != nil {
			return err
		}
		if all = append(all, more...); enough(all) {
			return nil
		}
		if ended {
			return errors.New("e2e: the job ended before what was waited for")
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-r.ended:
			ended = true
		case <-time.After(2 * time.Millisecond):
		}
	}
}
