package jobrun

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver/audit"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// openTasks makes the job's scheduler of tasks, which goes on with what is written down. copied:
// the job's journal has a copy, from which another machine may go on with it.
func openTasks(s *settings.Settings,
	d *jobdir.Dir, authority *identity.Authority, copied bool, events chan<- job.TaskEvent, to *tracks, log *logrus.Logger,
) (*scheduler.Scheduler, error) {
	creds, err := authority.Issue(identity.Subject{Role: identity.Driver})
	if err != nil {
		return nil, err
	}
	cfg := scheduler.Config{Run: s.RunID, Credentials: creds, Repeated: copied, Memory: s.TasksMemory, Grace: s.TasksGrace, Log: log, Event: func(e scheduler.Event) {
		select {
		case events <- taskEvent(e):
		default: // the driver is busy, and these are not worth waiting for
		}
	}}
	if to != nil {
		cfg.Ran = to.task
	}
	if d == nil || d.Secrets.Dir == "" {
		return scheduler.New(cfg), nil
	}
	cfg.Journal = d.TasksJournal()
	side, err := scheduler.Open(cfg)
	if err == nil || errors.Is(err, journal.ErrLocked) {
		return side, err
	}
	log.WithError(err).Errorf("the tasks of the job are lost; %s.damaged has what can be read of them", cfg.Journal)
	if err := os.Rename(cfg.Journal, cfg.Journal+".damaged"); err != nil {
		return nil, err
	}
	return scheduler.New(cfg), nil
}

// serveTasks makes the job's scheduler of tasks. Clients of this machine reach it by a socket in
// the job's folder, if it has one. The function it returns ends it.
func serveTasks(s *settings.Settings,
	d *jobdir.Dir, authority *identity.Authority, copied bool, events chan<- job.TaskEvent, to *tracks, log *logrus.Logger,
) (*scheduler.Scheduler, func(), error) {
	side, err := openTasks(s, d, authority, copied, events, to, log)
	if err != nil {
		return nil, nil, err
	}
	if d == nil {
		return side, side.Close, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		refused := func(from net.Addr, why error) {
			s.Record(audit.Record{What: "connect", Outcome: audit.Refused(why), Who: audit.Who{From: from.String()}})
		}
		if err := side.ServeLocal(ctx, d.TasksPath(), refused); err != nil {
			log.WithError(err).Warn("programs that the job has not started cannot submit tasks")
		}
	})
	return side, func() {
		cancel()
		serving.Wait()
		side.Close()
	}, nil
}

// taskEvent returns an event of the scheduler as the job has it.
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
