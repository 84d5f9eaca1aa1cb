// Package settings reads, checks and prints the settings of hvdrun. Each setting of its table is a
// flag, an environment variable and a key of the config file.
package settings

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// WorkerEnv returns the environment that workers inherit: env, without the variables of this node,
// with the variables of the config file added or replaced.
func (s *Settings) WorkerEnv(env []string) []string {
	env = plan.WithoutNode(env) // whatever starts a worker adds the variables of its node
	for _, e := range s.Env {
		name, _, _ := strings.Cut(e, "=")
		env = slices.DeleteFunc(env, func(old string) bool { return strings.HasPrefix(old, name+"=") })
		env = append(env, e)
	}
	if s.NoPythonPath {
		env = append(env, plan.EnvNoPythonPath+"=1")
	}
	return env
}

// Record adds an audit record of what this process does for its job, if it has a job.
func (s *Settings) Record(r audit.Record) {
	if s.Trail == nil {
		return
	}
	if r.Who == (audit.Who{}) {
		r.Who = audit.Self("", s.RunID)
	}
	s.Trail.Add(r)
}

// JournalSettings are the settings of the copy of a job's journal, from which a driver on another
// machine takes over the job.
type JournalSettings struct {
	URL, KeyFile string
	Lease        time.Duration
}

// restartSettings are the settings for programs that do not use hvdrun's library.
type restartSettings struct {
	Workers  bool
	Prestart string
}

// Settings are the settings that the user has given by flags, environment variables or a file.
type Settings struct {
	RunID        string // of the job, if this process runs one
	Name         string // of the job; empty: none
	Np           int
	MinNP, MaxNP int
	Spares       int
	TasksOnly    bool
	TasksMemory  int64         // bytes; 0: the default
	TasksGrace   time.Duration // negative: for ever
	Restart      restartSettings
	sourceSettings
	Slurm     SlurmSettings
	Cluster   ClusterSettings
	Timeouts  job.Timeouts
	Blame     job.Blame
	Tuning    plan.Tuning // its TimelineFilename is absolute
	BindGPUs  bool
	CoreLimit uint64 // bytes
	OutputSettings
	SSH           SSHSettings
	Lease, orphan time.Duration // 0: the defaults
	JobDir        string
	NoResume      bool
	NoPythonPath  bool
	Detach        bool
	Journal       JournalSettings
	Metrics       metricsSettings
	fileSettings
	Provenance
}

// sourceSettings are the settings of fixed hosts and of sources of hosts.
type sourceSettings struct {
	Hosts, Hostfile, Script string
	SlotsPerHost            int // 0: as many as there are visible GPUs, or 1 without GPUs
	Plugin                  string
	PluginSettings          map[string]string
	Trail                   *audit.Trail      // receives the audit records of a job; nil: none are kept
	PluginEndTimeout        time.Duration     // how long a plugin may take to end with SIGTERM; 0: the default
	Stray                   func(line string) // receives lines that a plugin must not print; nil: they are only logged
	DiscoveryTimeout        time.Duration
	RemovalAfter            int // 0: the default
}

// OutputSettings are the settings of output, events and the log.
type OutputSettings struct {
	OutputDir               string
	Timestamps              bool
	LogLevel                logrus.Level
	logJSON, verbose, quiet bool
	EventsFile              string
	Dashboard               string // address and port
	OTLP                    string // URL of a collector of traces
}

// fileSettings are the settings that only a file can contain.
type fileSettings struct {
	Command []string
	Env     []string // NAME=value, for the workers
	Dir     string   // of the workers; absolute
}

// Provenance records where settings come from.
type Provenance struct {
	// Origins has, for each setting that is given, the flag, variable or line of a file that set
	// it, and texts its value.
	Origins, texts map[string]string
	mistyped       []string // warnings about variables with names similar to settings
	ConfigText     string   // text of the config file
	HostsText      string   // text of the hostfile; empty: not read
	configExposed  bool     // everybody may read the config file
}

