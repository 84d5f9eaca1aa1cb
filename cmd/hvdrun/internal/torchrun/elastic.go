package torchrun

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobrun"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/torchrun"
)

// elasticFlags are the flags that have an effect with --elastic.
var elasticFlags = []string{"elastic", "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf",
	"standalone", "no-python", "local-addr", "shutdown-timeout", "log-level", "monitor-interval", "signals-to-handle"}

// checkElastic returns an error for flags that would have no effect.
func (f *torchFlags) checkElastic(fs *pflag.FlagSet) (err error) {
	fs.Visit(func(flag *pflag.Flag) {
		if err == nil && !slices.Contains(elasticFlags, flag.Name) {
			err = fmt.Errorf("--%s has no meaning with --elastic", flag.Name)
		}
	})
	if err == nil && f.backend == "static" && !f.standalone && f.nnodes != "1" && f.nnodes != "1:1" {
		err = errors.New("--elastic: nodes come and go: give --rdzv-backend c10d or etcd")
	}
	return err
}

// runTorchElastic runs one node of a job whose programs use package elastic.
func runTorchElastic(ctx context.Context, p *cli.Program, f *torchFlags, command []string) error {
	level, err := logrus.ParseLevel(f.logLevel)
	if err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	workers, err := f.localWorkers()
	if err != nil {
		return err
	}
	least, most, err := f.nodes()
	if err != nil {
		return err
	}
	if f.standalone || most == 1 {
		return runAlone(ctx, p, f, workers, command)
	}
	drain, err := settings.ParseDuration(f.shutdownTimeout)
	if err != nil {
		return fmt.Errorf("--shutdown-timeout: %w", err)
	}
	conf, err := f.rdzvConf()
	if err == nil && conf.insecure {
		err = errors.New("--elastic: the nodes need a key: key_file=FILE instead of insecure in --rdzv-conf")
	}
	if err != nil {
		return err
	}
	key, keyFile, err := conf.key(p.Env, "localhost") // meet refuses other hosts without a key_file
	if err != nil {
		return err
	}
	log := settings.Logger(p, &settings.Settings{OutputSettings: settings.OutputSettings{LogLevel: level}})
	cfg := torchrun.Config{RunID: f.id, Backend: f.backend, Log: log}
	if err := f.meet(ctx, p.Env, &cfg); err != nil {
		return err
	}
	rendezvous := cfg.Rendezvous.(*torchrun.Dynamic) // checkElastic refuses other kinds
	node := elasticNode{program: p, log: log, label: "torchrun " + f.id}
	node.args = func(nodes int, gossip string) []string {
		return append([]string{
			// The smallest size is the number of workers that needs the smallest number of nodes.
			"--np", strconv.Itoa(nodes * workers), "--min-np", strconv.Itoa((least-1)*workers + 1), "--max-np", strconv.Itoa(most * workers),
			"--gossip-join", gossip, "--gossip-key-file", keyFile, "--gossip-label", node.label,
			"--drain-timeout", drain.String(), "--log-level", level.String(), "--",
		}, command...)
	}
	if node.agent, err = elasticAgent(cfg.Peers); err != nil {
		return errors.Join(err, rendezvous.Leave(ctx))
	}
	node.agent.Key, node.agent.Label, node.agent.Slots = key, node.label, workers
	node.agent.Drain, node.agent.Hurry, node.agent.Log = drain, p.Hurry, log
	defer cli.Inherit(log, cli.AgentReaps)()
	elastic := torchrun.Elastic{Rendezvous: rendezvous, Peers: cfg.Peers, Serve: node.serve, Drive: node.drive, Log: log}
	status, err := elastic.Run(ctx)
	if err != nil {
		return cli.Failed(err)
	}
	if status != 0 {
		return cli.ExitWith(fmt.Errorf("the job has ended with exit status %d", status), status)
	}
	return nil
}

// runAlone runs a job of this node alone, with the driver in this process.
func runAlone(ctx context.Context, p *cli.Program, f *torchFlags, workers int, command []string) error {
	again := *p
	again.Args = append([]string{"--np", strconv.Itoa(workers), "--min-np", "1", "--drain-timeout", f.shutdownTimeout,
		"--log-level", f.logLevel, "--"}, command...)
	s, command, err := settings.OfArgs(again.Args, p.Env, "")
	if err != nil {
		return err
	}
	return jobrun.Run(ctx, &again, &s, command, nil)
}

// elasticNode is this node's part in a job.
type elasticNode struct {
	program *cli.Program
	log     *logrus.Logger
	label   string // of the cluster of the nodes' agents
	agent   agent.Config
	args    func(nodes int, gossip string) []string // arguments of hvdrun for the driver
}

