package jobrun

import (
	"context"
	"slices"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
)

// hook is one of the things that a job has beside its driver.
type hook interface {
	// start begins it before the driver begins, and adds to the run what the driver is to know of
	// it or to tell it. An error names the setting that cannot be met, or the package that has
	// failed; then the job ends, and stop is not called.
	start(ctx context.Context, r *run) error
	// stop ends it when the driver has ended, or was never started, with r.result. It returns when
	// all that start has started has ended. What fails then is logged: the job's result stands.
	stop(r *run)
}

// hooks returns what a job has beside its driver, in the order in which it is started. It is
// stopped in the reverse order: what takes events and output comes late, so that the page, the
// tasks and the metrics are there until all of that is written.
func hooks() []hook {
	return []hook{
		new(auditHook),    // the record of commands
		new(orphansHook),  // processes that workers leave behind
		new(copyHook),     // the claim to the job, and the copy of its journal
		new(folderHook),   // the job's folder, its journal, its socket, its secrets
		new(slurmHook),    // what nodes of Slurm need
		new(sourceHook),   // the hosts
		new(agentsHook),   // the agents that start the workers
		new(timelineHook), // the driver's part of the timeline
		new(metricsHook),
		new(tasksHook),
		new(pageHook),
		new(membersHook), // some members of the agents' cluster, for the driver that follows
		new(eventsHook),
		new(tracesHook),
		new(storyHook), // the log's lines about what happens
		new(outputHook),
		new(signalsHook), // what a person asks for by signals
		new(prepareHook), // the agents of hosts that are there all the time
		new(bringHook),   // hosts that the source brings
	}
}

// startOnly is embedded by hooks that have nothing to stop.
type startOnly struct{}

func (startOnly) stop(*run) {}

// run is one run of a job's driver, which hooks prepare.
type run struct {
	Spec
	program  *cli.Program
	settings *settings.Settings
	log      *logrus.Logger

	cfg      driver.Config        // events, replayed and traces apart
	events   []func(job.Event)    // are called with each event, in this order
	replayed []func(job.Event)    // with those of the drivers before this one
	traces   []func(driver.Trace) // with each trace of a reset

	agents    *client.Agents // that start the workers
	localOnly bool           // all hosts there will ever be are this machine
	output    *launch.Output
	tracks    *tracks // of the timeline; nil: no timeline

	started []hook
	result  error // of the job, once its driver has ended
}

// newRun returns a run without hooks.
func newRun(p *cli.Program, s *settings.Settings, j Spec) *run {
	return &run{Spec: j, program: p, settings: s, log: settings.Logger(p, s), cfg: driver.Config{
		RunID:        s.RunID,
		Command:      workerCommand(s, j.Command),
		Env:          s.WorkerEnv(p.Env),
		Dir:          s.Dir,
		RemovalAfter: s.RemovalAfter,
		Authority:    j.Authority,
		Size:         j.Size,
		Blame:        s.Blame,
		Timeouts:     s.Timeouts,
		Tuning:       s.Tuning,
		CoreLimit:    s.CoreLimit,
	}}
}

// start starts hooks, in this order, up to the first that fails.
func (r *run) start(ctx context.Context, all []hook) error {
	r.cfg.Log = r.log
	for _, h := range all {
		if err := h.start(ctx, r); err != nil {
			return err
		}
		r.started = append(r.started, h)
	}
	r.cfg.Events, r.cfg.Replayed, r.cfg.Traces = each(r.events), each(r.replayed), each(r.traces)
	return nil
}

// each returns a function that calls all functions, in this order; nil: no function is given.
func each[T any](all []func(T)) func(T) {
	if len(all) == 0 {
		return nil
	}
	return func(v T) {
		for _, f := range all {
			f(v)
		}
	}
}

// stop stops the hooks that have been started, the last one first. result is the job's.
func (r *run) stop(result error) {
	r.result = result
	for _, h := range slices.Backward(r.started) {
		h.stop(r)
	}
}
