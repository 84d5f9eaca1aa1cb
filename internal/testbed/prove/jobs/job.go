package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/testbed/e2e"
	"github.com/hvdrun/hvdrun/internal/testbed/steplog"
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

// job is hvdrun and its workers, with their state as observed so far.
type job struct {
	setup
	programs e2e.Binaries
	dir      string   // the case's directory
	word     string   // the last argument of orphaned processes
	mark     string   // an environment entry of all other processes
	env      []string // more of the environment, before inherited variables
	unset    []string // variables that are not inherited
	wrap     []string // a command that runs hvdrun
	out      *os.File // hvdrun's stdout and stderr; nil: a file in dir
	events   string   // the events file
	flags    []string // hvdrun's
	trainer  []string // flags of the workers
	command  []string // replaces the trainer
	wanted   []int    // permitted exit statuses

	cmd      *exec.Cmd
	ended    chan struct{}
	err      error
	steplog  *steplog.Follower[steplog.Line]
	told     *steplog.Follower[e2e.Event]
	lines    []steplog.Line
	happened []e2e.Event
	step     int         // the last step of any worker
	world    uint64      // the newest generation in the steplog
	ranks    map[int]int // rank by process there
	alive    map[int]bool
	moved    time.Time // time of the last progress
	stepped  time.Time // time of the last step
	written  int64     // bytes of output
	counted  atomic.Int64
	exits    int

	published     uint64 // the newest generation in the events
	publishedSize int
	joined        map[int]int    // rank by process there
	before        []steplog.Line // lines of the case's first job, whose checkpoints this one resumes
	log           string         // the end of the output before stacks were dumped
	name          string         // distinguishes the files of a case's jobs
}

// newJob returns a job; its fields may be changed until start.
func newJob(s setup, programs e2e.Binaries, dir string) (*job, error) {
	number, err := rand.Int(rand.Reader, big.NewInt(1e15))
	if err != nil {
		return nil, err
	}
	j := &job{
		setup: s, programs: programs, dir: dir, word: fmt.Sprintf("0.%015d", number), mark: "PROVE_JOB=" + rand.Text(),
		events: filepath.Join(dir, "events"), wanted: []int{0}, ranks: make(map[int]int), alive: make(map[int]bool),
		joined: make(map[int]int),
	}
	j.env = []string{"XDG_STATE_HOME=" + filepath.Join(dir, "state"), "GOTRACEBACK=all"}
	j.flags = []string{"-np", strconv.Itoa(s.Workers), "--min-np", "1", "--blacklist-cooldown-range", "0.1,0.4",
		"--log-level", "info", "-H", s.hostList()}
	weights, ballast := s.State/4, int64(0)
	if s.State >= 32<<20 { // checking weights bit by bit is slow
		weights, ballast = 1<<18, s.State/1e6
	}
	j.trainer = []string{"-log-all=" + strconv.FormatBool(s.Workers <= 16), "-steps", strconv.Itoa(j.steps()), "-size",
		strconv.FormatInt(max(16, weights), 10), "-ballast", strconv.FormatInt(ballast, 10), "-step-time", s.Pause.String(),
		"-print", strconv.Itoa(s.Print), "-async=" + strconv.FormatBool(s.Async)}
	return j, nil
}

const endless = 1_000_000 // steps of a job that is stopped

func (s setup) steps() int {
	if s.Steps == 0 {
		return endless
	}
	return s.Steps
}

func (j *job) stepLogPath() string { return filepath.Join(j.dir, "steplog"+j.name) }
func (j *job) outputPath() string  { return filepath.Join(j.dir, "output"+j.name) }

// again gives the case's n-th job its own files and renews its faults.
func (j *job) again(n int) {
	j.name = fmt.Sprintf(".%d", n)
	j.events += j.name
	j.env[0] += j.name
	for i := 0; ; i++ { // faults happen again if their marks are removed
		if os.Remove(filepath.Join(j.dir, fmt.Sprintf("fault.%d", i))) != nil {
			return
		}
	}
}

func (j *job) environment() []string {
	env := slices.DeleteFunc(os.Environ(), func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		return slices.Contains(j.unset, name)
	})
	return append(append(env, j.mark), j.env...)
}

// start starts hvdrun. The caller must call end or kill.
func (j *job) start() error {
	args := append(slices.Clone(j.flags), "--events-file", j.events, "--")
	if len(j.command) > 0 {
		args = append(args, j.command...)
	} else {
		args = append(append(args, j.programs.Trainer, "-log", j.stepLogPath(), "-dir", j.dir), j.trainer...)
	}
	return j.begin(args)
}

