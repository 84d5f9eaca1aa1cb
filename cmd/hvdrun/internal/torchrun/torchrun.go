// Package torchrun implements hvdrun torchrun: it turns torchelastic's flags into a node of package
// torchrun.
package torchrun

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/etcd"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
)

// torchFlags are the flags of torchrun. Flags whose values need parsing are kept as text.
type torchFlags struct {
	nnodes, workers                                              string
	backend, endpoint, id, conf                                  string
	standalone, module, noPython, runPath, virtualRank, elastic  bool
	maxRestarts, nodeRank, masterPort                            int
	monitorInterval                                              float64
	startMethod, eventLog, role, logDir                          string
	redirects, tee, shown                                        string
	masterAddr, localAddr, logsSpecs, numa, signals              string
	shutdownTimeout, exitBarrier, healthAddr, logLevel, prestart string
	healthPort                                                   int
}

// Commands returns hvdrun torchrun, and the hidden command that runs the driver of a job of its
// nodes.
func Commands(p *cli.Program) []*cobra.Command {
	return []*cobra.Command{torchrunCommand(p), driverCommand(p)}
}

func torchrunCommand(p *cli.Program) *cobra.Command {
	var f torchFlags
	cmd := &cobra.Command{
		Use:   settings.TorchrunName + " [flags] script [args…]",
		Short: "Run a PyTorch program as torchrun does",
		Long: `torchrun runs unmodified PyTorch programs as torchrun and python -m torch.distributed.run do: it takes their flags, with
dashes or underscores, and their variables (PET_NNODES=2 for --nnodes), gives workers the same environment, and restarts
them when one fails or nodes come and go. Each node runs it; there is no driver.

Workers reach the store of torch.distributed at a port of loopback, which admits only them. Agents of several nodes reach
each other over mutual TLS, for which all need the same key: --rdzv-conf key_file=FILE, a file of hvdrun agent
--generate-key FILE. Agents that all run on this machine need no key. With --rdzv-conf insecure=true no key is required, as
with torchrun: whoever reaches the ports can change what the job's processes read.

docs/torchrun.md lists the differences.`,
		Example: `  hvdrun torchrun --standalone --nproc-per-node 4 train.py --epochs 10
  hvdrun torchrun --nnodes 2 --node-rank 0 --master-addr node1 \
      --rdzv-conf key_file=key --nproc-per-node 8 train.py`,
		Args:                  cobra.ArbitraryArgs,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.fromEnvironment(cmd.Flags(), p.Env); err != nil {
				return err
			}
			if len(args) == 0 {
				return errors.New("no script to run\nusage: hvdrun " + cmd.Use)
			}
			if f.elastic {
				if err := errors.Join(f.checkElastic(cmd.Flags()), f.check()); err != nil {
					return err
				}
				command, err := elasticCommand(args)
				if err != nil {
					return err
				}
				return runTorchElastic(cmd.Context(), p, &f, command)
			}
			return runTorch(cmd.Context(), p, &f, args)
		},
	}
	f.addFlags(cmd.Flags())
	return cmd
}

// noID is the run id of a job without --rdzv-id.
const noID = "none"

