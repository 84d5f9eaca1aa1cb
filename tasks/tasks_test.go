package tasks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/tasks/report"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quiet() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

// place is a scheduler that listens on loopback. Its connections can be cut.
type place struct {
	t     testing.TB
	s     *scheduler.Scheduler
	ln    net.Listener
	wg    sync.WaitGroup
	root  string              // of the stores
	ca    *identity.Authority // authority of the workers that provide values; nil: none does
	creds *identity.Credentials
	mu    sync.Mutex
	conns map[net.Conn]bool
}

func newPlace(t testing.TB, cfg scheduler.Config) *place {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = quiet()
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &place{t: t, ln: ln, conns: map[net.Conn]bool{}, root: cfg.Store.Root}
	if p.root == "" {
		p.root = t.TempDir()
	}
	cfg.Store.Root = p.root
	p.s = scheduler.New(cfg)
	p.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.conns[conn] = true
			p.mu.Unlock()
			p.wg.Go(func() {
				_ = p.scheduler().Handle(context.Background(), conn, identity.Subject{Role: identity.Worker})
				p.mu.Lock()
				delete(p.conns, conn)
				p.mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		p.scheduler().Close()
		p.wg.Wait()
	})
	return p
}

func (p *place) scheduler() *scheduler.Scheduler {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.s
}

// replace ends the scheduler and starts another one without its state.
func (p *place) replace(cfg scheduler.Config) {
	cfg.Log, cfg.Store.Root = quiet(), p.root
	p.mu.Lock()
	old := p.s
	p.s = scheduler.New(cfg)
	p.mu.Unlock()
	old.Close()
}

func (p *place) dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", p.ln.Addr().String())
}

// cut breaks all connections.
func (p *place) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

// serve runs a worker until the test ends or stop is called.
func (p *place) serve(cfg ServeConfig) (stop func()) {
	cfg.Dial, cfg.Log, cfg.root, cfg.run = p.dial, quiet(), p.root, "run"
	if p.ca != nil {
		creds, err := p.ca.Issue(identity.Subject{Role: identity.Worker, Host: cfg.Host, Incarnation: "1"})
		if err != nil {
			p.t.Fatal(err)
		}
		cfg.credentials = creds
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := Serve(ctx, cfg); err != nil {
			p.t.Errorf("Serve returned %v", err)
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
	})
	p.t.Cleanup(stop)
	return stop
}

func (p *place) connect(cfg ConnectConfig) *Pool {
	p.t.Helper()
	cfg.Dial, cfg.Log = p.dial, quiet()
	pool, err := Connect(context.Background(), cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { pool.Close() })
	return pool
}

type shape struct {
	Name  string
	Sides []int
}

var (
	double = Register[int]("double/v1", func(_ context.Context, n int) (int, error) { return 2 * n, nil })
	sum    = Register[int]("sum/v1", func(_ context.Context, all ...int) (n int, _ error) {
		for _, a := range all {
			n += a
		}
		return n, nil
	})
	grow = Register[shape]("grow/v1", func(_ context.Context, s shape, by float64) (shape, error) {
		for i := range s.Sides {
			s.Sides[i] = int(float64(s.Sides[i]) * by)
		}
		return s, nil
	})
	fails  = Register[None]("fails/v1", func(context.Context) error { return errors.New("it is Tuesday") })
	panics = Register[string]("panics/v1", func(context.Context) (string, error) { panic("no") })
	waits  = Register[string]("waits/v1", func(ctx context.Context) (string, error) {
		waiting.Add(1)
		<-ctx.Done()
		return "", ctx.Err()
	})
	takesNone = Register[string]("takesNone/v1", func(context.Context, None) (string, error) { return "", nil })
	waiting   atomic.Int32
)

