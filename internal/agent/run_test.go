package agent

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// cluster is a gossip cluster on loopback, and a driver's view of it.
type cluster struct {
	t      *testing.T
	seed   string
	source *gossip.Source
	lists  chan []plan.Host
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	seed, err := gossip.Join(t.Context(), gossip.Config{BindAddr: "127.0.0.1:0", Key: testKey, Label: "blue", Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, seed: seed.Addr(), lists: make(chan []plan.Host, 64)}
	c.source = gossip.NewSource(gossip.Config{
		BindAddr: "127.0.0.1:0", Join: []string{c.seed}, Key: testKey, Label: "blue", Log: quiet(),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.source.Watch(ctx, func(hosts []plan.Host) {
			select {
			case c.lists <- hosts:
			case <-ctx.Done():
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		c.source.Close()
		seed.Close()
	})
	c.await(func(hosts []plan.Host) bool { return len(hosts) == 0 })
	return c
}

func (c *cluster) await(is func([]plan.Host) bool) {
	c.t.Helper()
	limit := sandbox.Expired()
	for {
		select {
		case hosts := <-c.lists:
			if is(hosts) {
				return
			}
		case <-limit:
			c.t.Fatal("the expected list does not come")
		}
	}
}

// run starts an agent of the cluster. stop asks it to stop and waits for its end.
func (c *cluster) run(cfg Config) (stop func() error) {
	cfg.Key, cfg.Label, cfg.Bind, cfg.Join, cfg.Log = testKey, "blue", "127.0.0.1:0", []string{c.seed}, quiet()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg) }()
	c.t.Cleanup(cancel)
	return func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-sandbox.Expired():
			return errors.New("the agent does not end")
		}
	}
}

func (c *cluster) launcher(run string) *client.Agents {
	l := client.New(client.Config{
		Credentials: driverOf(c.t, run), Log: quiet(),
		Find: func(host string) (string, bool) {
			m, ok := c.source.Agent(host)
			return m.LaunchAddr, ok
		},
	})
	c.t.Cleanup(func() { l.Close() })
	return l
}

func listed(host plan.Host) func([]plan.Host) bool {
	return func(hosts []plan.Host) bool { return slices.Contains(hosts, host) }
}