// addFlags defines the flags, in both spellings; the first word that is not a flag begins the
// script.
func (f *torchFlags) addFlags(fs *pflag.FlagSet) {
	fs.SortFlags = false
	fs.SetInterspersed(false)
	fs.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	fs.StringVar(&f.nnodes, "nnodes", "1:1", "nodes of the job: N, or MIN:MAX where they may come and go")
	fs.StringVar(&f.workers, "nproc-per-node", "1", "workers of this node: a number, or auto, cpu or gpu for as many as it has")
	fs.StringVar(&f.backend, "rdzv-backend", "static", "how nodes meet: static (each is given its rank), c10d, or etcd")
	fs.StringVar(&f.endpoint, "rdzv-endpoint", "", "host[:port] where nodes meet (default: for static --master-addr:--master-port; port of c10d: 29400, of etcd: 2379)")
	fs.StringVar(&f.id, "rdzv-id", noID, "name of the job, the same on all nodes; a job of one node has a random one if it is given none")
	fs.StringVar(&f.conf, "rdzv-conf", "", "k=v,…: key_file, insecure, timeout, join_timeout, last_call_timeout, close_timeout and others of torchrun")
	fs.BoolVar(&f.standalone, "standalone", false, "a job of this node alone; --rdzv-backend, --rdzv-endpoint and --rdzv-id are ignored")
	fs.IntVar(&f.maxRestarts, "max-restarts", 0, "restarts because of failures of workers, of all nodes together; 0: none")
	fs.Float64Var(&f.monitorInterval, "monitor-interval", 0.1, "accepted without effect: hvdrun acts on the end of a worker at once")
	fs.StringVar(&f.startMethod, "start-method", "spawn", "accepted without effect: spawn, fork or forkserver")
	fs.StringVar(&f.eventLog, "event-log-handler", "null", "what becomes of events: null, or console for a line of JSON each on stderr")
	fs.StringVar(&f.role, "role", "default", "role of this node's workers")
	fs.BoolVarP(&f.module, "module", "m", false, "the script is the name of a module, as for python -m")
	fs.BoolVar(&f.noPython, "no-python", false, "run the script itself, without python")
	fs.BoolVar(&f.runPath, "run-path", false, "run the script by runpy.run_path")
	fs.StringVar(&f.logDir, "log-dir", "", "folder of logs and error files (default: a temporary one)")
	fs.StringVarP(&f.redirects, "redirects", "r", "0", "streams that go only to files: 0, 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:1")
	fs.StringVarP(&f.tee, "tee", "t", "0", "streams that go to files and, with a prefix, to the console; written as for --redirects")
	fs.StringVar(&f.shown, "local-ranks-filter", "", "local ranks whose output reaches the console: 0,1 (default: all)")
	fs.IntVar(&f.nodeRank, "node-rank", 0, "rank of this node, for static")
	fs.StringVar(&f.masterAddr, "master-addr", "127.0.0.1", "host of the node with rank 0, for static")
	fs.IntVar(&f.masterPort, "master-port", 29500, "port where that node listens for the other nodes, for static")
	fs.StringVar(&f.localAddr, "local-addr", "", "address or name under which other nodes reach this one (default: that of the route to the endpoint)")
	fs.StringVar(&f.logsSpecs, "logs-specs", "", "only default is accepted")
	fs.StringVar(&f.numa, "numa-binding", "", "not accepted: start the script by numactl instead")
	fs.StringVar(&f.signals, "signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "signals that are passed on to the workers before this program ends")
	fs.BoolVar(&f.virtualRank, "virtual-local-rank", false, "show each worker one device, as local rank 0")
	fs.StringVar(&f.shutdownTimeout, "shutdown-timeout", "30s", "longest from the first signal to a worker until it is killed (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, in seconds)")
	fs.StringVar(&f.exitBarrier, "exit-barrier-timeout", "300s", "longest time that a finished node waits for the others; 0: it does not wait")
	fs.StringVar(&f.healthAddr, "health-check-addr", "127.0.0.1", "IP address of health checks")
	fs.IntVar(&f.healthPort, "health-check-port", 0, "port where HTTP requests are answered while the agent lives (TORCHELASTIC_HEALTH_CHECK_PORT); 0: none")
	fs.StringVar(&f.prestart, "prestart", "", "code in Python, such as 'import torch', that interpreters run in advance, to become the workers of the next round")
	fs.BoolVar(&f.elastic, "elastic", false, "the script is a program that uses package elastic: it is run directly, and is not restarted when others die or nodes come and go")
	fs.StringVar(&f.logLevel, "log-level", "warning", "lowest level that is logged: trace, debug, info, warning or error")
}

// petPrefix is the prefix of the variables of torchrun's flags.
const petPrefix = "PET_"

// fromEnvironment sets the flags that were not given from their variables.
func (f *torchFlags) fromEnvironment(fs *pflag.FlagSet, env []string) (err error) {
	set := func(flag *pflag.Flag, variable string) {
		value, is := cli.Lookup(env, variable)
		if !is || flag.Changed || err != nil {
			return
		}
		if serr := fs.Set(flag.Name, value); serr != nil {
			err = fmt.Errorf("%s: %w", variable, serr)
		}
	}
	fs.VisitAll(func(flag *pflag.Flag) {
		set(flag, petPrefix+strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_")))
	})
	set(fs.Lookup("health-check-port"), "TORCHELASTIC_HEALTH_CHECK_PORT")
	set(fs.Lookup("shutdown-timeout"), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
	set(fs.Lookup("signals-to-handle"), "TORCHELASTIC_SIGNALS_TO_HANDLE")
	return err
}

// nodes returns the smallest and the largest number of nodes.
func (f *torchFlags) nodes() (least, most int, err error) {
	first, second, ranged := strings.Cut(f.nnodes, ":")
	least, err1 := strconv.Atoi(first)
	most = least
	if ranged {
		most, err = strconv.Atoi(second)
	}
	if err1 != nil || err != nil || least < 1 || most < least {
		return 0, 0, fmt.Errorf("--nnodes: %q is neither a number of nodes, such as 2, nor MIN:MAX, such as 1:4", f.nnodes)
	}
	return least, most, nil
}

// command returns the command of a worker.
func (f *torchFlags) command(args, env []string) ([]string, error) {
	if f.module && f.noPython {
		return nil, errors.New("--module and --no-python: give one of them")
	}
	python, is := cli.Lookup(env, "PYTHON_EXEC")
	if !is || python == "" {
		python = "python3"
	}
	switch {
	case f.runPath:
		const run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
		return append([]string{python, "-u", "-c", run}, args...), nil
	case f.noPython:
		return args, nil
	case f.module:
		return append([]string{python, "-u", "-m"}, args...), nil
	}
	return append([]string{python, "-u"}, args...), nil
}

// confKeys are the keys of --rdzv-conf that have an effect here or in torchrun.
var confKeys = []string{"key_file", "insecure", "rank", "timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout",
	"keep_alive_interval", "keep_alive_max_attempt", "read_timeout", "is_host", "store_type", "use_libuv", "protocol", "cacert", "cert", "key"}

// rdzvConf is the value of --rdzv-conf.
type rdzvConf struct {
	keyFile              string
	insecure             bool
	timeout, readTimeout time.Duration
	host                 *bool // is_host; nil: not given
	storeType            string
	etcd                 etcd.Config
	dynamic              dynamic.Settings
	others               []string // unknown keys, which have no effect, as with torchrun
}

// rdzvConf parses --rdzv-conf. All values must be valid, whether they have an effect in this job or
// not.
func (f *torchFlags) rdzvConf() (rdzvConf, error) {
	c := rdzvConf{timeout: 900 * time.Second, readTimeout: 60 * time.Second}
	rest := make(map[string]string)
	for part := range strings.SplitSeq(f.conf, ",") {
		if strings.TrimSpace(part) == "" {
			continue
		}
		key, value, ok := strings.Cut(part, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		if !ok || value == "" {
			return c, fmt.Errorf("--rdzv-conf: %q is not key=value", part)
		}
		var err error
		switch key {
		case "key_file":
			c.keyFile = value
		case "insecure":
			c.insecure, err = parseBool(value)
		case "timeout":
			c.timeout, err = settings.ParseDuration(value)
		case "read_timeout":
			c.readTimeout, err = settings.ParseDuration(value)
		case "is_host":
			c.host = new(bool)
			*c.host, err = parseBool(value)
		case "store_type":
			c.storeType = value
		case "protocol":
			c.etcd.TLS = c.etcd.TLS || value == "https"
		case "cacert":
			c.etcd.TLS, c.etcd.CA = true, value
		case "cert":
			c.etcd.TLS, c.etcd.Cert = true, value
		case "key":
			c.etcd.Key = value
		case "rank", "use_libuv": // without effect
		default:
			rest[key] = value
		}
		if err != nil {
			return c, fmt.Errorf("--rdzv-conf: %s: %w", key, err)
		}
	}
	var err error
	if c.others, err = c.dynamic.ParseConf(rest); err != nil {
		return c, fmt.Errorf("--rdzv-conf: %w", err)
	}
	return c, nil
}

// parseBool parses true, yes, false, no, and what strconv.ParseBool takes.
func parseBool(text string) (is bool, err error) {
	switch strings.ToLower(text) {
	case "yes":
		return true, nil
	case "no":
		return false, nil
	}
	if is, err = strconv.ParseBool(text); err != nil {
		err = fmt.Errorf("%q is neither true nor false", text)
	}
	return is, err
}

// key returns the key shared by the nodes that meet at host, and the file that contains it; nil: no
// key is required.
func (c *rdzvConf) key(env []string, host string) (key []byte, path string, err error) {
	addr, aerr := netip.ParseAddr(host)
	switch {
	case c.insecure && c.keyFile != "":
		err = errors.New("--rdzv-conf: insecure and key_file: give one of them")
	case c.insecure:
	case c.keyFile != "":
		path = c.keyFile
		if key, err = identity.ReadClusterKey(path); err != nil {
			err = fmt.Errorf("--rdzv-conf: key_file: %w", err)
		}
	case host == "localhost" || aerr == nil && addr.IsLoopback():
		if key, path, err = machineKey(env); err != nil {
			err = cli.Failed(err)
		}
	default:
		err = fmt.Errorf("--rdzv-conf: key_file is missing: the nodes of a job that meet at %s need one key, which "+
			"`hvdrun agent --generate-key FILE` makes; copy the file to each node and add key_file=FILE "+
			"(insecure=true does without, as torchrun does, for networks that nobody else is on)", host)
	}
	return key, path, err
}

// check returns an error for values that hvdrun does not support.
func (f *torchFlags) check() error {
	choices := []struct {
		flag, value string
		known       []string
		why         string
	}{
		{"start-method", f.startMethod, []string{"spawn", "fork", "forkserver"}, "spawn, fork and forkserver are taken"},
		{"event-log-handler", f.eventLog, []string{"null", "console"}, "null and console are taken"},
		{"logs-specs", f.logsSpecs, []string{"", "default"}, "plugins of Python cannot be loaded here; default is taken"},
		{"numa-binding", f.numa, []string{""}, "processes are not bound to NUMA nodes; --no-python with numactl does so"},
		{"rdzv-backend", f.backend, []string{"static", "c10d", "etcd"}, "static, c10d and etcd are taken; the older API of etcd-v2 is not spoken"},
	}
	for _, c := range choices {
		if !slices.Contains(c.known, c.value) {
			return fmt.Errorf("--%s: %q: %s", c.flag, c.value, c.why)
		}
	}
	for flag, n := range map[string]int{"max-restarts": f.maxRestarts, "node-rank": f.nodeRank} {
		if n < 0 {
			return fmt.Errorf("--%s: %d is less than 0", flag, n)
		}
	}
	for flag, n := range map[string]int{"master-port": f.masterPort, "health-check-port": f.healthPort} {
		if n < 0 || n > 65535 {
			return fmt.Errorf("--%s: %d is not a port", flag, n)
		}
	}
	if !(f.monitorInterval > 0) {
		return fmt.Errorf("--monitor-interval: %v is not a number of seconds", f.monitorInterval)
	}
	return nil
}

// runTorch runs the agent of this node.
func runTorch(ctx context.Context, p *cli.Program, f *torchFlags, args []string) error {
	cfg, err := torchConfig(ctx, p, f, args)
	if err != nil {
		return err
	}
	return runTorchAgent(ctx, p, f, cfg)
}
