package scaler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeScheduler is the ROUTER of a scheduler whose part a test plays.
type fakeScheduler struct {
	*listener
	t *testing.T
}

func listen(t *testing.T) *fakeScheduler { return &fakeScheduler{listenAsScheduler(t), t} }

// peer is a worker as the scheduler sees it.
type peer struct {
	t *testing.T
	*zmtp.Conn
}

// accept returns the next worker after its handshake.
func (s *fakeScheduler) accept() *peer {
	s.t.Helper()
	return &peer{s.t, s.Accept()}
}

func (p *peer) send(all ...outgoing) {
	p.t.Helper()
	for _, m := range all {
		if err := p.Write(encode(m)); err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *peer) next() message {
	p.t.Helper()
	frames, err := p.Read()
	if err != nil {
		p.t.Fatal(err)
	}
	m, err := decodeAny(frames)
	if err != nil {
		p.t.Fatal(err)
	}
	return m
}

// expect returns the next message, which must have this type. It answers heartbeats and requests
// for objects.
func expect[M message](p *peer) M {
	p.t.Helper()
	for {
		m := p.next()
		if m, ok := m.(M); ok {
			return m
		}
		switch m := m.(type) {
		case *heartbeat:
			p.send(&heartbeatEcho{})
		case *objectRequest:
			p.send(objectsOf(m))
		default:
			p.t.Fatalf("a message of type %s: %+v", m.kind(), m)
		}
	}
}

// objectsOf answers a request. An object's content is its id after the sign =, or 2,000 bytes.
func objectsOf(m *objectRequest) *objectResponse {
	r := &objectResponse{Kind: contentFound, objects: objects{IDs: m.IDs}}
	for _, id := range m.IDs {
		_, content, _ := bytes.Cut(id, b("="))
		if string(id) == "large" {
			content = make([]byte, 2000)
		}
		r.Names, r.Contents = append(r.Names, b("n")), append(r.Contents, content)
	}
	return r
}

func call1(id, function string, args ...string) *task {
	task := newTask(id, 0)
	task.Function = b("=" + function)
	for _, a := range args {
		task.Args = append(task.Args, argument{argObject, b("=" + a)})
	}
	return task
}

// work runs a worker until the test ends or stop is called. It sends the result of Work to ended.
func work(t *testing.T, cfg Config) (stop context.CancelCauseFunc, ended chan error) {
	t.Helper()
	ctx, stop := context.WithCancelCause(t.Context())
	ended = make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { ended <- Work(ctx, cfg) })
	t.Cleanup(func() { stop(nil); wg.Wait() })
	return stop, ended
}

type square struct{ X, Y float64 }

func testFunctions() Functions {
	return Functions{
		"echo":  echoFunc,
		"panic": func(context.Context, [][]byte) ([]byte, error) { panic("no such shard") },
		"wait": func(ctx context.Context, _ [][]byte) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
		"norm": JSON(func(_ context.Context, s square) (float64, error) { return s.X*s.X + s.Y*s.Y, nil }),
	}
}

