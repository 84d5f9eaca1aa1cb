package settings

// AgentTable lists the settings that only an agent has, in the order of the help. Like the settings
// of a job, each is a flag, an environment variable (HVD_KEY_FILE) and a key of the config file.
var AgentTable = section("agent", []setting{
	{Name: "enroll", arg: "host:port",
		usage: "address of hvdrun cluster serve, which signs the certificates",
		set:   text(func(s *Settings) *string { return &s.Cluster.Enroll })},
	{Name: "token-file", arg: "F",
		usage: "file with a token of hvdrun cluster token, needed once",
		set:   text(func(s *Settings) *string { return &s.Cluster.TokenFile })},
	{Name: "state-dir", arg: "DIR",
		usage: "the agent's own folder, where its key, its certificate and the gossip keys are kept",
		set:   text(func(s *Settings) *string { return &s.Cluster.StateDir })},
	{Name: "key-file", arg: "F",
		usage: "instead, for trying out: file that holds one key for the whole cluster, and that only its owner may read",
		set:   text(func(s *Settings) *string { return &s.Cluster.KeyFile })},
	{Name: "label", arg: "L",
		unset: "none", usage: "name of the cluster: the agent ignores agents and drivers with another one",
		set: text(func(s *Settings) *string { return &s.Cluster.Label })},
	{Name: "join", arg: "host:port,...", repeat: true,
		usage: "some other agents of the cluster; the agent keeps trying those that do not answer yet", set: setJoin},
	{Name: "name", arg: "HOST",
		unset: "the one that the system knows", usage: "name of this host in the cluster",
		set: text(func(s *Settings) *string { return &s.Cluster.Name })},
	{Name: "bind", arg: "ADDR:PORT",
		unset: "0.0.0.0:7946", usage: "where to gossip, over UDP and TCP",
		set: text(func(s *Settings) *string { return &s.Cluster.Bind })},
	{Name: "advertise", arg: "ADDR",
		usage: "address at which others reach this host, if it is not the bound one",
		set:   text(func(s *Settings) *string { return &s.Cluster.Advertise })},
	{Name: "run-as", arg: "F",
		usage: "file of the users and cgroups for the workers of each driver; for an agent that runs as root",
		set:   text(func(s *Settings) *string { return &s.Cluster.RunAs })},
	{Name: "launch-port", arg: "P",
		unset: "any free one", usage: "TCP port to which drivers connect", set: number(func(s *Settings) *int { return &s.Cluster.LaunchPort }, 1, maxPort)},
	{Name: "stopped-status", arg: "N", def: "0",
		usage: "exit status after the agent was asked to stop; a Job of Kubernetes replaces a pod that ends with 143, but none that ends with 0",
		set:   number(func(s *Settings) *int { return &s.Cluster.StoppedStatus }, 0, 255)},
})

// AgentShares lists the settings of a job that an agent has too, with their meaning for an agent.
var AgentShares = []struct{ Name, Usage string }{
	{"slots-per-host", "room for workers on this host; auto: as many as GPUs are seen, else 1; also --slots"},
	{"listen", "IP address for drivers, gossip and workers (default: that of --bind, and for workers all)"},
	{"bind-gpus", "show each worker the GPU of its slot only (CUDA_VISIBLE_DEVICES)"},
	{"drain-timeout", "longest that workers may take to leave when the agent is asked to stop"},
	{"log-level", "lowest level that is logged: trace, debug, info, warning, error or fatal (default: info)"},
	{"metrics-listen", ""}, {"metrics-token-file", ""}, {"metrics-tls-cert", ""}, {"metrics-tls-key", ""},
	{"log-format", ""},
	{configFile, ""},
}
