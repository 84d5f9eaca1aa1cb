package main

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/driver/audit"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// settings are what a person has set, by flags, variables or a file.
type settings struct {
	runID        string // of the job that is run, if one is
	np           int
	minNP, maxNP int
	spares       int
	tasksOnly    bool
	tasksMemory  int64         // bytes; 0: the default
	tasksGrace   time.Duration // less than 0: for ever
	restart      restartSettings
	sourceSettings
	slurm     slurmSettings
	cluster   clusterSettings
	timeouts  job.Timeouts
	blame     job.Blame
	tuning    plan.Tuning // its TimelineFilename is absolute
	bindGPUs  bool
	coreLimit uint64 // bytes
	outputSettings
	ssh           sshSettings
	lease, orphan time.Duration // 0: the defaults
	jobDir        string
	noResume      bool
	journal       journalSettings
	metrics       metricsSettings
	fileSettings
	provenance
}

// sourceSettings say which hosts there are, or what finds them.
type sourceSettings struct {
	hosts, hostfile, script string
	slotsPerHost            int // 0: as many as GPUs are seen, else 1
	plugin                  string
	pluginSettings          map[string]string
	trail                   *audit.Trail      // has the records of a job; nil: there is none
	stray                   func(line string) // takes what a plugin should not have printed; nil: it is only logged
	discoveryTimeout        time.Duration
	removalAfter            int // 0: as is usual
}

// outputSettings say where output, events and the log go.
type outputSettings struct {
	outputDir               string
	timestamps              bool
	logLevel                logrus.Level
	logJSON, verbose, quiet bool
	eventsFile              string
	dashboard               string // address and port
	otlp                    string // URL of a collector of traces
}

// fileSettings are those that only a file can set.
type fileSettings struct {
	command []string
	env     []string // NAME=value, for the workers
	dir     string   // of the workers; absolute
}

// provenance is where settings come from.
type provenance struct {
	// origins names, for each setting that was set, the flag, variable or line of a file that did,
	// and texts its value.
	origins, texts map[string]string
	mistyped       []string // what is to be said of variables that nearly are settings
	configText     string   // of the file
	configExposed  bool     // everybody may read it
}

// given returns whether the setting was set at all.
func (s *settings) given(name string) bool { return s.origins[name] != "" }

// origin names what set the setting, or its flag where nothing did.
func (s *settings) origin(name string) string {
	if o := s.origins[name]; o != "" {
		return o
	}
	return flagName(name)
}

// setting is one thing that can be set: a flag, an environment variable and a key of the file, all
// of one name.
type setting struct {
	name    string
	aliases []string
	short   string
	arg     string // stands for the value in the help; "" for a switch
	usage   string
	section string // of the file
	// def is the value where none is given, as text; where there is none, or not the same for all,
	// unset says what is.
	def, unset string
	source     bool // is about which hosts there are: a setting of `hvdrun discover` too
	list       bool // of values a,b,c; a file may have a list
	repeat     bool // the same, and values of several flags are joined
	pairs      bool // of values key=value, a line each; a file may have a map
	set        func(s *settings, text string) error
}

// section names the section of the file in which the settings may stand.
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