func TestWork(t *testing.T) {
	s := listen(t)
	stop, ended := work(t, Config{Address: s.Address(), Functions: testFunctions(), Name: "go", Slots: 2})
	p := s.accept()
	if id := strings.Split(string(p.Peer()), "|"); len(id) != 3 || id[1] != "go" || len(id[2]) != 32 {
		t.Errorf("the identity is %q", p.Peer())
	}
	p.send(&heartbeatEcho{})
	if m, ok := p.next().(*heartbeat); !ok || len(m.Processors) != 2 || m.RSS == 0 || m.Free == 0 {
		t.Fatalf("a worker begins with %+v", m)
	}
	const n = 400
	for i := range n {
		p.send(call1(fmt.Sprint("t", i), `"norm"`, fmt.Sprintf(`{"X":%d,"Y":1}`, i)))
	}
	for range n {
		object, result := expect[*objectInstruction](p), expect[*taskResult](p)
		var i int
		if _, err := fmt.Sscanf(string(result.ID), "t%d", &i); err != nil || result.Status != success {
			t.Fatalf("%+v", result)
		}
		if want := fmt.Sprint(i*i + 1); string(object.Contents[0]) != want || !equal(object.IDs, result.Results) {
			t.Errorf("task %d: %s, want %s", i, object.Contents[0], want)
		}
		if result.Profile.Absent {
			t.Error("no profile")
		}
	}
	for function, want := range map[string]string{"panic": "no such shard", "norm": "argument", `"none"`: "no function", "\x80\x05cloudpickle": "Python"} {
		p.send(call1("t", function, "not JSON"))
		object, result := expect[*objectInstruction](p), expect[*taskResult](p)
		if result.Status != failed || !bytes.Contains(object.Contents[0], b(want)) {
			t.Errorf("%s: %c, %q", function, result.Status, object.Contents[0])
		}
	}
	over := errors.New("the program ends")
	p.send(call1("waits", "wait"), call1("queued", "wait"), call1("queued too", "wait"))
	p.send(&taskCancel{ID: b("waits"), Force: true})
	if r := expect[*taskResult](p); string(r.ID) != "waits" || r.Status != canceled {
		t.Errorf("%+v", r)
	}
	stop(over)
	if r := expect[*disconnectRequest](p); !bytes.Equal(r.Worker, p.Peer()) {
		t.Errorf("%+v", r)
	}
	p.send(&disconnectResponse{p.Peer()})
	if err := <-ended; !errors.Is(err, over) {
		t.Errorf("Work returns %v", err)
	}
}

// TestShutdown: the scheduler shuts a worker down, which ends its running calls.
func TestShutdown(t *testing.T) {
	s := listen(t)
	_, ended := work(t, Config{Address: s.Address(), Functions: testFunctions()})
	p := s.accept()
	p.send(call1("t", "wait"))
	for len(expect[*objectRequest](p).IDs) != 1 {
	}
	p.send(objectsOf(&objectRequest{IDs: [][]byte{b("=wait")}}), &disconnect{shutdown})
	expect[*disconnectRequest](p)
	p.Close() // the worker waits for nothing more
	if err := <-ended; err != nil {
		t.Errorf("Work returns %v", err)
	}
}

// TestLostResult: the connection ends after the result's object was read and before the result was.
// The worker sends both again, under another identity, before it lets the scheduler give its other
// tasks away.
func TestLostResult(t *testing.T) {
	s := listen(t)
	work(t, Config{Address: s.Address(), Functions: testFunctions()})
	p := s.accept()
	p.send(call1("t", "echo", "payload"))
	first := expect[*objectInstruction](p)
	p.Close()
	again := s.accept()
	if bytes.Equal(again.Peer(), p.Peer()) {
		t.Error("the identity is the same: a router that has not seen the end refuses it")
	}
	object := expect[*objectInstruction](again)
	if !equal(object.IDs, first.IDs) || string(object.Contents[0]) != "payload" {
		t.Errorf("the object is %+v", object)
	}
	if r := expect[*taskResult](again); r.Status != success || !equal(r.Results, first.IDs) {
		t.Errorf("%+v", r)
	}
	if r := expect[*disconnectRequest](again); !bytes.Equal(r.Worker, p.Peer()) {
		t.Errorf("%+v", r)
	}
	again.send(call1("u", "echo", "more"))
	expect[*objectInstruction](again)
	expect[*taskResult](again)
}

// TestSchedulerRestarts: a worker outlives a scheduler and joins the next one at the same address.
func TestSchedulerRestarts(t *testing.T) {
	s := listen(t)
	work(t, Config{Address: s.Address(), Functions: testFunctions()})
	p := s.accept()
	expect[*heartbeat](p)
	s.Restart()
	p.Close()
	p = s.accept()
	expect[*disconnectRequest](p)
	p.send(call1("t", "echo", "payload"))
	expect[*objectInstruction](p)
	expect[*taskResult](p)
}

