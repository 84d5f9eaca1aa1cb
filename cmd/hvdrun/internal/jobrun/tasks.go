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

// tasksHook is the job's scheduler of tasks. Clients of this machine reach it by a socket in the
// job's folder, if it has one.
type tasksHook struct {
	side  *scheduler.Scheduler
	leave func() // ends serve; nil: it was not called
}

func (h *tasksHook) start(_ context.Context, r *run) error {
	events := make(chan job.TaskEvent, 256)
	side, err := openTasks(r, events)
	if err != nil {
		return cli.Failed(err)
	}
	h.side = side
	r.cfg.Tasks, r.cfg.TaskEvents, r.cfg.TasksStatus = side, events, side.Summary
	if r.dir != nil {
		h.leave = cli.Background(func(ctx context.Context) { h.serve(ctx, r) })
	}
	return nil
}

// serve takes clients of this machine until ctx ends.
func (h *tasksHook) serve(ctx context.Context, r *run) {
	refused := func(from net.Addr, why error) {
		r.settings.Record(audit.Record{What: "connect", Outcome: audit.Refused(why), Who: audit.Who{From: from.String()}})
	}
	if err := h.side.ServeLocal(ctx, r.dir.TasksPath(), refused); err != nil {
		r.log.WithError(err).Warn("programs that the job has not started cannot submit tasks")
	}
}

func (h *tasksHook) stop(*run) {
	if h.leave != nil {
		h.leave()
	}
	h.side.Close()
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
		Event: func(e scheduler.Event) {
			select {
			case events <- taskEvent(e):
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

// taskEvent converts an event of the scheduler into an event of the job.
func taskEvent(e scheduler.Event) job.TaskEvent {
	names := map[scheduler.EventKind]job.EventName{
		scheduler.WorkerJoined: job.TaskWorkerJoined, scheduler.WorkerLeft: job.TaskWorkerLeft, scheduler.TaskFailed: job.TaskFailed,
		scheduler.WorkerStuck: job.TaskWorkerStuck,
	}
	return job.TaskEvent{
		Name: names[e.What], Worker: e.Worker, Host: e.Host, Offers: e.Offers, Lost: e.Lost,
		Function: e.Function, Client: e.Client, N: e.N, Reason: e.Failure, Text: e.Text, Dropped: e.Dropped,
		Incarnation: e.Incarnation,
	}
}