// table is every setting of a job, in the order of the help, by the sections of the file.
var table = slices.Concat(
	section("job", []setting{
		{name: "np", aliases: []string{"num-proc"}, arg: "N", source: true, unset: "the slots of -H",
			usage: "slots needed before the first start, mostly written -np N",
			set:   count(func(s *settings) *int { return &s.np })},
		{name: "min-np", aliases: []string{"min-num-proc"}, arg: "N", unset: "-np",
			usage: "fewest workers with which training goes on; makes the job elastic",
			set:   count(func(s *settings) *int { return &s.minNP })},
		{name: "max-np", aliases: []string{"max-num-proc"}, arg: "N", unset: "no bound",
			usage: "most workers; makes the job elastic",
			set:   count(func(s *settings) *int { return &s.maxNP })},
		{name: "tasks-only", def: "false",
			usage: "the workers run tasks (see hvdrun tasks) and do not train: nobody waits for them to join a world",
			set:   onOff(func(s *settings) *bool { return &s.tasksOnly })},
		{name: "tasks-memory", arg: "BYTES", unset: "an eighth of the machine's, 128MiB to 2GiB",
			usage: "memory of hvdrun that tasks and their results may take (512MiB); programs that submit more wait",
			set: func(s *settings, text string) error {
				n, err := parseBytes(text)
				if err == nil && (n < scheduler.LeastMemory || n > math.MaxInt64) {
					err = fmt.Errorf("%q is less than 128MiB, or too much", text)
				}
				s.tasksMemory = int64(n)
				return err
			}},
		{name: "tasks-grace", arg: "D", def: "30s",
			usage: "time that a function may go on after its task is cancelled or its time is up, until its worker is ended and started again; 0: for ever",
			set:   durationOrNever(func(s *settings) *time.Duration { return &s.tasksGrace })},
		{name: "spares", arg: "N", def: "0",
			usage: "workers beyond the most (-np, where --max-np is not given) that wait with the state to take a lost one's place",
			set: func(s *settings, text string) (err error) {
				s.spares, err = parseCount(text, 0)
				return err
			}},
		{name: "restart-workers", def: "false",
			usage: "for programs that know nothing of hvdrun: end them all when one fails or the hosts change, and start them anew",
			set:   onOff(func(s *settings) *bool { return &s.restart.workers })},
		{name: "prestart", arg: "CODE", unset: "none",
			usage: "with --restart-workers, Python code that the next interpreter runs in advance, such as 'import torch'",
			set:   text(func(s *settings) *string { return &s.restart.prestart })},
		{name: "core-limit", arg: "BYTES", def: "0",
			usage: "bound of a crashed worker's core file (4096, 64MiB, unlimited); the others go on while it is written",
			set: func(s *settings, text string) (err error) {
				s.coreLimit, err = parseBytes(text)
				return err
			}},
		{name: "bind-gpus", def: "false",
			usage: "show each worker the GPU of its slot only, and use no slot whose GPU fails (on hosts of agents, theirs counts)",
			set:   onOff(func(s *settings) *bool { return &s.bindGPUs })},
		{name: "job-dir", arg: "DIR", unset: "one in ~/.local/state/hvdrun/jobs",
			usage: "the job's folder, from which it can be resumed; the job's key and environment are in it then",
			set:   text(func(s *settings) *string { return &s.jobDir })},
		{name: "no-resume", def: "false",
			usage: "keep the job's key and environment in memory alone: where hvdrun dies, its workers soon end",
			set:   onOff(func(s *settings) *bool { return &s.noResume })},
		{name: "journal", arg: "URL", unset: "none",
			usage: "etcd://HOST:PORT, where to keep a copy of the job's journal, with which hvdrun resume goes on on another machine",
			set:   text(func(s *settings) *string { return &s.journal.url })},
		{name: "journal-key-file", arg: "F",
			usage: "file of the key that seals the copy (hvdrun agent --generate-key)",
			set:   text(func(s *settings) *string { return &s.journal.keyFile })},
		{name: "journal-lease", arg: "D", def: "20s",
			usage: "time after which another machine may go on with a job whose driver has not reached etcd",
			set:   duration(func(s *settings) *time.Duration { return &s.journal.lease })},
	}),
	section("discovery", []setting{
		{name: "hosts", short: "H", list: true, arg: "a:2,b:4", source: true, unset: "localhost with -np slots",
			usage: "fixed hosts and their slots",
			set:   text(func(s *settings) *string { return &s.hosts })},
		{name: "hostfile", arg: "F", source: true,
			usage: "file of fixed hosts: \"a slots=2\" or \"a:2\" a line",
			set:   text(func(s *settings) *string { return &s.hostfile })},
		{name: "host-discovery-script", arg: "CMD", source: true,
			usage: "command, run by a shell again and again, that prints \"host\" or \"host:slots\" a line; makes the job elastic",
			set:   text(func(s *settings) *string { return &s.script })},
		{name: "discovery-plugin", arg: "PATH", source: true,
			usage: "program that says which hosts there are, and may push changes: a name of one that comes with hvdrun (dns, file, http, kubernetes, slurm), or a path (see discovery/README.md); makes the job elastic",
			set:   text(func(s *settings) *string { return &s.plugin })},
		{name: "discovery-config", arg: "k=v", source: true, repeat: true, pairs: true,
			usage: "setting for the plugin; give it again for more", set: setPluginSettings},
		{name: "slurm", def: "false",
			usage: "bring nodes of Slurm: those of the job in which hvdrun runs, and for more jobs of a node each; makes the job elastic",
			set:   onOff(func(s *settings) *bool { return &s.slurm.on })},
		{name: "slurm-args", arg: "OPTIONS", unset: "none",
			usage: "with --slurm, sbatch's options for these jobs, such as '--partition=low --gres=gpu:8 --time=8:00:00'",
			set:   setSlurmArgs},
		{name: "gossip-join", arg: "host:port,…", source: true, repeat: true,
			usage: "agents (hvdrun agent) that know the others: their hosts are the job's; makes the job elastic", set: setJoin},
		{name: "cluster", arg: "DIR", source: true,
			usage: "folder of the agents' cluster (hvdrun cluster init), with the authority that lets jobs run there",
			set:   clusterText(func(c *clusterSettings) *string { return &c.dir })},
		{name: "gossip-key-file", arg: "F", source: true,
			usage: "file that holds the one key that agents and drivers share, for trying out",
			set:   clusterText(func(c *clusterSettings) *string { return &c.keyFile })},
		{name: "gossip-label", arg: "L", source: true, unset: "none",
			usage: "name of the agents' cluster",
			set:   clusterText(func(c *clusterSettings) *string { return &c.label })},
		{name: "gossip-bind", arg: "ADDR:PORT", source: true, unset: "any port",
			usage: "where to listen to the gossip, over UDP and TCP",
			set:   clusterText(func(c *clusterSettings) *string { return &c.bind })},
		{name: "gossip-advertise", arg: "ADDR", source: true,
			usage: "address under which agents reach this machine, where that is not the one that is bound to",
			set:   clusterText(func(c *clusterSettings) *string { return &c.advertise })},
		{name: "slots-per-host", aliases: []string{"slots"}, arg: "N", source: true, def: "auto",
			usage: "slots of a host whose line names none; auto: the GPUs seen, else 1", set: setSlotsPerHost},
		{name: "discovery-interval", arg: "D", source: true, def: "1s",
			usage: "pause between two runs of the discovery",
			set:   duration(func(s *settings) *time.Duration { return &s.timeouts.DiscoveryInterval })},
		{name: "discovery-timeout", arg: "D", source: true, def: "30s",
			usage: "longest that one run of the discovery may take",
			set:   duration(func(s *settings) *time.Duration { return &s.discoveryTimeout })},
		{name: "discovery-removal-after", arg: "N", source: true, def: "1",
			usage: "lists in a row from which a host must be missing before it counts as gone; it takes two empty ones at least",
			set:   count(func(s *settings) *int { return &s.removalAfter })},
	}),
	section("timeouts", []setting{
		{name: "elastic-timeout", arg: "D", def: "600s",
			usage: "longest wait for enough slots; 24h with --slurm if nothing is said",
			set:   duration(func(s *settings) *time.Duration { return &s.timeouts.Elastic })},
		{name: "start-timeout", arg: "D", def: "30s",
			usage: "longest until a worker's process starts, and from then until it joins",
			set:   duration(func(s *settings) *time.Duration { return &s.timeouts.Start })},
		{name: "join-timeout", arg: "D", def: "30s",
			usage: "longest that a running worker may take to come to the next world without being seen on its way",
			set:   duration(func(s *settings) *time.Duration { return &s.timeouts.Join })},
		{name: "drain-timeout", arg: "D", def: "30s",
			usage: "grace for a worker that is asked to end; it begins anew while a last checkpoint grows",
			set:   duration(func(s *settings) *time.Duration { return &s.timeouts.Drain })},
		{name: "finish-timeout", arg: "D", def: "30s",
			usage: "grace for the other workers once one is done",
			set:   duration(func(s *settings) *time.Duration { return &s.timeouts.Finish })},
		{name: "exit-timeout", arg: "D", def: "5m",
			usage: "longest from a worker's report that it is done until its process exits, for what the program does after training",
			set:   duration(func(s *settings) *time.Duration { return &s.timeouts.Exit })},
		{name: "agent-timeout", aliases: []string{"agent-lease"}, arg: "D", def: "10s",
			usage: "longest that a host may be out of reach before its workers count as lost",
			set:   setLease},
		{name: "orphan-timeout", arg: "D", def: "10m",
			usage: "time after which no worker is left of a driver that is silent, the grace of --drain-timeout included",
			set:   duration(func(s *settings) *time.Duration { return &s.orphan })},
		{name: "stall-warning", arg: "D", def: "5s",
			usage: "time after which a worker is named in the log for which the others wait; 0: never",
			set:   durationOrNever(func(s *settings) *time.Duration { return &s.timeouts.StallWarning })},
		{name: "stall-timeout", arg: "D", def: "120s",
			usage: "time after which such a worker is stopped and replaced; 0: never",
			set:   durationOrNever(func(s *settings) *time.Duration { return &s.timeouts.Stall })},
	}),
	section("failures", []setting{
		{name: "failure-policy", arg: "slot|host", def: "slot",
			usage: "what a worker's failure excludes: its slot, or as in Horovod its whole host", set: setPolicy},
		{name: cooldownRange, list: true, arg: "MIN MAX", unset: "for slot: 1 600, for host: for ever",
			usage: "bounds of the time an excluded slot or host stays out; it doubles from MIN",
			set:   setCooldown},
		{name: "reset-limit", arg: "N", unset: "no limit",
			usage: "most resets within the reset window; 0 forbids any", set: setResetLimit},
		{name: "reset-window", arg: "D", def: "0",
			usage: "time within which resets count for the limit; 0: all that the job takes",
			set:   setResetWindow},
		{name: "verify-state", arg: "N", unset: "after each sync",
			usage: "check after each N commits that all workers hold the same bits; 0: never",
			set:   setVerifyState},
		{name: "heal-state", def: "false",
			usage: "give workers whose state differs that of most others, and train on, instead of failing",
			set:   onOff(func(s *settings) *bool { return &s.tuning.HealState })},
		{name: "commit-replicas", arg: "N", def: "0",
			usage: "other workers, on other hosts first, that keep what one alone has of each commit (elastic.Local)", set: setCommitReplicas},
	}),
	section("ssh", []setting{
		{name: "ssh-port", short: "p", arg: "PORT", source: true, unset: "ssh's own",
			usage: "port of the ssh servers of other machines", set: setSSHPort},
		{name: "ssh-identity-file", short: "i", arg: "F", source: true, unset: "ssh's own",
			usage: "file of the private key for them",
			set:   sshText(func(c *sshSettings) *string { return &c.identityFile })},
		{name: "ssh-command", arg: "CMD", source: true, unset: "ssh",
			usage: "command in place of ssh, that takes its options, a host and a command", set: setSSHCommand},
		{name: "remote-hvdrun", arg: "PATH", source: true, unset: "this very program is brought to where it is missing",
			usage: "hvdrun on other machines",
			set:   sshText(func(c *sshSettings) *string { return &c.remoteHvdrun })},
	}),
	section("data", []setting{
		{name: "listen", arg: "ADDR", unset: "loopback; all once a host is another machine",
			usage: "IP address of this machine to listen on, and of which other machines use theirs towards it; 0.0.0.0: all",
			set:   setListen},
		{name: "network-interfaces", aliases: []string{"network-interface"}, arg: "a,b", repeat: true, unset: "all",
			usage: "interfaces on which workers listen for each other, and whose addresses they offer", set: setInterfaces},
		{name: "encrypt-data", def: "false",
			usage: "encrypt the connections that carry tensors too",
			set:   onOff(func(s *settings) *bool { return &s.tuning.EncryptData })},
		{name: "connections", arg: "N", def: "1",
			usage: "TCP connections that share large messages between two workers of different hosts: more where the network bounds each",
			set:   setConnections},
		{name: "fusion-threshold-mb", arg: "N", def: "64",
			usage: "reduce tensors that are due at the same time as one, up to so many MiB; 0: one by one", set: setFusion},
		{name: "cycle-time-ms", arg: "T", def: "1",
			usage: "longest that an asynchronous operation waits for others to be fused with, in milliseconds",
			set:   setCycleTime},
	}),
	section("output", []setting{
		{name: "output-filename", arg: "DIR",
			usage: "also append the workers' output to DIR/rank.N/stdout and stderr",
			set:   text(func(s *settings) *string { return &s.outputDir })},
		{name: "prefix-output-with-timestamp", aliases: []string{"prefix-timestamp"}, def: "false",
			usage: "begin each line of the workers' output with the time",
			set:   onOff(func(s *settings) *bool { return &s.timestamps })},
		{name: "events-file", arg: "F",
			usage: "append what happens to the job, one JSON object a line",
			set:   text(func(s *settings) *string { return &s.eventsFile })},
		{name: "dashboard-listen", arg: "ADDR:PORT", unset: "no page",
			usage: "serve a page on which the job is watched and steered, as hvdrun dashboard does; hvdrun dashboard --url prints its URLs",
			set:   setDashboard},
		{name: "metrics-listen", arg: "ADDR", unset: "not served",
			usage: "where to serve metrics for Prometheus: a port of loopback (9464), or an IP address and a port; 0: any port",
			set:   setMetricsListen},
		{name: "metrics-token-file", arg: "F", unset: "all may",
			usage: "file of the bearer token that those must have who read the metrics",
			set:   metricsText(func(m *metricsSettings) *string { return &m.tokenFile })},
		{name: "metrics-tls-cert", arg: "F",
			usage: "file of the certificate, in PEM, with which metrics are served by HTTPS",
			set:   metricsText(func(m *metricsSettings) *string { return &m.cert })},
		{name: "metrics-tls-key", arg: "F",
			usage: "file of its key",
			set:   metricsText(func(m *metricsSettings) *string { return &m.key })},
		{name: "share-output", def: "false",
			usage: "let other users read output, events, timelines and checkpoints (modes 0644 and 0755, else 0600 and 0700)",
			set:   onOff(func(s *settings) *bool { return &s.tuning.ShareOutput })},
		{name: "otlp-endpoint", arg: "URL",
			usage: "send a trace of each reset to an OpenTelemetry collector (http://host:4318, or gRPC at port 4317)",
			unset: "OTEL_EXPORTER_OTLP_ENDPOINT", set: setOTLP},
		{name: "timeline-filename", arg: "F",
			usage: "write the workers' operations to F.rank.N.json on their hosts; hvdrun timeline F joins them for Perfetto",
			set:   setTimeline},
		{name: "log-level", arg: "L", source: true, unset: "info",
			usage: "least that is logged: trace, debug, info, warning, error or fatal", set: setLogLevel},
		{name: "log-format", arg: "text|json", source: true, def: "text",
			usage: "how it is logged", set: setLogFormat},
		{name: "verbose", source: true, def: "false",
			usage: "log at level debug, unless --log-level is given: what agents do, who has asked for what",
			set:   onOff(func(s *settings) *bool { return &s.verbose })},
		{name: "quiet", source: true, def: "false",
			usage: "log at level warning, unless --log-level or --verbose is given: failures, and nothing of how the job goes",
			set:   onOff(func(s *settings) *bool { return &s.quiet })},
	}),
	section("", []setting{
		{name: configFile, arg: "F", source: true,
			usage: "YAML file of settings, by the names of these flags, and of the command; hvdrun config prints one",
			set:   func(*settings, string) error { return nil }}, // read before all others
	}),
)

