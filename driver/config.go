package driver

import (
	"encoding/json"
	"errors"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// Config configures a job: its command, hosts and limits.
type Config struct {
	// RunID identifies the job. Empty: a random one.
	RunID string
	// Command is the command line of every worker. Env is its environment, to which the worker's
	// own variables are added; plan.WithoutNode(os.Environ()) is this process's environment without
	// the variables that describe only its node. Dir is its working directory; empty: the driver's.
	Command []string
	Env     []string
	Dir     string

	// Source lists the hosts.
	Source discovery.Discoverer
	// RemovalAfter is the number of consecutive lists without a host after which the host is
	// removed; an empty list must occur at least twice. 0: 1.
	RemovalAfter int
	// Launcher starts workers. Nil: launch.Local. If it is a launch.Router, it determines the
	// address on which the driver listens; otherwise that is a loopback address.
	Launcher launch.Launcher
	// Authority issues the credentials of the job. Nil: a new one. Resume needs the authority of
	// the previous driver.
	Authority Authority
	// Output takes the workers' output. Nil: this process's stdout and stderr.
	Output *launch.Output

	// Size sets the number of workers, Blame the consequences of failures, and Timeouts the
	// driver's waits.
	Size     job.Size
	Blame    job.Blame
	Timeouts job.Timeouts

	// Journal is the path of the file in which Run records what another driver needs to continue
	// the job with Resume if this one dies. It contains no secrets. Empty: no journal. It is useful
	// only if the Launcher is a launch.Keeper.
	Journal string
	// Tuning is passed on to the workers.
	plan.Tuning
	// CoreLimit bounds, in bytes, the core file of a worker that crashes (launch.Spec.CoreLimit).
	// 0: no core file.
	CoreLimit uint64

	// Events is called with each event of the job, in order, from one goroutine. Nil: not called.
	Events func(job.Event)
	// Mirror, if not nil, gets a copy of the journal. The mirror has all events that lead to a
	// world, or to the job's end, before that world is published or the job ends.
	Mirror Mirror
	// Mark is called between two calls of Events when the journal is compacted, which drops the
	// earlier events from it. It returns, as JSON, what Marked needs to know about them. Nil:
	// nothing.
	Mark func() json.RawMessage
	// Marked is called by Resume with the last result of Mark, if any. Then Replayed is called with
	// each event of previous drivers since that mark, before the first call of Events. Nil: not
	// called.
	Marked   func(json.RawMessage)
	Replayed func(job.Event)
	// Control is the path, of any length, of a unix socket on which the job's user asks for the
	// status and gives commands with a control.Client. It must be in a directory that only that
	// user may enter. Empty: no socket.
	Control string
	// Tasks schedules tasks that workers run beside the job. Nil: no tasks.
	Tasks rendezvous.Tasks
	// TasksStatus, if not nil, returns the status of the tasks. It must not block.
	TasksStatus func() []string
	// Traces is called with each trace of a reset, some seconds after the first commit of the next
	// world or at the job's end, by one goroutine at a time. The job waits for it only at its end.
	// Nil: not called.
	Traces func(Trace)
	// TaskEvents delivers the scheduler's events for operators. Nil: none.
	TaskEvents <-chan job.TaskEvent
	// Audit holds the records of the requests that this process has made and received for the job.
	// The driver adds its own, and writes all of them among the events until the job has ended.
	// Nil: a new one.
	Audit *audit.Trail
	// Meter, if not nil, measures the job.
	Meter *Meter
	// Stop is called on a stop command. It must end the context of Run and, if now is set, kill the
	// workers. It must not block. Nil: stop commands are refused.
	Stop func(now bool)
	// Log takes the driver's log messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// withDefaults returns the config with its zero fields filled in, or an error if it is not valid.
func (c Config) withDefaults() (Config, error) {
	if len(c.Command) == 0 {
		return c, errors.New("driver: Config.Command, which the workers run, is empty")
	}
	if c.Source == nil {
		return c, errors.New("driver: Config.Source, which finds the hosts, is nil")
	}
	if c.RunID == "" {
		c.RunID = NewRunID()
	}
	if c.Launcher == nil {
		c.Launcher = launch.Local{}
	}
	if c.Log == nil {
		c.Log = logrus.StandardLogger()
	}
	if c.Events == nil {
		c.Events = func(job.Event) {}
	}
	if c.Audit == nil {
		c.Audit = audit.NewTrail()
	}
	var err error
	if c.Size, err = c.Size.WithDefaults(); err != nil {
		return c, err
	}
	if c.Blame, err = c.Blame.WithDefaults(); err != nil {
		return c, err
	}
	c.Timeouts = c.Timeouts.WithDefaults()
	return c, nil
}
