package torchrun

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/launch"
)

// TestScenarioA1 to A4 and A10 test the pure machine.
func TestScenarioA1(t *testing.T) {
	m := newMachine(10)
	check := func(seen State, want action) {
		t.Helper()
		if do := m.see(seen, false); do != want {
			t.Fatalf("%s: %s; want %s", seen, do, want)
		}
	}
	check(Healthy, goOn)
	check(Healthy, goOn)
	check(Succeeded, finish)
	if m.left != 10 || m.state != Succeeded {
		t.Errorf("%d left, %s", m.left, m.state)
	}
}

func TestScenarioA2(t *testing.T) {
	m, looks := newMachine(3), 0
	for do := restart; do == restart; looks++ {
		do = m.see(Failed, false)
	}
	if looks != 4 || m.left != 0 || m.state != Failed {
		t.Errorf("%d looks, %d left, %s", looks, m.left, m.state)
	}
}

func TestScenarioA3(t *testing.T) {
	m, restarts := newMachine(1), 0
	for _, waiting := range []bool{true, true, false} {
		if m.see(Healthy, waiting) == restart {
			restarts++
		}
	}
	if do := m.see(Succeeded, false); do != finish || restarts != 2 || m.left != 1 {
		t.Errorf("%s, %d restarts, %d left", do, restarts, m.left)
	}
}

// noStore replaces a store that listens at loopback, whose connections would block the fake clock
// of a synctest bubble.
type noStore struct{}

func (noStore) Addr() string { return "127.0.0.1:1" }
func (noStore) asked() bool  { return true }
func (noStore) Close()       {}

func withoutStore(a *Agent) *Agent {
	a.store = func(context.Context, Round) (roundStore, error) { return noStore{}, nil }
	return a
}

// nowhere is a rendezvous whose Next fails.
type nowhere struct{ Single }

var errNowhere = errors.New("nowhere to meet")

func (*nowhere) Next(context.Context, bool) (Round, error) { return Round{}, errNowhere }

func TestScenarioA5(t *testing.T) {
	a := newAgent(t, Config{Rendezvous: &nowhere{}})
	if err := a.Run(t.Context()); !errors.Is(err, errNowhere) || a.machine.state != Init {
		t.Errorf("%v, %s", err, a.machine.state)
	}
}

func TestScenarioA6(t *testing.T) {
	got := assign([]node{{"ps", 4}, {"trainer", 1}, {"trainer", 2}, {"trainer", 3}, {"ps", 5}})
	want := []ranks{{0, 15, 0, 9}, {4, 15, 0, 6}, {5, 15, 1, 6}, {7, 15, 3, 6}, {10, 15, 4, 9}}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestScenarioA7(t *testing.T) {
	nodes := []node{{"master", 8}, {"trainer", 1}, {"trainer", 2}, {"trainer", 3}, {"trainer", 4}, {"ps", 5}, {"ps", 2}}
	sizes := map[string]int{"master": 8, "trainer": 10, "ps": 7}
	seen, roleSeen := make([]bool, 25), map[string]bool{}
	for i, r := range assign(nodes) {
		if r.World != 25 || r.RoleWorld != sizes[nodes[i].Role] {
			t.Errorf("node %d: %+v", i, r)
		}
		for w := range nodes[i].Workers {
			role := fmt.Sprint(nodes[i].Role, r.RoleBase+w)
			if seen[r.Base+w] || roleSeen[role] || r.RoleBase+w >= r.RoleWorld {
				t.Errorf("rank %d or %s is given twice, or too large", r.Base+w, role)
			}
			seen[r.Base+w], roleSeen[role] = true, true
		}
	}
	if slices.Contains(seen, false) {
		t.Errorf("ranks are missing: %v", seen)
	}
}

// errTold is the cause with which the tests stop an agent, as a signal does.
var errTold = errors.New("told to stop")

// recorded counts an agent's calls of a rendezvous.
type recorded struct {
	Single
	mu            sync.Mutex
	closed, left  int
	rounds        int
	change        chan struct{}
	changesWanted int
	lost          int // nodes of a changing round that publish nothing
}

func (r *recorded) Next(ctx context.Context, failed bool) (Round, error) {
	r.mu.Lock()
	r.rounds++
	lost := 0
	if r.changesWanted > 0 {
		r.changesWanted--
		lost = r.lost
		r.change = make(chan struct{})
		close(r.change)
	} else {
		r.change = nil
	}
	r.mu.Unlock()
	round, err := r.Single.Next(ctx, failed)
	round.World += lost
	return round, err
}

func (r *recorded) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.change
}

