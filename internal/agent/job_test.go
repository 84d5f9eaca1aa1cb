package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/launch/launchtest"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// inside is a starter that runs job agents as goroutines of the test.
type inside struct {
	t      *testing.T
	ctx    context.Context
	behind func(addr string) string // returns the address that the driver uses instead; nil: the same
	before func()                   // called before each start; nil: nothing
	ended  chan error               // receives the result of RunJob

	mu     sync.Mutex
	starts int
}

func (i *inside) Start(_ context.Context, host string, hello client.Hello) (client.Ready, error) {
	i.mu.Lock()
	i.starts++
	i.mu.Unlock()
	if i.before != nil {
		i.before()
	}
	hello.LogLevel = "info"
	ready := make(chan client.Ready, 1)
	go func() {
		i.ended <- RunJob(i.ctx, JobConfig{
			Hello: hello, Log: quiet(), Facts: Facts{Version: "test", GPUs: func() (int, error) { return 3, nil }},
			Ready: func(r client.Ready) error { ready <- r; return nil },
		})
	}()
	select {
	case r := <-ready:
		r.Addresses = []string{"127.0.0.1"}
		if i.behind != nil {
			_, port, err := net.SplitHostPort(i.behind(net.JoinHostPort("127.0.0.1", strconv.Itoa(r.Port))))
			if err != nil {
				return r, err
			}
			r.Port, _ = strconv.Atoi(port)
		}
		return r, nil
	case err := <-i.ended:
		return client.Ready{}, err
	case <-sandbox.Expired():
		return client.Ready{}, errors.New("no answer")
	}
}

// jobAgents returns a launcher that starts its agents, and its starter. Remaining agents end with
// the test.
func jobAgents(t *testing.T, change func(*client.Config, *inside)) (*client.Agents, *inside) {
	t.Helper()
	authority, err := identity.NewAuthority("r")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	in := &inside{t: t, ctx: ctx, ended: make(chan error, 16)}
	cfg := client.Config{
		Authority: authority, Starter: in, LocalOnly: true, Log: quiet(),
		Hello: client.Hello{Drain: 5 * time.Second, Patience: time.Minute},
	}
	if change != nil {
		change(&cfg, in)
	}
	l := client.New(cfg)
	t.Cleanup(func() {
		l.Close()
		cancel()
	})
	return l, in
}

// over waits for the end of an agent and returns its error.
func (i *inside) over() error {
	i.t.Helper()
	select {
	case err := <-i.ended:
		return err
	case <-sandbox.Expired():
		i.t.Fatal("the agent does not end")
		return nil
	}
}

func TestJobKit(t *testing.T) {
	launchtest.Run(t, func(t *testing.T) launch.Launcher {
		l, _ := jobAgents(t, nil)
		return newAnySlot(l, 16)
	})
}

// TestJobAgent: an agent is started with its first worker, only once, and ends with the job.
func TestJobAgent(t *testing.T) {
	l, in := jobAgents(t, nil)
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			s, _ := script(t, n, "exit 3")
			var exit *launch.ExitError
			if err := l.Run(t.Context(), s, nil); !errors.As(err, &exit) || exit.Code != 3 {
				t.Errorf("Run returned %v", err)
			}
		})
	}
	wg.Wait()
	if in.starts != 1 {
		t.Errorf("%d agents were started", in.starts)
	}
	l.Close()
	if err := in.over(); err != nil {
		t.Error(err)
	}
}

