package torchrun

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/prestart"
)

// Config configures an Agent.
type Config struct {
	// RunID names the job, and Role is the role of the workers of this node.
	RunID, Role string
	// Workers is the number of workers on this node, at least 1.
	Workers int
	// MaxRestarts is the largest number of restarts after failures of workers, counted over all
	// nodes: a round with failures counts once.
	MaxRestarts int
	// Command is the program and its arguments, in which ${local_rank} stands for the local rank.
	// Name is its name in reports; empty: Command[0].
	Command []string
	Name    string
	// Env is the environment that workers inherit, as NAME=value.
	Env []string
	// StoreAddrs are further loopback addresses, host:port, at which the workers of a job with a
	// single node reach their store: addresses that the programs themselves name.
	StoreAddrs []string
	// Stdin, if not nil, is the input of all workers: they share the file.
	Stdin *os.File
	// Prestart, if not empty, is Python code such as "import torch". Interpreters run it during a
	// round and become the workers of the next round. Command must be Python with a file or a
	// module.
	Prestart string
	// Host is the name of this node, and Backend the name of the rendezvous, for reports.
	Host, Backend string
	// Rendezvous is where the agents meet, and Peers connects them to the store of the agent with
	// rank 0. If Peers is nil, no other node can take part.
	Rendezvous Rendezvous
	Peers      *Peers
	Logs       Logs
	// ShutdownTimeout is the time between the first signal to a worker and SIGKILL. Zero: 30 s.
	ShutdownTimeout time.Duration
	// ExitBarrier is how long a finished agent waits for the others. Zero: 300 s. Negative: it does
	// not wait.
	ExitBarrier time.Duration
	// VirtualLocalRank makes each worker see one device, as local rank 0.
	VirtualLocalRank bool
	// FileTimer lets workers set timers through the FIFO TimerFile. The agent sends a signal to a
	// worker that does not release its timer in time. If TimerFile is empty, a FIFO is created.
	FileTimer bool
	TimerFile string
	// ErrorFile, if not empty, receives a copy of the first failure's error file.
	ErrorFile string
	// HealthAddr, if not empty, is the address at which the agent answers HTTP requests about its
	// health.
	HealthAddr string
	// Mark, if not empty, is the HVD_RUN_ID of all processes, by which a guard finds them.
	Mark string
	// TempDir is the folder for files for which no other setting names a place. Empty: os.TempDir.
	TempDir string
	// Hurry, if not nil, ends the grace period of ShutdownTimeout when it is closed.
	Hurry <-chan struct{}
	// SignalOf returns the signal that workers get when the context has ended with the given cause.
	// Nil: SIGTERM.
	SignalOf func(cause error) syscall.Signal
	// Launcher starts workers; nil: launch.Local.
	Launcher launch.Launcher
	// Events, if not nil, is called with events, by one goroutine at a time, and must not block.
	Events func(Event)
	Log    logrus.FieldLogger
}

// Agent runs the workers of one node. New makes one. Run must be called only once.
type Agent struct {
	cfg     Config
	machine machine
	begun   time.Time
	place   place
	logs    *logs
	timer   *fileTimer // nil: no timers
	health  health
	program prestart.Program // valid with Prestart
	warm    []*warm          // by local rank; nil: none is running
	now     func() time.Time
	store   func(context.Context, Round) (roundStore, error)
}

// roundStore is a *WorkerStore.
type roundStore interface {
	Addr() string
	asked() bool
	Close()
}

// New returns an agent. It starts nothing.
func New(cfg Config) (*Agent, error) {
	switch {
	case cfg.Workers < 1:
		return nil, errors.New("torchrun: Config.Workers is less than 1")
	case len(cfg.Command) == 0:
		return nil, errors.New("torchrun: Config.Command is empty")
	case cfg.Rendezvous == nil:
		return nil, errors.New("torchrun: Config.Rendezvous is nil")
	}
	if err := cfg.Logs.check(); err != nil {
		return nil, err
	}
	if cfg.Name == "" {
		cfg.Name = cfg.Command[0]
	}
	if cfg.ShutdownTimeout == 0 {
		cfg.ShutdownTimeout = 30 * time.Second
	}
	if cfg.ExitBarrier == 0 {
		cfg.ExitBarrier = 300 * time.Second
	}
	if cfg.Launcher == nil {
		cfg.Launcher = launch.Local{}
	}
	if cfg.Log == nil {
		log := logrus.New()
		log.SetLevel(logrus.PanicLevel)
		cfg.Log = log
	}
	a := &Agent{cfg: cfg, machine: newMachine(cfg.MaxRestarts), now: time.Now, warm: make([]*warm, cfg.Workers)}
	if cfg.Prestart != "" {
		var err error
		if a.program, err = prestart.Parse(cfg.Command); err != nil {
			return nil, fmt.Errorf("torchrun: starting interpreters in advance: %w", err)
		}
	}
	a.store = a.openStore
	return a, nil
}

