package torchrun

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/tcpstore"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

// shell returns an agent whose workers run a script.
func shell(t *testing.T, workers int, script string, more func(*Config)) *Agent {
	t.Helper()
	cfg := Config{Rendezvous: new(Single), Workers: workers, Launcher: launch.Local{}, Env: []string{"PATH=" + os.Getenv("PATH")}}
	if more != nil {
		more(&cfg)
	}
	a := newAgent(t, cfg)
	a.cfg.Command = []string{"/bin/sh", "-c", script, "sh", "${local_rank}"}
	return a
}

// TestScenarioA12: two of three workers fail, and the launcher's error file is a copy of that of
// the first failure.
func TestScenarioA12(t *testing.T) {
	file := filepath.Join(t.TempDir(), "error.json")
	a := shell(t, 3, `
case $RANK in
0 | 1)
	printf '%s' '{"message": {"message": "rank '$RANK' is broken", "extraInfo": {"py_callstack": "Traceback\n  line", "timestamp": "12'$RANK'"}}}' >$TORCHELASTIC_ERROR_FILE
	exit 1 ;;
esac
sleep 100`, func(c *Config) { c.ErrorFile = file })
	var failed *FailedError
	if err := a.Run(t.Context()); !errors.As(err, &failed) {
		t.Fatal(err)
	}
	root := failed.Root()
	if root.Rank > 1 || root.ExitCode != 1 || root.Message != fmt.Sprintf("rank %d is broken", root.Rank) || root.Traceback == "" {
		t.Errorf("%+v", root)
	}
	if at := root.Time.Unix(); at != 120+int64(root.Rank) {
		t.Errorf("it failed at %d", at)
	}
	own, err1 := os.ReadFile(root.ErrorFile)
	copied, err2 := os.ReadFile(file)
	if err1 != nil || err2 != nil || !bytes.Equal(own, copied) || !json.Valid(copied) {
		t.Errorf("%v, %v: %s, %s", err1, err2, own, copied)
	}
	for _, want := range []string{"FAILED", "Root Cause", "rank      : " + fmt.Sprint(root.Rank), "exitcode  : 1", "Traceback\n    line"} {
		if !strings.Contains(failed.Report(), want) {
			t.Errorf("the report lacks %q:\n%s", want, failed.Report())
		}
	}
}

// TestSignalsReachWorkers: a worker gets the signal of its agent, which waits until the worker has
// exited.
func TestSignalsReachWorkers(t *testing.T) {
	var out bytes.Buffer
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	ready := &lineWatch{line: "ready", seen: func() { cancel(errTold) }}
	a := shell(t, 1, `trap 'echo got INT; exit 3' INT; echo ready; while :; do sleep 0.01; done`, func(c *Config) {
		c.SignalOf = sigint
		c.Logs.Stdout = io.MultiWriter(&out, ready)
	})
	if err := a.Run(ctx); !errors.Is(err, errTold) {
		t.Error(err)
	}
	if !strings.Contains(out.String(), "got INT\n") {
		t.Errorf("the worker wrote %q", &out)
	}
}

// TestShutdownTimeout: a worker that ignores the signal is killed after the timeout.
func TestShutdownTimeout(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	ready := &lineWatch{line: "ready", seen: func() { cancel(errTold) }}
	a := shell(t, 1, `trap '' TERM; echo ready; while :; do sleep 0.01; done`, func(c *Config) {
		c.ShutdownTimeout = 50 * time.Millisecond
		c.Logs.Stdout = ready
	})
	if err := a.Run(ctx); !errors.Is(err, errTold) {
		t.Error(err)
	}
}

// lineWatch calls seen at the first write that contains the line.
type lineWatch struct {
	line string
	seen func()
	once sync.Once
}

func (l *lineWatch) Write(b []byte) (int, error) {
	if strings.Contains(string(b), l.line) {
		l.once.Do(l.seen)
	}
	return len(b), nil
}

