// Package agent implements the commands hvdrun agent and hvdrun cluster.
package agent

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/measure"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/agent/enroll"
	"github.com/hvdrun/hvdrun/internal/agent/runas"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
)

// Commands returns hvdrun agent and hvdrun cluster.
func Commands(p *cli.Program) []*cobra.Command {
	return []*cobra.Command{agentCommand(p), clusterCommand(p)}
}

func agentCommand(p *cli.Program) *cobra.Command {
	var newKey string
	var job, enrollOnly bool
	cmd := &cobra.Command{
		Use:   "agent [flags]",
		Short: "Be the agent of this host: offer its slots to jobs by gossip, and run their workers",
		Long: `agent joins a cluster of agents by gossip, announces how many slots this host has, and starts, watches and stops workers for
drivers (hvdrun --gossip-join) with a certificate of the cluster. Workers run as the agent's user, or, if that is root, as
the users that the file of --run-as names.

With --enroll the agent makes a key, which hvdrun cluster serve certifies for a token, and later renews its certificate. Nothing on its host lets anyone run commands on another host. With --key-file all agents and drivers
share one key, and whoever reads it can run commands on all hosts.

SIGTERM and SIGINT drain the host: jobs move their workers elsewhere at the next step, the agent ends the remaining workers
after --drain-timeout, leaves the gossip, and exits with 0. A second signal ends it at once.`,
		Example: `  hvdrun cluster init ~/cluster && hvdrun cluster serve ~/cluster # on head
  hvdrun agent --enroll head:7945 --token-file token \
      --state-dir /var/lib/hvdrun --join node1:7946,node2:7946
  hvdrun -np 8 --gossip-join node1:7946 --cluster ~/cluster ./train

  hvdrun agent --generate-key key                              # for trying out
  hvdrun agent --key-file key --join node1:7946
  hvdrun -np 8 --gossip-join node1:7946 --gossip-key-file key ./train`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if job {
				return runJobAgent(cmd.Context(), p)
			}
			if newKey != "" {
				return cli.Failed(identity.GenerateClusterKey(newKey))
			}
			s, err := settings.Load(cmd.Flags(), p.Env)
			if err != nil {
				return err
			}
			if enrollOnly {
				return joinCluster(cmd.Context(), &s, &agent.Config{Name: s.Cluster.Name, Log: settings.Logger(p, &s)})
			}
			return runAgent(cmd.Context(), p, &s)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	for i := range settings.AgentTable {
		settings.AddFlag(fs, &settings.AgentTable[i])
	}
	for _, share := range settings.AgentShares {
		f := settings.AddFlag(fs, settings.SettingNamed(share.Name))
		if share.Usage != "" {
			f.Usage = share.Usage
		}
	}
	fs.StringVar(&newKey, "generate-key", "", "write a new key for a cluster to this new file, and exit")
	fs.BoolVar(&enrollOnly, "enroll-only", false, "get a certificate unless a valid one exists, and exit; the agent itself then needs no token")
	fs.BoolVar(&job, "job", false, "be the agent of one job, which its driver has started")
	fs.Lookup("job").Hidden = true
	return cmd
}

func runAgent(ctx context.Context, p *cli.Program, s *settings.Settings) error {
	c := s.Cluster
	if _, err := s.ListenAddr(); err != nil {
		return err
	}
	log, slots := settings.Logger(p, s), hostsource.DefaultSlots(s)
	cfg := agent.Config{
		Facts: hostsource.Facts(), Name: c.Name, Slots: slots, Label: c.Label, Listen: s.Tuning.Listen, Bind: c.Bind, Advertise: c.Advertise, Join: c.Join,
		LaunchPort: c.LaunchPort, Drain: s.Timeouts.Drain, Hurry: p.Hurry, Log: log,
	}
	var err error
	if cfg.RunAs, err = runAs(s, log); err != nil {
		return err
	}
	if err := joinCluster(ctx, s, &cfg); err != nil {
		return err
	}
	if cfg.Launcher, cfg.Health, err = agentDevices(s, log, slots); err != nil {
		return err
	}
	stop, err := measure.Agent(s, &cfg, log)
	if err != nil {
		return err
	}
	defer stop()
	defer cli.Inherit(log, cli.AgentReaps)()
	if err := agent.Run(ctx, cfg); err != nil {
		return cli.Failed(err)
	}
	if c.StoppedStatus != 0 {
		return cli.ExitWith(errors.New("the agent was asked to stop"), c.StoppedStatus)
	}
	return nil
}

// joinCluster sets in cfg what the agent needs to join the cluster.
func joinCluster(ctx context.Context, s *settings.Settings, cfg *agent.Config) error {
	c := s.Cluster
	if cfg.Name == "" {
		var err error
		if cfg.Name, err = os.Hostname(); err != nil {
			return cli.Failed(fmt.Errorf("the host's name: %w", err))
		}
	}
	switch {
	case c.Enroll != "" && c.KeyFile != "":
		return fmt.Errorf("%s and %s: give one of them", s.Origin("enroll"), s.Origin("key-file"))
	case c.Enroll == "" && (c.TokenFile != "" || c.StateDir != ""):
		return errors.New("--enroll is missing: where `hvdrun cluster serve` runs, host:port")
	case c.Enroll == "" && c.KeyFile == "":
		return errors.New("--enroll is missing: where `hvdrun cluster serve` runs; for trying out, --key-file is missing: " +
			"a key for the whole cluster, which `hvdrun agent --generate-key FILE` makes")
	case c.Enroll != "" && c.StateDir == "":
		return fmt.Errorf("%s: --state-dir is missing: a folder for the agent's certificate", s.Origin("enroll"))
	case c.Enroll == "":
		var err error
		if cfg.Key, err = identity.ReadClusterKey(c.KeyFile); err != nil {
			return fmt.Errorf("%s: %w", s.Origin("key-file"), err)
		}
		cfg.Log.Warnf("agent: %s: %s", s.Origin("key-file"), hostsource.SingleKeyWarning)
		return nil
	}
	if _, port, err := net.SplitHostPort(c.Enroll); err != nil || port == "" {
		return fmt.Errorf("%s: %q is not host:port", s.Origin("enroll"), c.Enroll)
	}
	m, err := enroll.Join(ctx, enroll.Config{Addr: c.Enroll, TokenFile: c.TokenFile, Host: cfg.Name, Dir: c.StateDir, Log: cfg.Log})
	if err != nil {
		return cli.Failed(err)
	}
	cfg.Credentials, cfg.Follow = m.Credentials(), m.Follow
	cfg.Key, cfg.OtherKeys = m.Keys()[0], m.Keys()[1:]
	return nil
}

// runAs returns the policy that selects the user of a worker; nil: workers run as this process's
// user.
func runAs(s *settings.Settings, log logrus.FieldLogger) (agent.RunAs, error) {
	file, root := s.Cluster.RunAs, os.Geteuid() == 0
	switch {
	case file == "" && root:
		log.Warn("agent: workers run as root, like the agent, and can read its files; --run-as names another user for them")
		return nil, nil
	case file == "":
		return nil, nil
	case !root:
		return nil, fmt.Errorf("%s: only an agent that runs as root can start workers as other users", s.Origin("run-as"))
	}
	policy, err := runas.Read(file)
	if err == nil {
		err = policy.Check(func(cgroup string) error {
			_, err := proc.CgroupsBelow(cgroup)
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Origin("run-as"), err)
	}
	// Workers must not inherit the descriptors with which this process was started. Linux before
	// 5.11 does not support this, but under systemd or in a container there are no such
	// descriptors.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	return policy, nil
}