// elasticAgent returns the configuration of this node's agent, except for its cluster.
func elasticAgent(peers *torchrun.Peers) (agent.Config, error) {
	host, err := os.Hostname()
	if err != nil {
		return agent.Config{}, cli.Failed(fmt.Errorf("the host's name: %w", err))
	}
	addr, port, err := net.SplitHostPort(peers.Addr())
	if err == nil && torchrun.IsLoopbackName(addr) {
		own := identity.OwnAddrs()
		if i := slices.IndexFunc(own, netip.Addr.IsGlobalUnicast); i >= 0 {
			addr = own[i].String()
		} else {
			err = errors.New("this machine has only loopback addresses")
		}
	}
	if err != nil {
		return agent.Config{}, cli.Failed(err)
	}
	return agent.Config{
		// Several nodes of a job may be on one machine.
		Name: host + "-" + port, Bind: net.JoinHostPort(addr, "0"), Facts: hostsource.Facts(),
	}, nil
}

// serve implements the Serve of torchrun.Elastic.
func (n *elasticNode) serve(ctx context.Context, seeds func() []string, joined func(addr string)) error {
	cfg := n.agent
	cfg.Join, cfg.Seeds, cfg.Joined = seeds(), seeds, joined
	return agent.Run(ctx, cfg)
}

// drive implements the Drive of torchrun.Elastic. The driver is a separate process, so that it can
// be killed while the workers and this process continue.
func (n *elasticNode) drive(ctx context.Context, stop <-chan struct{}, at torchrun.Seat) (int, error) {
	conn, theirs, err := socketPair()
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	program, err := os.Executable()
	if err != nil {
		return 0, errors.Join(err, theirs.Close())
	}
	p := n.program
	cmd := exec.Command(program, torchrunDriver)
	cmd.Env, cmd.Stdout, cmd.Stderr = p.Env, p.Stdout, p.Stderr
	cmd.ExtraFiles = []*os.File{theirs}                   // seatFD
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the terminal's signals go to this process only
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return 0, fmt.Errorf("the job's driver cannot be started: %w", err)
	}
	done := make(chan struct{})
	var beside sync.WaitGroup
	beside.Go(func() { n.signal(ctx, cmd.Process, stop, done) })
	beside.Go(func() {
		err := keep(conn, driverStart{Args: n.args(at.Nodes, at.Gossip), Found: at.Found}, at)
		n.log.Debugf("torchrun: the driver's records end: %v", err)
	})
	werr := cmd.Wait()
	close(done)
	_ = conn.Close()
	beside.Wait()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case werr == nil:
		return 0, nil
	case errors.As(werr, &exit) && exit.Exited():
		return exit.ExitCode(), nil
	}
	return 0, fmt.Errorf("%w: %w", torchrun.ErrDriverDied, werr)
}

// socketPair returns the two ends of a connection: one for this process, and one for its child.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("a connection to the job's driver: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "the driver"), os.NewFile(uintptr(fds[1]), "the agent")
	conn, err := net.FileConn(ours)
	_ = ours.Close() // it was duplicated
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return conn, theirs, nil
}

// signal kills the driver when ctx ends. It sends SIGTERM when stop is closed, and again when the
// user asks again. It blocks until ctx ends or done is closed.
func (n *elasticNode) signal(ctx context.Context, driver *os.Process, stop, done <-chan struct{}) {
	var hurry <-chan struct{}
	for {
		select {
		case <-ctx.Done():
			_ = driver.Kill()
			return
		case <-stop:
			_ = driver.Signal(syscall.SIGTERM)
			stop, hurry = nil, n.program.Hurry
		case <-hurry:
			_ = driver.Signal(syscall.SIGTERM)
		case <-done:
			return
		}
	}
}

// keep sends start to the driver at the other end of conn, and stores the changes that the driver
// sends on the nodes. It blocks until the connection ends.
func keep(conn net.Conn, start driverStart, at torchrun.Seat) error {
	out, in := json.NewEncoder(conn), json.NewDecoder(conn)
	if err := out.Encode(start); err != nil {
		return err
	}
	for {
		var says driverSays
		if err := in.Decode(&says); err != nil {
			return err
		}
		if says.Change != nil {
			at.Journal.Do(*says.Change)
		}
		if !says.Sync {
			continue
		}
		if err := at.Journal.Sync(); err != nil {
			return err
		}
		if err := out.Encode(true); err != nil {
			return err
		}
	}
}

// elasticCommand returns the command of a worker.
func elasticCommand(args []string) ([]string, error) {
	if strings.HasSuffix(args[0], ".py") {
		return nil, fmt.Errorf("--elastic: %s is a script of Python, which does not use package elastic: leave out --elastic", args[0])
	}
	return args, nil
}
