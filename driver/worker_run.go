package driver

import (
	"context"
	"errors"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/python"
)

// outputGrace is how long the report of a worker's end is delayed so that its last output can be
// written first.
const outputGrace = 500 * time.Millisecond

// start runs a worker in its own goroutines, which post its start and its end. The end is posted
// after the worker's output is written, or after outputGrace if the reader is slow.
func (l *loop) start(a decide.StartWorker) {
	ctx, stop := context.WithCancel(context.Background())
	hurried := make(chan struct{})
	p := &process{
		subject: l.subjectOf(a.ID, a.Slot.SlotID),
		stop:    stop, hurry: sync.OnceFunc(func() { close(hurried) }), more: wake.New(), look: wake.New(),
	}
	p.rank.Store(int64(a.Slot.Rank))
	l.procs[a.ID] = p
	l.meet.Admit(p.subject)
	l.stalls.expect(a.ID)
	l.wg.Add(1) // until its end is posted
	r := &workerRun{
		workerEnd: workerEnd{loop: l, process: p, slot: a.Slot.SlotID, written: make(chan job.Exit, 1)},
		worker:    a,
		hurry:     hurried,
	}
	p.forget = r.forget
	l.output.Add(1) // until its output is written
	go func() {
		defer r.wrote.Do(l.output.Done)
		defer stop()
		r.run(ctx)
	}()
}

// workerRun is one run of a worker. Its goroutine blocks with small stack frames, because a job can
// have thousands of workers.
type workerRun struct {
	workerEnd
	worker         decide.StartWorker
	hurry          <-chan struct{} // closed when the grace period is over
	spec           launch.Spec
	stdout, stderr *launch.LineWriter
}

// run runs the worker until its output is written.
func (r *workerRun) run(ctx context.Context) {
	if err := r.prepare(ctx); err != nil {
		r.outputWritten(exitOf(err))
		return
	}
	err := r.loop.cfg.Launcher.Run(ctx, &r.spec, r.started)
	if lines := r.loop.lines; lines != nil {
		lines.Forget(r.spec.Incarnation)
	}
	r.finish(err)
}

// prepare sets up the process to launch.
func (r *workerRun) prepare(ctx context.Context) error {
	l, a, p := r.loop, &r.worker, r.process
	env, err := l.environ(ctx, a)
	if err != nil {
		return err
	}
	r.stdout, r.stderr = l.cfg.Output.Worker(func() int { return int(p.rank.Load()) })
	before := l.outputs.of(a.ID)
	r.stdout.Hold(before.Out)
	r.stderr.Hold(before.Err)
	r.spec = launch.Spec{
		Incarnation: a.ID,
		Slot:        a.Slot.SlotID,
		Command:     l.cfg.Command,
		Env:         env,
		Prepare: func(env []string) []string {
			return python.Environ(env, l.cfg.Command[0], false, r.stderr)
		},
		Dir:       l.cfg.Dir,
		Stdout:    r.stdout,
		Stderr:    r.stderr,
		Line:      func(text []byte, noted func()) { l.meet.Hear(a.ID, text, noted) },
		Stream:    func(protocol string, conn net.Conn) { l.stream(a.ID, protocol, conn) },
		Grace:     l.cfg.Timeouts.Drain,
		Hurry:     r.hurry,
		More:      p.more,
		CoreLimit: l.cfg.CoreLimit,
		Look:      p.look,
		Dying: func(what string, by syscall.Signal) {
			l.postNoted(decide.WorkerDying{ID: a.ID, What: what, Signal: by})
		},
		Left: func(processes []string) {
			l.cfg.Log.Warnf("%s: its process %s", a.Slot.SlotID, launch.LeftText(processes))
		},
		Resumed: a.Forked,
		Passed: func(bytes uint64) {
			l.outputs.note(outputNote{Worker: a.ID, Bytes: bytes, Out: r.stdout.Held(), Err: r.stderr.Held()})
		},
		PassedBefore: before.Bytes,
		Ended:        func(err error) { r.processEnded(exitOf(err)) },
	}
	if l.lines != nil {
		r.spec.Talk = l.lines.Talk(env)
	}
	return nil
}