func (r *recorded) Close(context.Context) error {
	r.closed++
	return nil
}

func (r *recorded) Leave(context.Context) error {
	r.left++
	return nil
}

func sigint(error) syscall.Signal { return syscall.SIGINT }

func TestScenarioA8(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorded{}
		f := &fake{life: func(ctx context.Context, s *launch.Spec) error {
			<-ctx.Done()
			return &launch.ExitError{Code: 128 + int(s.Signal()), Signal: s.Signal()}
		}}
		ctx, cancel := context.WithCancelCause(t.Context())
		a := withoutStore(newAgent(t, Config{Rendezvous: r, Launcher: f, Workers: 2, SignalOf: sigint}))
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		f.await(2)
		cancel(errTold)
		if err := <-done; !errors.Is(err, errTold) {
			t.Error(err)
		}
		if r.closed != 0 || r.left != 1 {
			t.Errorf("closed %d times, left %d times", r.closed, r.left)
		}
		for _, end := range f.ends {
			if exitCode(end) != -int(syscall.SIGINT) {
				t.Errorf("a worker got another signal: %v", end)
			}
		}
	})
}

// TestScenarioA11: the workers of several nodes get each rank once.
func TestScenarioA11(t *testing.T) {
	for _, nodes := range [][]int{{1, 2, 3}, {4, 4}} {
		f := &fake{}
		runStatic(t, nodes, f)
		var ranks []int
		world := 0
		for _, n := range nodes {
			world += n
		}
		for _, spec := range f.specs {
			if v, _ := lookup(spec.Env, "WORLD_SIZE"); v != fmt.Sprint(world) {
				t.Errorf("the world has %s of %d workers", v, world)
			}
			v, _ := lookup(spec.Env, "RANK")
			var rank int
			_, _ = fmt.Sscan(v, &rank)
			ranks = append(ranks, rank)
		}
		slices.Sort(ranks)
		for i, rank := range ranks {
			if i != rank || len(ranks) != world {
				t.Fatalf("ranks %v", ranks)
			}
		}
	}
}

// TestScenarioA13: half of the workers fail in every round.
func TestScenarioA13(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorded{}
		f := &fake{life: func(ctx context.Context, s *launch.Spec) error {
			if s.Slot.Index%2 == 0 {
				return &launch.ExitError{Code: 1}
			}
			<-ctx.Done()
			return &launch.ExitError{Code: 143, Signal: syscall.SIGTERM}
		}}
		a := withoutStore(newAgent(t, Config{Rendezvous: r, Launcher: f, Workers: 4, MaxRestarts: 2}))
		var failed *FailedError
		if err := a.Run(t.Context()); !errors.As(err, &failed) || a.machine.left != 0 || a.machine.state != Failed {
			t.Fatalf("%v, %d left, %s", err, a.machine.left, a.machine.state)
		}
		if r.rounds != 3 || r.closed != 1 || failed.Root().Rank%2 != 0 || failed.Root().ExitCode != 1 {
			t.Errorf("%d rounds, closed %d times, %+v", r.rounds, r.closed, failed.Root())
		}
		for _, f := range failed.Failures {
			if f.Rank%2 != 0 {
				t.Errorf("rank %d, which was stopped, counts as failed", f.Rank)
			}
		}
	})
}

// TestMembershipChanges: changes of membership restart the workers without using up a restart.
func TestMembershipChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorded{changesWanted: 2}
		f := &fake{}
		f.life = func(ctx context.Context, s *launch.Spec) error {
			if v, _ := lookup(s.Env, "TORCHELASTIC_RESTART_COUNT"); v != "0" {
				t.Errorf("restart count %s", v)
			}
			select {
			case <-ctx.Done():
				return &launch.ExitError{Code: 143, Signal: syscall.SIGTERM}
			case <-time.After(time.Minute):
				return nil
			}
		}
		a := withoutStore(newAgent(t, Config{Rendezvous: r, Launcher: f, Workers: 1, MaxRestarts: 1}))
		if err := a.Run(t.Context()); err != nil || r.rounds != 3 || a.machine.left != 1 {
			t.Errorf("%v, %d rounds, %d left", err, r.rounds, a.machine.left)
		}
	})
}

// TestNodeDiesAsRoundCompletes: if a node dies before it has published its part of a new round, the
// others do not wait for it, and meet again.
func TestNodeDiesAsRoundCompletes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorded{changesWanted: 1, lost: 1}
		a := withoutStore(newAgent(t, Config{Rendezvous: r}))
		begun := time.Now()
		if err := a.Run(t.Context()); err != nil || r.rounds != 2 || time.Since(begun) != 0 {
			t.Errorf("%v, %d rounds, after %v", err, r.rounds, time.Since(begun))
		}
	})
}

