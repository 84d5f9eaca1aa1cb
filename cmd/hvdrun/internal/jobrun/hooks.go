package jobrun

import (
	"context"
	"slices"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
)

// hook is a part of a job that runs beside its driver.
type hook interface {
	// start starts the part before the driver, and adds to r the things that the driver needs and
	// the functions that it calls. An error names the setting that cannot be met, or the package
	// that failed; the job then ends, and stop is not called.
	start(ctx context.Context, r *run) error
	// stop ends the part after the driver has ended, or was not started, with r.result. It blocks
	// until everything that start started has ended. Failures are logged only: they do not change
	// the job's result.
	stop(r *run)
}

// hooks returns the hooks of a job in the order in which they are started. They are stopped in
// reverse order. Hooks that write events and output come late, so that they have written everything
// before the page, the tasks and the metrics stop.
func hooks() []hook {
	return []hook{
		new(auditHook),    // the record of commands
		new(orphansHook),  // processes that workers leave behind
		new(copyHook),     // the claim on the job, and the copy of its journal
		new(folderHook),   // the job's folder, its journal, its socket, its secrets
		new(slurmHook),    // the settings for nodes of Slurm
		new(sourceHook),   // the hosts
		new(agentsHook),   // the agents that start the workers
		new(timelineHook), // the driver's part of the timeline
		new(metricsHook),
		new(tasksHook),
		new(pageHook),
		new(membersHook), // some members of the agents' cluster, for the next driver
		new(eventsHook),
		new(tracesHook),
		new(storyHook), // the log's lines about what happens
		new(outputHook),
		new(signalsHook), // requests of the user by signals
		new(prepareHook), // the agents of fixed hosts
		new(bringHook),   // requests to the source for hosts
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
	events   []func(job.Event)    // called with each event, in this order
	replayed []func(job.Event)    // called with each event of earlier drivers
	traces   []func(driver.Trace) // called with each trace of a reset

	agents    *client.Agents // they start the workers
	localOnly bool           // this machine is the only host the job can have
	output    *launch.Output
	tracks    *tracks   // of the timeline; nil: no timeline
	again     wake.Flag // the user has asked again to stop

	started []hook
	result  error // of the job, once its driver has ended
}

// newRun returns a run without hooks.
func newRun(p *cli.Program, s *settings.Settings, j Spec) *run {
	return &run{Spec: j, program: p, again: wake.New(), settings: s, log: settings.Logger(p, s), cfg: driver.Config{
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

// start starts the hooks in this order, up to the first that fails.
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

// each returns a function that calls all the given functions in this order, or nil if there are no
// functions.
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

// stop stops the started hooks, the last one first. result is the job's result.
func (r *run) stop(result error) {
	r.result = result
	for _, h := range slices.Backward(r.started) {
		h.stop(r)
	}
}