func (j *job) begin(args []string) error {
	line := slices.Concat(j.wrap, []string{j.programs.Hvdrun}, args)
	j.cmd = exec.Command(line[0], line[1:]...)
	j.cmd.Env, j.cmd.Dir = j.environment(), j.dir
	j.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out := j.out
	if out == nil {
		var err error
		if out, err = os.OpenFile(j.outputPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666); err != nil {
			return err
		}
		defer out.Close()
	}
	j.cmd.Stdout, j.cmd.Stderr = out, out
	if j.steplog == nil {
		j.steplog, j.told = steplog.Follow[steplog.Line](j.stepLogPath()), steplog.Follow[e2e.Event](j.events)
	}
	j.moved, j.stepped = time.Now(), time.Now()
	j.ended = make(chan struct{})
	started := make(chan error)
	go func(cmd *exec.Cmd, ended chan struct{}) {
		runtime.LockOSThread() // the parent-death signal is tied to the thread that forks
		defer runtime.UnlockOSThread()
		defer close(ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			j.err = cmd.Wait()
		}
	}(j.cmd, j.ended)
	return <-started
}

// pid returns the process id of hvdrun, or of the command that wraps it.
func (j *job) pid() int { return j.cmd.Process.Pid }

func (j *job) over() bool {
	select {
	case <-j.ended:
		return true
	default:
		return false
	}
}

// look updates the job's observed state.
func (j *job) look() error {
	now := time.Now()
	lines, err := j.steplog.Next()
	if err != nil {
		return err
	}
	events, err := j.told.Next()
	if err != nil {
		return err
	}
	j.lines, j.happened = append(j.lines, lines...), append(j.happened, events...)
	for _, l := range lines {
		if l.Generation > j.world {
			j.world = l.Generation
			clear(j.ranks)
		}
		if l.Generation == j.world {
			j.ranks[l.PID] = l.Rank
		}
		if l.Step > j.step || l.Event == steplog.Enter {
			j.stepped = now
		}
		j.step = max(j.step, l.Step)
	}
	for _, e := range events {
		switch e.Name {
		case "worker_started":
			j.alive[e.PID] = true
		case "worker_exited":
			delete(j.alive, e.PID)
			j.exits++
		case "world_published":
			j.published, j.publishedSize = e.Generation, e.Size
			clear(j.joined)
			for _, slot := range e.Slots {
				j.joined[slot.PID] = slot.Rank
			}
		}
	}
	written := j.counted.Load()
	if fi, err := os.Stat(j.outputPath()); err == nil {
		written = fi.Size()
	}
	if len(lines)+len(events) > 0 || written != j.written {
		j.moved, j.written = now, written
	}
	return nil
}

// errHung is returned by until if the job hangs.
var errHung = errors.New("hung")

