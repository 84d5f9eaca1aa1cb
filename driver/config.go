package driver

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/launch"
)

// Config says what job to run, on what, and within which limits.
type Config struct {
	// RunID names the job. Empty: a random one.
	RunID string
	// Command is what every worker executes; Env and Dir are its environment, to which the worker's
	// own variables are added, and its working directory ("" is the driver's).
	Command []string
	Env     []string
	Dir     string

	// Source says which hosts there are.
	Source discovery.Discoverer
	// RemovalAfter is from how many lists in a row a host must be missing before it counts as gone;
	// it takes two empty ones at least. 0: 1.
	RemovalAfter int
	// Launcher starts workers. Nil: launch.Local. A launch.Router says where the driver listens;
	// otherwise it does so on loopback only.
	Launcher launch.Launcher
	// Authority issues the credentials of the job. Nil: a new one. Resume needs that of the driver
	// before.
	Authority *identity.Authority
	// Output takes what workers print. Nil: this process's stdout and stderr.
	Output *launch.Output

	// Size bounds the worlds, Blame says what failures cost, Timeouts bound every wait.
	Size     Size
	Blame    Blame
	Timeouts Timeouts

	// Journal is the path of a file in which everything is written down that another driver must
	// know to go on with the job, with Resume, should this one die; Run makes it. It holds no
	// secret. Empty: there is none. It is of use where the Launcher is a launch.Keeper.
	Journal string
	// EncryptData asks for TLS on the connections that carry tensors too; they are proven but plain
	// otherwise.
	EncryptData bool
	// NetworkInterfaces narrows the addresses that workers offer to their peers. Empty: all.
	NetworkInterfaces []string
	// TimelineFilename is what the files are named after, on each worker's host, in which workers
	// write down their operations. Empty: they do not.
	TimelineFilename string

	// FusionThreshold (in MiB) and CycleTime tune the workers' asynchronous collectives. 0: as is
	// usual; negative: not at all.
	FusionThreshold int
	CycleTime       time.Duration
	// Connections share the large messages between two workers of different hosts, up to
	// collective.MaxConnections. 0: one.
	Connections int
	// CoreLimit bounds, in bytes, the core file of a worker that crashes (launch.Spec.CoreLimit).
	// 0: there is none.
	CoreLimit uint64
	// VerifyState is after how many commits the workers compare their states. 0: only after each
	// sync; negative: not at all.
	VerifyState int
	// HealState gives workers whose state differs that of most others. Otherwise the workers fail.
	HealState bool
	// CommitReplicas is how many other workers keep what one alone has of each commit.
	CommitReplicas int

	// Events is called with everything that happened to the job, in order, from one goroutine. Nil:
	// nobody listens.
	Events func(Event)
	// Mark is called between two calls of Events, when the journal is about to forget the events
	// until then, and returns what Marked needs to know of them, as JSON. Nil: nothing.
	Mark func() json.RawMessage
	// Marked is called by Resume with what Mark has returned last, if it was called; after it, and
	// before Events, Replayed is called with each event of the drivers before, since that mark.
	// Nil: nobody listens.
	Marked   func(json.RawMessage)
	Replayed func(Event)
	// Control is the path, of any length, of a unix socket at which the job's user may ask how the
	// job is doing and give commands, with a control.Client; it must be in a folder that only that
	// user may enter. Empty: there is none.
	Control string
	// Stop is called when a command asks to stop the job, and sees that the context of Run ends,
	// and where now is set that the workers are killed. It does not block. Nil: such a command is
	// refused.
	Stop func(now bool)
	// Log takes the driver's own messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// withDefaults returns the config with its zero fields filled, or what is wrong with it.
func (c Config) withDefaults() (Config, error) {
	if len(c.Command) == 0 {
		return c, errors.New("driver: no command to run")
	}
	if c.Source == nil {
		return c, errors.New("driver: no source of hosts")
	}
	if c.RunID == "" {
		c.RunID = randomID()
	}
	if c.Launcher == nil {
		c.Launcher = launch.Local{}
	}
	if c.Log == nil {
		c.Log = logrus.StandardLogger()
	}
	if c.Events == nil {
		c.Events = func(Event) {}
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
