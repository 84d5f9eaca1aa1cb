package follow

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
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/steplog"
)

// Running is a started job and what it has done so far. Its methods that read its files are not
// safe for concurrent use.
type Running struct {
	Job
	*View
	// PID is the process id of hvdrun, or of the command that wraps it; it leads a process group.
	PID int
	// Tag is an environment entry of all the job's processes.
	Tag string
	// Tail is the end of the output before the processes dumped their stacks.
	Tail string

	programs Programs
	ended    chan struct{}
	err      error // of hvdrun's process
	hung     atomic.Bool
	dump     sync.Once
	wg       sync.WaitGroup
	test     *test // nil: the job belongs to no test
}

// Start starts the job. The caller must call Wait or Kill.
func (p Programs) Start(j Job) (*Running, error) { return p.start(j, nil) }

func (p Programs) start(j Job, by *test) (*Running, error) {
	args, err := j.args(p)
	if err != nil {
		return nil, err
	}
	if j.Still == 0 && by == nil {
		j.Still = Patience
	}
	r := &Running{Job: j, View: newView(j), Tag: "TESTBED_JOB=" + rand.Text(), programs: p, test: by}
	if err := r.begin(args); err != nil {
		return nil, err
	}
	return r, nil
}

// Folder returns the job's directory, from which another driver can resume it.
func (r *Running) Folder() (string, error) {
	found, err := filepath.Glob(filepath.Join(r.StateDir(), "hvdrun", "jobs", "*"))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("follow: the job's folders are %q, %v", found, err)
	}
	return found[0], nil
}

// KillDriver kills hvdrun only, and returns when it has ended.
func (r *Running) KillDriver() {
	_ = syscall.Kill(r.PID, syscall.SIGKILL) // it may have ended
	<-r.ended
	r.wg.Wait()
}

// Resume starts another hvdrun for a job whose hvdrun has ended. folder is the job's directory;
// empty: the one that [Running.Folder] finds.
func (r *Running) Resume(folder string) (next *Running, err error) {
	if folder == "" {
		if folder, err = r.Folder(); err != nil {
			return nil, err
		}
	}
	return r.ResumeAs(r.Job, r.programs, folder)
}

// ResumeAs starts another hvdrun for the job, for example as on another machine: with the
// directories of j, the programs p, and these arguments of hvdrun resume. The job's own hvdrun can
// still be running.
func (r *Running) ResumeAs(j Job, p Programs, args ...string) (*Running, error) {
	next := &Running{Job: j, View: r.View, Tag: r.Tag, programs: p, test: r.test}
	if err := next.begin(append([]string{"resume"}, args...)); err != nil {
		return nil, err
	}
	return next, nil
}

func (r *Running) begin(args []string) error {
	if err := os.MkdirAll(r.RuntimeDir(), 0o700); err != nil {
		return fmt.Errorf("follow: %w", err)
	}
	r.ended = make(chan struct{})
	out := r.Output
	if out == nil {
		var err error
		if out, err = os.OpenFile(r.OutputPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666); err != nil {
			return fmt.Errorf("follow: %w", err)
		}
		defer out.Close()
	}
	line := slices.Concat(r.Wrap, []string{r.programs.Hvdrun}, args)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = append(r.environment(), r.Tag), r.Dir, out, out
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
		return fmt.Errorf("follow: %w", err)
	}
	r.PID = cmd.Process.Pid
	r.wg.Go(r.watch)
	if r.test != nil {
		r.test.t.Cleanup(func() { r.test.end(r) })
	}
	return nil
}

// watch ends a job that hangs.
func (r *Running) watch() {
	if r.test != nil {
		select {
		case <-r.ended:
			return
		case <-r.test.limit:
		}
	} else if !r.awaitStillness() {
		return
	}
	r.hung.Store(true)
	r.Stacks()
	r.Kill()
}

// awaitStillness blocks until the job has made no progress for the time Still, and returns true. It
// returns false if hvdrun ends first.
func (r *Running) awaitStillness() bool {
	s := stillness{limit: r.Still}
	ticks := time.NewTicker(look / 2)
	defer ticks.Stop()
	for last := time.Now(); ; {
		select {
		case <-r.ended:
			return false
		case <-ticks.C:
		}
		now := time.Now()
		if s.hung(r.moved(), now.Sub(last)) {
			return true
		}
		last = now
	}
}

// Ended is closed when hvdrun has ended.
func (r *Running) Ended() <-chan struct{} { return r.ended }

// Over reports whether hvdrun has ended.
func (r *Running) Over() bool {
	select {
	case <-r.ended:
		return true
	default:
		return false
	}
}

// Hung reports whether the job has made no progress for [Job].Still, for which it was killed.
func (r *Running) Hung() bool { return r.hung.Load() }

// Status returns the exit status of hvdrun, which must have ended: 128+n if signal n ended it, -1
// if its process could not be awaited.
func (r *Running) Status() int {
	var exit *exec.ExitError
	switch {
	case r.err == nil:
		return 0
	case !errors.As(r.err, &exit):
		return -1
	}
	if s := exit.Sys().(syscall.WaitStatus); s.Signaled() {
		return 128 + int(s.Signal())
	}
	return exit.ExitCode()
}