// separator stands between values that are joined.
func (st *setting) separator() string {
	if st.pairs {
		return "\n"
	}
	return ","
}

// canonical returns the name under which the table knows the flag or key: dashes for underscores,
// no alias.
func canonical(name string) string {
	name = strings.ReplaceAll(name, "_", "-")
	for i := range table {
		for _, alias := range table[i].aliases {
			if name == alias {
				return table[i].name
			}
		}
	}
	return name
}

// settingNamed returns the setting of the canonical name, or nil.
func settingNamed(name string) *setting {
	for i := range table {
		if table[i].name == name {
			return &table[i]
		}
	}
	return nil
}

// flagName is the flag as people write it.
func flagName(name string) string {
	if name == "np" {
		return "-np"
	}
	return "--" + name
}

func count(field func(*settings) *int) func(*settings, string) error {
	return func(s *settings, text string) (err error) {
		*field(s), err = parseCount(text, 1)
		return err
	}
}

func duration(field func(*settings) *time.Duration) func(*settings, string) error {
	return func(s *settings, text string) (err error) {
		*field(s), err = parseDuration(text)
		return err
	}
}

func setConnections(s *settings, text string) (err error) {
	if s.tuning.Connections, err = parseCount(text, 1); err == nil && s.tuning.Connections > collective.MaxConnections {
		err = fmt.Errorf("%q is more than %d", text, collective.MaxConnections)
	}
	return err
}