// Given reports whether the setting was given by a flag, a variable or a file.
func (s *Settings) Given(name string) bool { return s.Origins[name] != "" }

// Origin returns the flag, variable or line of a file that set the setting, or the name of its flag
// if nothing did.
func (s *Settings) Origin(name string) string {
	if o := s.Origins[name]; o != "" {
		return o
	}
	return flagName(name)
}

// setting is a setting: a flag, an environment variable and a key of the config file, all with the
// same name.
type setting struct {
	Name    string
	aliases []string
	short   string
	arg     string // placeholder of the value in the help; "": the setting is a switch
	usage   string
	section string // section of the config file
	// def is the default as text. If a setting has no default, or different ones, unset describes
	// what applies.
	def, unset string
	first      string // description on the first screen of the help; empty: not shown there
	Source     bool   // the setting is about hosts: `hvdrun discover` has it too
	list       bool   // the value is a list a,b,c; a file may contain a YAML list
	repeat     bool   // like list; the values of several flags are joined
	pairs      bool   // the value is key=value, one per line; a file may contain a map
	set        func(s *Settings, text string) error
}

// section sets the section of the config file to which the settings belong, and returns list.
func section(name string, list []setting) []setting {
	for i := range list {
		list[i].section = name
	}
	return list
}

const (
	cooldownRange = "blacklist-cooldown-range"
	configFile    = "config-file"
)

