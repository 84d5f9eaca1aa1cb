package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/agent"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// agentTable is what only an agent can be told, in the order of the help. Like the settings of a
// job, each is a flag, a variable (HVD_KEY_FILE) and a key of the file.
var agentTable = section("agent", []setting{
	{name: "key-file", arg: "F",
		usage: "file that holds the cluster's key, and that only its owner may read",
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
	{name: "launch-port", arg: "P",
		unset: "any that is free", usage: "TCP port to which drivers come", set: setLaunchPort},
})

// agentShares are the settings of a job that an agent has too, with what they mean there.
var agentShares = []struct{ name, usage string }{
	{"slots-per-host", "room for workers on this host; auto: as many as GPUs are seen, else 1; also --slots"},
	{"listen", "IP address for drivers, gossip and workers (default: that of --bind, and for workers all)"},
	{"bind-gpus", "show each worker the GPU of its slot only (CUDA_VISIBLE_DEVICES)"},
	{"drain-timeout", "longest that workers may take to leave when the agent is asked to stop"},
	{"log-level", "least that is logged: trace, debug, info, warning, error or fatal (default: info)"},
	{"log-format", ""},
	{configFile, ""},
}

func setLaunchPort(s *settings, text string) (err error) {
	if s.cluster.launchPort, err = parseCount(text, 1); err == nil && s.cluster.launchPort > 65535 {
		err = fmt.Errorf("%q is not a port", text)
	}
	return err
}

func (p *program) agentCommand() *cobra.Command {
	var newKey string
	var job bool
	cmd := &cobra.Command{
		Use:   "agent [flags]",
		Short: "Be the agent of this host: offer its slots to jobs by gossip, and run their workers",
		Long: `agent joins a cluster of agents by gossip, says how many slots this host has, and starts, watches and stops workers for
drivers (hvdrun --gossip-join) that have the cluster's key. Workers run as the user that the agent runs as: whoever has
the key can run any command as that user.

It serves until it is asked to stop by SIGTERM or SIGINT; then the host is draining: jobs move their workers elsewhere at
the next step, the agent ends what is left after --drain-timeout, says good-bye, and exits with 0. A second signal cuts
that short.`,
		Example: `  hvdrun agent --generate-key /etc/hvdrun/key
  hvdrun agent --key-file /etc/hvdrun/key --join node1:7946,node2:7946
  hvdrun -np 8 --gossip-join node1:7946 --gossip-key-file /etc/hvdrun/key ./train`,
		Args:                  cobra.NoArgs,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if job {
				return p.runJobAgent(cmd.Context())
			}
			if newKey != "" {
				if err := identity.GenerateClusterKey(newKey); err != nil {
					return runError{err}
				}
				return nil
			}
			s, err := load(cmd.Flags(), p.env)
			if err != nil {
				return err
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
	fs.BoolVar(&job, "job", false, "be the agent of one job, which its driver has started")
	fs.Lookup("job").Hidden = true
	return cmd
}

func (p *program) runAgent(ctx context.Context, s *settings) error {
	c := s.cluster
	if c.keyFile == "" {
		return errors.New("--key-file is missing: the cluster's key; `hvdrun agent --generate-key FILE` makes one")
	}
	key, err := identity.ReadClusterKey(c.keyFile)
	if err != nil {
		return fmt.Errorf("%s: %w", s.origin("key-file"), err)
	}
	if !s.given("log-level") {
		s.logLevel = logrus.InfoLevel
	}
	if _, err := s.listenAddr(); err != nil {
		return err
	}
	log, slots := p.logger(s), s.defaultSlots()
	launcher, health, err := s.agentDevices(log, slots)
	if err != nil {
		return err
	}
	defer inherit(log, agentReaps)()
	err = agent.Run(ctx, agent.Config{
		Launcher: launcher, Health: health, Facts: facts(),
		Name: c.name, Slots: slots, Key: key, Label: c.label,
		Listen: s.tuning.Listen, Bind: c.bind, Advertise: c.advertise, Join: c.join, LaunchPort: c.launchPort,
		Drain: s.timeouts.Drain, Hurry: p.hurry, Log: log,
	})
	if err != nil {
		return runError{err}
	}
	return nil
}