// TestJobEndsWhileAnAgentStarts: an agent ends with the job although another is still being
// started.
func TestJobEndsWhileAnAgentStarts(t *testing.T) {
	slow, release := make(chan struct{}), make(chan struct{})
	l, in := jobAgents(t, func(cfg *client.Config, in *inside) {
		cfg.Lease, cfg.Orphan = longLease, time.Hour
		in.before = func() {
			if in.starts == 2 {
				close(slow)
				<-release
			}
		}
	})
	s, _ := script(t, 0, "exit 0")
	if err := l.Run(t.Context(), s, nil); err != nil {
		t.Fatal(err)
	}
	other, _ := script(t, 0, "exit 0")
	other.Slot.Host = "b"
	r := start(t, l, other)
	<-slow
	r.cancel()
	_ = r.wait()
	closed := make(chan error, 1)
	go func() { closed <- l.Close() }()
	if err := in.over(); err != nil {
		t.Error(err)
	}
	close(release)
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestJobAgentStops: an agent that is asked to stop lets its workers end, and the next worker gets
// another agent.
func TestJobAgentStops(t *testing.T) {
	var stop context.CancelFunc
	l, in := jobAgents(t, func(_ *client.Config, in *inside) { in.ctx, stop = context.WithCancel(in.ctx) })
	s, pipe := script(t, 0, `exec 9>"$1"; trap 'echo bye; exit 4' TERM; echo ready; while :; do sleep 0.01; done`)
	s.Grace = time.Hour
	r := start(t, l, s)
	r.awaitOutput("ready")
	stop()
	var exit *launch.ExitError
	if err := r.wait(); !errors.As(err, &exit) || exit.Code != 4 {
		t.Errorf("Run returned %v", err)
	}
	gone(t, pipe)
	if err := in.over(); err != nil {
		t.Error(err)
	}
	in.ctx = context.Background()
	next, _ := script(t, 0, "exit 6")
	next.Incarnation = "next"
	for {
		// If the driver does not know yet that the agent is gone, the worker counts as lost.
		err := l.Run(t.Context(), next, nil)
		if errors.As(err, &exit) && exit.Lost {
			next.Incarnation += "x"
			continue
		}
		if !errors.As(err, &exit) || exit.Code != 6 || in.starts != 2 {
			t.Errorf("Run returned %v; %d agents", err, in.starts)
		}
		break
	}
}

// TestJobAgentWithoutDriver: an agent whose driver never connects ends.
func TestJobAgentWithoutDriver(t *testing.T) {
	_, in := jobAgents(t, nil)
	authority, err := identity.NewAuthority("r")
	if err != nil {
		t.Fatal(err)
	}
	creds, err := authority.Issue(identity.Subject{Role: identity.Agent, Host: "a"})
	if err != nil {
		t.Fatal(err)
	}
	hello := client.Hello{RunID: "r", Host: "a", Credentials: creds.Encode(), Patience: 50 * time.Millisecond, Loopback: true}
	if _, err := in.Start(t.Context(), "a", hello); err != nil {
		t.Fatal(err)
	}
	if err := in.over(); err == nil || !strings.Contains(err.Error(), "no driver connected within 50ms") {
		t.Errorf("it ended with %v", err)
	}
	hello.Host = "b"
	if _, err := in.Start(t.Context(), "b", hello); err == nil || !strings.Contains(err.Error(), "the credentials are those of agent a") {
		t.Errorf("another host's credentials: %v", err)
	}
}

// TestJobAgentForgotten: an agent that was started, but is no longer known to any driver, ends no
// later than the workers of a silent driver.
func TestJobAgentForgotten(t *testing.T) {
	l, in := jobAgents(t, func(cfg *client.Config, in *inside) {
		cfg.Orphan, cfg.Hello.Patience = 60*time.Millisecond, 0
		cfg.Begun = func(client.KnownAgent) error { return errors.New("the driver was killed here") }
	})
	if failed := l.Prepare(t.Context(), []string{"a"}); failed["a"] == nil {
		t.Fatal("the agent is known")
	}
	if err := in.over(); err == nil || !strings.Contains(err.Error(), "no driver connected within 60ms") {
		t.Errorf("it ended with %v", err)
	}
}

// TestJobAgentOfTheDead: an agent whose driver ended before it connected ends at once; one whose
// driver is alive waits for it.
func TestJobAgentOfTheDead(t *testing.T) {
	for _, c := range []struct {
		starter int
		want    string
	}{{os.Getppid(), "no driver connected within 100ms"}, {1 << 30, "the driver that started it ended"}} {
		_, in := jobAgents(t, nil)
		authority, err := identity.NewAuthority("r")
		if err != nil {
			t.Fatal(err)
		}
		creds, err := authority.Issue(identity.Subject{Role: identity.Agent, Host: "a"})
		if err != nil {
			t.Fatal(err)
		}
		hello := client.Hello{RunID: "r", Host: "a", Credentials: creds.Encode(), Patience: 100 * time.Millisecond, Starter: c.starter, Loopback: true}
		if c.starter != os.Getppid() {
			hello.Patience = time.Hour
		}
		if _, err := in.Start(t.Context(), "a", hello); err != nil {
			t.Fatal(err)
		}
		if err := in.over(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("it ended with %v, not since %s", err, c.want)
		}
	}
}

// TestFence: a driver that cannot reach an agent for the lease gives its workers up. They are
// killed as soon as the agent is reachable again, whatever their grace, and long before the agent
// itself would end them.
func TestFence(t *testing.T) {
	var c *cable
	l, in := jobAgents(t, func(cfg *client.Config, in *inside) {
		cfg.Lease, cfg.Orphan = 4*time.Second, time.Hour
		in.behind = func(addr string) string {
			c = newCable(t, addr)
			return c.addr
		}
	})
	s, pipe := script(t, 0, `exec 9>"$1"; trap '' TERM; echo ready; while :; do sleep 1; done`)
	s.Grace = time.Hour
	r := start(t, l, s)
	r.awaitOutput("ready")
	c.setSilent(true)
	wantLost(t, r.wait(), "nothing was heard")
	if len(in.ended) > 0 {
		t.Error("the agent has ended too early")
	}
	c.cut()
	c.setSilent(false)
	gone(t, pipe)
	if err := in.over(); err != nil {
		t.Error(err)
	}
}

// TestLogComesToTheDriver: the driver gets what an agent logs.
func TestLogComesToTheDriver(t *testing.T) {
	lines := &watched{news: wake.New()}
	l, _ := jobAgents(t, func(cfg *client.Config, _ *inside) {
		log := logrus.New()
		log.SetOutput(lines)
		log.SetLevel(logrus.DebugLevel)
		cfg.Log = log
	})
	s, _ := script(t, 0, "exit 0")
	if err := l.Run(t.Context(), s, nil); err != nil {
		t.Fatal(err)
	}
	limit := sandbox.Expired()
	for !strings.Contains(lines.String(), "slot 0: started process") {
		select {
		case <-lines.news:
		case <-limit:
			t.Fatalf("the log holds %q", lines.String())
		}
	}
}

// TestInspect: the host's agent reports its clock, its GPUs, and which other agents it reaches.
func TestInspect(t *testing.T) {
	l, _ := jobAgents(t, nil)
	a, err := l.Inspect(t.Context(), "a")
	if err != nil || a.Version != "test" || a.GPUs != 3 || a.GPUError != "" || a.Offset.Abs() > a.RoundTrip {
		t.Fatalf("%+v, %v", a, err)
	}
	b, err := l.Inspect(t.Context(), "b")
	if err != nil {
		t.Fatal(err)
	}
	unheard := unheardOf(t)
	nobody, other := b, b
	nobody.Endpoints = []string{unheard}
	other.Host = "c"
	others := append([]client.Inspection{b, nobody, other}, slices.Repeat([]client.Inspection{{Host: "none"}}, client.MaxTargets)...)
	failures, routes, err := l.Reachable(t.Context(), "a", others)
	if err != nil || len(failures) != len(others) || len(routes) != len(others) {
		t.Fatalf("%q, %d routes, %v", failures, len(routes), err)
	}
	for i, want := range []string{"", unheard + ": connect: connection refused", "the peer is the agent of b, not of c", "names no address"} {
		if want == "" && failures[i] != "" || !strings.Contains(failures[i], want) {
			t.Errorf("%d: %q; want %q", i, failures[i], want)
		}
	}
}

// TestSilentTargetHoldsUpNoOther: an agent that does not answer does not delay the search for
// another.
func TestSilentTargetHoldsUpNoOther(t *testing.T) {
	another := make(chan struct{}) // closed when the second agent is looked for
	listen := func(take func()) string {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var serving sync.WaitGroup
		serving.Go(func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				take()
				conn.Close()
			}
		})
		t.Cleanup(func() {
			ln.Close()
			serving.Wait()
		})
		return ln.Addr().String()
	}
	second := listen(sync.OnceFunc(func() { close(another) }))
	first := listen(func() { <-another })
	inspect := Facts{}.inspector(driverOf(t, "r"))
	reply := inspect(t.Context(), &agentpb.InspectRequest{Targets: []*agentpb.Target{
		{Host: "b", Addresses: []string{first}}, {Host: "c", Addresses: []string{second}},
	}})
	for i, why := range reply.GetFailures() {
		if why == "" || strings.Contains(why, "does not answer") {
			t.Errorf("target %d: %q; want that it hangs up", i, why)
		}
	}
}

// TestStartsAreBounded: the number of agents that are started at a time is bounded, however many
// hosts there are.
func TestStartsAreBounded(t *testing.T) {
	const hosts, most = 12, 3
	busy := make(chan struct{}, hosts)
	var worst atomic.Int64
	l, in := jobAgents(t, func(cfg *client.Config, in *inside) {
		cfg.Parallel = most
		in.before = func() {
			busy <- struct{}{}
			for n := int64(len(busy)); n > worst.Load(); {
				worst.Store(n)
			}
			runtime.Gosched()
			<-busy
		}
	})
	var wg sync.WaitGroup
	for n := range hosts {
		wg.Go(func() {
			if _, err := l.Inspect(t.Context(), fmt.Sprint("host", n)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if in.starts != hosts || worst.Load() > most {
		t.Errorf("%d agents, %d at a time; want %d and %d", in.starts, worst.Load(), hosts, most)
	}
}