func get[R any](t *testing.T, f *Future[R], err error) R {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithDeadline(t.Context(), sandbox.Limit())
	defer cancel()
	r, err := f.Get(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestCalls(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{Host: "a"})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	f, err := double.Submit(ctx, pool, 21)
	if n := get(t, f, err); n != 42 {
		t.Errorf("double returned %d", n)
	}
	g, err := grow.With(Priority(3), Prefer("a")).Submit(ctx, pool, shape{"box", []int{1, 2}}, 2)
	if s := get(t, g, err); s.Name != "box" || len(s.Sides) != 2 || s.Sides[1] != 4 {
		t.Errorf("grow returned %+v", s)
	}
	h, err := double.Submit(ctx, pool, f) // the argument's task is over
	if err != nil {
		t.Fatal(err)
	}
	i, err := sum.Submit(ctx, pool, h, h, 1) // the arguments' task may still run
	if n := get(t, i, err); n != 169 {
		t.Errorf("sum returned %d", n)
	}
	all, err := Map(ctx, pool, double, []int{1, 2, 3})
	if err != nil || fmt.Sprint(all) != "[2 4 6]" {
		t.Errorf("Map returned %v, %v", all, err)
	}
}

func TestErrors(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	var failed *FunctionError
	if _, err := fails.Call(ctx, pool); !errors.As(err, &failed) || err.Error() != "tasks: fails/v1: it is Tuesday" {
		t.Errorf("fails: %v", err)
	}
	if _, err := panics.Call(ctx, pool); !errors.As(err, &failed) || err.Error() != "tasks: panics/v1: panic: no" || !strings.Contains(failed.Stack, "tasks_test.go") {
		t.Errorf("panics: %v", err)
	}
	f, err := waits.Submit(ctx, pool)
	if err != nil {
		t.Fatal(err)
	}
	for waiting.Load() == 0 {
		<-time.After(time.Millisecond)
	}
	f.Cancel()
	if _, err := f.Get(ctx); !errors.Is(err, ErrCancelled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := waits.With(TimeLimit(20*time.Millisecond)).Call(ctx, pool); !errors.Is(err, ErrTimeLimit) {
		t.Errorf("time limit: %v", err)
	}
	bad, err := fails.Submit(ctx, pool)
	if err != nil {
		t.Fatal(err)
	}
	var dependency *DependencyError
	if _, err := takesNone.Call(ctx, pool, bad); !errors.As(err, &dependency) || !strings.Contains(err.Error(), "it is Tuesday") {
		t.Errorf("dependency: %v", err)
	}
	for says, submit := range map[string]func() error{
		"double/v1 takes 1 arguments, not 2": func() error { _, err := double.Submit(ctx, pool, 1, 2); return err },
		"double/v1 takes 1 arguments, not 0": func() error { _, err := double.Submit(ctx, pool); return err },
		"argument 1 is a string, not a int":  func() error { _, err := double.Submit(ctx, pool, "1"); return err },
		"argument 1 is a Future of tasks.None, not of int": func() error {
			_, err := double.Submit(ctx, pool, bad)
			return err
		},
	} {
		if err := submit(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
		}
	}
	pool.Close()
	if _, err := double.Submit(ctx, pool, 1); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestBrokenConnections: tasks and results survive broken connections, each result arrives once,
// and nothing is lost when workers come or leave.
func TestBrokenConnections(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	leave := p.serve(ServeConfig{Offers: map[string]float64{"cpu": 2}})
	p.serve(ServeConfig{Offers: map[string]float64{"cpu": 2}})
	pool := p.connect(ConnectConfig{})
	n := 20_000
	if testing.Short() {
		n = 4_000
	}
	futures := make([]*Future[int], n)
	for i := range futures {
		f, err := double.Submit(t.Context(), pool, i)
		if err != nil {
			t.Fatal(err)
		}
		futures[i] = f
		if i%(n/10) == n/20 {
			p.cut()
		}
		if i == n/2 {
			leave()
		}
	}
	p.cut()
	for i, f := range futures {
		if got := get(t, f, nil); got != 2*i {
			t.Fatalf("task %d returned %d", i, got)
		}
	}
}

// TestRunAll: each worker gets one call, however busy it is; a lost worker is not replaced.
func TestRunAll(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	for _, host := range []string{"a", "b", "c"} {
		p.serve(ServeConfig{Host: host})
	}
	pool := p.connect(ConnectConfig{})
	followed := make(map[string]bool)
	for len(followed) < 3 { // until all have joined
		s, err := pool.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range s.Workers {
			followed[w.Host] = true
		}
	}
	for range 20 {
		all, err := RunAll(t.Context(), pool, double, 4)
		if err != nil || fmt.Sprint(all) != "[8 8 8]" {
			t.Fatalf("%v, %v", all, err)
		}
	}
	s, err := pool.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range s.Workers {
		if w.Done != 20 {
			t.Errorf("worker %s has run %d calls", w.Host, w.Done)
		}
	}
}

// TestRunAllWithout: RunAll leaves out a worker that is leaving, and fails if a worker lacks the
// function.
func TestRunAllWithout(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{Host: "a"})
	leave := p.serve(ServeConfig{Host: "b", Offers: map[string]float64{"b": 1}})
	pool := p.connect(ConnectConfig{})
	waiting.Store(0)
	busy, err := waits.With(Resource("b", 1)).Submit(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if !follow.Await(t, func() bool { return waiting.Load() == 1 }) {
		t.Fatal("the task does not begin")
	}
	var leaving sync.WaitGroup
	leaving.Go(leave)
	defer leaving.Wait()
	defer busy.Cancel()
	workers := func(is func(Status) bool) bool {
		return follow.Await(t, func() bool {
			s, err := pool.Status(t.Context())
			return err == nil && is(s)
		})
	}
	if !workers(func(s Status) bool { return len(s.Workers) == 2 && (s.Workers[0].Leaving || s.Workers[1].Leaving) }) {
		t.Fatal("the worker does not leave")
	}
	if all, err := RunAll(t.Context(), pool, double, 4); err != nil || fmt.Sprint(all) != "[8]" {
		t.Errorf("beside a worker that leaves: %v, %v", all, err)
	}
	p.serve(ServeConfig{Host: "c", without: map[string]bool{double.fn.name: true}})
	if !workers(func(s Status) bool {
		return slices.ContainsFunc(s.Workers, func(w report.WorkerStatus) bool { return w.Host == "c" })
	}) {
		t.Fatal("the other worker does not come")
	}
	if _, err := RunAll(t.Context(), pool, double, 4); !errors.Is(err, ErrWorkerLost) || !strings.Contains(err.Error(), "has no such function") {
		t.Errorf("beside a worker without the function: %v", err)
	}
}

// TestMapFails: Map returns the first error although its window has no room for the remaining
// tasks, and cancels the submitted ones.
func TestMapFails(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{})
	pool := p.connect(ConnectConfig{Window: 2})
	var failed *FunctionError
	firsts.Store(0)
	if _, err := Map(t.Context(), pool, first, make([]int, 10)); !errors.As(err, &failed) || failed.Text != "it is the first" {
		t.Error(err)
	}
	if !follow.Await(t, func() bool {
		s, err := pool.Status(t.Context())
		return err == nil && s.Waiting+s.Ready+s.Running == 0
	}) {
		t.Error("the other tasks are not cancelled")
	}
}

// first fails at its first call, and waits at others.
var (
	first = Register[int]("first/v1", func(ctx context.Context, _ int) (int, error) {
		if firsts.Add(1) == 1 {
			return 0, errors.New("it is the first")
		}
		<-ctx.Done()
		return 0, ctx.Err()
	})
	firsts atomic.Int32
)

// TestAdmission: a worker that refuses gets no task until it is asked again.
func TestAdmission(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	var busy atomic.Bool
	busy.Store(true)
	refused := wake.New()
	p.serve(ServeConfig{Offers: map[string]float64{"cpu": 1}, Admit: func(function string) error {
		if function != double.Name() || !busy.Load() {
			return nil
		}
		refused.Set()
		return errors.New("it trains")
	}})
	pool := p.connect(ConnectConfig{})
	f, err := double.Submit(t.Context(), pool, 1)
	if err != nil {
		t.Fatal(err)
	}
	<-refused
	// The worker runs one task at a time: if it had the refused task, that would end first.
	if _, err := sum.Call(t.Context(), pool, 1); err != nil {
		t.Fatal(err)
	}
	select {
	case <-f.Done():
		t.Fatal("a worker that has refused has run a task")
	default:
	}
	busy.Store(false)
	if n := get(t, f, nil); n != 2 {
		t.Errorf("it returned %d", n)
	}
}

// TestRan: the scheduler reports what a worker has run, and for how long.
func TestRan(t *testing.T) {
	type ran struct {
		worker, function string
		took             time.Duration
	}
	told := make(chan ran, 10)
	p := newPlace(t, scheduler.Config{Ran: func(worker, function string, began, ended time.Time) {
		told <- ran{worker, function, ended.Sub(began)}
	}})
	p.serve(ServeConfig{Name: "w"})
	pool := p.connect(ConnectConfig{})
	began := time.Now()
	if _, err := double.Call(t.Context(), pool, 1); err != nil {
		t.Fatal(err)
	}
	got := <-told
	if got.worker != "w" || got.function != double.Name() || got.took < 0 || got.took > time.Since(began) {
		t.Errorf("it is told %+v", got)
	}
}