// Table lists every setting of a job, in the order of the help and by sections of the config file.
var Table = slices.Concat(
	section("job", []setting{
		{Name: "np", first: "slots needed before the first start", aliases: []string{"num-proc"}, arg: "N", Source: true, unset: "the slots of -H, else the GPUs of this machine, or 1",
			usage: "slots needed before the first start, usually written -np N",
			set:   count(func(s *Settings) *int { return &s.Np })},
		{Name: "min-np", first: "fewest workers with which training continues", aliases: []string{"min-num-proc"}, arg: "N", unset: "-np",
			usage: "fewest workers with which training continues; makes the job elastic",
			set:   count(func(s *Settings) *int { return &s.MinNP })},
		{Name: "max-np", first: "most workers", aliases: []string{"max-num-proc"}, arg: "N", unset: "no bound",
			usage: "most workers; makes the job elastic",
			set:   count(func(s *Settings) *int { return &s.MaxNP })},
		{Name: "tasks-only", def: "false",
			usage: "workers run tasks (see hvdrun tasks) and do not train: hvdrun does not wait for them to join a world",
			set:   onOff(func(s *Settings) *bool { return &s.TasksOnly })},
		{Name: "tasks-memory", arg: "BYTES", unset: "an eighth of the machine's, 128MiB to 2GiB",
			usage: "memory of hvdrun that tasks and their results may take (512MiB); programs that submit more wait",
			set: func(s *Settings, text string) error {
				n, err := parseBytes(text)
				if err == nil && (n < scheduler.LeastMemory || n > math.MaxInt64) {
					err = fmt.Errorf("%q is less than 128MiB, or too large", text)
				}
				s.TasksMemory = int64(n)
				return err
			}},
		{Name: "tasks-grace", arg: "D", def: "30s",
			usage: "time that a function may still run after its task is cancelled or its time is up, before its worker is restarted; 0: no limit",
			set:   durationOrNever(func(s *Settings) *time.Duration { return &s.TasksGrace })},
		{Name: "spares", arg: "N", def: "0",
			usage: "workers in addition to the maximum (--max-np, else -np) that wait with the state to replace a lost one",
			set:   number(func(s *Settings) *int { return &s.Spares }, 0, math.MaxInt)},
		{Name: "restart-workers", def: "false",
			usage: "for programs that do not use hvdrun's library: when one fails or the hosts change, restart all",
			set:   onOff(func(s *Settings) *bool { return &s.Restart.Workers })},
		{Name: "prestart", arg: "CODE", unset: "none",
			usage: "with --restart-workers, Python code that the next interpreter runs in advance, such as 'import torch'",
			set:   text(func(s *Settings) *string { return &s.Restart.Prestart })},
		{Name: "core-limit", arg: "BYTES", def: "0",
			usage: "largest core file of a crashed worker (4096, 64MiB, unlimited); the others continue while it is written",
			set: func(s *Settings, text string) (err error) {
				s.CoreLimit, err = parseBytes(text)
				return err
			}},
		{Name: "no-python-path", def: "false",
			usage: "keep hvdrun's package for PyTorch out of PYTHONPATH of workers",
			set:   onOff(func(s *Settings) *bool { return &s.NoPythonPath })},
		{Name: "bind-gpus", def: "false",
			usage: "show each worker only the GPU of its slot, and do not use a slot whose GPU fails (agents have their own setting)",
			set:   onOff(func(s *Settings) *bool { return &s.BindGPUs })},
		{Name: "name", arg: "NAME", unset: "none",
			usage: "name of the job: its run id is the name with eight digits (nightly-3f2a91bc), and commands take the name for it",
			set:   setName},
		{Name: "job-dir", arg: "DIR", unset: "one in ~/.local/state/hvdrun/jobs",
			usage: "the job's folder, from which it can be resumed; it then also contains the job's key and environment",
			set:   text(func(s *Settings) *string { return &s.JobDir })},
		{Name: "no-resume", def: "false",
			usage: "keep the job's key and environment only in memory: if hvdrun dies, its workers soon end",
			set:   onOff(func(s *Settings) *bool { return &s.NoResume })},
		{Name: "detach", first: "run the job in the background", short: "d", def: "false",
			usage: "run the job in the background and print its run id; hvdrun logs shows its output, hvdrun wait its end",
			set:   onOff(func(s *Settings) *bool { return &s.Detach })},
		{Name: "journal", arg: "URL", unset: "none",
			usage: "etcd://HOST:PORT for a copy of the job's journal, from which hvdrun resume can continue on another machine",
			set:   text(func(s *Settings) *string { return &s.Journal.URL })},
		{Name: "journal-key-file", arg: "F",
			usage: "file of the key that encrypts the copy (hvdrun agent --generate-key)",
			set:   text(func(s *Settings) *string { return &s.Journal.KeyFile })},
		{Name: "journal-lease", arg: "D", def: "20s",
			usage: "time after which another machine may take over a job whose driver has not reached etcd",
			set:   duration(func(s *Settings) *time.Duration { return &s.Journal.Lease })},
	}),
	section("discovery", []setting{
		{Name: "hosts", first: "hosts and their slots", short: "H", list: true, arg: "a:2,b:4", Source: true, unset: "localhost with -np slots",
			usage: "fixed hosts and their slots",
			set:   text(func(s *Settings) *string { return &s.Hosts })},
		{Name: "hostfile", arg: "F", Source: true,
			usage: "file of fixed hosts, or - for standard input: \"a slots=2\" or \"a:2\" a line",
			set:   text(func(s *Settings) *string { return &s.Hostfile })},
		{Name: "host-discovery-script", first: "command that prints the hosts", arg: "CMD", Source: true,
			usage: "command, run by a shell again and again, that prints \"host\" or \"host:slots\" a line; makes the job elastic",
			set:   text(func(s *Settings) *string { return &s.Script })},
		{Name: "discovery-plugin", arg: "PATH", Source: true,
			usage: "program that lists the hosts, and may push changes: the name of one that comes with hvdrun (dns, file, http, kubernetes, slurm), or a path (see discovery/README.md); makes the job elastic",
			set:   text(func(s *Settings) *string { return &s.Plugin })},
		{Name: "discovery-config", arg: "k=v", Source: true, repeat: true, pairs: true,
			usage: "setting for the plugin; give it again for more", set: setPluginSettings},
		{Name: "slurm", def: "false",
			usage: "use nodes of Slurm: those of the Slurm job in which hvdrun runs, and more by jobs of one node each; makes the job elastic",
			set:   onOff(func(s *Settings) *bool { return &s.Slurm.On })},
		{Name: "slurm-args", arg: "OPTIONS", unset: "none",
			usage: "with --slurm, sbatch's options for these jobs, such as '--partition=low --gres=gpu:8 --time=8:00:00'",
			set:   setSlurmArgs},
		{Name: "gossip-join", arg: "host:port,...", Source: true, repeat: true,
			usage: "some agents (hvdrun agent) of a cluster, whose hosts the job uses; makes the job elastic", set: setJoin},
		{Name: "cluster", arg: "DIR", Source: true,
			usage: "folder of the agents' cluster (hvdrun cluster init), with the authority that lets jobs run there",
			set:   text(func(s *Settings) *string { return &s.Cluster.Dir })},
		{Name: "gossip-key-file", arg: "F", Source: true,
			usage: "file of the one key that agents and drivers share, for trying out",
			set:   text(func(s *Settings) *string { return &s.Cluster.KeyFile })},
		{Name: "gossip-label", arg: "L", Source: true, unset: "none",
			usage: "name of the agents' cluster",
			set:   text(func(s *Settings) *string { return &s.Cluster.Label })},
		{Name: "gossip-bind", arg: "ADDR:PORT", Source: true, unset: "any port",
			usage: "address for the gossip, over UDP and TCP",
			set:   text(func(s *Settings) *string { return &s.Cluster.Bind })},
		{Name: "gossip-advertise", arg: "ADDR", Source: true,
			usage: "address at which agents reach this machine, if it is not the bound one",
			set:   text(func(s *Settings) *string { return &s.Cluster.Advertise })},
		{Name: "slots-per-host", aliases: []string{"slots"}, arg: "N", Source: true, def: "auto",
			usage: "slots of a host whose line has no number; auto: the GPUs seen, else 1", set: setSlotsPerHost},
		{Name: "discovery-interval", arg: "D", Source: true, def: "1s",
			usage: "pause between two runs of the discovery",
			set:   duration(func(s *Settings) *time.Duration { return &s.Timeouts.DiscoveryInterval })},
		{Name: "discovery-timeout", arg: "D", Source: true, def: "30s",
			usage: "longest time of one run of the discovery",
			set:   duration(func(s *Settings) *time.Duration { return &s.DiscoveryTimeout })},
		{Name: "discovery-removal-after", arg: "N", Source: true, def: "1",
			usage: "consecutive lists that must lack a host before it counts as gone; empty lists: at least two",
			set:   count(func(s *Settings) *int { return &s.RemovalAfter })},
	}),
	section("timeouts", []setting{
		{Name: "elastic-timeout", arg: "D", def: "600s",
			usage: "longest wait for enough slots; 24h with --slurm unless it is given",
			set:   duration(func(s *Settings) *time.Duration { return &s.Timeouts.Elastic })},
		{Name: "start-timeout", arg: "D", def: "30s",
			usage: "longest time until a worker's process starts, and from then until it joins",
			set:   duration(func(s *Settings) *time.Duration { return &s.Timeouts.Start })},
		{Name: "join-timeout", arg: "D", def: "30s",
			usage: "longest time of a running worker without progress towards the next world",
			set:   duration(func(s *Settings) *time.Duration { return &s.Timeouts.Join })},
		{Name: "drain-timeout", arg: "D", def: "30s",
			usage: "grace for a worker that is asked to end; it starts again while a last checkpoint grows",
			set:   duration(func(s *Settings) *time.Duration { return &s.Timeouts.Drain })},
		{Name: "finish-timeout", arg: "D", def: "30s",
			usage: "grace for the other workers once one is done",
			set:   duration(func(s *Settings) *time.Duration { return &s.Timeouts.Finish })},
		{Name: "exit-timeout", arg: "D", def: "5m",
			usage: "longest time from a worker's report that it is done until its process exits",
			set:   duration(func(s *Settings) *time.Duration { return &s.Timeouts.Exit })},
		{Name: "agent-timeout", aliases: []string{"agent-lease"}, arg: "D", def: "10s",
			usage: "longest time that a host may be out of reach before its workers count as lost",
			set:   setLease},
		{Name: "orphan-timeout", arg: "D", def: "10m",
			usage: "time after which all workers of a silent driver have ended, the grace of --drain-timeout included",
			set:   duration(func(s *Settings) *time.Duration { return &s.orphan })},
		{Name: "stall-warning", arg: "D", def: "5s",
			usage: "time after which the log names a worker for which the others wait; 0: never",
			set:   durationOrNever(func(s *Settings) *time.Duration { return &s.Timeouts.StallWarning })},
		{Name: "stall-timeout", arg: "D", def: "120s",
			usage: "time after which such a worker is stopped and replaced; 0: never",
			set:   durationOrNever(func(s *Settings) *time.Duration { return &s.Timeouts.Stall })},
	}),
	section("failures", []setting{
		{Name: "failure-policy", arg: "slot|host", def: "slot",
			usage: "what a worker's failure excludes: its slot, or, as in Horovod, its whole host", set: setPolicy},
		{Name: cooldownRange, list: true, arg: "MIN MAX", unset: "for slot: 1 600, for host: for ever",
			usage: "bounds of the time an excluded slot or host stays out; it doubles from MIN",
			set:   setCooldown},
		{Name: "reset-limit", arg: "N", unset: "no limit",
			usage: "most resets within the reset window; 0: none are allowed", set: setResetLimit},
		{Name: "reset-window", arg: "D", def: "0",
			usage: "time within which resets count for the limit; 0: the whole job",
			set:   setResetWindow},
		{Name: "failure-limit", arg: "N", def: "5",
			usage: "most consecutive worlds that failures of the program end without a commit, or failures in one slot before its worker joins, if there are too few other slots; 0: no limit",
			set:   numberOrNone(func(s *Settings) *int { return &s.Blame.FailureLimit }, math.MaxInt)},
		{Name: "verify-state", arg: "N", unset: "after each sync",
			usage: "check after each N commits that all workers hold the same bits; 0: never",
			set:   numberOrNone(func(s *Settings) *int { return &s.Tuning.VerifyState }, math.MaxInt32)},
		{Name: "heal-state", def: "false",
			usage: "give workers with a different state that of the majority, and continue, instead of failing",
			set:   onOff(func(s *Settings) *bool { return &s.Tuning.HealState })},
		{Name: "commit-replicas", arg: "N", def: "0",
			usage: "workers, on other hosts first, that keep a copy of the local parts of each commit (elastic.Local)",
			set:   number(func(s *Settings) *int { return &s.Tuning.CommitReplicas }, 0, plan.MaxSlots)},
	}),
	section("ssh", []setting{
		{Name: "ssh-port", short: "p", arg: "PORT", Source: true, unset: "ssh's own",
			usage: "port of the ssh servers of other machines",
			set:   number(func(s *Settings) *int { return &s.SSH.Port }, 1, maxPort)},
		{Name: "ssh-identity-file", short: "i", arg: "F", Source: true, unset: "ssh's own",
			usage: "file of the private key for them",
			set:   text(func(s *Settings) *string { return &s.SSH.IdentityFile })},
		{Name: "ssh-command", arg: "CMD", Source: true, unset: "ssh",
			usage: "command instead of ssh, which takes ssh's options, a host and a command", set: setSSHCommand},
		{Name: "remote-hvdrun", arg: "PATH", Source: true, unset: "this program is copied to hosts that lack it",
			usage: "path of hvdrun on other machines",
			set:   text(func(s *Settings) *string { return &s.SSH.RemoteHvdrun })},
	}),
	section("data", []setting{
		{Name: "listen", arg: "ADDR", unset: "loopback; all once a host is another machine",
			usage: "IP address of this machine to listen on; other machines listen on the address from which they reach it; 0.0.0.0: all",
			set:   setListen},
		{Name: "port-range", arg: "A-B", unset: "any",
			usage: "ports of hvdrun, its agents and the workers to which other machines connect, for firewalls: two for each worker on a host, and three",
			set:   setPortRange},
		{Name: "network-interfaces", aliases: []string{"network-interface"}, arg: "a,b", repeat: true, unset: "all",
			usage: "interfaces on which workers listen for each other", set: setInterfaces},
		{Name: "encrypt-data", def: "false",
			usage: "encrypt the connections that carry tensors too",
			set:   onOff(func(s *Settings) *bool { return &s.Tuning.EncryptData })},
		{Name: "connections", arg: "N", def: "1",
			usage: "TCP connections that share large messages between two workers of different hosts",
			set:   number(func(s *Settings) *int { return &s.Tuning.Connections }, 1, collective.MaxConnections)},
		{Name: "fusion-threshold-mb", arg: "N", def: "64",
			usage: "reduce tensors that are ready at the same time together, up to N MiB; 0: one by one",
			set:   numberOrNone(func(s *Settings) *int { return &s.Tuning.FusionThreshold }, plan.MaxFusionThreshold)},
		{Name: "cycle-time-ms", arg: "T", def: "1",
			usage: "longest time that an asynchronous operation waits for others to be fused with, in milliseconds",
			set:   setCycleTime},
	}),
	section("output", []setting{
		{Name: "output-filename", arg: "DIR",
			usage: "also append the workers' output to DIR/rank.N/stdout and stderr",
			set:   text(func(s *Settings) *string { return &s.OutputDir })},
		{Name: "prefix-output-with-timestamp", aliases: []string{"prefix-timestamp"}, def: "false",
			usage: "begin each line of the workers' output with the time",
			set:   onOff(func(s *Settings) *bool { return &s.Timestamps })},
		{Name: "events-file", arg: "F",
			usage: "append the job's events to a file, one JSON object a line",
			set:   text(func(s *Settings) *string { return &s.EventsFile })},
		{Name: "dashboard-listen", arg: "ADDR:PORT", unset: "no page",
			usage: "serve a page that shows and steers the job, as hvdrun dashboard does; hvdrun dashboard --url prints its URLs",
			set:   setDashboard},
		{Name: "metrics-listen", arg: "ADDR", unset: "not served",
			usage: "where to serve metrics for Prometheus: a port of loopback (9464), or an IP address and a port; 0: any port",
			set:   setMetricsListen},
		{Name: "metrics-token-file", arg: "F", unset: "all may",
			usage: "file of the bearer token that readers of the metrics must have",
			set:   text(func(s *Settings) *string { return &s.Metrics.TokenFile })},
		{Name: "metrics-tls-cert", arg: "F",
			usage: "file of the certificate, in PEM, with which metrics are served by HTTPS",
			set:   text(func(s *Settings) *string { return &s.Metrics.Cert })},
		{Name: "metrics-tls-key", arg: "F",
			usage: "file of its key",
			set:   text(func(s *Settings) *string { return &s.Metrics.Key })},
		{Name: "share-output", def: "false",
			usage: "let other users read output, events, timelines and checkpoints (modes 0644 and 0755, else 0600 and 0700)",
			set:   onOff(func(s *Settings) *bool { return &s.Tuning.ShareOutput })},
		{Name: "otlp-endpoint", arg: "URL",
			usage: "send a trace of each reset to an OpenTelemetry collector (http://host:4318, or gRPC at port 4317)",
			unset: "OTEL_EXPORTER_OTLP_ENDPOINT", set: SetOTLP},
		{Name: "timeline-filename", arg: "F",
			usage: "write the workers' operations to F.rank.N.json on their hosts; hvdrun timeline F joins them for Perfetto",
			set:   setTimeline},
		{Name: "log-level", arg: "L", Source: true, unset: "info",
			usage: "lowest level that is logged: trace, debug, info, warning, error or fatal", set: setLogLevel},
		{Name: "log-format", arg: "text|json", Source: true, def: "text",
			usage: "format of the log", set: setLogFormat},
		{Name: "verbose", Source: true, def: "false",
			usage: "log at level debug, unless --log-level is given: actions of agents, commands of people",
			set:   onOff(func(s *Settings) *bool { return &s.verbose })},
		{Name: "quiet", Source: true, def: "false",
			usage: "log at level warning, unless --log-level or --verbose is given: only failures",
			set:   onOff(func(s *Settings) *bool { return &s.quiet })},
	}),
	section("", []setting{
		{Name: configFile, arg: "F", Source: true,
			usage: "YAML file of settings, by the names of these flags, and of the command; hvdrun config prints one",
			set:   func(*Settings, string) error { return nil }}, // Load reads it before all others
	}),
)

