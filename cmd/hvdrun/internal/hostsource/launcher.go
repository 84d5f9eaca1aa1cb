package hostsource

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// AllLocal reports whether hosts is not empty and each host is this machine.
func AllLocal(ctx context.Context, hosts []plan.Host) bool {
	return client.AllLocal(ctx, HostNames(hosts))
}

// SlotsOf returns the number of slots of all hosts.
func SlotsOf(hosts []plan.Host) (n int) {
	for _, h := range hosts {
		n += h.Slots
	}
	return n
}

// HostNames returns the names of hosts.
func HostNames(hosts []plan.Host) []string {
	names := make([]string, len(hosts))
	for i, h := range hosts {
		names[i] = h.Name
	}
	return names
}

// Agents returns the configuration by which workers are started: by the agents of an open cluster
// and, on hosts without such an agent, by agents of this job alone. fixed are all hosts that the
// job can have, if they are known.
func Agents(
	ctx context.Context, s *settings.Settings, authority *identity.Authority, fixed []plan.Host, log *logrus.Logger,
) (cfg client.Config, err error) {
	listen, err := s.ListenAddr()
	if err != nil {
		return cfg, err
	}
	cfg = client.Config{
		Listen:    listen,
		Authority: authority, Starter: starter(s), LocalOnly: AllLocal(ctx, fixed), Patience: s.Timeouts.Start, Lease: s.Lease, Orphan: s.OrphanTime(), Log: log,
		Audit: s.Record,
		Hello: client.Hello{LogLevel: log.GetLevel().String(), Drain: s.Timeouts.Drain, BindGPUs: s.BindGPUs, Ports: s.Tuning.PortRange},
	}
	if s.BindGPUs && cfg.LocalOnly {
		if _, err := LocalDevices(); err != nil {
			return cfg, fmt.Errorf("%s: %w", s.Origin("bind-gpus"), err)
		}
	}
	if s.Cluster.Source == nil {
		return cfg, nil
	}
	cfg.Credentials = s.Cluster.Credentials
	cfg.Find = func(host string) (string, bool) { return FindAgent(s, host) }
	return cfg, nil
}

// Prepare starts the agents of fixed hosts before the driver waits for a worker, since copying the
// program to a host may take long. It logs the hosts that cannot be used, and returns an error if
// the job cannot run without them.
func Prepare(ctx context.Context, a *client.Agents, hosts []plan.Host, size job.Size, log logrus.FieldLogger) error {
	names := HostNames(hosts)
	failed := a.Prepare(ctx, names)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, name := range slices.Sorted(maps.Keys(failed)) {
		log.Error(failed[name])
	}
	if len(failed) > 0 && !size.Elastic {
		return fmt.Errorf("%d of %d hosts cannot be used", len(failed), len(hosts))
	}
	return nil
}

// starter returns the Starter of agents on hosts without one.
func starter(s *settings.Settings) client.Starter {
	ssh := Shell(s.SSH)
	ssh.Audit = s.Record
	return client.Hosts{Remote: ssh}
}

// Shell returns the ssh that reaches other machines.
func Shell(s settings.SSHSettings) *client.SSH {
	return &client.SSH{Command: strings.Fields(s.Command), Port: s.Port, IdentityFile: s.IdentityFile, Hvdrun: s.RemoteHvdrun}
}