// TestRun: an agent is found by gossip and runs a worker for a driver. When it is asked to stop, it
// announces that and lets the worker leave.
func TestRun(t *testing.T) {
	c := newCluster(t)
	begin := time.Now()
	bad := make(chan []int)
	stop := c.run(Config{Name: "a", Slots: 2, Health: func(ctx context.Context, report func([]int)) error {
		for {
			select {
			case slots := <-bad:
				report(slots)
			case <-ctx.Done():
				return nil
			}
		}
	}})
	c.await(listed(plan.Host{Name: "a", Slots: 2}))
	t.Logf("listed %v after its start", time.Since(begin))
	l := c.launcher("r")
	s, pipe := script(t, 0, `exec 9>"$1"; trap 'echo bye; exit 0' USR1; echo ready; while :; do sleep 0.01; done`)
	r := start(t, l, s)
	r.awaitOutput("ready")
	if addr, err := l.HostAddr(t.Context(), "a"); err != nil || addr != "127.0.0.1" {
		t.Errorf("the host is reached at %v, %v", addr, err)
	}
	select {
	case bad <- []int{1}:
	case <-sandbox.Expired():
		t.Fatal("the devices' health is not watched")
	}
	other, _ := script(t, 1, "exit 0")
	end := sandbox.Limit()
	for n := 0; ; n++ { // until the report has arrived
		if time.Now().After(end) {
			t.Fatal("a slot whose device has failed is still used")
		}
		other.Incarnation = string(rune('A' + n%26))
		err := l.Run(t.Context(), other, nil)
		var refused *launch.StartError
		if errors.As(err, &refused) { // a worker that runs when the report arrives is ended
			wantRefused(t, err, "has failed")
			break
		}
	}

	pid := <-r.pid
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	c.await(listed(plan.Host{Name: "a", Slots: 2, Draining: true}))
	other.Incarnation, other.Slot.Index = "late", 0
	wantRefused(t, l.Run(t.Context(), other, nil), "draining")
	if err := syscall.Kill(pid, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if err := r.wait(); err != nil {
		t.Errorf("the worker that left: %v", err)
	}
	gone(t, pipe)
	if err := <-stopped; err != nil {
		t.Errorf("the agent that left: %v", err)
	}
	c.await(func(hosts []plan.Host) bool { return len(hosts) == 0 })
}

// TestDrainTimeout: workers that do not leave in time are ended, and those that ignore that are
// killed; the driver learns both.
func TestDrainTimeout(t *testing.T) {
	c := newCluster(t)
	stop := c.run(Config{Name: "a", Slots: 2, Drain: 50 * time.Millisecond})
	c.await(listed(plan.Host{Name: "a", Slots: 2}))
	l := c.launcher("r")
	obeys, pipe0 := script(t, 0, sleeper)
	obeys.Grace = time.Hour
	first := start(t, l, obeys)
	first.awaitOutput("ready")
	deaf, pipe1 := script(t, 1, `exec 9>"$1"; trap '' TERM; echo ready; while :; do sleep 1; done`)
	deaf.Grace = time.Hour
	second := start(t, l, deaf)
	second.awaitOutput("ready")
	if err := stop(); err != nil {
		t.Error(err)
	}
	var exit *launch.ExitError
	if err := first.wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGTERM {
		t.Errorf("the worker that obeys: %v", err)
	}
	if err := second.wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGKILL {
		t.Errorf("the worker that does not: %v", err)
	}
	gone(t, pipe0)
	gone(t, pipe1)
}

// TestDriverHearsBeforeTheClusterDoes: the cluster learns that the host is gone only after the
// driver has learned how its workers ended.
func TestDriverHearsBeforeTheClusterDoes(t *testing.T) {
	c := newCluster(t)
	stop := c.run(Config{Name: "a", Slots: 1, end: time.Hour})
	c.await(listed(plan.Host{Name: "a", Slots: 1}))
	s, pipe := script(t, 0, `exec 9>"$1"; echo last words; exit 3`)
	busy := &blocked{open: make(chan struct{}), first: make(chan struct{})}
	s.Stdout = busy
	l := c.launcher("r")
	ended := make(chan error, 1)
	go func() { ended <- l.Run(t.Context(), s, nil) }()
	<-busy.first
	gone(t, pipe)
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	c.await(listed(plan.Host{Name: "a", Slots: 1, Draining: true}))
	select {
	case hosts := <-c.lists:
		t.Errorf("the hosts are %v, and the driver has not heard all", hosts)
	case err := <-stopped:
		t.Fatalf("the agent left with %v, and the driver has not heard all", err)
	case <-time.After(time.Second):
	}
	close(busy.open)
	var exit *launch.ExitError
	if err := <-ended; !errors.As(err, &exit) || exit.Code != 3 {
		t.Errorf("Run returned %v", err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	c.await(func(hosts []plan.Host) bool { return len(hosts) == 0 })
}

func TestRunRefuses(t *testing.T) {
	c := newCluster(t)
	for name, cfg := range map[string]Config{
		"key":   {Key: testKey[1:]},
		"slots": {Key: testKey, Slots: -1},
		"bind":  {Key: testKey, Bind: "192.0.2.1:0"},
		"port":  {Key: testKey, LaunchPort: 1 << 16},
	} {
		cfg.Log = quiet()
		if err := Run(t.Context(), cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	other := bytes.Clone(testKey)
	other[5] ^= 1
	err := Run(t.Context(), Config{
		Name: "b", Key: other, Label: "blue", Bind: "127.0.0.1:0", Join: []string{c.seed}, Log: quiet(),
	})
	if !errors.Is(err, gossip.ErrKey) {
		t.Errorf("a wrong key: %v", err)
	}
}
