package torchrun

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobrun"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/etcd"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/torchrun"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/prestart"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

// torchConfig returns the configuration that the flags describe, without anything that listens.
func torchConfig(ctx context.Context, p *cli.Program, f *torchFlags, args []string) (cfg torchrun.Config, err error) {
	if err = f.check(); err != nil {
		return cfg, err
	}
	cfg = torchrun.Config{RunID: f.id, Role: f.role, MaxRestarts: f.maxRestarts, Env: p.Env, Backend: f.backend, VirtualLocalRank: f.virtualRank}
	cfg.Logs = torchrun.Logs{Dir: f.logDir, Stdout: cli.Lossy(p.Stdout), Stderr: cli.Lossy(p.Stderr)}
	cfg.Logs.Template, _ = cli.Lookup(p.Env, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
	cfg.ErrorFile, _ = cli.Lookup(p.Env, "TORCHELASTIC_ERROR_FILE")
	cfg.TimerFile, _ = cli.Lookup(p.Env, "TORCHELASTIC_TIMER_FILE")
	timer, _ := cli.Lookup(p.Env, "TORCHELASTIC_ENABLE_FILE_TIMER")
	cfg.FileTimer = timer == "1"
	if cfg.Host, err = os.Hostname(); err != nil {
		return cfg, cli.Failed(fmt.Errorf("the host's name: %w", err))
	}
	if cfg.Workers, err = f.localWorkers(); err != nil {
		return cfg, err
	}
	cfg.Name = args[0]
	cfg.StoreAddrs = f.storeAddrs(args[1:])
	if cfg.Command, err = f.command(args, p.Env); err != nil {
		return cfg, err
	}
	if cfg.Prestart = f.prestart; cfg.Prestart != "" {
		if _, err := prestart.Parse(cfg.Command); err != nil {
			return cfg, fmt.Errorf("--prestart: %w", err)
		}
	}
	if cfg.Logs.Redirects, err = torchrun.ParseStreams(f.redirects); err != nil {
		return cfg, fmt.Errorf("--redirects: %w", err)
	}
	if cfg.Logs.Tee, err = torchrun.ParseStreams(f.tee); err != nil {
		return cfg, fmt.Errorf("--tee: %w", err)
	}
	if cfg.Logs.Shown, err = parseRanks(f.shown); err != nil {
		return cfg, fmt.Errorf("--local-ranks-filter: %w", err)
	}
	for flag, ranks := range map[string]iter.Seq[int]{
		"redirects": maps.Keys(cfg.Logs.Redirects.Of), "tee": maps.Keys(cfg.Logs.Tee.Of), "local-ranks-filter": maps.Keys(cfg.Logs.Shown),
	} {
		for local := range ranks {
			if local >= cfg.Workers {
				return cfg, fmt.Errorf("--%s: there is no local rank %d: this node has %d workers (--nproc-per-node)", flag, local, cfg.Workers)
			}
		}
	}
	if cfg.ShutdownTimeout, err = settings.ParseDuration(f.shutdownTimeout); err != nil {
		return cfg, fmt.Errorf("--shutdown-timeout: %w", err)
	}
	cfg.ExitBarrier = -1
	if f.exitBarrier != "0" && f.exitBarrier != "0s" {
		if cfg.ExitBarrier, err = settings.ParseDuration(f.exitBarrier); err != nil {
			return cfg, fmt.Errorf("--exit-barrier-timeout: %w", err)
		}
	}
	if f.healthPort > 0 {
		addr, err := netip.ParseAddr(f.healthAddr)
		if err != nil {
			return cfg, fmt.Errorf("--health-check-addr: %q is not an IP address", f.healthAddr)
		}
		cfg.HealthAddr = netip.AddrPortFrom(addr, uint16(f.healthPort)).String()
	}
	return cfg, nil
}

// localWorkers returns the number of workers of this node.
func (f *torchFlags) localWorkers() (int, error) {
	switch f.workers {
	case "gpu":
		n := hostsource.Gpus()
		if n == 0 {
			return 0, errors.New("--nproc-per-node: gpu: this node has no visible GPU; give a number of workers instead")
		}
		return n, nil
	case "auto":
		if n := hostsource.Gpus(); n > 0 {
			return n, nil
		}
		return runtime.NumCPU(), nil
	case "cpu":
		return runtime.NumCPU(), nil
	case "xpu":
		return 0, errors.New("--nproc-per-node: xpu: devices of Intel are not counted; give their number")
	}
	n, err := strconv.Atoi(f.workers)
	if err != nil || n < 1 || n > plan.MaxSlots {
		return 0, fmt.Errorf("--nproc-per-node: %q is neither a number of workers nor auto, cpu or gpu", f.workers)
	}
	return n, nil
}

// parseRanks parses ranks joined by commas; nil for none.
func parseRanks(text string) (map[int]bool, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	ranks := make(map[int]bool)
	for part := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%q is not a local rank", part)
		}
		ranks[n] = true
	}
	return ranks, nil
}