// TestOutput: redirects, tee, prefix and filter.
func TestOutput(t *testing.T) {
	var stdout, stderr bytes.Buffer
	dir := t.TempDir()
	a := shell(t, 3, `echo out $1; echo err $1 >&2`, func(c *Config) {
		c.Role = "trainer"
		c.Logs = Logs{Dir: dir, Redirects: Streams{Of: map[int]Std{0: 1}}, Tee: Streams{Of: map[int]Std{1: 3}}, Shown: map[int]bool{0: true, 1: true},
			Stdout: &stdout, Stderr: &stderr, Template: "<${role_name} ${rank}/${local_rank}> "}
	})
	if err := a.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := stdout.String(), "<trainer 1/1> out 1\n"; got != want {
		t.Errorf("stdout %q, want %q", got, want)
	}
	if got := stderr.String(); !strings.Contains(got, "err 0\n") || !strings.Contains(got, "<trainer 1/1> err 1\n") || strings.Contains(got, "err 2") {
		t.Errorf("stderr %q", got)
	}
	for name, want := range map[string]string{"0/stdout.log": "out 0\n", "1/stdout.log": "out 1\n", "1/stderr.log": "err 1\n"} {
		files, _ := filepath.Glob(filepath.Join(dir, "test_*", "attempt_0", name))
		if len(files) != 1 {
			t.Errorf("%s: %v", name, files)
			continue
		}
		if text, err := os.ReadFile(files[0]); err != nil || string(text) != want {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "test_*", "attempt_0", "*", "*.log")); len(files) != 3 {
		t.Errorf("%v", files)
	}
}

func TestParseStreams(t *testing.T) {
	for text, want := range map[string][3]Std{"0": {}, "3": {3, 3, 3}, "0:3,2:1": {3, 0, 1}} {
		s, err := ParseStreams(text)
		if got := [3]Std{s.of(0), s.of(1), s.of(2)}; err != nil || got != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"4", "-1", "x", "0:4", "x:1", "1:", ":1"} {
		if _, err := ParseStreams(text); err == nil {
			t.Errorf("%s is taken", text)
		}
	}
	if err := (Logs{Dir: os.DevNull, Tee: Streams{All: 1}}).check(); err == nil {
		t.Error("files in /dev/null are taken")
	}
}

// TestEnvironment: a worker's environment has the variables of its round and those that it
// inherits.
func TestEnvironment(t *testing.T) {
	a := newAgent(t, Config{Rendezvous: new(Single), Workers: 2, MaxRestarts: 5, Role: "trainer", VirtualLocalRank: true,
		Env: []string{"TORCH_NCCL_ASYNC_ERROR_HANDLING=0", "CUDA_VISIBLE_DEVICES=4,7", "RANK=99", "OTHER=kept"}})
	p := place{round: Round{Rank: 1, World: 2, Restarts: 2}, ranks: ranks{4, 6, 3, 5}, host: "127.0.0.1", port: 1234}
	env := a.environment(p, 1, paths{errorFile: "/e"}, "life")
	for name, want := range map[string]string{
		"LOCAL_RANK": "0", "RANK": "5", "GROUP_RANK": "1", "ROLE_RANK": "4", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6",
		"GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "5", "ROLE_NAME": "trainer", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234",
		"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "5", "TORCHELASTIC_RUN_ID": "test",
		"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/e", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
		"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "7", "OTHER": "kept",
	} {
		if got, _ := lookup(env, name); got != want {
			t.Errorf("%s=%s, want %s", name, got, want)
		}
	}
}

// dismissed is a rendezvous without room for the node, which then ends without an error.
type dismissed struct{ Single }

func (*dismissed) Next(context.Context, bool) (Round, error) { return Round{}, dynamic.ErrDismissed }

func TestScenarioA9(t *testing.T) {
	if err := newAgent(t, Config{Rendezvous: &dismissed{}}).Run(t.Context()); err != nil {
		t.Error(err)
	}
}

// stopper returns the life of a worker that runs until it is stopped or done is closed.
func stopper(done <-chan struct{}) func(context.Context, *launch.Spec) error {
	return func(ctx context.Context, _ *launch.Spec) error {
		select {
		case <-ctx.Done():
			return &launch.ExitError{Code: 143, Signal: syscall.SIGTERM}
		case <-done:
			return nil
		}
	}
}

// TestScenarioA14: one of two nodes is lost and returns, and the job continues.
func TestScenarioA14(t *testing.T) {
	done := make(chan struct{})
	f := &fake{life: stopper(done)}
	agents := static(t, []int{1, 1}, f)
	first := make(chan error, 1)
	go func() { first <- agents[0].Run(t.Context()) }()
	ctx, cancel := context.WithCancelCause(t.Context())
	lost := make(chan error, 1)
	go func() { lost <- agents[1].Run(ctx) }()
	f.await(2)
	cancel(errTold)
	if err := <-lost; !errors.Is(err, errTold) {
		t.Error(err)
	}
	s := agents[1].cfg.Rendezvous.(*Static)
	peers, err := NewPeers(make([]byte, 32), "test", "127.0.0.1", discard())
	if err != nil {
		t.Fatal(err)
	}
	back := newAgent(t, Config{Peers: peers, Launcher: f, MaxRestarts: 3, Rendezvous: &Static{
		Node: 1, Nodes: 2, Addr: s.Addr, Peers: peers, Log: discard(), Timeout: time.Minute}})
	second := make(chan error, 1)
	go func() { second <- back.Run(t.Context()) }()
	f.await(4)
	close(done)
	if err := errors.Join(<-first, <-second); err != nil {
		t.Error(err)
	}
	if agents[0].machine.left != 3 {
		t.Errorf("%d restarts are left of 3", agents[0].machine.left)
	}
}

