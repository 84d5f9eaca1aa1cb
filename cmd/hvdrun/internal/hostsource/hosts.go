// Package hostsource turns settings into the source of a job's hosts (fixed ones, a script, a
// plugin, gossip, Slurm), the bounds of its worlds, and the launcher of its workers.
package hostsource

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Possible returns the errors in the settings that a job would return before it begins. It does not
// query sources of hosts.
func Possible(s *settings.Settings) error {
	fixed, err := Fixed(s)
	if err == nil && (s.Given("np") || fixed != nil) {
		_, err = Size(s, fixed)
	}
	return err
}

// DefaultSlots returns the number of slots of a host whose line does not name one.
func DefaultSlots(s *settings.Settings) int {
	if s.SlotsPerHost > 0 {
		return s.SlotsPerHost
	}
	return max(1, Gpus())
}

// openers has, by setting, the function that makes the source of that setting. close closes the
// source.
var openers = map[string]func(s *settings.Settings, log logrus.FieldLogger) (source discovery.Discoverer, close func(), err error){
	"host-discovery-script": openScript,
	"discovery-plugin":      openPlugin,
	"gossip-join":           OpenGossip,
	"slurm":                 openSlurm,
}

// OpenKind makes the source of the setting name, one of Settings.Dynamic. close closes the source.
func OpenKind(s *settings.Settings, name string, log logrus.FieldLogger) (source discovery.Discoverer, close func(), err error) {
	return openers[name](s, log)
}

// openScript returns the source that runs the script. For a job, the script's processes carry a
// mark, so that none of them outlives the job.
func openScript(s *settings.Settings, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
	s.Record(audit.Record{What: "discover", How: "a script is run again and again", Outcome: audit.Done})
	script := &discovery.Script{
		Told:    new(discovery.Told),
		Command: s.Script, DefaultSlots: DefaultSlots(s), Timeout: s.DiscoveryTimeout, Log: log,
	}
	if s.RunID == "" {
		return script, func() {}, nil
	}
	mark, kill, err := guarded("script", log)
	script.Env = []string{mark}
	return script, kill, err
}

// guarded returns a variable that marks the processes of what, a script or plugin, and a function
// that kills all processes with the mark. If this process dies, another process kills them.
func guarded(what string, log logrus.FieldLogger) (mark string, kill func(), err error) {
	id := what + "-" + rand.Text()
	guard, err := proc.StartGuard(plan.EnvRunID, id)
	if err != nil {
		return "", nil, cli.Failed(err)
	}
	return plan.EnvRunID + "=" + id, func() {
		if err := guard.Close(); err != nil {
			log.WithError(err).Warnf("the discovery %s has left processes behind", what)
		}
	}, nil
}

// Fixed returns the hosts that the settings list, directly or in a hostfile; nil if sources list
// the hosts.
func Fixed(s *settings.Settings) ([]plan.Host, error) {
	var hosts []plan.Host
	var err error
	switch {
	case len(s.Dynamic()) > 0:
		return nil, nil
	case s.Hosts != "":
		if hosts, err = plan.ParseHostList(s.Hosts, DefaultSlots(s)); err != nil {
			return nil, fmt.Errorf("%s: %w", s.Origin("hosts"), err)
		}
	case s.Hostfile != "":
		data, err := s.ReadHosts()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Origin("hostfile"), err)
		}
		if hosts, err = plan.ParseHostfile(data, DefaultSlots(s)); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", s.Origin("hostfile"), s.Hostfile, err)
		}
		if len(hosts) == 0 {
			return nil, fmt.Errorf("%s: %s names no host", s.Origin("hostfile"), s.Hostfile)
		}
	case s.Given("np"):
		if s.Np > plan.MaxSlots {
			return nil, fmt.Errorf("%s: %d are more than the %d slots that a host may have, and no other host is named", s.Origin("np"), s.Np, plan.MaxSlots)
		}
		return []plan.Host{{Name: "localhost", Slots: s.Np}}, nil
	default:
		return []plan.Host{{Name: "localhost", Slots: max(DefaultSlots(s), s.MinNP)}}, nil
	}
	return hosts, nil
}