// runTorchAgent meets the other nodes and runs the workers.
func runTorchAgent(ctx context.Context, p *cli.Program, f *torchFlags, cfg torchrun.Config) error {
	level, err := logrus.ParseLevel(f.logLevel)
	if err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	log := settings.Logger(p, &settings.Settings{OutputSettings: settings.OutputSettings{LogLevel: level}})
	cfg.Log = log
	if err := f.meet(ctx, p.Env, &cfg); err != nil {
		return err
	}
	if f.eventLog == "console" {
		cfg.Events = torchrun.Console(p.Stderr)
	}
	defer cli.Inherit(log, cli.DriverReaps)()
	cfg.Mark = "torchrun-" + rand.Text()
	guard, err := proc.StartGuard(plan.EnvRunID, cfg.Mark)
	if err != nil {
		return cli.Failed(err)
	}
	defer func() {
		if err := guard.Close(); err != nil {
			log.WithError(err).Warn("the workers have left processes behind")
		}
	}()
	ctx, release, err := f.handleSignals(ctx)
	if err != nil {
		return err
	}
	defer release()
	cfg.SignalOf = func(cause error) syscall.Signal {
		if stopped, ok := errors.AsType[cli.StopSignal](cause); ok && stopped.Signal != syscall.SIGPIPE {
			return stopped.Signal
		}
		return syscall.SIGTERM
	}
	hurry := make(chan struct{})
	cfg.Hurry = hurry
	defer jobrun.WatchStop(ctx, p, log, sync.OnceFunc(func() { close(hurry) }), fmt.Sprintf("%v at most", cfg.ShutdownTimeout))()
	const old = "NCCL_ASYNC_ERROR_HANDLING"
	if _, is := cli.Lookup(cfg.Env, old); !is && !f.noPython && hostsource.Gpus() > 0 && before22(torchVersion(ctx, cfg.Command[0])) {
		cfg.Env = append(slices.Clone(cfg.Env), old+"=1")
	}
	cfg.Env = append(slices.Clip(cfg.Env), "TORCHELASTIC_SIGNALS_TO_HANDLE="+f.signals) // as torchrun sets it for its workers
	// Each worker is in a separate process group, which a terminal would stop when the worker reads
	// from it.
	if in, is := p.Stdin.(*os.File); is && !cli.IsTerminal(in) {
		cfg.Stdin = in
	}
	agent, err := torchrun.New(cfg)
	if err != nil {
		return err
	}
	err = agent.Run(ctx)
	if failed, ok := errors.AsType[*torchrun.FailedError](err); ok {
		fmt.Fprint(p.Stderr, failed.Report())
	}
	if err != nil {
		return cli.Failed(err)
	}
	return nil
}