// separator returns the separator of joined values.
func (st *setting) separator() string {
	if st.pairs {
		return "\n"
	}
	return ","
}

// canonical returns the name of the flag or key in the table: with dashes instead of underscores,
// and with aliases resolved.
func canonical(name string) string {
	name = strings.ReplaceAll(name, "_", "-")
	for i := range Table {
		for _, alias := range Table[i].aliases {
			if name == alias {
				return Table[i].Name
			}
		}
	}
	return name
}

// SettingNamed returns the setting of a job with the canonical name, or nil.
func SettingNamed(name string) *setting {
	for i := range Table {
		if Table[i].Name == name {
			return &Table[i]
		}
	}
	return nil
}

// flagName returns the flag as users write it.
func flagName(name string) string {
	if name == "np" {
		return "-np"
	}
	return "--" + name
}

func count(field func(*Settings) *int) func(*Settings, string) error {
	return number(field, 1, math.MaxInt)
}

// number returns a function that sets a number from least to most.
func number(field func(*Settings) *int, least, most int) func(*Settings, string) error {
	return func(s *Settings, text string) error {
		n, err := ParseCount(text, least)
		if err == nil && n > most {
			err = fmt.Errorf("%q is more than %d", text, most)
		}
		*field(s) = n
		return err
	}
}

