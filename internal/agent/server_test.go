package agent

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/launch/launchtest"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// longLease expires in no test, however long a busy machine keeps a driver from renewing it.
const longLease = time.Minute

// testKey is the cluster's key. Only this process and those that it starts have it: others can run
// the same tests on this machine.
var testKey = []byte(cmp.Or(os.Getenv("AGENT_TEST_KEY"), (rand.Text() + rand.Text())[:identity.ClusterKeyLen]))

func TestMain(m *testing.M) {
	if os.Getenv("AGENT_TEST_SERVER") != "" {
		playServer()
		return
	}
	if err := proc.Adopt(); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(sandbox.Tests{M: m})
}

func quiet() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func credentials(t testing.TB, key []byte, label string, s identity.Subject) *identity.Credentials {
	t.Helper()
	a, err := identity.ForCluster(key, label)
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Issue(s)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func driverOf(t testing.TB, run string) *identity.Credentials {
	return credentials(t, testKey, "blue", identity.Subject{RunID: run, Role: identity.Driver})
}

// host is a server that serves on loopback until the test ends.
type host struct {
	*server
	addr string
}

func newHost(t testing.TB, slots int) *host {
	t.Helper()
	ln, err := identity.Drivers.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{newServer("a", slots, quiet()), ln.Addr().String()}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	creds := credentials(t, testKey, "blue", identity.Subject{Role: identity.Agent, Host: "a"})
	go func() { done <- h.serve(ctx, ln, creds) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return h
}

// agents returns a launcher that finds the agent of every host at addr.
func agents(t testing.TB, creds *identity.Credentials, addr string, lease time.Duration) *client.Agents {
	return keepingAgents(t, creds, addr, client.Config{Lease: lease})
}

// keepingAgents is like agents, with further configuration.
func keepingAgents(t testing.TB, creds *identity.Credentials, addr string, cfg client.Config) *client.Agents {
	cfg.Credentials, cfg.Log = creds, quiet()
	cfg.Find = func(string) (string, bool) { return addr, true }
	a := client.New(cfg)
	t.Cleanup(func() { a.Close() })
	return a
}

// anySlot assigns each worker its own slot on host a, because the kit assigns none.
type anySlot struct {
	launch.Launcher
	free chan int
}

func newAnySlot(l launch.Launcher, slots int) anySlot {
	a := anySlot{l, make(chan int, slots)}
	for i := range slots {
		a.free <- i
	}
	return a
}

func (a anySlot) Run(ctx context.Context, s *launch.Spec, started func(int)) error {
	i := <-a.free
	defer func() { a.free <- i }()
	s.Slot = plan.SlotID{Host: "a", Index: i}
	return a.Launcher.Run(ctx, s, started)
}

func TestKit(t *testing.T) {
	launchtest.Run(t, func(t *testing.T) launch.Launcher {
		h := newHost(t, 16)
		return newAnySlot(agents(t, driverOf(t, "kit"), h.addr, longLease), 16)
	})
}

// script returns the specification of a shell script in slot i of host a, and a pipe. The pipe's
// path is $1, and processes of the script can keep it open.
func script(t *testing.T, i int, text string) (*launch.Spec, *os.File) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "held")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pipe.Close() })
	incarnation := rand.Text() // another copy of these tests must not have processes with this name
	return &launch.Spec{
		Incarnation: incarnation,
		Slot:        plan.SlotID{Host: "a", Index: i},
		Command:     []string{"sh", "-c", text, "sh", path},
		Env:         []string{"PATH=" + os.Getenv("PATH"), "HVD_INCARNATION=" + incarnation},
	}, pipe
}

const sleeper = `exec 9>"$1"; setsid sleep 1000 & echo ready; exec sleep 1000`

// gone waits until no process of the script holds the pipe open.
func gone(t *testing.T, pipe *os.File) {
	t.Helper()
	_ = pipe.SetReadDeadline(sandbox.Limit())
	if rest, err := io.ReadAll(pipe); err != nil || len(rest) > 0 {
		t.Fatalf("somebody is left: %v (read %q)", err, rest)
	}
}