// storeAddrs returns the loopback addresses at which programs may connect to the store without the
// environment: --master-addr with --master-port, and the addresses tcp://host:port in the script's
// arguments, as written there. An address that is the value of a flag counts only if the flag's
// name contains init or dist: the script may itself listen on the addresses of other flags.
func (f *torchFlags) storeAddrs(args []string) (addrs []string) {
	var known []string // as IP addresses
	take := func(host, port string) {
		n, err := strconv.ParseUint(port, 10, 16)
		addr, aerr := netip.ParseAddr(host)
		switch {
		case err != nil || n == 0:
			return
		case host == "localhost":
			addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		case aerr != nil || !addr.IsLoopback():
			return
		}
		at := netip.AddrPortFrom(addr, uint16(n)).String()
		if i := slices.Index(known, at); i >= 0 {
			known, addrs = slices.Delete(known, i, i+1), slices.Delete(addrs, i, i+1)
		}
		known, addrs = append(known, at), append(addrs, net.JoinHostPort(host, strconv.Itoa(int(n))))
	}
	if !f.standalone && strconv.Itoa(f.masterPort) != staticPort {
		take(f.masterAddr, strconv.Itoa(f.masterPort))
	}
	last := ""
	for _, arg := range args {
		flag, url, is := strings.Cut(arg, "tcp://")
		if flag == "" && strings.HasPrefix(last, "-") {
			flag = last
		}
		last = arg
		if is && (flag == "" || strings.Contains(flag, "init") || strings.Contains(flag, "dist")) {
			url, _, _ = strings.Cut(url, "?")
			if host, port, err := net.SplitHostPort(strings.TrimRight(url, "/")); err == nil {
				take(host, port)
			}
		}
	}
	return addrs
}

// torchVersion returns the version of torch that is installed for a Python, without importing
// torch; empty: unknown.
func torchVersion(ctx context.Context, python string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, _ := exec.CommandContext(ctx, python, "-c", "from importlib.metadata import version; print(version('torch'))").Output()
	return strings.TrimSpace(string(out))
}

// before22 reports whether a version of torch is known and earlier than 2.2. Those versions read
// another variable than later ones, which warn if the old variable is set.
func before22(version string) bool {
	var major, minor int
	n, _ := fmt.Sscanf(version, "%d.%d", &major, &minor)
	return n == 2 && (major < 2 || major == 2 && minor < 2)
}

// handleSignals makes the signals of --signals-to-handle stop the workers too, also those that do
// not stop other jobs of hvdrun.
func (f *torchFlags) handleSignals(ctx context.Context) (context.Context, func(), error) {
	var more []os.Signal
	for name := range strings.SplitSeq(f.signals, ",") {
		name = strings.ToUpper(strings.TrimSpace(name))
		if name == "" {
			continue
		}
		sig := unix.SignalNum(name)
		if sig == 0 || sig == syscall.SIGKILL || sig == syscall.SIGSTOP {
			return nil, nil, fmt.Errorf("--signals-to-handle: %q is not a signal that can be handled", name)
		}
		if !slices.Contains([]syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}, sig) {
			more = append(more, sig)
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	caught, done := make(chan os.Signal, 1), make(chan struct{})
	if len(more) > 0 {
		signal.Notify(caught, more...)
	}
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case s := <-caught:
			cancel(cli.StopSignal{Signal: s.(syscall.Signal)})
		case <-done:
		}
	})
	return ctx, func() {
		signal.Stop(caught)
		close(done)
		watching.Wait()
		cancel(nil)
	}, nil
}

// meet sets the rendezvous in cfg.
func (f *torchFlags) meet(ctx context.Context, env []string, cfg *torchrun.Config) error {
	least, most, err := f.nodes()
	if err != nil {
		return err
	}
	conf, err := f.rdzvConf()
	if err != nil {
		return err
	}
	if len(conf.others) > 0 {
		cfg.Log.Warnf("torchrun: --rdzv-conf: unknown keys, which have no effect: %q; the keys are %s", conf.others, strings.Join(confKeys, ", "))
	}
	switch {
	case f.standalone:
		cfg.RunID, cfg.Backend = rand.Text(), "c10d"
		cfg.Rendezvous = new(torchrun.Single)
		return nil
	case most == 1: // no other node can join
		if cfg.RunID == noID {
			cfg.RunID = rand.Text() // distinguishes jobs on one machine
		}
		cfg.Rendezvous = new(torchrun.Single)
		return nil
	case f.backend == "static" && least != most:
		return fmt.Errorf("--nnodes: %s: with --rdzv-backend static the number of nodes is fixed; c10d lets them come and go", f.nnodes)
	case f.backend == "static":
		return f.meetStatic(ctx, env, cfg, most, &conf)
	}
	return f.meetDynamic(ctx, env, cfg, least, most, &conf)
}

