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

// AllLocal returns whether there are hosts and all are this machine.
func AllLocal(ctx context.Context, hosts []plan.Host) bool {
	return client.AllLocal(ctx, HostNames(hosts))
}

// SlotsOf counts the slots of hosts.
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

// Agents returns how the workers are started: by the agents of an open cluster, and agents of
// this job alone on hosts where the cluster, if there is one, has none. fixed are all hosts that
// there will ever be, if they are known.
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

// Prepare starts the agents of hosts that will be there all the time before anything waits for a
// worker: bringing a program there may take its time. It logs which hosts cannot be used;
// unless others may do, that ends the job.
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

// starter returns how agents are started on hosts without one.
func starter(s *settings.Settings) client.Starter {
	ssh := Shell(s.SSH)
	ssh.Audit = s.Record
	return client.Hosts{Remote: ssh}
}

// Shell returns what reaches hosts that are other machines.
func Shell(s settings.SSHSettings) *client.SSH {
	return &client.SSH{Command: strings.Fields(s.Command), Port: s.Port, IdentityFile: s.IdentityFile, Hvdrun: s.RemoteHvdrun}
}
