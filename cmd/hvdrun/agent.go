package main

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

	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/agent/enroll"
	"github.com/hvdrun/hvdrun/internal/agent/runas"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
)

// agentTable is what only an agent can be told, in the order of the help. Like the settings of a
// job, each is a flag, a variable (HVD_KEY_FILE) and a key of the file.
var agentTable = section("agent", []setting{
	{name: "enroll", arg: "host:port",
		usage: "where those who have the cluster's authority run hvdrun cluster serve: certificates come from there",
		set:   clusterText(func(c *clusterSettings) *string { return &c.enroll })},
	{name: "token-file", arg: "F",
		usage: "file with a token of hvdrun cluster token, needed once",
		set:   clusterText(func(c *clusterSettings) *string { return &c.tokenFile })},
	{name: "state-dir", arg: "DIR",
		usage: "the agent's own folder, where its key, its certificate and the keys of the gossip are kept",
		set:   clusterText(func(c *clusterSettings) *string { return &c.stateDir })},
	{name: "key-file", arg: "F",
		usage: "instead, for trying out: file that holds one key for the whole cluster, and that only its owner may read",
		set:   clusterText(func(c *clusterSettings) *string { return &c.keyFile })},
	{name: "label", arg: "L",
		unset: "none", usage: "name of the cluster: agents and drivers of another one are not heard",
		set: clusterText(func(c *clusterSettings) *string { return &c.label })},
	{name: "join", arg: "host:port,…", repeat: true,
		usage: "agents that may be there already; those that are not yet are tried again and again", set: setJoin},
	{name: "name", arg: "HOST",
		unset: "the one that the system knows", usage: "name of this host in the cluster",
		set: clusterText(func(c *clusterSettings) *string { return &c.name })},
	{name: "bind", arg: "ADDR:PORT",
		unset: "0.0.0.0:7946", usage: "where to gossip, over UDP and TCP",
		set: clusterText(func(c *clusterSettings) *string { return &c.bind })},
	{name: "advertise", arg: "ADDR",
		usage: "address under which others reach this host, where that is not the one that is bound to",
		set:   clusterText(func(c *clusterSettings) *string { return &c.advertise })},
	{name: "run-as", arg: "F",
		usage: "file that says as which user the workers of which drivers run, and in which cgroup; for an agent that is root",
		set:   clusterText(func(c *clusterSettings) *string { return &c.runAs })},
	{name: "launch-port", arg: "P",
		unset: "any that is free", usage: "TCP port to which drivers come", set: setLaunchPort},
	{name: "stopped-status", arg: "N", def: "0",
		usage: "exit status after the agent was asked to stop; a Job of Kubernetes replaces a pod that ends with 143, and none with 0",
		set:   setStoppedStatus},
})

// agentShares are the settings of a job that an agent has too, with what they mean there.
var agentShares = []struct{ name, usage string }{
	{"slots-per-host", "room for workers on this host; auto: as many as GPUs are seen, else 1; also --slots"},
	{"listen", "IP address for drivers, gossip and workers (default: that of --bind, and for workers all)"},
	{"bind-gpus", "show each worker the GPU of its slot only (CUDA_VISIBLE_DEVICES)"},
	{"drain-timeout", "longest that workers may take to leave when the agent is asked to stop"},
	{"log-level", "least that is logged: trace, debug, info, warning, error or fatal (default: info)"},
	{"metrics-listen", ""}, {"metrics-token-file", ""}, {"metrics-tls-cert", ""}, {"metrics-tls-key", ""},
	{"log-format", ""},
	{configFile, ""},
}

func setStoppedStatus(s *settings, text string) (err error) {
	if s.cluster.stoppedStatus, err = parseCount(text, 0); err == nil && s.cluster.stoppedStatus > 255 {
		err = fmt.Errorf("%q is not an exit status", text)
	}
	return err
}

func setLaunchPort(s *settings, text string) (err error) {
	if s.cluster.launchPort, err = parseCount(text, 1); err == nil && s.cluster.launchPort > 65535 {
		err = fmt.Errorf("%q is not a port", text)
	}
	return err
}