// TestScenarioA16: a node that is done waits for a node whose worker ends late. A17: the wait is
// bounded, and its end is not a failure.
func TestScenarioA16(t *testing.T) {
	late := make(chan struct{})
	f := &fake{life: func(ctx context.Context, s *launch.Spec) error {
		if v, _ := lookup(s.Env, "GROUP_RANK"); v == "1" {
			<-late
		}
		return nil
	}}
	agents := static(t, []int{1, 1}, f)
	done := make(chan int, 2)
	var wg sync.WaitGroup
	for i, a := range agents {
		wg.Go(func() {
			if err := a.Run(t.Context()); err != nil {
				t.Error(err)
			}
			done <- i
		})
	}
	f.await(2)
	f.awaitEnds(1)
	if n := len(done); n > 0 {
		t.Errorf("%d agents have ended", n)
	}
	close(late)
	wg.Wait()
}

func TestScenarioA17(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, Config{Rendezvous: &lonely{}, Launcher: &fake{}, ExitBarrier: time.Minute})
		begun := time.Now()
		a.place = place{round: Round{World: 2, Store: (&lonely{}).store()}}
		a.barrier(t.Context())
		if d := time.Since(begun); d != time.Minute {
			t.Errorf("the barrier lasted %v", d)
		}
	})
}

// lonely is a rendezvous whose other node never publishes anything.
type lonely struct{ Single }

func (*lonely) store() KV {
	r, _ := new(Single).Next(context.Background(), false)
	return r.Store
}

// newAgent returns an agent, with defaults for what cfg leaves out.
func newAgent(t *testing.T, cfg Config) *Agent {
	t.Helper()
	cfg.RunID, cfg.TempDir = "test", t.TempDir()
	if cfg.Role == "" {
		cfg.Role = "default"
	}
	cfg.Command = []string{"program", "--rank=${local_rank}"}
	cfg.Workers = max(cfg.Workers, 1)
	if cfg.Launcher == nil {
		cfg.Launcher = &fake{}
	}
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// fake is a launcher that starts no processes: it calls life for each worker. If life is nil, the
// workers succeed.
type fake struct {
	life func(ctx context.Context, s *launch.Spec) error

	mu    sync.Mutex
	specs []*launch.Spec
	ends  []error
	cond  *sync.Cond
}

func (f *fake) Run(ctx context.Context, s *launch.Spec, started func(pid int)) error {
	f.mu.Lock()
	f.specs = append(f.specs, s)
	pid := len(f.specs)
	f.wake()
	f.mu.Unlock()
	started(pid)
	var end error
	if f.life != nil {
		end = f.life(ctx, s)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ends = append(f.ends, end)
	f.wake()
	return end
}

// wake wakes the callers of until. The caller holds the lock.
func (f *fake) wake() {
	if f.cond == nil {
		f.cond = sync.NewCond(&f.mu)
	}
	f.cond.Broadcast()
}

func (f *fake) until(test func() bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cond == nil {
		f.cond = sync.NewCond(&f.mu)
	}
	for !test() {
		f.cond.Wait()
	}
}

// await blocks until n workers have started, awaitEnds until n have ended.
func (f *fake) await(n int)     { f.until(func() bool { return len(f.specs) >= n }) }
func (f *fake) awaitEnds(n int) { f.until(func() bool { return len(f.ends) >= n }) }

// static returns one agent per element of workers, with that number of workers, in a static
// rendezvous on this machine.
func static(t *testing.T, workers []int, f launch.Launcher) []*Agent {
	t.Helper()
	key := make([]byte, 32)
	var addr net.Addr
	agents := make([]*Agent, len(workers))
	for i, n := range workers {
		peers, err := NewPeers(key, "test", "127.0.0.1", discard())
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			if addr, err = peers.Listen("127.0.0.1:0"); err != nil {
				t.Fatal(err)
			}
		}
		s := &Static{Node: i, Nodes: len(workers), Addr: addr.String(), Peers: peers, Log: discard(), Timeout: time.Minute}
		agents[i] = newAgent(t, Config{Rendezvous: s, Peers: peers, Launcher: f, Workers: n, MaxRestarts: 3})
	}
	return agents
}

// runStatic runs these agents until all have ended.
func runStatic(t *testing.T, workers []int, f launch.Launcher) {
	t.Helper()
	var wg sync.WaitGroup
	for _, a := range static(t, workers, f) {
		wg.Go(func() {
			if err := a.Run(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func discard() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}