// running is a Run in progress.
type running struct {
	t      *testing.T
	cancel context.CancelFunc
	pid    chan int
	stdout *watched
	ended  chan error
}

// watched is output that can be waited for.
type watched struct {
	mu   sync.Mutex
	text bytes.Buffer
	news wake.Flag
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text.Write(b)
	w.news.Set()
	return len(b), nil
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// start runs a worker. s remains the caller's.
func start(t *testing.T, l launch.Launcher, s *launch.Spec) *running {
	t.Helper()
	spec := *s
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{
		t: t, cancel: cancel, pid: make(chan int, 1), ended: make(chan error, 1),
		stdout: &watched{news: wake.New()},
	}
	spec.Stdout = r.stdout
	go func() { r.ended <- l.Run(ctx, &spec, func(pid int) { r.pid <- pid }) }()
	t.Cleanup(cancel)
	return r
}

func (r *running) awaitOutput(text string) {
	r.t.Helper()
	limit := sandbox.Expired()
	for !strings.Contains(r.stdout.String(), text) {
		select {
		case <-r.stdout.news:
		case err := <-r.ended:
			r.t.Fatalf("ended before it said %q: %v", text, err)
		case <-limit:
			r.t.Fatalf("it does not say %q", text)
		}
	}
}

func (r *running) wait() error {
	r.t.Helper()
	select {
	case err := <-r.ended:
		return err
	case <-sandbox.Expired():
		r.t.Fatal("Run does not return")
		return nil
	}
}

func wantLost(t *testing.T, err error, words string) {
	t.Helper()
	var exit *launch.ExitError
	if !errors.As(err, &exit) || !exit.Lost || exit.Signal != syscall.SIGKILL {
		t.Fatalf("Run returned %v (%T), want a lost agent", err, err)
	}
	if text := err.Error(); !strings.Contains(text, "was lost: its agent: ") || !strings.Contains(text, words) {
		t.Errorf("message %q", text)
	}
}

func wantRefused(t *testing.T, err error, words ...string) {
	t.Helper()
	var startErr *launch.StartError
	if !errors.As(err, &startErr) {
		t.Fatalf("Run returned %v (%T), want a *StartError", err, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("message %q does not say %q", err, w)
		}
	}
}

// cable is a TCP proxy that can be cut, or become silent with its connections open.
type cable struct {
	to   string
	addr string

	mu     sync.Mutex
	conns  map[net.Conn]bool
	silent bool
	budget int // bytes towards the client after which a connection is cut; 0: none
	cuts   int
	closed bool
	woken  *sync.Cond
	wg     sync.WaitGroup
}

func newCable(t *testing.T, to string) *cable {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cable{to: to, addr: ln.Addr().String(), conns: make(map[net.Conn]bool)}
	c.woken = sync.NewCond(&c.mu)
	c.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			c.wg.Go(func() { c.carry(conn) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		c.mu.Lock()
		c.closed = true
		c.mu.Unlock()
		c.cut()
		c.wg.Wait()
	})
	return c
}

func (c *cable) carry(near net.Conn) {
	far, err := net.Dial("tcp", c.to)
	if err != nil {
		near.Close()
		return
	}
	c.mu.Lock()
	if c.closed {
		near.Close()
		far.Close()
	}
	c.conns[near], c.conns[far] = true, true
	c.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() { c.copy(far, near, false) })
	wg.Go(func() { c.copy(near, far, true) })
	wg.Wait()
	c.mu.Lock()
	delete(c.conns, near)
	delete(c.conns, far)
	c.mu.Unlock()
}

func (c *cable) copy(to, from net.Conn, counted bool) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 4096)
	for passed := 0; ; {
		n, err := from.Read(buf)
		c.mu.Lock()
		for c.silent && !c.closed {
			c.woken.Wait()
		}
		passed += n
		over := counted && c.budget > 0 && passed > c.budget
		if over {
			c.cuts++
		}
		c.mu.Unlock()
		if over || err != nil {
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// cut closes all connections; new ones are forwarded.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.conns {
		conn.Close()
	}
	c.woken.Broadcast()
}

func (c *cable) setSilent(silent bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.silent = silent
	c.woken.Broadcast()
}