// TestStrangeScheduler: invalid messages from a scheduler do not end a worker.
func TestStrangeScheduler(t *testing.T) {
	s := listen(t)
	work(t, Config{Address: s.Address(), Functions: testFunctions(), Message: 1 << 10})
	p := s.accept()
	for _, frames := range [][][]byte{
		{b("HE")}, {b("XX"), {}}, {{}, {}}, {b("TK"), {}}, {b("OA"), b("C"), bytes.Repeat([]byte{0xff}, 12)},
		{b("HB"), make([]byte, 51)}, {make([]byte, 2000)}, {b("OA"), make([]byte, 2000)}, {b("DP"), b("w")}, {b("CE"), {}},
	} {
		if err := p.Write(frames); err != nil {
			t.Fatal(err)
		}
	}
	p.send(&objectInstruction{Kind: createObjects}, &objectResponse{Kind: noObject}, &disconnect{leave}, &heartbeatEcho{}, &heartbeatEcho{})
	task := call1("t", "echo", "a")
	task.Args = append(task.Args, argument{argObject, b("large")})
	p.send(task)
	object, result := expect[*objectInstruction](p), expect[*taskResult](p)
	if result.Status != failed || !bytes.Contains(object.Contents[0], b("MemoryError")) {
		t.Errorf("%c, %q", result.Status, object.Contents[0])
	}
	p.send(call1("u", "echo", "small"))
	if object := expect[*objectInstruction](p); string(object.Contents[0]) != "small" {
		t.Errorf("%q", object.Contents[0])
	}
	expect[*taskResult](p)
}

func TestConfig(t *testing.T) {
	for _, cfg := range []Config{
		{},
		{Address: "tcp://h:1"},
		{Address: "h:1", Functions: testFunctions()},
		{Address: "tcp://h:1", Functions: testFunctions(), Slots: -1},
		{Address: "tcp://h:1", Functions: testFunctions(), Name: "a|b"},
	} {
		if err := Work(t.Context(), cfg); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
}

// pipe is a Socket whose other end is the test.
type pipe struct {
	id      []byte
	in, out chan [][]byte
	closed  chan struct{}
	once    sync.Once
}

func newPipe(id []byte) *pipe {
	return &pipe{id: id, in: make(chan [][]byte), out: make(chan [][]byte), closed: make(chan struct{})}
}

func (p *pipe) Send(frames [][]byte) error {
	select {
	case p.out <- frames:
		return nil
	case <-p.closed:
		return net.ErrClosed
	}
}

func (p *pipe) Recv() ([][]byte, error) {
	select {
	case frames := <-p.in:
		return frames, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipe) Identity() []byte { return p.id }

func (p *pipe) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

// TestSilentScheduler: connections stay open and nothing arrives on them: a worker reconnects, and
// finally gives up.
func TestSilentScheduler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var heartbeats, dials int
		var mu sync.Mutex
		var wg sync.WaitGroup
		cfg := Config{Functions: testFunctions(), Dial: func(_ context.Context, id []byte) (Socket, error) {
			mu.Lock()
			defer mu.Unlock()
			if dials++; dials%2 == 0 {
				return nil, errors.New("refused")
			}
			p := newPipe(id)
			wg.Go(func() {
				for {
					select {
					case frames := <-p.out:
						if string(frames[0]) == "HB" {
							mu.Lock()
							heartbeats++
							mu.Unlock()
						}
					case <-p.closed:
						return
					}
				}
			})
			return p, nil
		}}
		if err := Work(t.Context(), cfg); !errors.Is(err, ErrNoScheduler) {
			t.Errorf("Work returns %v", err)
		}
		wg.Wait()
		if took := time.Since(began); took < 5*time.Minute || took > 5*time.Minute+3*time.Second {
			t.Errorf("after %v", took)
		}
		if heartbeats != 10 || dials < 19 { // one every 30 s, and a second until the next connection
			t.Errorf("%d heartbeats, %d dials", heartbeats, dials)
		}
	})
}

// TestSlowScheduler: a scheduler that does not read delays neither its own messages nor the
// worker's end.
func TestSlowScheduler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipe(b("w"))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		started := make(chan string)
		go func() {
			ended <- Work(ctx, Config{
				Dial: func(context.Context, []byte) (Socket, error) { return p, nil },
				Functions: Functions{"f": func(_ context.Context, args [][]byte) ([]byte, error) {
					started <- string(args[0])
					return args[0], nil
				}},
			})
		}()
		const n = 100
		for i := range n {
			p.in <- encode(call1(fmt.Sprint(i), "f", "x"))
		}
		p.in <- encode(objectsOf(&objectRequest{IDs: [][]byte{b("=f"), b("=x")}}))
		for range n {
			<-started
		}
		synctest.Wait()
		cancel()
		began := time.Now()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Work returns %v", err)
		}
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("leaving took %v", took)
		}
	})
}
