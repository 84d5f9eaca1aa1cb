package bridge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scaler"
	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// aPool is a pool that workers of Scaler may join.
type aPool struct {
	t       *testing.T
	address string
	client  *tasks.Pool
	dial    func(context.Context) (net.Conn, error)
	stop    context.CancelFunc
	ended   chan error
}

func quietLog() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func servePool(t *testing.T, cfg ServeConfig) *aPool {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := scheduler.New(scheduler.Config{Log: quietLog(), WorkerGrace: 50 * time.Millisecond})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { _ = s.Handle(context.Background(), conn, identity.Subject{Role: identity.Worker}) })
		}
	})
	p := &aPool{t: t, ended: make(chan error, 1), dial: func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
	}}
	if p.client, err = tasks.Connect(t.Context(), tasks.ConnectConfig{Dial: p.dial, Log: quietLog()}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	ready := make(chan string, 1)
	if cfg.Listen == "" {
		cfg.Listen = "tcp://127.0.0.1:0"
	}
	cfg.Dial, cfg.Ready = p.dial, func(address string) { ready <- address }
	if cfg.Log == nil {
		cfg.Log = quietLog()
	}
	var serving sync.WaitGroup
	serving.Go(func() { p.ended <- Serve(ctx, cfg) })
	p.address = <-ready
	t.Cleanup(func() {
		stop()
		serving.Wait() // workers leave in order, for which they need the scheduler
		p.client.Close()
		ln.Close()
		s.Close()
		wg.Wait()
	})
	return p
}

// joins connects a worker that a test plays, with so many processors.
func (p *aPool) joins(name string, processors int) *guest {
	p.t.Helper()
	g := p.connects(fmt.Sprintf("1|%s|%032d", name, 0))
	g.send(&scaler.Heartbeat{Processors: make([]scaler.Processor, processors)})
	return g
}

func (p *aPool) connects(id string) *guest {
	p.t.Helper()
	ctx, cancel := context.WithDeadline(p.t.Context(), sandbox.Limit())
	defer cancel()
	conn, err := zmtp.Dial(ctx, p.address, zmtp.Config{Role: zmtp.Dealer, Identity: []byte(id)})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	return &guest{p.t, conn, []byte(id)}
}

// guest is a worker that a test plays.
type guest struct {
	t *testing.T
	*zmtp.Conn
	id []byte
}

func (g *guest) send(all ...scaler.Message) {
	g.t.Helper()
	for _, m := range all {
		if err := g.Write(scaler.Encode(m)); err != nil {
			g.t.Fatal(err)
		}
	}
}

// await returns the next message of a type; others are passed over.
func await[M scaler.Message](g *guest) M {
	g.t.Helper()
	for {
		frames, err := g.Read()
		if err != nil {
			g.t.Fatal(err)
		}
		m, err := scaler.Decode(frames)
		if err != nil {
			g.t.Fatal(err)
		}
		if m, ok := m.(M); ok {
			return m
		}
	}
}

// ends reads until the connection ends.
func (g *guest) ends() {
	g.t.Helper()
	for {
		if _, err := g.Read(); err != nil {
			return
		}
	}
}

// succeeds sends the result of a task.
func (g *guest) succeeds(t *scaler.Task, content string) {
	g.t.Helper()
	id := scaler.ObjectID(t.Source, t.ID)
	g.send(
		&scaler.ObjectInstruction{Kind: scaler.Create, User: t.Source, Objects: scaler.Objects{IDs: [][]byte{id}, Names: [][]byte{b("res")}, Contents: [][]byte{b(content)}}},
		&scaler.TaskResult{ID: t.ID, Status: scaler.Success, Profile: scaler.Profile{Absent: true}, Results: [][]byte{id}},
	)
}

// fails sends a failure of a task.
func (g *guest) fails(t *scaler.Task, exception []byte) {
	g.t.Helper()
	id := scaler.ObjectID(t.Source, t.ID)
	g.send(
		&scaler.ObjectInstruction{Kind: scaler.Create, User: t.Source, Objects: scaler.Objects{IDs: [][]byte{id}, Names: [][]byte{b("res")}, Contents: [][]byte{exception}}},
		&scaler.TaskResult{ID: t.ID, Status: scaler.Failed, Profile: scaler.Profile{Absent: true}, Results: [][]byte{id}},
	)
}

func named(t *testing.T, name string, options ...tasks.Option) *Function {
	t.Helper()
	f, err := Named(name)
	if err != nil {
		t.Fatal(err)
	}
	return f.With(options...)
}