// TestCutStreamsLoseNothing: a stream that breaks repeatedly loses no byte, neither of what was
// sent nor of what was not.
func TestCutStreamsLoseNothing(t *testing.T) {
	h := newHost(t, 2)
	c := newCable(t, h.addr)
	c.budget = 150_000
	l := agents(t, driverOf(t, "cut"), c.addr, longLease)
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			s, _ := script(t, i, `i=0; while [ $i -lt 30000 ]; do i=$((i+1)); echo "line $i of some length"; done; echo end >&2; exit 7`)
			var out, errOut bytes.Buffer
			s.Stdout, s.Stderr = &out, &errOut
			starts := 0
			err := l.Run(t.Context(), s, func(int) { starts++ })
			var exit *launch.ExitError
			if !errors.As(err, &exit) || exit.Code != 7 || starts != 1 || errOut.String() != "end\n" {
				t.Errorf("%d starts, %v, stderr %q", starts, err, errOut.String())
			}
			var want bytes.Buffer
			for n := range 30000 {
				fmt.Fprintf(&want, "line %d of some length\n", n+1)
			}
			if !bytes.Equal(out.Bytes(), want.Bytes()) {
				t.Errorf("worker %d: %d bytes of output are not the %d that it wrote", i, out.Len(), want.Len())
			}
		})
	}
	wg.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cuts < 5 {
		t.Errorf("the stream was cut %d times only", c.cuts)
	}
	t.Logf("%d cuts", c.cuts)
}

// TestStopAcrossACut: a request that was made without a stream is carried out when there is one
// again.
func TestStopAcrossACut(t *testing.T) {
	h := newHost(t, 1)
	c := newCable(t, h.addr)
	s, pipe := script(t, 0, sleeper)
	s.Grace = time.Hour
	r := start(t, agents(t, driverOf(t, "stop"), c.addr, longLease), s)
	r.awaitOutput("ready")
	c.setSilent(true)
	r.cancel()
	c.cut()
	c.setSilent(false)
	var exit *launch.ExitError
	if err := r.wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGTERM {
		t.Errorf("Run returned %v", err)
	}
	gone(t, pipe)
}

// TestLeaseRunsOut: a silent driver loses its workers and all processes that they started; then
// their slots are free.
func TestLeaseRunsOut(t *testing.T) {
	h := newHost(t, 1)
	c := newCable(t, h.addr)
	s, pipe := script(t, 0, sleeper)
	s.Grace = 10 * time.Second
	r := start(t, agents(t, driverOf(t, "lease"), c.addr, 5*time.Second), s)
	r.awaitOutput("ready")
	c.setSilent(true)
	wantLost(t, r.wait(), "nothing was heard")
	gone(t, pipe)
	idle(t, h)
	other, _ := script(t, 0, "exit 3")
	var exit *launch.ExitError
	err := agents(t, driverOf(t, "next"), h.addr, longLease).Run(t.Context(), other, nil)
	if !errors.As(err, &exit) || exit.Code != 3 {
		t.Errorf("the next worker in the slot: %v", err)
	}
}

// idle waits until the host has no sessions.
func idle(t *testing.T, h *host) {
	t.Helper()
	limit := sandbox.Expired()
	for {
		slots, sessions, news := h.busy()
		if slots == 0 && sessions == 0 {
			return
		}
		select {
		case <-news:
		case <-limit:
			t.Fatalf("%d slots are taken by %d sessions", slots, sessions)
		}
	}
}

// TestLeaseKillsTheDisobedient: a worker that ignores the request to end is killed after its grace,
// without a further request.
func TestLeaseKillsTheDisobedient(t *testing.T) {
	h := newHost(t, 1)
	c := newCable(t, h.addr)
	s, pipe := script(t, 0, `exec 9>"$1"; trap '' TERM; echo ready; while :; do sleep 1; done`)
	s.Grace = 100 * time.Millisecond
	r := start(t, agents(t, driverOf(t, "lease"), c.addr, 5*time.Second), s)
	r.awaitOutput("ready")
	c.setSilent(true)
	gone(t, pipe)
	wantLost(t, r.wait(), "nothing was heard")
}