// openStore opens the store of a round. The node with rank 0 publishes its address under the key
// "store" of round.Store.
func (a *Agent) openStore(ctx context.Context, round Round) (roundStore, error) {
	const key = "store"
	switch {
	case round.World == 1:
		s, err := ServeStore(round.Number, nil, a.cfg.Log)
		if err == nil {
			s.also(a.cfg.StoreAddrs)
		}
		return s, err
	case round.Rank == 0:
		s, err := ServeStore(round.Number, a.cfg.Peers, a.cfg.Log)
		if err == nil {
			if err = round.Store.Set(ctx, key, []byte(a.cfg.Peers.Addr())); err != nil {
				s.Close()
			}
		}
		return s, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, rankTimeout, errors.New("the node with rank 0 does not report the address of its store"))
	defer cancel()
	addr, err := round.Store.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	return ForwardStore(string(addr), round.Number, a.cfg.Peers, a.cfg.Log)
}

// Run runs the workers until all have succeeded, some have failed and no restart is left, or ctx
// ends. It returns nil, a *FailedError, or ctx's cause. No worker is left when it returns. Run
// closes the rendezvous for all nodes, unless ctx has ended; then only this node leaves it.
func (a *Agent) Run(ctx context.Context) (err error) {
	a.begun = a.now()
	if err := a.open(ctx); err != nil {
		return err
	}
	err = a.run(ctx)
	a.endWarm()
	if errors.Is(err, dynamic.ErrDismissed) {
		a.cfg.Log.Info("torchrun: the job has ended without a place for this node")
		err = nil
	}
	if cause := context.Cause(ctx); cause != nil && err != nil {
		err = cause
	}
	a.settle(ctx, err)
	return err
}

// open sets up what the agent needs for the duration of Run.
func (a *Agent) open(ctx context.Context) (err error) {
	if a.logs, err = a.cfg.Logs.open(a.cfg.RunID, a.cfg.TempDir, a.cfg.Log); err != nil {
		return err
	}
	if a.cfg.FileTimer {
		if a.timer, err = newFileTimer(a.cfg.TimerFile, a.cfg.TempDir); err != nil {
			return errors.Join(err, a.logs.close())
		}
	}
	if a.cfg.HealthAddr != "" {
		if err = a.health.open(a.cfg.HealthAddr); err != nil {
			return errors.Join(err, a.timer.close(), a.logs.close())
		}
		a.cfg.Log.Infof("torchrun: health checks are answered at http://%s", a.health.addr())
	}
	return nil
}

// settle informs the other nodes, and frees what open and the rounds have set up.
func (a *Agent) settle(ctx context.Context, err error) {
	var failed *FailedError
	if errors.As(err, &failed) {
		a.keepError(failed)
	}
	a.event("torchelastic.agent", func(e *Event) {
		if err != nil {
			e.Metadata.Error = err.Error()
		}
	})
	rest, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if ctx.Err() == nil {
		if err := a.cfg.Rendezvous.Close(rest); err != nil {
			a.cfg.Log.Warnf("torchrun: closing the rendezvous: %v", err)
		}
	}
	if err := a.cfg.Rendezvous.Leave(rest); err != nil {
		a.cfg.Log.Warnf("torchrun: leaving the rendezvous: %v", err)
	}
	if err := errors.Join(a.health.close(), a.timer.close(), a.logs.close()); err != nil {
		a.cfg.Log.Warnf("torchrun: %v", err)
	}
}

// leaveTimeout bounds the calls by which an agent that ends informs the other nodes.
const leaveTimeout = 10 * time.Second

// run runs rounds until one of them ends the job.
func (a *Agent) run(ctx context.Context) error {
	failed := false
	for {
		g, err := a.start(ctx, failed)
		if err != nil {
			return err
		}
		do, err := a.watch(ctx, g)
		if do == finish && err == nil {
			if a.place.ranks.World > 1 && !g.store.asked() {
				a.cfg.Log.Warnf("torchrun: no worker of this node has asked for the store of torch.distributed, so torch has not connected "+
					"them: each of the %d ran alone, unless it found the others in another way, such as MPI", len(g.workers))
			}
			a.barrier(ctx)
		}
		failed = len(g.failures) > 0
		g.stop(context.Cause(ctx))
		switch {
		case err != nil:
			a.machine.state = Stopped
			return err
		case do == finish:
			return nil
		case do == giveUp:
			return &FailedError{Command: a.cfg.Name, Host: a.cfg.Host, Failures: g.failures}
		}
	}
}

