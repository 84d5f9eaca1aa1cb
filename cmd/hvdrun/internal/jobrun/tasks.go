package jobrun

import (
	"context"
	"errors"
	"net"
	"os"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// scheduleTasks runs the job's scheduler of tasks. Clients of this machine reach it by a socket in
// the job's folder, if it has one.
func scheduleTasks(_ context.Context, r *run) (stop func(), err error) {
	events := make(chan job.TaskEvent, 256)
	side, err := openTasks(r, events)
	if err != nil {
		return nil, cli.Failed(err)
	}
	r.cfg.Tasks, r.cfg.TaskEvents, r.cfg.TasksStatus = side, events, side.Summary
	if r.dir == nil {
		return side.Close, nil
	}
	leave := cli.Background(func(ctx context.Context) { r.serveTasks(ctx, side) })
	return func() {
		leave()
		side.Close()
	}, nil
}

// serveTasks takes clients of this machine until ctx ends.
func (r *run) serveTasks(ctx context.Context, side *scheduler.Scheduler) {
	refused := func(from net.Addr, why error) {
		r.settings.Record(audit.Record{What: "connect", Outcome: audit.Refused(why), Who: audit.Who{From: from.String()}})
	}
	if err := side.ServeLocal(ctx, r.dir.TasksPath(), refused); err != nil {
		r.log.WithError(err).Warn("programs that the job has not started cannot submit tasks")
	}
}

// openTasks makes the job's scheduler of tasks, which continues from the journal of tasks.
func openTasks(r *run, events chan<- job.TaskEvent) (*scheduler.Scheduler, error) {
	s := r.settings
	creds, err := r.Authority.Issue(identity.Subject{Role: identity.Driver})
	if err != nil {
		return nil, err
	}
	cfg := scheduler.Config{
		// With a copy of the journal, another machine may take over the job.
		Run: s.RunID, Credentials: creds, Repeated: r.copy != nil, Memory: s.TasksMemory, Grace: s.TasksGrace, Log: r.log,
		Event: func(e job.TaskEvent) {
			select {
			case events <- e:
			default: // the driver is busy: the event is dropped
			}
		},
	}
	if r.tracks != nil {
		cfg.Ran = r.tracks.task
	}
	if r.dir == nil || r.dir.Secrets.Dir == "" {
		return scheduler.New(cfg), nil
	}
	cfg.Journal = r.dir.TasksJournal()
	side, err := scheduler.Open(cfg)
	if err == nil || errors.Is(err, journal.ErrLocked) {
		return side, err
	}
	r.log.WithError(err).Errorf("the tasks of the job are lost; %s.damaged has what can be read of them", cfg.Journal)
	if err := os.Rename(cfg.Journal, cfg.Journal+".damaged"); err != nil {
		return nil, err
	}
	return scheduler.New(cfg), nil
}