// TestGoneHostIsLostAtOnce: if others know that the host is gone, the driver does not wait for the
// lease.
func TestGoneHostIsLostAtOnce(t *testing.T) {
	h := newHost(t, 1)
	c := newCable(t, h.addr)
	there := true
	var mu sync.Mutex
	l := client.New(client.Config{
		Credentials: driverOf(t, "gone"), Lease: 5 * time.Second, Log: quiet(),
		Find: func(string) (string, bool) {
			mu.Lock()
			defer mu.Unlock()
			return c.addr, there
		},
	})
	defer l.Close()
	s, pipe := script(t, 0, sleeper)
	r := start(t, l, s)
	r.awaitOutput("ready")
	mu.Lock()
	there = false // as long as the agent answers, the host is not lost: see TestSilenceIsCountedInLooks of agent/client
	mu.Unlock()
	c.setSilent(true)
	wantLost(t, r.wait(), "the host is gone") // and not that the agent was silent for the lease
	gone(t, pipe)
}

// TestFenceBeforeClose: the workers of an agent that counts as gone, but is there, are killed even
// if the driver ends at once.
func TestFenceBeforeClose(t *testing.T) {
	h := newHost(t, 1)
	c := newCable(t, h.addr)
	var known atomic.Bool
	known.Store(true)
	l := client.New(client.Config{
		Credentials: driverOf(t, "fence"), Lease: longLease, Orphan: time.Hour, Log: quiet(),
		Find: func(string) (string, bool) { return c.addr, known.Load() },
	})
	s, pipe := script(t, 0, `exec 9>"$1"; trap '' TERM; echo ready; while :; do sleep 1; done`)
	r := start(t, l, s)
	r.awaitOutput("ready")
	known.Store(false)
	c.cut()
	wantLost(t, r.wait(), "the host is gone")
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	gone(t, pipe)
}

func TestSlots(t *testing.T) {
	h := newHost(t, 2)
	first := agents(t, driverOf(t, "first"), h.addr, longLease)
	second := agents(t, driverOf(t, "second"), h.addr, longLease)
	s, pipe := script(t, 1, sleeper)
	r := start(t, first, s)
	r.awaitOutput("ready")
	other, _ := script(t, 1, "exit 0")
	other.Incarnation = "other"
	wantRefused(t, second.Run(t.Context(), other, nil), "slot 1 of host a is taken by worker "+s.Incarnation+" of run first")
	if used := h.used(); len(used) != 1 || used["first"] != 1 {
		t.Errorf("used: %v", used)
	}
	other.Slot.Index, other.Incarnation = 2, "other-2"
	wantRefused(t, second.Run(t.Context(), other, nil), "slot 2 is out of range: host a has 2 slots")
	other.Slot.Index, other.Incarnation = 0, "other-3"
	if err := second.Run(t.Context(), other, nil); err != nil {
		t.Errorf("a free slot: %v", err)
	}
	h.drain()
	other.Incarnation = "late"
	wantRefused(t, second.Run(t.Context(), other, nil), "draining")
	first.Kill()
	var exit *launch.ExitError
	if err := r.wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGKILL {
		t.Errorf("Run returned %v", err)
	}
	gone(t, pipe)
}

// TestProgram: a worker can run the program of its agent, wherever it is, even if the driver passes
// on another path.
func TestProgram(t *testing.T) {
	h := newHost(t, 1)
	s, _ := script(t, 0, `exec "$HVD_AGENT_PROGRAM" -test.list '^TestProgram$'`)
	s.Env = append(s.Env, plan.EnvAgentProgram+"=/nowhere/hvdrun")
	r := start(t, agents(t, driverOf(t, "run"), h.addr, longLease), s)
	r.awaitOutput("TestProgram")
	if err := r.wait(); err != nil {
		t.Error(err)
	}
}

