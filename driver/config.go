package driver

import (
	"encoding/json"
	"errors"
	"fmt"
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
	// Command is what every worker executes; Env and Dir are its environment, to which the worker's own variables are
	// added, and its working directory ("" is the driver's).
	Command []string
	Env     []string
	Dir     string

	// Source says which hosts there are.
	Source discovery.Discoverer
	// RemovalAfter is from how many lists in a row a host must be missing before it counts as gone; it takes two empty ones at
	// least. 0: 1.
	RemovalAfter int
	// Launcher starts workers. Nil: launch.Local. A launch.Router says where the driver listens; otherwise it does so on
	// loopback only.
	Launcher launch.Launcher
	// Authority issues the credentials of the job. Nil: a new one. Resume needs that of the driver before.
	Authority *identity.Authority
	// Output takes what workers print. Nil: this process's stdout and stderr.
	Output *launch.Output

	// Size bounds the worlds, Blame says what failures cost, Timeouts bound every wait.
	Size     Size
	Blame    Blame
	Timeouts Timeouts

	// Journal is the path of a file in which everything is written down that another driver must know to go on with the
	// job, with Resume, should this one die; Run makes it. It holds no secret. Empty: there is none. It is of use where the
	// Launcher is a launch.Keeper.
	Journal string
	// EncryptData asks for TLS on the connections that carry tensors too; they are proven but plain otherwise.
	EncryptData bool
	// NetworkInterfaces narrows the addresses that workers offer to their peers. Empty: all.
	NetworkInterfaces []string
	// TimelineFilename is what the files are named after, on each worker's host, in which workers write down their
	// operations. Empty: they do not.
	TimelineFilename string

	// FusionThreshold (in MiB) and CycleTime tune the workers' asynchronous collectives. 0: as is usual; negative: not at all.
	FusionThreshold int
	CycleTime       time.Duration
	// Connections share the large messages between two workers of different hosts, up to collective.MaxConnections. 0: one.
	Connections int
	// CoreLimit bounds, in bytes, the core file of a worker that crashes (launch.Spec.CoreLimit). 0: there is none.
	CoreLimit uint64
	// VerifyState is after how many commits the workers compare their states. 0: only after each sync; negative: not at all.
	VerifyState int
	// HealState gives workers whose state differs that of most others. Otherwise the workers fail.
	HealState bool
	// CommitReplicas is how many other workers keep what one alone has of each commit.
	CommitReplicas int

	// Events is called with everything that happened to the job, in order, from one goroutine. Nil: nobody listens.
	Events func(Event)
	// Mark is called between two calls of Events, when the journal is about to forget the events
	// until then, and returns what Marked needs to know of them, as JSON. Nil: nothing.
	Mark func() json.RawMessage
	// Marked is called by Resume with what Mark has returned last, if it was called; after it, and
	// before Events, Replayed is called with each event of the drivers before, since that mark.
	// Nil: nobody listens.
	Marked   func(json.RawMessage)
	Replayed func(Event)
	// Control is the path, of any length, of a unix socket at which the job's user may ask how the job is doing and give
	// commands, with a control.Client; it must be in a folder that only that user may enter. Empty: there is none.
	Control string
	// Stop is called when a command asks to stop the job, and sees that the context of Run ends, and where now is set that
	// the workers are killed. It does not block. Nil: such a command is refused.
	Stop func(now bool)
	// Log takes the driver's own messages. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Size bounds the number of workers.
type Size struct {
	// NP is the number of slots needed before the first start.
	NP int
	// Min is the fewest workers with which training goes on. 0: NP.
	Min int
	// Max is the most workers. 0: no bound.
	Max int
	// Starts is how many workers of one host may start at a time: one counts until it has joined,
	// for 5 s, or for 15 s once another one has joined. 0: 32.
	Starts int `json:",omitempty"`
	// Elastic lets the world change. Otherwise the job has NP workers, and the failure of one ends it.
	Elastic bool
}

// FailurePolicy says what a worker's failure excludes.
type FailurePolicy uint8

const (
	// BlameSlot excludes the slot of the worker that failed, and its host only when all its slots are out.
	BlameSlot FailurePolicy = iota
	// BlameHost excludes the whole host at the first failure and stops its other workers, as Horovod does.
	BlameHost
)

// Blame says what a failure costs.
type Blame struct {
	Policy FailurePolicy
	// CooldownMin and CooldownMax bound the time for which an excluded slot or host stays out; it doubles from
	// CooldownMin. Both 0: 1 s and 600 s for BlameSlot, for ever for BlameHost.
	CooldownMin, CooldownMax time.Duration
	// ResetLimit is the most resets within any ResetWindow. Nil: no limit.
	ResetLimit *int
	// ResetWindow is a span of time. 0: all the time that the job takes.
	ResetWindow time.Duration `json:",omitempty"`
}

// Timeouts bound the driver's waits. A zero field has the default named beside it.
type Timeouts struct {
	DiscoveryInterval time.Duration // 1 s: pause between polls
	Elastic           time.Duration // 600 s: longest wait for enough slots
	Start             time.Duration // 30 s: from a worker's start to its join
	Join              time.Duration // 30 s: from the first worker's join to the last's
	Drain             time.Duration // 30 s: from SIGTERM to SIGKILL of a worker
	Finish            time.Duration // 30 s: from the first worker's done to the last's
	Exit              time.Duration // 5 min: from a worker's done to its exit

	// How long a worker may hold up the others: until it is named, and until it is stopped. Negative: for ever.
	StallWarning time.Duration // 5 s
	Stall        time.Duration // 120 s
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
	if c.Size, err = c.Size.withDefaults(); err != nil {
		return c, err
	}
	if c.Blame, err = c.Blame.withDefaults(); err != nil {
		return c, err
	}
	c.Timeouts = c.Timeouts.withDefaults()
	return c, nil
}

func (s Size) withDefaults() (Size, error) {
	if s.Min == 0 || !s.Elastic {
		s.Min = s.NP
	}
	if !s.Elastic {
		s.Max = s.NP
	}
	if s.Starts <= 0 {
		s.Starts = defaultStarts
	}
	switch {
	case s.NP < 1:
		return s, fmt.Errorf("driver: a job needs at least one worker, not %d", s.NP)
	case s.Min < 1:
		return s, fmt.Errorf("driver: at least one worker is needed to go on, not %d", s.Min)
	case s.Min > s.NP:
		return s, fmt.Errorf("driver: the fewest workers (%d) exceed those of the start (%d)", s.Min, s.NP)
	case s.Max != 0 && s.Max < s.NP:
		return s, fmt.Errorf("driver: the most workers (%d) are fewer than those of the start (%d)", s.Max, s.NP)
	}
	return s, nil
}

func (b Blame) withDefaults() (Blame, error) {
	if b.CooldownMin == 0 && b.CooldownMax == 0 && b.Policy == BlameSlot {
		b.CooldownMin, b.CooldownMax = time.Second, 600*time.Second
	}
	if b.CooldownMin < 0 || b.CooldownMax < b.CooldownMin {
		return b, fmt.Errorf("driver: cooldown from %v to %v is no range", b.CooldownMin, b.CooldownMax)
	}
	if b.ResetLimit != nil && *b.ResetLimit < 0 {
		return b, fmt.Errorf("driver: a reset limit of %d cannot be kept", *b.ResetLimit)
	}
	if b.ResetWindow < 0 {
		return b, fmt.Errorf("driver: %v is no window for resets", b.ResetWindow)
	}
	return b, nil
}

// forever tells that an exclusion has no end.
func (b Blame) forever() bool { return b.CooldownMax == 0 }

func (t Timeouts) withDefaults() Timeouts {
	for _, d := range []struct {
		field *time.Duration
		def   time.Duration
	}{
		{&t.DiscoveryInterval, time.Second}, {&t.Elastic, 600 * time.Second}, {&t.Start, 30 * time.Second},
		{&t.Join, 30 * time.Second}, {&t.Drain, 30 * time.Second}, {&t.Finish, 30 * time.Second},
		{&t.Exit, 5 * time.Minute},
		{&t.StallWarning, 5 * time.Second}, {&t.Stall, 120 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.def
		}
	}
	return t
}