// numberOrNone is number from 0 on. The text 0 means none, and the field is then negative.
func numberOrNone(field func(*Settings) *int, most int) func(*Settings, string) error {
	set := number(field, 0, most)
	return func(s *Settings, text string) error {
		err := set(s, text)
		if n := field(s); *n == 0 {
			*n = -1
		}
		return err
	}
}

// maxPort is the largest number of a port.
const maxPort = 65535

func duration(field func(*Settings) *time.Duration) func(*Settings, string) error {
	return func(s *Settings, text string) (err error) {
		*field(s), err = ParseDuration(text)
		return err
	}
}

func setCycleTime(s *Settings, text string) error {
	ms, err := strconv.ParseFloat(text, 64)
	if err != nil || !(ms >= 0 && ms <= math.MaxInt32) {
		return fmt.Errorf("%q is not a number of milliseconds", text)
	}
	if s.Tuning.CycleTime = time.Duration(ms * 1e6); s.Tuning.CycleTime == 0 {
		s.Tuning.CycleTime = -1
	}
	return nil
}

// durationOrNever returns a function that sets a duration. The text 0 means no limit; the field is
// then negative.
func durationOrNever(field func(*Settings) *time.Duration) func(*Settings, string) error {
	return func(s *Settings, text string) (err error) {
		if text == "0" || text == "0s" {
			*field(s) = -1
			return nil
		}
		*field(s), err = ParseDuration(text)
		return err
	}
}