// meeting returns an agent of a dynamic rendezvous.
func meeting(t *testing.T, s store.Store, least, most, workers int, f launch.Launcher) *Agent {
	t.Helper()
	peers, err := NewPeers(make([]byte, 32), "test", "127.0.0.1", discard())
	if err == nil {
		_, err = peers.Listen("127.0.0.1:0")
	}
	if err != nil {
		t.Fatal(err)
	}
	h, err := dynamic.New(dynamic.Config{Store: s, Log: discard(), Settings: dynamic.Settings{
		RunID: "test", MinNodes: least, MaxNodes: most, LastCall: 100 * time.Millisecond}})
	if err != nil {
		t.Fatal(err)
	}
	d := &Dynamic{Handler: h, Peers: peers, End: peers.Close}
	return newAgent(t, Config{Rendezvous: d, Peers: peers, Launcher: f, Workers: workers, MaxRestarts: 3})
}

// TestScenarioA15: a job of one to three nodes grows to three; one leaves, and the others continue.
func TestScenarioA15(t *testing.T) {
	done := make(chan struct{})
	f := &fake{life: stopper(done)}
	s := new(storetest.Memory)
	world := func(n string) func() bool {
		return func() bool {
			last := f.specs[max(0, len(f.specs)-len(n)):]
			count := 0
			for _, spec := range last {
				if v, _ := lookup(spec.Env, "WORLD_SIZE"); v == fmt.Sprint(len(n)) {
					count++
				}
			}
			return count == len(n)
		}
	}
	ends := make(chan error, 3)
	start := func(ctx context.Context) {
		a := meeting(t, s, 1, 3, 1, f)
		go func() { ends <- a.Run(ctx) }()
	}
	start(t.Context())
	f.until(world("x"))
	start(t.Context())
	f.until(world("xx"))
	ctx, cancel := context.WithCancelCause(t.Context())
	start(ctx)
	f.until(world("xxx"))
	cancel(errTold)
	f.until(world("xx"))
	close(done)
	told := 0
	for range 3 {
		switch err := <-ends; {
		case errors.Is(err, errTold):
			told++
		case err != nil:
			t.Error(err)
		}
	}
	if told != 1 {
		t.Errorf("%d agents were told to stop", told)
	}
}

// TestWorkersStores: the workers of all nodes share one store, which strangers cannot use.
func TestWorkersStores(t *testing.T) {
	var mu sync.Mutex
	addrs := map[string]string{}
	f := &fake{}
	both := make(chan struct{})
	f.life = func(ctx context.Context, s *launch.Spec) error {
		host, _ := lookup(s.Env, "MASTER_ADDR")
		port, _ := lookup(s.Env, "MASTER_PORT")
		rank, _ := lookup(s.Env, "RANK")
		mu.Lock()
		addrs[rank] = net.JoinHostPort(host, port)
		if len(addrs) == 2 {
			close(both)
		}
		mu.Unlock()
		conn, err := net.Dial("tcp", net.JoinHostPort(host, port))
		if err != nil {
			return err
		}
		c, err := tcpstore.NewClient(conn, rank == "1")
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.Set(ctx, "from-"+rank, []byte("hello")); err != nil {
			return err
		}
		return c.Wait(ctx, "from-0", "from-1")
	}
	runStatic(t, []int{1, 1}, f)
	<-both
	if addrs["0"] == addrs["1"] || !strings.HasPrefix(addrs["1"], "127.") {
		t.Errorf("%v", addrs)
	}
	for _, end := range f.ends {
		if end != nil {
			t.Error(end)
		}
	}
	s, err := serveStore(0, nil, func(net.Conn) error { return errors.New("a stranger") }, discard())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c, err := tcpstore.NewClient(conn, false)
	if err == nil {
		_, err = c.Add(t.Context(), "k", 1)
	}
	if err == nil {
		t.Error("a stranger is served")
	}
}