// start meets the other nodes and starts the workers. If the nodes change before the workers have
// started, it meets again. failed means that workers of this node failed in the last round.
func (a *Agent) start(ctx context.Context, failed bool) (*group, error) {
	for {
		s, err := a.meet(ctx, failed)
		if err == nil {
			return a.begin(ctx, s)
		}
		if !errors.Is(err, errChanged) {
			return nil, err
		}
		a.cfg.Log.Infof("torchrun: round %d: %v before the workers were started: another round begins", a.place.round.Number, err)
		failed = false // the rendezvous has counted the failure
	}
}

// meet joins the next round, and returns the store of this node's workers. It returns errChanged if
// the nodes of the round change meanwhile.
func (a *Agent) meet(ctx context.Context, failed bool) (s roundStore, err error) {
	since := a.now()
	round, err := a.cfg.Rendezvous.Next(ctx, failed)
	if err != nil {
		return nil, fmt.Errorf("torchrun: rendezvous: %w", err)
	}
	ctx, end := a.whileUnchanged(ctx)
	defer end()
	a.place = place{round: round}
	a.machine.begin(round.Restarts)
	a.lasted("RENDEZVOUS", since)
	since = a.now()
	what := "ranks"
	if a.place.ranks, err = a.rank(ctx, round); err == nil {
		a.lasted("ASSIGN_WORKER_RANKS", since)
		what = "store"
		s, err = a.store(ctx, round)
	}
	if err != nil && context.Cause(ctx) == errChanged {
		return nil, errChanged
	}
	if err != nil {
		return nil, fmt.Errorf("torchrun: the %s of round %d: %w", what, round.Number, err)
	}
	return s, nil
}

// errChanged means that nodes wait to join the round, or that a member is gone.
var errChanged = errors.New("the nodes of the job have changed")

// whileUnchanged returns a context that ends with errChanged when the nodes of the round change.
// The caller must call end.
func (a *Agent) whileUnchanged(ctx context.Context) (unchanged context.Context, end func()) {
	unchanged, cancel := context.WithCancelCause(ctx)
	changed := a.cfg.Rendezvous.Changed()
	var waiting sync.WaitGroup
	waiting.Go(func() {
		select {
		case <-changed:
			cancel(errChanged)
		case <-unchanged.Done():
		}
	})
	return unchanged, func() {
		cancel(nil)
		waiting.Wait()
	}
}

// begin starts the workers of a round.
func (a *Agent) begin(ctx context.Context, s roundStore) (*group, error) {
	host, port, _ := net.SplitHostPort(s.Addr())
	a.place.host = host
	a.place.port, _ = strconv.Atoi(port)
	round := a.place.round
	a.cfg.Log.Infof("torchrun: round %d: node %d of %d, ranks %d to %d of %d, restart %d of %d", round.Number, round.Rank, round.World,
		a.place.ranks.Base, a.place.ranks.Base+a.cfg.Workers-1, a.place.ranks.World, round.Restarts, a.cfg.MaxRestarts)
	g, err := a.startWorkers(ctx, s)
	if err != nil {
		return nil, err
	}
	a.machine.state = Healthy
	return g, nil
}

// rank returns the ranks of this node's workers. The node with rank 0 computes them for all nodes.
func (a *Agent) rank(ctx context.Context, round Round) (r ranks, err error) {
	own := node{Role: a.cfg.Role, Workers: a.cfg.Workers}
	if round.World == 1 {
		return assign([]node{own})[0], nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, rankTimeout, errors.New("the other nodes do not report how many workers they have"))
	defer cancel()
	text, err := json.Marshal(own)
	if err == nil {
		err = round.Store.Set(ctx, "node/"+strconv.Itoa(round.Rank), text)
	}
	if err == nil && round.Rank == 0 {
		err = publishRanks(ctx, round)
	}
	if err != nil {
		return r, err
	}
	if text, err = round.Store.Get(ctx, "ranks/"+strconv.Itoa(round.Rank)); err != nil {
		return r, err
	}
	return r, json.Unmarshal(text, &r)
}

// rankTimeout bounds the exchange of ranks in a round whose nodes have all just arrived.
const rankTimeout = 60 * time.Second