func onOff(field func(*Settings) *bool) func(*Settings, string) error {
	return func(s *Settings, text string) (err error) {
		*field(s), err = parseSwitch(text)
		return err
	}
}

func text(field func(*Settings) *string) func(*Settings, string) error {
	return func(s *Settings, text string) error {
		if strings.TrimSpace(text) == "" {
			return errors.New("the value is empty")
		}
		*field(s) = text
		return nil
	}
}

// maxName bounds the name of a job, in bytes. The name is part of names of folders and of
// certificates.
const maxName = 64

var jobName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

func setName(s *Settings, text string) error {
	if len(text) > maxName || !jobName.MatchString(text) {
		return fmt.Errorf("%q is not a name of letters, digits, dots, dashes and underscores, at most %d, with a letter or a digit first", text, maxName)
	}
	s.Name = text
	return nil
}

func setSlotsPerHost(s *Settings, text string) (err error) {
	if strings.EqualFold(text, "auto") {
		s.SlotsPerHost = 0
		return nil
	}
	s.SlotsPerHost, err = ParseCount(text, 1)
	return err
}

func setPolicy(s *Settings, text string) error {
	i, err := parseChoice(text, "slot", "host")
	s.Blame.Policy = []job.FailurePolicy{job.BlameSlot, job.BlameHost}[i]
	return err
}