// until waits until a condition holds. It fails if hvdrun ends or the job makes no progress.
func (j *job) until(ctx context.Context, what string, holds func() bool) error {
	began := time.Now()
	for {
		over := j.over()
		if err := j.look(); err != nil {
			return err
		}
		now := time.Now()
		switch {
		case holds():
			return nil
		case over:
			return fmt.Errorf("waiting for %s: hvdrun has ended: %v", what, j.status())
		case now.Sub(j.moved) > quiet && now.Sub(began) > quiet:
			return fmt.Errorf("waiting for %s: %w: nothing new for %v, neither steps, events nor output", what, errHung, quiet)
		case now.Sub(j.stepped) > barren && now.Sub(began) > barren:
			return fmt.Errorf("waiting for %s: %w: no step for %v", what, errHung, barren)
		case j.Steps == 0 && now.Sub(began) > patience:
			return fmt.Errorf("waiting for %s: in vain for %v, while steps were made", what, patience)
		}
		if err := rest(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// trained waits until n more steps have been completed in the newest world.
func (j *job) trained(ctx context.Context, n int) error {
	if err := j.look(); err != nil {
		return err
	}
	want := j.step + n
	return j.until(ctx, fmt.Sprintf("step %d", want), func() bool { return j.step >= want })
}

// later waits until a world after the generation has completed a step.
func (j *job) later(ctx context.Context, generation uint64) error {
	return j.until(ctx, fmt.Sprintf("a step after generation %d", generation), func() bool {
		return slices.ContainsFunc(j.lines, func(l steplog.Line) bool { return l.Generation > generation && l.Event == steplog.Step })
	})
}

// count returns the number of events with a name.
func (j *job) count(name string) int { return e2e.Count(j.happened, name) }

// gone waits until hvdrun has reported the ends of these workers, and returns how long that took.
// More than limit is an error.
func (j *job) gone(ctx context.Context, limit time.Duration, pids ...int) error {
	began := time.Now()
	err := j.until(ctx, fmt.Sprintf("the ends of workers %v", pids), func() bool {
		return !slices.ContainsFunc(pids, func(pid int) bool { return j.alive[pid] })
	})
	if took := time.Since(began); err == nil && took > limit {
		err = fmt.Errorf("the deaths of workers %v were noticed after %v, more than %v", pids, took.Round(time.Millisecond), limit)
	}
	return err
}

// holders returns the living members of the newest world in the steplog, by rank.
func (j *job) holders() []int { return j.living(j.ranks) }

// members returns the members of the newest world in the events.
func (j *job) members() []int { return j.living(j.joined) }

func (j *job) living(ranks map[int]int) []int {
	var pids []int
	for pid := range ranks {
		if j.alive[pid] {
			pids = append(pids, pid)
		}
	}
	slices.SortFunc(pids, func(a, b int) int { return ranks[a] - ranks[b] })
	return pids
}

// status returns hvdrun's exit status once it has ended; 128+n if signal n ended it.
func (j *job) status() int {
	var exit *exec.ExitError
	if errors.As(j.err, &exit) {
		if s := exit.Sys().(syscall.WaitStatus); s.Signaled() {
			return 128 + int(s.Signal())
		}
		return exit.ExitCode()
	}
	if j.err != nil {
		return -1
	}
	return 0
}

// ask runs a subcommand of hvdrun for this job. It must return in time, successfully or not.
func (j *job) ask(ctx context.Context, args ...string) (string, int, error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	cmd := exec.CommandContext(ctx, j.programs.Hvdrun, args...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = j.environment(), j.dir, time.Second
	out, err := cmd.CombinedOutput()
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
	pid := j.pid()
	if len(j.wrap) > 0 {
		if pid = j.driver(); pid == 0 {
			return
		}
	}
	_ = syscall.Kill(pid, s) // it may have ended
}

// end waits for hvdrun's end and checks the conditions that must hold then.
func (j *job) end(ctx context.Context) error {
	if err := j.until(ctx, "the end", j.over); err != nil {
		return err
	}
	var errs []error
	if !slices.Contains(j.wanted, j.status()) {
		errs = append(errs, fmt.Errorf("exit status %d, want one of %v", j.status(), j.wanted))
	}
	if left := j.left(ctx, lingering); len(left) > 0 {
		errs = append(errs, fmt.Errorf("processes are left: %q", left))
	}
	return errors.Join(append(errs, j.look(), j.checkStepLog())...)
}

// beyond exceeds the generations of a case's first job.
const beyond = 1 << 20

// checkStepLog checks with steplog.Check that no commit is lost and no step is left out.
func (j *job) checkStepLog() error {
	at := slices.Index(j.trainer, "-size")
	n, err := strconv.Atoi(j.trainer[at+1])
	if err != nil {
		return err
	}
	lines := slices.Clone(j.before)
	for _, l := range j.lines {
		if len(j.before) > 0 {
			l.Generation += beyond
		}
		lines = append(lines, l)
	}
	return steplog.Check(lines, j.steps(), n)
}

// marks are the strings that identify the job's processes.
func (j *job) marks() []string {
	marks := []string{j.mark, j.word}
	if id := j.runID(); id != "" {
		marks = append(marks, "HVD_RUN_ID="+id)
	}
	return marks
}

func (j *job) runID() string {
	if len(j.lines) > 0 {
		return j.lines[0].Run
	}
	return ""
}

// left waits for the end of all processes of the job, at most for the given time, and returns the
// remaining ones.
func (j *job) left(ctx context.Context, limit time.Duration) []string {
	end := time.Now().Add(limit)
	for {
		var left []string
		for _, pid := range e2e.Processes(j.marks()...) {
			left = append(left, fmt.Sprintf("%d %s", pid, commandLine(pid)))
		}
		if len(left) == 0 || time.Now().After(end) || rest(ctx, 20*time.Millisecond) != nil {
			return left
		}
	}
}

func commandLine(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // it may have ended
	return strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
}

// kill ends all processes of the job and returns when they have ended.
func (j *job) kill() {
	if j.cmd == nil || j.cmd.Process == nil {
		return
	}
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		pids := e2e.Processes(j.marks()...)
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
		if len(pids) == 0 && j.over() {
			return
		}
	}
}

// stacks records what the job's processes are doing: their kernel stacks in a file of the case's
// directory, then the stacks of Go programs in hvdrun's output. The workers go first, because
// hvdrun forwards their output.
func (j *job) stacks() {
	f, err := os.Create(filepath.Join(j.dir, "processes"))
	if err != nil {
		return
	}
	defer f.Close()
	pids := e2e.Processes(j.marks()...)
	for _, pid := range pids {
		fmt.Fprintf(f, "== %d %s\n", pid, commandLine(pid))
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stack", pid))
		for _, name := range append(files, fmt.Sprintf("/proc/%d/status", pid)) {
			if text, err := os.ReadFile(name); err == nil {
				fmt.Fprintf(f, "-- %s\n%s", name, text)
			}
		}
	}
	hvdrun := func(pid int) bool { return strings.HasPrefix(commandLine(pid), j.programs.Hvdrun) }
	for _, first := range []bool{true, false} {
		for _, pid := range pids {
			if hvdrun(pid) != first {
				_ = syscall.Kill(pid, syscall.SIGQUIT)
			}
		}
		time.Sleep(time.Second)
	}
}

// tail returns the end of a file.
func tail(path string, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil && fi.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd) // read as much as possible
	}
	b, _ := io.ReadAll(io.LimitReader(f, n))
	return string(b)
}