func (p *aPool) submit(f *Function, args ...any) *tasks.Future[[]byte] {
	p.t.Helper()
	t, err := f.Submit(p.t.Context(), p.client, args...)
	if err != nil {
		p.t.Fatal(err)
	}
	return t
}

func (p *aPool) get(f *tasks.Future[[]byte]) string {
	p.t.Helper()
	got, err := f.Get(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	return string(got)
}

// TestServeWork: workers in Go join a pool in Go.
func TestServeWork(t *testing.T) {
	p := servePool(t, ServeConfig{})
	_, ended := work(t, scaler.Config{Address: p.address, Functions: testFunctions(), Name: "go", Slots: 4})
	norm := named(t, "norm")
	var futures []*tasks.Future[[]byte]
	for i := range 500 {
		futures = append(futures, p.submit(norm, square{float64(i), 1}))
	}
	for i, f := range futures {
		if got, want := p.get(f), fmt.Sprint(i*i+1); got != want {
			t.Errorf("task %d: %s, want %s", i, got, want)
		}
	}
	for function, want := range map[string]string{"panic": "RuntimeError: scaler: the function panics: no such shard", "none": `LookupError: no function "none"`} {
		var failed *tasks.FunctionError
		if err := named(t, function).Call(t.Context(), p.client, new(any), 1); !errors.As(err, &failed) || !strings.Contains(failed.Text, want) {
			t.Errorf("%s: %v", function, err)
		}
	}
	// The result of one task is the argument of another.
	echo := named(t, "echo")
	if got := p.get(p.submit(echo, p.submit(norm, square{1, 2}))); got != "5" {
		t.Errorf("echo: %s", got)
	}
	s, err := p.client.Status(t.Context())
	if err != nil || len(s.Workers) != 1 || !strings.HasPrefix(s.Workers[0].Name, "go:") || s.Workers[0].Offers != "cpu=4,scaler:go=4" {
		t.Errorf("%+v, %v", s.Workers, err)
	}
	// A cancelled task gives its place free.
	var waiting []*tasks.Future[[]byte]
	for range 4 {
		waiting = append(waiting, p.submit(named(t, "wait"), 1))
	}
	for _, f := range waiting {
		f.Cancel()
	}
	if got := p.get(p.submit(norm, square{3, 4})); got != "25" {
		t.Errorf("after the cancels: %s", got)
	}
	p.stop()
	if err := <-ended; err != nil {
		t.Errorf("Work returns %v", err)
	}
	if err := <-p.ended; err != nil {
		t.Errorf("Serve returns %v", err)
	}
}

// TestServeDeath: the connection of a worker breaks, and it does not come back. What it ran runs
// elsewhere; its late results, by another connection, are refused.
func TestServeDeath(t *testing.T) {
	p := servePool(t, ServeConfig{Return: 20 * time.Millisecond})
	first := p.joins("first", 1)
	f := p.submit(named(t, "f"), 1)
	old := await[*scaler.Task](first)
	first.Close()
	second := p.joins("second", 1)
	again := await[*scaler.Task](second)
	if bytes.Equal(again.ID, old.ID) {
		t.Error("both attempts have the same id")
	}
	late := p.connects("1|late|0")
	late.succeeds(old, `"late"`)
	late.send(&scaler.DisconnectRequest{Worker: b("1|none|0")}, &scaler.Heartbeat{})
	await[*scaler.HeartbeatEcho](late)
	await[*scaler.HeartbeatEcho](late) // and so the late result has been read
	second.succeeds(again, `"right"`)
	if got := p.get(f); got != `"right"` {
		t.Errorf("the result is %s", got)
	}
}

// TestServeSilence: a worker that is silent, over a connection that does not break, is lost.
func TestServeSilence(t *testing.T) {
	p := servePool(t, ServeConfig{Silence: 100 * time.Millisecond})
	first := p.joins("first", 1)
	f := p.submit(named(t, "f"), 1)
	await[*scaler.Task](first)
	first.ends()
	second := p.joins("second", 1)
	second.succeeds(await[*scaler.Task](second), "2")
	if got := p.get(f); got != "2" {
		t.Errorf("the result is %s", got)
	}
}

// TestServePoison: a task that ends three workers has failed; so has one whose process dies three
// times in the care of a worker that lives.
func TestServePoison(t *testing.T) {
	p := servePool(t, ServeConfig{Return: time.Millisecond})
	f := p.submit(named(t, "f"), 1)
	for i := range 3 {
		g := p.joins(fmt.Sprint("w", i), 1)
		await[*scaler.Task](g)
		g.Close()
	}
	if _, err := f.Get(t.Context()); !errors.Is(err, tasks.ErrPoison) || !strings.Contains(err.Error(), "w2:1 (Scaler)") {
		t.Errorf("%v", err)
	}
	g := p.joins("lives", 1)
	f = p.submit(named(t, "f"), 1)
	for range 3 {
		// As Scaler's worker reports it.
		g.fails(await[*scaler.Task](g), b("\x80\x05\x95R\x00\x00\x00\x00\x00\x00\x00\x8c\x19scaler.utility.exceptions\x94"+
			"\x8c\x12ProcessorDiedError\x94\x93\x94\x8c\x17process_status='zombie'\x94\x85\x94R\x94."))
	}
	if _, err := f.Get(t.Context()); !errors.Is(err, tasks.ErrPoison) {
		t.Errorf("%v", err)
	}
}

// TestServeReturns: a worker connects anew under the same identity. What it had runs again, and
// does not count as a loss.
func TestServeReturns(t *testing.T) {
	p := servePool(t, ServeConfig{Return: time.Minute})
	f := p.submit(named(t, "f", tasks.Retries(0)), 1)
	g := p.joins("w", 1)
	old := await[*scaler.Task](g)
	for range 5 {
		g.Close()
		g = p.joins("w", 1)
		if c := await[*scaler.TaskCancel](g); !bytes.Equal(c.ID, old.ID) || !c.Force {
			t.Errorf("%+v", c)
		}
		g.send(&scaler.TaskResult{ID: old.ID, Status: scaler.Canceled, Profile: scaler.Profile{Absent: true}})
		old = await[*scaler.Task](g)
	}
	g.succeeds(old, "1")
	p.get(f)
}

// TestServeLeaves: a worker leaves in order. What it had runs elsewhere, and does not count.
func TestServeLeaves(t *testing.T) {
	p := servePool(t, ServeConfig{})
	f := p.submit(named(t, "f", tasks.Retries(0)), 1)
	for i := range 4 {
		g := p.joins(fmt.Sprint("w", i), 1)
		await[*scaler.Task](g)
		g.send(&scaler.DisconnectRequest{Worker: g.id})
		if r := await[*scaler.DisconnectResponse](g); !bytes.Equal(r.Worker, g.id) {
			t.Errorf("%+v", r)
		}
	}
	g := p.joins("stays", 1)
	g.succeeds(await[*scaler.Task](g), "1")
	p.get(f)
}

// TestServeCancel: a worker is told to end a task that was cancelled; one that does not is lost.
func TestServeCancel(t *testing.T) {
	p := servePool(t, ServeConfig{CancelTimeout: 50 * time.Millisecond})
	g := p.joins("w", 1)
	f := p.submit(named(t, "f"), 1)
	task := await[*scaler.Task](g)
	f.Cancel()
	if _, err := f.Get(t.Context()); !errors.Is(err, tasks.ErrCancelled) {
		t.Errorf("%v", err)
	}
	if c := await[*scaler.TaskCancel](g); !bytes.Equal(c.ID, task.ID) || !c.Force {
		t.Errorf("%+v", c)
	}
	g.send(&scaler.TaskResult{ID: task.ID, Status: scaler.Canceled, Profile: scaler.Profile{Absent: true}})
	f = p.submit(named(t, "f"), 2)
	await[*scaler.Task](g) // its place is free again
	f.Cancel()
	await[*scaler.TaskCancel](g)
	g.ends()
}

// TestServeObjects: a worker is given what a task needs, once, and told to forget it.
func TestServeObjects(t *testing.T) {
	p := servePool(t, ServeConfig{})
	g := p.joins("w", 1)
	fn := named(t, "f")
	ask := func(task *scaler.Task) *scaler.ObjectResponse {
		ids := [][]byte{scaler.SerializerID(task.Source), task.Function}
		for _, a := range task.Args {
			ids = append(ids, a.ID)
		}
		g.send(&scaler.ObjectRequest{IDs: ids})
		r := await[*scaler.ObjectResponse](g)
		if !slices.EqualFunc(r.IDs, ids, bytes.Equal) {
			t.Errorf("asked for %x, got %x", ids, r.IDs)
		}
		return r
	}
	f := p.submit(fn, "a", "b", "a")
	task := await[*scaler.Task](g)
	r := ask(task)
	if len(r.Contents) != 5 || string(r.Contents[1]) != `"f"` || string(r.Contents[2]) != `"a"` || string(r.Contents[3]) != `"b"` {
		t.Errorf("%q", r.Contents)
	}
	if !bytes.Equal(task.Args[0].ID, task.Args[2].ID) || len(task.Args[0].ID) != 24 {
		t.Error("equal arguments have different ids")
	}
	g.succeeds(task, "1")
	p.get(f)
	g.send(&scaler.Heartbeat{})
	d := await[*scaler.ObjectInstruction](g)
	if d.Kind != scaler.Delete || !bytes.Equal(d.User, g.id) || len(d.IDs) != 2 {
		t.Errorf("%+v", d)
	}
	if r := ask(task); len(r.Contents) != 0 {
		t.Errorf("after the end: %q", r.Contents)
	}
	f = p.submit(fn, "c")
	again := await[*scaler.Task](g)
	if !bytes.Equal(again.Function, task.Function) || !bytes.Equal(again.Source, task.Source) {
		t.Error("the function has another id")
	}
	g.succeeds(again, "2")
	p.get(f)
}

// TestServeStrangers: what may not be said ends a connection, or is passed over; others go on.
func TestServeStrangers(t *testing.T) {
	p := servePool(t, ServeConfig{Workers: 1, Message: 10_000})
	g := p.joins("w", 1)
	await[*scaler.HeartbeatEcho](g)
	await[*scaler.HeartbeatEcho](g)
	for name, m := range map[string]scaler.Message{
		"a client": &scaler.ClientHeartbeat{}, "a scheduler": &scaler.HeartbeatEcho{}, "one too many": &scaler.Heartbeat{},
		"too much": &scaler.ObjectInstruction{Kind: scaler.Create, Objects: scaler.Objects{IDs: make([][]byte, 1030), Contents: make([][]byte, 1030)}},
	} {
		if i, ok := m.(*scaler.ObjectInstruction); ok {
			for n := range i.IDs {
				i.IDs[n] = fmt.Appendf(nil, "%d", n)
			}
		}
		s := p.connects("1|" + name + "|0")
		s.send(m)
		s.ends()
	}
	s := p.connects("") // without an identity
	s.send(&scaler.Heartbeat{})
	s.ends()
	raw, err := net.Dial("tcp", strings.TrimPrefix(p.address, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	_, _ = raw.Write([]byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
	_, _ = io.Copy(io.Discard, raw)
	for _, frames := range [][][]byte{{b("XX"), {}}, {b("TR"), b("unknown"), b("S"), {}}, {b("OR"), b("A"), b("none")}} {
		if frames[0][0] == 'T' {
			frames = append(frames, b("none"))
		}
		if err := g.Write(frames); err != nil {
			t.Fatal(err)
		}
	}
	if r := await[*scaler.ObjectResponse](g); len(r.Contents) != 0 {
		t.Errorf("%q", r.Contents)
	}
	f := p.submit(named(t, "f"), 1)
	task := await[*scaler.Task](g)
	id := scaler.ObjectID(task.Source, task.ID)
	large := &scaler.ObjectInstruction{Kind: scaler.Create, User: task.Source, Objects: scaler.Objects{IDs: [][]byte{id}, Names: [][]byte{{}}, Contents: [][]byte{make([]byte, 20_000)}}}
	g.send(large, &scaler.TaskResult{ID: task.ID, Status: scaler.Success, Profile: scaler.Profile{Absent: true}, Results: [][]byte{id}})
	if _, err := f.Get(t.Context()); err == nil || !strings.Contains(err.Error(), "too large") {
		t.Errorf("a large result: %v", err)
	}
	f = p.submit(named(t, "f"), 1)
	g.succeeds(await[*scaler.Task](g), "1")
	p.get(f)
}

// TestServeConfig: an address that others reach is only taken with Insecure.
func TestServeConfig(t *testing.T) {
	for _, address := range []string{"", "127.0.0.1:0", "tcp://0.0.0.0:0", "tcp://*:0", "tcp://:0", "tcp://192.0.2.1:1"} {
		if err := Serve(t.Context(), ServeConfig{Listen: address}); err == nil || strings.Contains(err.Error(), "environment") {
			t.Errorf("%q: %v", address, err)
		}
	}
	for _, cfg := range []ServeConfig{{Listen: "tcp://127.0.0.1:0"}, {Listen: "tcp://localhost:1"}, {Listen: "tcp://[::1]:1"}, {Listen: "ipc:///tmp/a"}, {Listen: "tcp://*:1", Insecure: true}} {
		if err := cfg.fill(); err != nil {
			t.Errorf("%q: %v", cfg.Listen, err)
		}
	}
}

// TestServeLocal: a unix socket, which goes with Serve.
func TestServeLocal(t *testing.T) {
	path := t.TempDir() + "/scaler"
	p := servePool(t, ServeConfig{Listen: "ipc://" + path})
	g := p.joins("w", 2)
	f := p.submit(named(t, "f"), 1)
	g.succeeds(await[*scaler.Task](g), "1")
	p.get(f)
	p.stop()
	if d := await[*scaler.Disconnect](g); d.Kind != scaler.Shutdown {
		t.Errorf("%+v", d)
	}
	g.send(&scaler.DisconnectRequest{Worker: g.id})
	await[*scaler.DisconnectResponse](g)
	g.Close()
	if err := <-p.ended; err != nil {
		t.Errorf("Serve returns %v", err)
	}
}

type pair struct{ X, Y float64 }

var (
	norms = tasks.Export(tasks.Register[float64]("relay-norm", func(_ context.Context, p pair) (float64, error) { return p.X*p.X + p.Y*p.Y, nil }))
	sums  = tasks.Export(tasks.Register[int]("relay-sum", func(_ context.Context, all ...int) (n int, _ error) {
		for _, a := range all {
			n += a
		}
		return n, nil
	}))
	fails = tasks.Export(tasks.Register[tasks.None]("relay-fails", func(context.Context) error { return errors.New("it is Tuesday") }))
	_     = tasks.Register[tasks.None]("relay-secret", func(context.Context) error { return nil })
)

// offers runs a worker of the pool with the functions of this program.
func (p *aPool) offers(cpu float64) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = tasks.Serve(ctx, tasks.ServeConfig{Dial: p.dial, Log: quietLog(), Offers: map[string]float64{"cpu": cpu}})
	})
	stop = func() { cancel(); wg.Wait() }
	p.t.Cleanup(stop)
	for {
		if s, err := p.client.Status(p.t.Context()); err != nil || len(s.Workers) > 0 {
			return stop
		}
	}
}

// TestRelay: a pool works for a scheduler, which gets what exported functions return.
func TestRelay(t *testing.T) {
	p := servePool(t, ServeConfig{})
	p.offers(3)
	s := listen(t)
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		ended <- Relay(t.Context(), RelayConfig{Address: s.Address(), Dial: p.dial, Workers: 2, Log: quietLog()})
	})
	defer wg.Wait()
	probe := s.accept()
	probe.send(&scaler.HeartbeatEcho{})
	w, other := s.accept(), s.accept()
	expect[*scaler.Heartbeat](w)
	expect[*scaler.Heartbeat](other)
	for i, c := range []struct{ call, status, want string }{
		{`"relay-norm" {"X":3,"Y":4}`, "S", "25"}, {`"relay-sum" 1 2 3`, "S", "6"}, {`relay-sum`, "S", "0"},
		{`"relay-fails"`, "F", "it is Tuesday"}, {`"relay-secret"`, "F", "LookupError"}, {`"relay-norm" 1`, "F", "argument 1 is no JSON of a bridge.pair"},
		{`"relay-norm"`, "F", "takes 1 arguments, not 0"},
	} {
		words := strings.Fields(c.call)
		w.send(call1(fmt.Sprint(i), words[0], words[1:]...))
		object, result := expect[*scaler.ObjectInstruction](w), expect[*scaler.TaskResult](w)
		if string(result.Status) != c.status || !strings.Contains(string(object.Contents[0]), c.want) {
			t.Errorf("%s: %c %q", c.call, result.Status, object.Contents[0])
		}
	}
	w.send(&scaler.Disconnect{Kind: scaler.Shutdown})
	w.Close()
	other.Close()
	if err := <-ended; err != nil {
		t.Errorf("Relay returns %v", err)
	}
	if norms.Name() == "" || sums.Name() == "" || fails.Name() == "" {
		t.Error("no names")
	}
}

// TestRelayErrors: each of what may be wrong is one error.
func TestRelayErrors(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	for address, want := range map[string]string{
		"tcp://" + ln.Addr().String(): "no scheduler at", "localhost": "want tcp://",
	} {
		if err := Relay(t.Context(), RelayConfig{Address: address}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", address, err)
		}
	}
	s := listen(t)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.accept() })
	if err := Relay(t.Context(), RelayConfig{Address: s.Address(), Connect: 50 * time.Millisecond}); err == nil || !strings.Contains(err.Error(), "does not answer as Scaler 1.7.14 does") {
		t.Errorf("%v", err)
	}
}