func (p *program) agentCommand() *cobra.Command {
	var newKey string
	var job, enrollOnly bool
	cmd := &cobra.Command{
		Use:   "agent [flags]",
		Short: "Be the agent of this host: offer its slots to jobs by gossip, and run their workers",
		Long: `agent joins a cluster of agents by gossip, says how many slots this host has, and starts, watches and stops workers for
drivers (hvdrun --gossip-join) with a certificate of the cluster. Workers run as the user that the agent runs as, or, if
that is root, as the file of --run-as says.

With --enroll the agent makes a key, has it certified by hvdrun cluster serve, for which it needs a token once, and has the
certificate renewed from then on. Nothing that is on its host lets anyone run commands on another host. With --key-file all
agents and drivers share one key, and whoever reads it can.

It serves until it is asked to stop by SIGTERM or SIGINT; then the host is draining: jobs move their workers elsewhere at
the next step, the agent ends what is left after --drain-timeout, says good-bye, and exits with 0. A second signal cuts
that short.`,
		Example: `  hvdrun cluster init ~/cluster && hvdrun cluster serve ~/cluster      # where jobs are started
  hvdrun agent --enroll head:7945 --token-file token --state-dir /var/lib/hvdrun --join node1:7946,node2:7946
  hvdrun -np 8 --gossip-join node1:7946 --cluster ~/cluster ./train

  hvdrun agent --generate-key key                                       # for trying out
  hvdrun agent --key-file key --join node1:7946
  hvdrun -np 8 --gossip-join node1:7946 --gossip-key-file key ./train`,
		Args:                  cobra.NoArgs,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if job {
				return p.runJobAgent(cmd.Context())
			}
			if newKey != "" {
				if err := identity.GenerateClusterKey(newKey); err != nil {
					return workFailed(err)
				}
				return nil
			}
			s, err := load(cmd.Flags(), p.env)
			if err != nil {
				return err
			}
			if enrollOnly {
				return s.joinCluster(cmd.Context(), &agent.Config{Name: s.cluster.name, Log: p.logger(&s)})
			}
			return p.runAgent(cmd.Context(), &s)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	for i := range agentTable {
		addFlag(fs, &agentTable[i])
	}
	for _, share := range agentShares {
		f := addFlag(fs, settingNamed(share.name))
		if share.usage != "" {
			f.Usage = share.usage
		}
	}
	fs.StringVar(&newKey, "generate-key", "", "write a new key for a cluster to this new file, and exit")
	fs.BoolVar(&enrollOnly, "enroll-only", false, "get a certificate where there is no valid one, and exit: then the agent itself needs no token")
	fs.BoolVar(&job, "job", false, "be the agent of one job, which its driver has started")
	fs.Lookup("job").Hidden = true
	return cmd
}

func (p *program) runAgent(ctx context.Context, s *settings) error {
	c := s.cluster
	if !s.given("log-level") {
		s.logLevel = logrus.InfoLevel
	}
	if _, err := s.listenAddr(); err != nil {
		return err
	}
	log, slots := p.logger(s), s.defaultSlots()
	cfg := agent.Config{
		Facts: facts(), Name: c.name, Slots: slots, Label: c.label, Listen: s.tuning.Listen, Bind: c.bind, Advertise: c.advertise, Join: c.join,
		LaunchPort: c.launchPort, Drain: s.timeouts.Drain, Hurry: p.hurry, Log: log,
	}
	var err error
	if cfg.RunAs, err = s.runAs(log); err != nil {
		return err
	}
	if err := s.joinCluster(ctx, &cfg); err != nil {
		return err
	}
	if cfg.Launcher, cfg.Health, err = s.agentDevices(log, slots); err != nil {
		return err
	}
	stop, err := s.measureAgent(&cfg, log)
	if err != nil {
		return err
	}
	defer stop()
	defer inherit(log, agentReaps)()
	if err := agent.Run(ctx, cfg); err != nil {
		return workFailed(err)
	}
	if c.stoppedStatus != 0 {
		return exitWith(errors.New("the agent was asked to stop"), c.stoppedStatus)
	}
	return nil
}

// joinCluster gives the agent what makes it one of the cluster.
func (s *settings) joinCluster(ctx context.Context, cfg *agent.Config) error {
	c := s.cluster
	if cfg.Name == "" {
		var err error
		if cfg.Name, err = os.Hostname(); err != nil {
			return workFailed(fmt.Errorf("the host's name: %w", err))
		}
	}
	switch {
	case c.enroll != "" && c.keyFile != "":
		return fmt.Errorf("%s and %s: give one of them", s.origin("enroll"), s.origin("key-file"))
	case c.enroll == "" && (c.tokenFile != "" || c.stateDir != ""):
		return errors.New("--enroll is missing: where `hvdrun cluster serve` runs, host:port")
	case c.enroll == "" && c.keyFile == "":
		return errors.New("--enroll is missing: where `hvdrun cluster serve` runs; for trying out, --key-file is missing: " +
			"a key for the whole cluster, which `hvdrun agent --generate-key FILE` makes")
	case c.enroll != "" && c.stateDir == "":
		return fmt.Errorf("%s: --state-dir is missing: a folder for the agent's certificate", s.origin("enroll"))
	case c.enroll == "":
		var err error
		if cfg.Key, err = identity.ReadClusterKey(c.keyFile); err != nil {
			return fmt.Errorf("%s: %w", s.origin("key-file"), err)
		}
		cfg.Log.Warnf("agent: %s: %s", s.origin("key-file"), singleKeyWarning)
		return nil
	}
	if _, port, err := net.SplitHostPort(c.enroll); err != nil || port == "" {
		return fmt.Errorf("%s: %q is not host:port", s.origin("enroll"), c.enroll)
	}
	m, err := enroll.Join(ctx, enroll.Config{Addr: c.enroll, TokenFile: c.tokenFile, Host: cfg.Name, Dir: c.stateDir, Log: cfg.Log})
	if err != nil {
		return workFailed(err)
	}
	cfg.Credentials, cfg.Follow = m.Credentials(), m.Follow
	cfg.Key, cfg.OtherKeys = m.Keys()[0], m.Keys()[1:]
	return nil
}

// runAs returns the policy that says as whom workers run; nil: they run as this process's user.
func (s *settings) runAs(log logrus.FieldLogger) (agent.RunAs, error) {
	file, root := s.cluster.runAs, os.Geteuid() == 0
	switch {
	case file == "" && root:
		log.Warn("agent: workers run as root, as the agent does, and can read what it has; --run-as names another user for them")
		return nil, nil
	case file == "":
		return nil, nil
	case !root:
		return nil, fmt.Errorf("%s: only an agent that runs as root can start workers as other users", s.origin("run-as"))
	}
	policy, err := runas.Read(file)
	if err == nil {
		err = policy.Check(func(cgroup string) error {
			_, err := proc.CgroupsBelow(cgroup)
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.origin("run-as"), err)
	}
	// Descriptors that this process was started with are none of the workers' business. Linux
	// before 5.11 cannot; there are none under systemd or in a container.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	return policy, nil
}