// staticPort and dynamicPort are the default ports of endpoints.
const staticPort, dynamicPort = "29500", "29400"

// where returns the endpoint's host, its address with the port, and whether that host is this
// machine. port is the default.
func (f *torchFlags) where(ctx context.Context, port string) (host, addr string, here bool, err error) {
	flag, text := "--rdzv-endpoint", f.endpoint
	if text == "" && f.backend == "static" {
		flag, text = "--master-addr", net.JoinHostPort(f.masterAddr, strconv.Itoa(f.masterPort))
	}
	if text == "" {
		return "", "", false, fmt.Errorf("--rdzv-endpoint is missing: the host, or host:port, of the node where all nodes meet")
	}
	host, given, err := net.SplitHostPort(text)
	if err != nil {
		host, given = strings.Trim(text, "[]"), port
	}
	if n, perr := strconv.ParseUint(given, 10, 16); perr != nil || n == 0 || host == "" {
		return "", "", false, fmt.Errorf("%s: %q is not host:port", flag, text)
	}
	if here, err = torchrun.IsHere(ctx, host); err != nil {
		return "", "", false, fmt.Errorf("%s: %w", flag, err)
	}
	return host, net.JoinHostPort(host, given), here, nil
}

// peers returns how this node connects to the others, with the key that all nodes share.
func (f *torchFlags) peers(env []string, cfg *torchrun.Config, host string, conf *rdzvConf) (*torchrun.Peers, error) {
	key, _, err := conf.key(env, host)
	if err != nil {
		return nil, err
	}
	if conf.insecure {
		cfg.Log.Warn("torchrun: insecure=true: anyone who can reach the ports of this job can change what its processes read")
	}
	peers, err := torchrun.NewPeers(key, cfg.RunID, f.localAddr, cfg.Log)
	if err == nil && f.localAddr == "" {
		if peers.Route, err = torchrun.OwnHost(host); err != nil {
			err = cli.Failed(err)
		}
	}
	return peers, err
}

// machineKey returns the key of jobs whose nodes are all on this machine, and the file that
// contains it. The key belongs to the user and is made if it does not exist.
func machineKey(env []string) (key []byte, path string, err error) {
	var failed error
	for _, jobs := range jobdir.StateDirs(env, jobdir.Shared) {
		err := jobdir.Usable(env, jobs, jobdir.Shared, true)
		dir := filepath.Dir(jobs)
		if err == nil {
			err = safefile.MakeDir(dir, safefile.Private)
		}
		path = filepath.Join(dir, "torchrun.key")
		if err == nil {
			if err = identity.GenerateClusterKey(path); errors.Is(err, os.ErrExist) {
				err = nil
			}
		}
		if err == nil {
			key, err = readNewKey(path)
		}
		if err == nil {
			return key, path, nil
		}
		failed = errors.Join(failed, err)
	}
	return nil, "", fmt.Errorf("the key of jobs of this machine: %w", failed)
}