// started records that the process runs.
func (r *workerRun) started(pid int) {
	r.loop.recordStart(&r.worker, pid, nil)
	r.loop.postNoted(decide.WorkerForked{ID: r.worker.ID, PID: pid})
}

// finish handles the result of the launcher's Run.
func (r *workerRun) finish(err error) {
	l := r.loop
	var start *launch.StartError
	if errors.As(err, &start) {
		l.recordStart(&r.worker, 0, start.Err)
	}
	if cerr := errors.Join(r.stdout.Close(), r.stderr.Close()); cerr != nil {
		l.cfg.Log.Warnf("the output of %v is incomplete: %v", r.slot, cerr)
	}
	r.outputWritten(exitOf(err))
	if r.process.over.Load() {
		l.outputs.note(outputNote{Worker: r.worker.ID, Ended: true}) // again, because other notes may have followed the first one
	}
}

// environ returns the environment of a worker to be started; nil if it already runs.
func (l *loop) environ(ctx context.Context, a *decide.StartWorker) ([]string, error) {
	if a.Forked {
		return nil, nil
	}
	masterAddr, err := l.masterAddr(ctx, a)
	if err != nil {
		return nil, err
	}
	env := plan.Worker{
		RunID: l.cfg.RunID, Incarnation: a.ID, Elastic: l.cfg.Size.Elastic,
		Slot: a.Slot, Size: a.Trial.Size, GroupRank: a.Trial.GroupRank, GroupSize: a.Trial.GroupSize,
		LauncherAddr: l.door, // agents replace it by their own address
		Credentials:  l.workers.ForWorker().Encode(),
		Restarts:     a.Resets, MaxRestarts: l.maxResets(),
		MasterAddr: masterAddr, MasterPort: l.job.MasterPort,
		StallWarning: l.cfg.Timeouts.StallWarning, Tuning: l.cfg.Tuning,
	}
	return slices.Concat(l.cfg.Env, l.workerDefaults(a.Slot.LocalSize), env.Environ()), nil
}

// workerDefaults returns the variables that a worker gets unless the user has set them: Python
// writes output without buffering and, as with torchrun, OpenMP uses one thread if workers share a
// host.
func (l *loop) workerDefaults(local int) (env []string) {
	missing := func(name string) bool {
		return !slices.ContainsFunc(l.cfg.Env, func(entry string) bool { return strings.HasPrefix(entry, name+"=") })
	}
	if missing("PYTHONUNBUFFERED") {
		env = append(env, "PYTHONUNBUFFERED=1")
	}
	if local > 1 && missing("OMP_NUM_THREADS") {
		env = append(env, "OMP_NUM_THREADS=1")
		l.oneThread.Do(func() {
			l.cfg.Log.Info("OMP_NUM_THREADS is not set: it is 1 for workers that share a host")
		})
	}
	return env
}

// masterAddr returns the MASTER_ADDR of workers, for those that use it.
func (l *loop) masterAddr(ctx context.Context, a *decide.StartWorker) (string, error) {
	if router, ok := l.cfg.Launcher.(launch.Router); ok {
		return router.HostAddr(ctx, a.Trial.First)
	}
	return a.Trial.First, nil
}

// maxResets returns the reset limit for torchrun's variables, which cannot express that there is no
// limit.
func (l *loop) maxResets() int {
	if limit := l.cfg.Blame.ResetLimit; limit != nil {
		return *limit
	}
	return math.MaxInt32
}

func exitOf(err error) job.Exit {
	var exit *launch.ExitError
	var start *launch.StartError
	var unkillable *launch.UnkillableError
	switch {
	case err == nil:
		return job.Exit{}
	case errors.As(err, &unkillable):
		return job.Exit{Code: 137, Err: err, Unkillable: true}
	case errors.As(err, &exit):
		return job.Exit{Code: exit.Code, Signal: exit.Signal, Evicted: exit.Evicted, Lost: exit.Lost, Said: line.CleanError(exit.Said), Why: exit.Why}
	}
	exited := job.Exit{Code: 127, Err: err}
	if errors.As(err, &start) {
		exited.Evicted, exited.TakenBy = start.Evicted, start.TakenBy
	}
	return exited
}