// TestBadSlot: the failure of a device ends the worker in its slot, and no other.
func TestBadSlot(t *testing.T) {
	h := newHost(t, 2)
	l := agents(t, driverOf(t, "bad"), h.addr, longLease)
	var workers [2]*running
	var pipes [2]*os.File
	for i := range workers {
		s, pipe := script(t, i, sleeper)
		s.Grace = time.Hour
		workers[i], pipes[i] = start(t, l, s), pipe
		workers[i].awaitOutput("ready")
	}
	h.setBad([]int{1})
	var exit *launch.ExitError
	if err := workers[1].wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGKILL {
		t.Errorf("Run returned %v", err)
	}
	gone(t, pipes[1])
	again, _ := script(t, 1, "exit 0")
	again.Incarnation += "-2"
	wantRefused(t, l.Run(t.Context(), again, nil), "the device of slot 1 of host a has failed")
	workers[0].cancel()
	if err := workers[0].wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGTERM {
		t.Errorf("the other worker: %v", err)
	}
	h.setBad(nil)
	again.Incarnation += "-3"
	if err := l.Run(t.Context(), again, nil); err != nil {
		t.Errorf("after it is well again: %v", err)
	}
}

// TestKillCutsGraceShort: Kill also ends workers that were given time to end.
func TestKillCutsGraceShort(t *testing.T) {
	h := newHost(t, 1)
	l := agents(t, driverOf(t, "kill"), h.addr, longLease)
	s, pipe := script(t, 0, `exec 9>"$1"; trap 'echo no' TERM; echo ready; while :; do sleep 0.01; done`)
	s.Grace = time.Hour
	r := start(t, l, s)
	r.awaitOutput("ready")
	r.cancel()
	r.awaitOutput("no")
	l.Kill()
	var exit *launch.ExitError
	if err := r.wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGKILL {
		t.Errorf("Run returned %v", err)
	}
	gone(t, pipe)
}

// TestAnotherSessionOfTheRun: a driver that begins another session of its run has given up the
// previous one: its workers are killed, and the new session is accepted.
func TestAnotherSessionOfTheRun(t *testing.T) {
	h := newHost(t, 1)
	c := newCable(t, h.addr)
	s, pipe := script(t, 0, `exec 9>"$1"; trap '' TERM; echo ready; while :; do sleep 1; done`)
	s.Grace = time.Hour
	r := start(t, agents(t, driverOf(t, "run"), c.addr, longLease), s)
	r.awaitOutput("ready")
	next, _ := script(t, 0, "exit 5")
	next.Incarnation = "next"
	err := agents(t, driverOf(t, "run"), h.addr, longLease).Run(t.Context(), next, nil)
	var exit *launch.ExitError
	if !errors.As(err, &exit) || exit.Code != 5 {
		t.Errorf("Run returned %v", err)
	}
	gone(t, pipe)
	if err := r.wait(); !errors.As(err, &exit) || exit.Signal != syscall.SIGKILL {
		t.Errorf("the worker of the last session: %v", err)
	}
}

// TestOutputIsHeldBack: a worker whose output nobody reads is blocked, and its output is complete
// when reading begins.
func TestOutputIsHeldBack(t *testing.T) {
	h := newHost(t, 2)
	l := agents(t, driverOf(t, "full"), h.addr, longLease)
	const size = 3 << 20
	s, _ := script(t, 0, fmt.Sprintf("head -c %d /dev/zero", size))
	block := &blocked{open: make(chan struct{}), first: make(chan struct{})}
	s.Stdout = block
	ended := make(chan error, 1)
	go func() { ended <- l.Run(t.Context(), s, nil) }()
	<-block.first
	// Meanwhile the agent serves other workers.
	other, _ := script(t, 1, "echo hello; exit 4")
	var out bytes.Buffer
	other.Stdout = &out
	var exit *launch.ExitError
	if err := l.Run(t.Context(), other, nil); !errors.As(err, &exit) || exit.Code != 4 || out.String() != "hello\n" {
		t.Errorf("%v, output %q", err, out.String())
	}
	if kept := h.kept(); kept > window+len(out.String()) {
		t.Errorf("%d bytes are kept, more than %d", kept, window)
	}
	close(block.open)
	if err := <-ended; err != nil || block.n != size {
		t.Errorf("%d bytes of %d, %v", block.n, size, err)
	}
}