// readNewKey reads a key that another process may be writing.
func readNewKey(path string) (key []byte, err error) {
	for range 50 {
		if key, err = identity.ReadClusterKey(path); err == nil {
			return key, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, err
}

// meetStatic sets the rendezvous of nodes that know their ranks.
func (f *torchFlags) meetStatic(ctx context.Context, env []string, cfg *torchrun.Config, nodes int, conf *rdzvConf) error {
	if f.nodeRank >= nodes {
		return fmt.Errorf("--node-rank: %d: the ranks of %d nodes are 0 to %d", f.nodeRank, nodes, nodes-1)
	}
	host, addr, here, err := f.where(ctx, staticPort)
	if err != nil {
		return err
	}
	peers, err := f.peers(env, cfg, host, conf)
	if err != nil {
		return err
	}
	if f.nodeRank == 0 {
		if !here {
			cfg.Log.Warnf("torchrun: %s is not a known name of this machine, which has rank 0 and listens at all its addresses", host)
			_, port, _ := net.SplitHostPort(addr)
			addr = net.JoinHostPort("", port)
		}
		if _, err := peers.Listen(addr); err != nil {
			return cli.Failed(err)
		}
	}
	cfg.Peers = peers
	cfg.Rendezvous = &torchrun.Static{Node: f.nodeRank, Nodes: nodes, Addr: addr, Peers: peers, Timeout: conf.timeout, Log: cfg.Log}
	return nil
}

// meetDynamic sets the rendezvous of nodes that join and leave.
func (f *torchFlags) meetDynamic(ctx context.Context, env []string, cfg *torchrun.Config, least, most int, conf *rdzvConf) error {
	set := conf.dynamic
	set.RunID, set.MinNodes, set.MaxNodes = f.id, least, most
	if conf.storeType != "" && conf.storeType != "tcp" {
		return fmt.Errorf("--rdzv-conf: store_type: %q: only tcp is supported", conf.storeType)
	}
	port := dynamicPort
	if f.backend == "etcd" {
		port = etcd.DefaultPort
	}
	host, addr, here, err := f.where(ctx, port)
	if err != nil {
		return err
	}
	peers, err := f.peers(env, cfg, host, conf)
	if err != nil {
		return err
	}
	shared, end, err := f.sharedStore(ctx, peers, host, addr, here, conf, cfg.Log)
	if err != nil {
		return err
	}
	handler, err := dynamic.New(dynamic.Config{Settings: set, Store: shared, Addr: f.localAddr, Info: peers.Member(), Log: cfg.Log})
	if err != nil {
		over, cancel := context.WithCancel(ctx)
		cancel()
		end(over)
		return fmt.Errorf("--nnodes, --rdzv-id or --rdzv-conf: %w", err)
	}
	cfg.Peers, cfg.Rendezvous = peers, &torchrun.Dynamic{Handler: handler, Peers: peers, End: end}
	return nil
}

// sharedStore returns the store that the nodes share, and a function that closes it and the
// connections to it.
func (f *torchFlags) sharedStore(ctx context.Context, peers *torchrun.Peers, host, addr string, here bool, conf *rdzvConf, log logrus.FieldLogger) (
	shared store.Store, end func(context.Context), err error,
) {
	if f.backend == "etcd" {
		s, closeStore, err := f.etcdStore(ctx, addr, conf, log)
		if err == nil {
			_, err = peers.Listen(net.JoinHostPort(f.listenHost(host), "0"))
		}
		return s, func(ctx context.Context) {
			closeStore()
			peers.Close(ctx)
		}, err
	}
	guessed := conf.host == nil
	if !guessed {
		here = *conf.host
	}
	bounded, cancel := context.WithTimeoutCause(ctx, conf.readTimeout, fmt.Errorf("nobody answers at %s: is the agent there running, "+
		"and is that its --rdzv-endpoint too? is_host=true in --rdzv-conf makes this one the host", addr))
	defer cancel()
	shared, end, err = peers.Meet(bounded, addr, here)
	if here && guessed && errors.Is(err, syscall.EADDRINUSE) { // another agent on this machine hosts the store
		log.Infof("torchrun: another program of this machine listens at %s: it is assumed to be the agent that has the store", addr)
		here = false
		shared, end, err = peers.Meet(bounded, addr, false)
	}
	if err == nil && !here {
		_, err = peers.Listen(net.JoinHostPort(f.listenHost(host), "0"))
	}
	if err != nil {
		return nil, nil, cli.Failed(fmt.Errorf("--rdzv-endpoint: %w", err))
	}
	return shared, end, nil
}

// listenHost returns the address on which a node that does not host the endpoint listens for the
// other nodes if it gets rank 0.
func (f *torchFlags) listenHost(endpoint string) string {
	if addr, err := netip.ParseAddr(f.localAddr); err == nil && identity.IsOwn(addr.Unmap()) {
		return f.localAddr
	}
	if addr, err := netip.ParseAddr(endpoint); endpoint == "localhost" || err == nil && addr.IsLoopback() {
		return identity.Loopback().String()
	}
	return "" // all addresses
}