func setFusion(s *settings, text string) (err error) {
	if s.tuning.FusionThreshold, err = parseCount(text, 0); err == nil && s.tuning.FusionThreshold > plan.MaxFusionThreshold {
		err = fmt.Errorf("%q is more than %d", text, plan.MaxFusionThreshold)
	}
	if s.tuning.FusionThreshold == 0 {
		s.tuning.FusionThreshold = -1
	}
	return err
}

func setCycleTime(s *settings, text string) error {
	ms, err := strconv.ParseFloat(text, 64)
	if err != nil || !(ms >= 0 && ms <= math.MaxInt32) {
		return fmt.Errorf("%q is not a number of milliseconds", text)
	}
	if s.tuning.CycleTime = time.Duration(ms * 1e6); s.tuning.CycleTime == 0 {
		s.tuning.CycleTime = -1
	}
	return nil
}

// durationOrNever is a duration of which 0 means that the end never comes, told to the driver by a
// negative one.
func durationOrNever(field func(*settings) *time.Duration) func(*settings, string) error {
	return func(s *settings, text string) (err error) {
		if text == "0" || text == "0s" {
			*field(s) = -1
			return nil
		}
		*field(s), err = parseDuration(text)
		return err
	}
}

func setVerifyState(s *settings, text string) (err error) {
	if s.tuning.VerifyState, err = parseCount(text, 0); err == nil && s.tuning.VerifyState > math.MaxInt32 {
		err = fmt.Errorf("%q is more than %d", text, math.MaxInt32)
	}
	if s.tuning.VerifyState == 0 {
		s.tuning.VerifyState = -1
	}
	return err
}

