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

// hook starts a part of a job that runs beside its driver. It is called before the driver, and adds
// to r the things that the driver needs and the functions that it calls. stop, unless it is nil,
// ends the part after the driver has ended, or was not started, with r.result. It blocks until
// everything that hook has started has ended, and only logs failures: they do not change the job's
// result. An error of hook names the setting that cannot be met, or the package that failed; the
// job then ends.
type hook func(ctx context.Context, r *run) (stop func(), err error)

// hooks are the hooks of a job in the order in which they are called. The parts are stopped in
// reverse order. Those that write events and output come late, so that they have written everything
// before the page, the tasks and the metrics stop.
var hooks = []hook{
	keepAudit,     // the record of commands
	adoptOrphans,  // processes that workers leave behind
	copyJournal,   // the claim on the job, and the copy of its journal
	keepFolder,    // the job's folder, its journal, its socket, its secrets
	takeSlurm,     // the settings for nodes of Slurm
	openSource,    // the hosts
	startAgents,   // the agents that start the workers
	writeTimeline, // the driver's part of the timeline
	serveMetrics,
	scheduleTasks,
	servePage,
	recordMembers, // some members of the agents' cluster, for the next driver
	writeEvents,
	exportTraces,
	tellStory, // the log's lines about what happens
	writeOutput,
	passSignals,   // requests of the user by signals
	prepareAgents, // the agents of fixed hosts
	bringHosts,    // requests to the source for hosts
}

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

	stops  []func() // of the hooks that have been called
	result error    // of the job, once its driver has ended
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

// start calls the hooks in this order, up to the first that fails.
func (r *run) start(ctx context.Context, all []hook) error {
	r.cfg.Log = r.log
	for _, start := range all {
		stop, err := start(ctx, r)
		if err != nil {
			return err
		}
		if stop != nil {
			r.stops = append(r.stops, stop)
		}
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

// stop stops what the hooks have started, the last part first. result is the job's result.
func (r *run) stop(result error) {
	r.result = result
	for _, stop := range slices.Backward(r.stops) {
		stop()
	}
}
