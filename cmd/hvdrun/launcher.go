package main

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
)

// defaultOrphan is the default of --orphan-timeout.
const defaultOrphan = 10 * time.Minute

// orphanTime is how long workers are kept whose driver is silent.
func (s *settings) orphanTime() time.Duration {
	if s.orphan == 0 {
		return defaultOrphan
	}
	return s.orphan
}

// sshSettings say how agents are started on other machines.
type sshSettings struct {
	port         int
	identityFile string
	command      string // in place of ssh
	remoteHvdrun string // on the hosts; empty: it is brought there
}

func sshText(field func(*sshSettings) *string) func(*settings, string) error {
	return text(func(s *settings) *string { return field(&s.ssh) })
}

func setSSHPort(s *settings, text string) (err error) {
	if s.ssh.port, err = parseCount(text, 1); err == nil && s.ssh.port > 65535 {
		err = fmt.Errorf("%q is not a port", text)
	}
	return err
}

// setSSHCommand takes a command whose first word can be run.
func setSSHCommand(s *settings, text string) error {
	words := strings.Fields(text)
	if len(words) == 0 {
		return fmt.Errorf("the value is empty")
	}
	if _, err := exec.LookPath(words[0]); err != nil {
		return fmt.Errorf("%s cannot be run: %w", words[0], err)
	}
	s.ssh.command = text
	return nil
}

// allLocal returns whether there are hosts and all are this machine.
func allLocal(ctx context.Context, hosts []plan.Host) bool {
	return client.AllLocal(ctx, hostNames(hosts))
}

func slotsOf(hosts []plan.Host) (n int) {
	for _, h := range hosts {
		n += h.Slots
	}
	return n
}

func hostNames(hosts []plan.Host) []string {
	names := make([]string, len(hosts))
	for i, h := range hosts {
		names[i] = h.Name
	}
	return names
}

// agents returns how the workers are started: by the agents of an open cluster, and agents of
// this job alone on hosts where the cluster, if there is one, has none. fixed are all hosts that
// there will ever be, if they are known.
func (s *settings) agents(
	ctx context.Context, authority *identity.Authority, fixed []plan.Host, log *logrus.Logger,
) (cfg client.Config, err error) {
	listen, err := s.listenAddr()
	if err != nil {
		return cfg, err
	}
	cfg = client.Config{
		Listen:    listen,
		Authority: authority, Starter: s.starter(), LocalOnly: allLocal(ctx, fixed), Lease: s.lease, Orphan: s.orphanTime(), Log: log,
		Audit: s.record,
		Hello: client.Hello{LogLevel: log.GetLevel().String(), Drain: s.timeouts.Drain, BindGPUs: s.bindGPUs},
	}
	if s.bindGPUs && cfg.LocalOnly {
		if _, err := localDevices(); err != nil {
			return cfg, fmt.Errorf("%s: %w", s.origin("bind-gpus"), err)
		}
	}
	if s.cluster.source == nil {
		return cfg, nil
	}
	cfg.Credentials = s.cluster.credentials
	cfg.Find = func(host string) (string, bool) { return s.findAgent(host) }
	return cfg, nil
}

// prepare starts the agents of hosts that will be there all the time before anything waits for a
// worker: bringing a program there may take its time. It logs which hosts cannot be used;
// unless others may do, that ends the job.
func prepare(ctx context.Context, a *client.Agents, hosts []plan.Host, size job.Size, log logrus.FieldLogger) error {
	names := hostNames(hosts)
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

// starter returns how agents are started where there are none.
func (s *settings) starter() client.Starter {
	ssh := s.ssh.shell()
	ssh.Audit = s.record
	return client.Hosts{Remote: ssh}
}

// shell returns what reaches hosts that are other machines.
func (s sshSettings) shell() *client.SSH {
	return &client.SSH{Command: strings.Fields(s.command), Port: s.port, IdentityFile: s.identityFile, Hvdrun: s.remoteHvdrun}
}