func setCommitReplicas(s *settings, text string) (err error) {
	if s.tuning.CommitReplicas, err = parseCount(text, 0); err == nil && s.tuning.CommitReplicas > plan.MaxSlots {
		err = fmt.Errorf("%q is more than %d", text, plan.MaxSlots)
	}
	return err
}

func onOff(field func(*settings) *bool) func(*settings, string) error {
	return func(s *settings, text string) (err error) {
		*field(s), err = parseSwitch(text)
		return err
	}
}

func text(field func(*settings) *string) func(*settings, string) error {
	return func(s *settings, text string) error {
		if strings.TrimSpace(text) == "" {
			return errors.New("the value is empty")
		}
		*field(s) = text
		return nil
	}
}

func setSlotsPerHost(s *settings, text string) (err error) {
	if strings.EqualFold(text, "auto") {
		s.slotsPerHost = 0
		return nil
	}
	s.slotsPerHost, err = parseCount(text, 1)
	return err
}

func setPolicy(s *settings, text string) error {
	i, err := parseChoice(text, "slot", "host")
	s.blame.Policy = []job.FailurePolicy{job.BlameSlot, job.BlameHost}[i]
	return err
}

func setCooldown(s *settings, text string) (err error) {
	s.blame.CooldownMin, s.blame.CooldownMax, err = parseRange(text)
	return err
}