// fixedOrigin names the setting of the fixed hosts.
func fixedOrigin(s *settings.Settings) string {
	if s.Hostfile != "" {
		return s.Origin("hostfile")
	}
	return s.Origin("hosts")
}

// Taken describes the value that is used for -np; empty if -np is given.
func Taken(s *settings.Settings, np int) string {
	switch {
	case s.Given("np"):
		return ""
	case s.Hosts != "" || s.Hostfile != "":
		return fmt.Sprintf("-np is not given: using %d, from %s", np, fixedOrigin(s))
	case s.Given("slots-per-host"):
		return fmt.Sprintf("-np is not given: using %d, from %s", np, s.Origin("slots-per-host"))
	case np == s.MinNP:
		return fmt.Sprintf("-np is not given: using %d, from %s", np, s.Origin("min-np"))
	case Gpus() > 0:
		return fmt.Sprintf("-np is not given: %d is taken, the GPUs of this machine", np)
	}
	return fmt.Sprintf("-np is not given: %d is taken, as this machine has no GPU", np)
}

// Ask opens the source as Open does, and asks it once. close closes the source.
func Ask(ctx context.Context, s *settings.Settings, fixed []plan.Host, log logrus.FieldLogger) (hosts []plan.Host, close func(), err error) {
	source, close, err := Open(s, fixed, log)
	if err != nil {
		return nil, nil, err
	}
	if hosts, err = source.Discover(ctx); err == nil && ctx.Err() == nil {
		return hosts, close, nil
	}
	close()
	if ctx.Err() != nil {
		return nil, nil, cli.Failed(context.Cause(ctx))
	}
	return nil, nil, cli.Failed(fmt.Errorf("%w: %w", job.ErrDiscovery, err))
}

// Open returns one source: the fixed hosts or, if fixed is nil, the merged sources in the settings.
// close closes it.
func Open(s *settings.Settings, fixed []plan.Host, log logrus.FieldLogger) (source discovery.Discoverer, close func(), err error) {
	if fixed != nil {
		return discovery.Fixed(fixed), func() {}, nil
	}
	var named []discovery.Named
	var closers []func()
	close = func() {
		for _, c := range closers {
			c()
		}
	}
	for _, name := range s.Dynamic() {
		source, closer, err := OpenKind(s, name, log)
		if err != nil {
			close()
			return nil, nil, fmt.Errorf("%s: %w", s.Origin(name), err)
		}
		closers = append(closers, closer)
		named = append(named, discovery.Named{Name: s.Origin(name), Source: source})
	}
	if len(named) == 1 {
		return named[0].Source, close, nil
	}
	return discovery.Merge(named...), close, nil
}

// Size checks the bounds of the worlds against each other and against the fixed hosts.
func Size(s *settings.Settings, fixed []plan.Host) (job.Size, error) {
	elastic := s.Given("min-np") || s.Given("max-np") || len(s.Dynamic()) > 0
	np, slots := s.Np, SlotsOf(fixed)
	if !s.Given("np") {
		if fixed == nil {
			return job.Size{}, fmt.Errorf("-np is missing: the number of slots to wait for before the start")
		}
		if np = max(1, slots-s.Spares); s.MaxNP > 0 {
			np = min(np, s.MaxNP)
		}
	}
	if s.Spares > 0 && !elastic {
		return job.Size{}, fmt.Errorf("%s is %d, and the job is not elastic: give --min-np too", s.Origin("spares"), s.Spares)
	}
	switch {
	case s.MinNP > np:
		return job.Size{}, fmt.Errorf("%s is %d, more than the %d slots of %s", s.Origin("min-np"), s.MinNP, np, fixedOrigin(s))
	case fixed != nil && slots < max(np, 1):
		return job.Size{}, cli.Failed(fmt.Errorf("%w: %d are needed (%s), and the hosts given have %d",
			job.ErrNotEnoughSlots, max(np, 1), s.Origin("np"), slots))

	}
	return job.Size{NP: np, Min: s.MinNP, Max: s.MaxNP, Spares: s.Spares, Elastic: elastic, TasksOnly: s.TasksOnly, Stateless: s.Restart.Workers}, nil
}