// TestOtherKeys: an agent with another key or of another job cannot use the store.
func TestOtherKeys(t *testing.T) {
	peers, err := NewPeers(make([]byte, 32), "test", "127.0.0.1", discard())
	if err != nil {
		t.Fatal(err)
	}
	addr, err := peers.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	peers.answer(agentsStore.of(0), func(conn net.Conn) error { return tcpstore.Serve(conn, new(tcpstore.Store)) })
	over, cancel := context.WithCancel(t.Context())
	defer peers.Close(over)
	defer cancel()
	other := make([]byte, 32)
	other[0] = 1
	for name, c := range map[string]struct {
		key   []byte
		runID string
		let   bool
	}{"same": {make([]byte, 32), "test", true}, "key": {other, "test", false}, "run": {make([]byte, 32), "other", false}, "none": {nil, "test", false}} {
		p, err := NewPeers(c.key, c.runID, "127.0.0.1", discard())
		if err != nil {
			t.Fatal(err)
		}
		conn, err := p.dial(t.Context(), addr.String(), agentsStore.of(0))
		if err == nil {
			client, cerr := tcpstore.NewClient(conn, false)
			if err = cerr; err == nil {
				_, err = client.Add(t.Context(), "k", 1)
			}
			conn.Close()
		}
		if (err == nil) != c.let {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestHealth: the agent answers HTTP requests while it runs.
func TestHealth(t *testing.T) {
	var h health
	if err := h.open("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + h.addr() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || resp.StatusCode != http.StatusOK || string(text) != "alive\n" {
		t.Errorf("%d %q %v", resp.StatusCode, text, err)
	}
	if err := h.close(); err != nil {
		t.Error(err)
	}
}

func TestTimers(t *testing.T) {
	var ts timers
	take := func(line string) {
		t.Helper()
		if err := ts.take([]byte(line)); err != nil {
			t.Fatal(err)
		}
	}
	take(`{"version": 1, "pid": 7, "scope_id": "a", "expiration_time": 100.5, "signal": 9}`)
	take(`{"version": 1, "pid": 7, "scope_id": "b", "expiration_time": 90, "signal": 15}`)
	take(`{"version": 1, "pid": 8, "scope_id": "a", "expiration_time": 200, "signal": 9}`)
	take(`{"version": 1, "pid": 9, "scope_id": "a", "expiration_time": 50, "signal": 9}`)
	take(`{"version": 1, "pid": 9, "scope_id": "a", "expiration_time": -1, "signal": 9}`)
	if next := ts.next(); !next.Equal(time.Unix(90, 0)) {
		t.Errorf("the first expires at %v", next)
	}
	if due := ts.due(time.Unix(89, 0)); len(due) != 0 {
		t.Errorf("%v", due)
	}
	due := ts.due(time.Unix(101, 0))
	if len(due) != 1 || due[0] != (expiry{7, "b", 15}) || len(ts.of) != 1 {
		t.Errorf("%v, %v", due, ts.of)
	}
	if err := ts.take([]byte("no json")); err == nil {
		t.Error("a malformed line is taken")
	}
}

// TestTimerInParts: a request that arrives in parts is not lost if a timer expires in between.
func TestTimerInParts(t *testing.T) {
	f, err := newFileTimer("", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	soon := float64(time.Now().Add(10*time.Millisecond).UnixMilli()) / 1e3
	for _, part := range []struct{ text, scope string }{
		{fmt.Sprintf(`{"pid": 7, "scope_id": "first", "expiration_time": %f}`+"\n"+`{"pid": 7, "scope_id": "sec`, soon), "first"},
		{`ond", "expiration_time": 1}` + "\n", "second"},
	} {
		if _, err := f.fifo.WriteString(part.text); err != nil {
			t.Fatal(err)
		}
		if e := <-f.expired(); e.scope != part.scope {
			t.Errorf("%+v, want %s", e, part.scope)
		}
	}
}

// TestFileTimer: a worker whose timer expires gets the signal that it has asked for.
func TestFileTimer(t *testing.T) {
	a := shell(t, 1, `echo "{\"version\": 1, \"pid\": $$, \"scope_id\": \"s\", \"expiration_time\": 1, \"signal\": 9}" >$TORCHELASTIC_TIMER_FILE
while :; do sleep 0.01; done`, func(c *Config) { c.FileTimer = true })
	var failed *FailedError
	if err := a.Run(t.Context()); !errors.As(err, &failed) || failed.Root().ExitCode != -int(syscall.SIGKILL) {
		t.Errorf("%v", err)
	}
}
