package torchrun

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// worker is one process of a round.
type worker struct {
	local       int
	incarnation string
	paths       paths
	pid         int
	warm        *warm // interpreter that becomes the worker; nil: a new process is started

	said string // line of its stderr that gives the reason of its failure; set before run returns

	// The fields below are set before the worker is sent to group.exits.
	end   error // nil: exit 0
	at    time.Time
	ended bool // it has been received from group.exits
}

// group holds the workers of one round.
type group struct {
	agent    *Agent
	store    roundStore
	workers  []*worker
	exits    chan *worker // of capacity len(workers)
	failures []Failure    // by rank

	cancel context.CancelFunc
	signal syscall.Signal // set before cancel
	wg     sync.WaitGroup
}

// startWorkers starts the workers of the round. A worker that cannot be started counts as failed.
func (a *Agent) startWorkers(ctx context.Context, s roundStore) (*group, error) {
	a.logs.begin(a.cfg.Role, a.cfg.Workers, a.place.ranks.Base)
	g := &group{agent: a, store: s, exits: make(chan *worker, a.cfg.Workers), signal: syscall.SIGTERM}
	var inner context.Context
	inner, g.cancel = context.WithCancel(context.WithoutCancel(ctx)) // stop cancels it, with the signal
	started := make(chan struct{}, a.cfg.Workers)
	for local := range a.cfg.Workers {
		p, err := a.logs.paths(a.place.round.Restarts, local)
		w := &worker{local: local, incarnation: newIncarnation(), paths: p}
		if w.warm = a.warm[local]; w.warm != nil {
			a.warm[local] = nil
			w.incarnation = w.warm.incarnation
		}
		g.workers = append(g.workers, w)
		var spec *launch.Spec
		var closeLogs func() error
		if err == nil {
			spec = g.spec(w)
			spec.Stdout, spec.Stderr, closeLogs, err = a.logs.writers(p, local)
		}
		if err != nil {
			if closeLogs != nil {
				err = errors.Join(err, closeLogs())
			}
			if w.warm != nil {
				w.warm.end()
			}
			g.stop(nil)
			return nil, err
		}
		g.wg.Go(func() { g.run(inner, w, spec, closeLogs, started) })
	}
	for range g.workers {
		<-started
	}
	for _, w := range g.workers {
		a.workerEvent("START", Healthy, w)
	}
	return g, nil
}

func (g *group) spec(w *worker) *launch.Spec {
	a := g.agent
	return &launch.Spec{
		Incarnation: w.incarnation,
		Slot:        plan.SlotID{Host: a.cfg.Host, Index: w.local},
		Command:     arguments(a.cfg.Command, w.local),
		Env:         a.environment(a.place, w.local, w.paths, w.incarnation),
		Stdin:       a.cfg.Stdin,
		Grace:       a.cfg.ShutdownTimeout,
		Signal:      func() syscall.Signal { return g.signal },
		CoreLimit:   launch.UnlimitedCore,
		Hurry:       a.cfg.Hurry,
		Left: func(processes []string) {
			a.cfg.Log.Warnf("torchrun: the worker of local rank %d %s", w.local, launch.LeftText(processes))
		},
	}
}

// run runs one worker, and reports its end as soon as it is known.
func (g *group) run(ctx context.Context, w *worker, spec *launch.Spec, closeLogs func() error, started chan<- struct{}) {
	begun := sync.OnceFunc(func() { started <- struct{}{} })
	ended := sync.OnceFunc(func() { g.exits <- w })
	spec.Ended = func(err error) {
		begun()
		w.end, w.at = err, g.agent.now()
		ended()
	}
	err := g.launch(ctx, w, spec, func(pid int) {
		w.pid = pid
		begun()
	})
	begun()
	if exit, is := errors.AsType[*launch.ExitError](err); is {
		w.said = exit.Said
	}
	if w.at.IsZero() { // Ended was not called
		w.end, w.at = err, g.agent.now()
	}
	ended()
	if err := closeLogs(); err != nil {
		g.agent.cfg.Log.Warnf("torchrun: the output of local rank %d: %v", w.local, err)
	}
}

// launch runs a worker until it ends, in the interpreter that waits for it if there is one.
func (g *group) launch(ctx context.Context, w *worker, spec *launch.Spec, started func(pid int)) error {
	if w.warm != nil {
		used, err := w.warm.become(ctx, spec, arguments(g.agent.program.Args, w.local), started)
		if used {
			return err
		}
		g.agent.cfg.Log.Warnf("torchrun: the interpreter that was started in advance is not used: %v", err)
	}
	return g.agent.cfg.Launcher.Run(ctx, spec, started)
}

// stop ends the remaining workers, with the signal for the cause or with SIGTERM, and blocks until
// they and their store are gone. Workers that had failed before that are then among the failures.
func (g *group) stop(cause error) {
	since := g.agent.now()
	if cause != nil && g.agent.cfg.SignalOf != nil {
		g.signal = g.agent.cfg.SignalOf(cause)
	}
	g.cancel()
	g.wg.Wait()
	for _, w := range g.workers {
		if !w.ended {
			w.ended = true
			g.judge(w, since)
			g.agent.workerEvent("torchelastic.worker.status.TERMINATED", stateTerminated, w)
		}
	}
	for i := range g.failures {
		f := &g.failures[i]
		f.say(g.workers[f.LocalRank].said)
	}
	g.store.Close()
}

// judge records the failure of a worker that had exited, or had written its error file, before the
// workers were stopped at the time since.
func (g *group) judge(w *worker, since time.Time) {
	if w.end == nil {
		return
	}
	written, err := os.Lstat(w.paths.errorFile)
	if !w.at.Before(since) && (err != nil || !written.ModTime().Before(since)) {
		return
	}
	g.fail(w)
}

// fail records and returns the failure of a worker.
func (g *group) fail(w *worker) Failure {
	f := newFailure(g.agent.place.ranks.Base+w.local, w.local, w.pid, w.end, w.paths.errorFile, w.at)
	g.failures = append(g.failures, f)
	slices.SortFunc(g.failures, func(a, b Failure) int { return a.Rank - b.Rank })
	return f
}

// holds reports whether a process is one of the workers or a descendant of one.
func (g *group) holds(pid int) bool {
	for _, w := range g.workers {
		if w.pid != 0 && proc.Below(pid, w.pid) {
			return true
		}
	}
	return false
}