// kept returns the number of bytes of output that the driver has not acknowledged.
func (h *host) kept() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sessions {
		for _, e := range s.events {
			n += len(e.GetOutput().GetText())
		}
	}
	return n
}

type blocked struct {
	open, first chan struct{}
	once        sync.Once
	n           int
}

func (b *blocked) Write(text []byte) (int, error) {
	b.once.Do(func() { close(b.first) })
	<-b.open
	b.n += len(text)
	return len(text), nil
}

func TestNoAgent(t *testing.T) {
	l := client.New(client.Config{Find: func(string) (string, bool) { return "", false }, Log: quiet()})
	defer l.Close()
	s, _ := script(t, 0, "echo here; exit 6")
	s.Slot.Host = "nowhere.invalid"
	wantRefused(t, l.Run(t.Context(), s, nil), "host nowhere.invalid has no agent")
}

// unheardOf returns an address at which nothing listens until the test ends.
func unheardOf(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	addr, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", addr.(*syscall.SockaddrInet4).Port)
}

// TestUnreachableAgent: an agent that does not answer is retried for the time of a lease.
func TestUnreachableAgent(t *testing.T) {
	addr := unheardOf(t)
	l := agents(t, driverOf(t, "none"), addr, 300*time.Millisecond)
	s, _ := script(t, 0, "exit 0")
	wantRefused(t, l.Run(t.Context(), s, nil), "the agent at "+addr+" cannot be reached", "nothing was heard from it")
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	wantRefused(t, l.Run(t.Context(), s, nil), "closed")
}

// TestSessionThatCannotBegin: if a session cannot begin on a host, the driver reports it: at once
// if the error is permanent, and otherwise after a lease, with a line in the log before that.
func TestSessionThatCannotBegin(t *testing.T) {
	for _, c := range []struct {
		name  string
		err   error
		fails int // calls that fail
		lease time.Duration
		want  []string // of the error; none: the worker runs
	}{
		{"lasting", unix.ENOENT, math.MaxInt, longLease, []string{"it cannot begin a session: proc: guard: no such file"}},
		{"passing", unix.EAGAIN, 2, longLease, nil},
		{"never passing", unix.EAGAIN, math.MaxInt, 300 * time.Millisecond, []string{"it cannot begin a session: proc: guard: resource temporarily"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t, 1)
			calls := 0
			h.mu.Lock()
			h.guard = func(session, cgroups string) (io.Closer, error) {
				if calls++; calls <= c.fails {
					return nil, fmt.Errorf("proc: guard: %w", c.err)
				}
				return startGuard(session, cgroups)
			}
			h.inspect = Facts{Version: "test"}.inspector(credentials(t, testKey, "blue", identity.Subject{Role: identity.Agent, Host: "a"}))
			h.mu.Unlock()
			log, said := logtest.NewNullLogger()
			s, _ := script(t, 0, "exit 0")
			var a *client.Agents
			var err, inspectErr error
			starved := func(err error) bool {
				return err != nil && strings.Contains(err.Error(), "nothing was heard from it") && !strings.Contains(err.Error(), "it cannot begin")
			}
			for again := true; again; again = starved(err) || starved(inspectErr) { // if the agent was silent for the time of a lease
				a = client.New(client.Config{
					Credentials: driverOf(t, "begin"), Log: log, Lease: c.lease, Find: func(string) (string, bool) { return h.addr, true },
				})
				defer a.Close()
				err = a.Run(t.Context(), s, nil)
				_, inspectErr = a.Inspect(t.Context(), "a")
			}
			if c.want == nil {
				if err != nil || inspectErr != nil {
					t.Errorf("%v; %v", err, inspectErr)
				}
				if e := said.AllEntries(); len(e) == 0 || e[0].Level != logrus.WarnLevel || !strings.Contains(e[0].Message, "resource temporarily") {
					t.Errorf("the log has %v", e)
				}
				return
			}
			wantRefused(t, err, append(c.want, "the agent at "+h.addr+": ")...)
			if failed, ok := errors.AsType[*client.HostError](inspectErr); !ok || !strings.Contains(failed.Error(), c.want[0]) {
				t.Errorf("it is described, with the error %v", inspectErr)
			}
		})
	}
}