func setResetLimit(s *settings, text string) error {
	n, err := parseCount(text, 0)
	s.blame.ResetLimit = &n
	return err
}

func setResetWindow(s *settings, text string) (err error) {
	if s.blame.ResetWindow = 0; text == "0" || text == "0s" {
		return nil
	}
	s.blame.ResetWindow, err = parseDuration(text)
	return err
}

func setInterfaces(s *settings, text string) (err error) {
	s.tuning.NetworkInterfaces, err = parseList(text)
	return err
}

func setListen(s *settings, text string) error {
	addr, err := identity.ParseListen(text)
	if err == nil {
		s.tuning.Listen = addr.String()
	}
	return err
}

// listenAddr returns the address to listen on; the zero Addr where none is given.
func (s *settings) listenAddr() (netip.Addr, error) {
	if s.tuning.Listen == "" {
		return netip.Addr{}, nil
	}
	addr := netip.MustParseAddr(s.tuning.Listen)
	if !addr.IsUnspecified() && !identity.IsOwn(addr) {
		return addr, fmt.Errorf("%s: %v is not an address of this machine; `ip addr` lists these", s.origin("listen"), addr)
	}
	return addr, nil
}

func setDashboard(s *settings, text string) error {
	host, port, err := net.SplitHostPort(text)
	if _, bad := strconv.ParseUint(port, 10, 16); err != nil || host == "" || bad != nil {
		return fmt.Errorf("%q is not an address and a port, such as 127.0.0.1:8470", text)
	}
	s.dashboard = text
	return nil
}

func setTimeline(s *settings, text string) (err error) {
	if strings.TrimSpace(text) == "" {
		return errors.New("the value is empty")
	}
	s.tuning.TimelineFilename, err = filepath.Abs(text)
	return err
}

func setLogLevel(s *settings, text string) error {
	i, err := parseChoice(text, "trace", "debug", "info", "warning", "warn", "error", "fatal")
	s.logLevel = []logrus.Level{logrus.TraceLevel, logrus.DebugLevel, logrus.InfoLevel, logrus.WarnLevel, logrus.WarnLevel,
		logrus.ErrorLevel, logrus.FatalLevel}[i]
	return err
}

func setLogFormat(s *settings, text string) error {
	i, err := parseChoice(text, "text", "json")
	s.logJSON = i == 1
	return err
}