// publishRanks sends each node its ranks.
func publishRanks(ctx context.Context, round Round) error {
	nodes := make([]node, round.World)
	for i := range nodes {
		text, err := round.Store.Get(ctx, "node/"+strconv.Itoa(i))
		if err == nil {
			err = json.Unmarshal(text, &nodes[i])
		}
		if err == nil {
			err = nodes[i].check()
		}
		if err != nil {
			return err
		}
	}
	for i, r := range assign(nodes) {
		text, err := json.Marshal(r)
		if err == nil {
			err = round.Store.Set(ctx, "ranks/"+strconv.Itoa(i), text)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// watch blocks until the round is over, and returns what to do next.
func (a *Agent) watch(ctx context.Context, g *group) (action, error) {
	changed := a.cfg.Rendezvous.Changed()
	running := len(g.workers)
	var warmUp <-chan time.Time
	if a.cfg.Prestart != "" {
		timer := time.NewTimer(prestartAfter)
		defer timer.Stop()
		warmUp = timer.C
	}
	for {
		seen, waiting := Healthy, false
		select {
		case <-ctx.Done():
			return goOn, context.Cause(ctx)
		case w := <-g.exits:
			running--
			if seen = a.exited(g, w); seen == Healthy && running == 0 {
				seen = Succeeded
			}
		case <-changed:
			waiting = true
		case <-warmUp:
			a.warmUp(ctx)
			continue
		case e := <-a.timer.expired():
			a.cfg.Log.Warnf("torchrun: the timer %s of process %d has expired", e.scope, e.pid)
			e.kill(g.holds)
			continue
		}
		do := a.machine.see(seen, waiting)
		switch {
		case do == restart && waiting:
			a.cfg.Log.Info("torchrun: the nodes of the job have changed: the workers are stopped and started in a new round")
		case do == restart:
			a.cfg.Log.Warnf("torchrun: %d restarts are left: the workers are stopped and started in a new round", a.machine.left)
		}
		if do != goOn {
			return do, nil
		}
	}
}

// exited records the end of a worker. Workers that have ended by now count as part of the same
// failure.
func (a *Agent) exited(g *group, w *worker) State {
	seen := Healthy
	for w != nil {
		w.ended = true
		if w.end != nil {
			seen = Failed
			f := g.fail(w)
			a.cfg.Log.Errorf("torchrun: rank %d (local rank %d, pid %d) has failed with exit code %d", f.Rank, f.LocalRank, f.PID, f.ExitCode)
			a.workerEvent("torchelastic.worker.status.FAILED", Failed, w)
		} else {
			a.workerEvent("torchelastic.worker.status.SUCCEEDED", Succeeded, w)
		}
		if seen != Failed {
			break
		}
		select {
		case w = <-g.exits:
		default:
			w = nil
		}
	}
	return seen
}

// barrier announces that this node is done, and waits until all nodes are, so that no node ends
// while another needs its store. A failure of the barrier does not fail the job.
func (a *Agent) barrier(ctx context.Context) {
	round := a.place.round
	if round.World == 1 {
		return
	}
	if err := a.cfg.Rendezvous.Done(ctx); err != nil {
		a.cfg.Log.Warnf("torchrun: the other nodes may not learn that this node is done, and restart: %v", err)
	}
	if a.cfg.ExitBarrier < 0 {
		return
	}
	ctx, cancel := context.WithTimeoutCause(ctx, a.cfg.ExitBarrier, fmt.Errorf("not all nodes were done within %v", a.cfg.ExitBarrier))
	defer cancel()
	ctx, end := a.whileUnchanged(ctx) // nobody waits for a node that restarts or is gone
	defer end()
	n, err := round.Store.Add(ctx, "done", 1)
	if err == nil && n == int64(round.World) {
		err = round.Store.Set(ctx, "all-done", nil)
	} else if err == nil {
		a.cfg.Log.Infof("torchrun: this node's workers are done; %d of %d nodes are", n, round.World)
		_, err = round.Store.Get(ctx, "all-done")
	}
	if err != nil {
		a.cfg.Log.Warnf("torchrun: no longer waiting for the other nodes: %v", err)
	}
}

// keepError copies the error file of the first failure to the place where this agent's parent
// expects it.
func (a *Agent) keepError(failed *FailedError) {
	if a.cfg.ErrorFile == "" {
		return
	}
	root := failed.Root()
	text, err := safefile.OwnText(root.ErrorFile, maxErrorFile)
	if root.ErrorFile == "" {
		text, err = json.Marshal(map[string]any{"message": root.Message, "timestamp": root.Time.Unix()})
	}
	if err == nil {
		err = safefile.Replace(a.cfg.ErrorFile, text, safefile.Private)
	}
	if err != nil {
		a.cfg.Log.Warnf("torchrun: the first failure's error file is not copied: %v", err)
	}
}

// newIncarnation returns a unique name for one run of a worker.
func newIncarnation() string { return rand.Text() }