// Until blocks until holds returns true; it calls holds each time it has read what the job has
// written. It returns an error if hvdrun or ctx ends first, or, for a job of no test, if the job
// continues for [endless] without it. what names the condition in the error.
func (r *Running) Until(ctx context.Context, what string, holds func() bool) error {
	s := stillness{limit: endless}
	for last := time.Now(); ; {
		over := r.Over()
		if err := r.Look(); err != nil {
			return err
		}
		switch {
		case holds():
			return nil
		case over && r.hung.Load():
			return fmt.Errorf("waiting for %s: %s, and the job was killed", what, r.why())
		case over:
			return fmt.Errorf("waiting for %s: hvdrun has ended with status %d", what, r.Status())
		}
		now := time.Now()
		if r.test == nil && s.hung(0, now.Sub(last)) {
			return fmt.Errorf("waiting for %s: the job has gone on without it for %v", what, endless)
		}
		last = now
		if err := Sleep(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
	}
}

// why returns why the job counted as hung.
func (r *Running) why() string {
	if r.test != nil {
		return "the limit of the run of tests is near"
	}
	return fmt.Sprintf("there was no progress for %v", r.Still)
}

// AwaitLines blocks until enough returns true for the whole steplog. It returns an error if the job
// or ctx ends first.
func (r *Running) AwaitLines(ctx context.Context, enough func([]steplog.Line) bool) error {
	return r.Until(ctx, "lines of the steplog", func() bool { return enough(r.Lines) })
}

// AwaitEvents is like AwaitLines, for the events file.
func (r *Running) AwaitEvents(ctx context.Context, enough func([]Event) bool) error {
	return r.Until(ctx, "events", func() bool { return enough(r.Events) })
}

// Subcommand returns a subcommand of hvdrun in the job's environment. Its process does not belong
// to the job. It is killed after [endless], or, for the job of a test, when the limit of the run of
// tests is near.
func (r *Running) Subcommand(ctx context.Context, args ...string) *exec.Cmd {
	if r.test != nil {
		ctx = r.test.bound(ctx)
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, endless)
		context.AfterFunc(ctx, cancel)
	}
	cmd := exec.CommandContext(ctx, r.programs.Hvdrun, args...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = r.environment(), r.Dir, Patience
	return cmd
}

// Result is the result of a job.
type Result struct {
	// Status is hvdrun's exit status; see [Running.Status].
	Status int
	// Hung: the job made no progress for [Job].Still, or the limit of the run of tests was near,
	// and the job was killed.
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
	res := Result{Hung: r.hung.Load(), Status: r.Status()}
	if res.Status < 0 {
		return res, fmt.Errorf("follow: %w", r.err)
	}
	out, err := os.ReadFile(r.OutputPath())
	if err != nil {
		return res, fmt.Errorf("follow: %w", err)
	}
	if err := r.Look(); err != nil {
		return res, err
	}
	res.Output, res.Lines, res.Events = string(out), r.Lines, r.Events
	var exit *exec.ExitError
	if !errors.As(r.err, &exit) || exit.Exited() {
		r.awaitFarAgents()
		if res.Left = r.Left(); len(res.Left) > 0 {
			r.strike(syscall.SIGKILL)
		}
	}
	return res, nil
}

// awaitFarAgents waits for agents on other machines (which in tests are this one), whose end hvdrun
// cannot await.
func (r *Running) awaitFarAgents() {
	if !slices.Contains(r.Flags, "--ssh-command") {
		return
	}
	r.awaitGone(Patience, func(pid int) bool { return strings.HasSuffix(CommandLine(pid), " agent --job") })
}

// Story includes at most these numbers of the last steps, events and lines of output. The job's
// directory has everything.
const (
	toldSteps  = 5
	toldEvents = 40
	toldLines  = 30
	toldLine   = 300 // bytes of a line of output
)

// Story formats the end of what the job has done and written.
func (res Result) Story() string {
	var s strings.Builder
	fmt.Fprintf(&s, "exit status %d\n", res.Status)
	for _, l := range last(res.Lines, toldSteps) {
		fmt.Fprintf(&s, "step %-3d %-5s %-7s generation %d rank %d of %d (first %d) %s pid %d\n",
			l.Step, l.Event, l.Outcome, l.Generation, l.Rank, l.Size, l.First, l.Where(), l.PID)
	}
	events := slices.DeleteFunc(slices.Clone(res.Events), func(e Event) bool { return e.Name == "audit" })
	for _, e := range last(events, toldEvents) {
		fmt.Fprintf(&s, "%s %s\n", e.Time.Local().Format("15:04:05.000"), e)
	}
	lines := slices.Collect(strings.Lines(res.Output))
	for _, line := range last(lines, toldLines) {
		if line = strings.TrimSuffix(line, "\n"); len(line) > toldLine {
			line = line[:toldLine] + "…"
		}
		s.WriteString(line + "\n")
	}
	return s.String()
}

func last[E any](all []E, n int) []E { return all[max(0, len(all)-n):] }