func setCooldown(s *Settings, text string) (err error) {
	s.Blame.CooldownMin, s.Blame.CooldownMax, err = parseRange(text)
	return err
}

func setResetLimit(s *Settings, text string) error {
	n, err := ParseCount(text, 0)
	s.Blame.ResetLimit = &n
	return err
}

func setResetWindow(s *Settings, text string) (err error) {
	if s.Blame.ResetWindow = 0; text == "0" || text == "0s" {
		return nil
	}
	s.Blame.ResetWindow, err = ParseDuration(text)
	return err
}

func setInterfaces(s *Settings, text string) (err error) {
	s.Tuning.NetworkInterfaces, err = parseList(text)
	return err
}

func setListen(s *Settings, text string) error {
	addr, err := identity.ParseListen(text)
	if err == nil {
		s.Tuning.Listen = addr.String()
	}
	return err
}

// setPortRange sets the range of ports, also for the listeners of this process.
func setPortRange(s *Settings, text string) error {
	ports, err := identity.ParsePorts(text)
	if err == nil {
		s.Tuning.PortRange = ports.String()
		identity.UsePorts(ports)
	}
	return err
}

// ListenAddr returns the address to listen on, or the zero Addr if none is given.
func (s *Settings) ListenAddr() (netip.Addr, error) {
	if s.Tuning.Listen == "" {
		return netip.Addr{}, nil
	}
	addr := netip.MustParseAddr(s.Tuning.Listen)
	if !addr.IsUnspecified() && !identity.IsOwn(addr) {
		return addr, fmt.Errorf("%s: %v is not an address of this machine; `ip addr` lists these", s.Origin("listen"), addr)
	}
	return addr, nil
}

func setDashboard(s *Settings, text string) error {
	host, port, err := net.SplitHostPort(text)
	if _, bad := strconv.ParseUint(port, 10, 16); err != nil || host == "" || bad != nil {
		return fmt.Errorf("%q is not an address and a port, such as 127.0.0.1:8470", text)
	}
	s.Dashboard = text
	return nil
}

func setTimeline(s *Settings, text string) (err error) {
	if strings.TrimSpace(text) == "" {
		return errors.New("the value is empty")
	}
	s.Tuning.TimelineFilename, err = filepath.Abs(text)
	return err
}

func setLogLevel(s *Settings, text string) error {
	i, err := parseChoice(text, "trace", "debug", "info", "warning", "warn", "error", "fatal")
	s.LogLevel = []logrus.Level{logrus.TraceLevel, logrus.DebugLevel, logrus.InfoLevel, logrus.WarnLevel, logrus.WarnLevel,
		logrus.ErrorLevel, logrus.FatalLevel}[i]
	return err
}

func setLogFormat(s *Settings, text string) error {
	i, err := parseChoice(text, "text", "json")
	s.logJSON = i == 1
	return err
}
