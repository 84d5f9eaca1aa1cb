package bridge

import (
	"bytes"
	"context"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/tasks/scaler"
	"github.com/hvdrun/hvdrun/tasks/scaler/internal/scalertest"
	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeScheduler is the ROUTER of a scheduler that a test plays.
type fakeScheduler struct {
	*scalertest.Listener
	t *testing.T
}

func listen(t *testing.T) *fakeScheduler { return &fakeScheduler{scalertest.Listen(t), t} }

// peer is a worker as the scheduler sees it.
type peer struct {
	t *testing.T
	*zmtp.Conn
}

// accept returns the next worker, after its handshake.
func (s *fakeScheduler) accept() *peer {
	s.t.Helper()
	return &peer{s.t, s.Accept()}
}

func (p *peer) send(all ...scaler.Message) {
	p.t.Helper()
	for _, m := range all {
		if err := p.Write(scaler.Encode(m)); err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *peer) next() scaler.Message {
	p.t.Helper()
	frames, err := p.Read()
	if err != nil {
		p.t.Fatal(err)
	}
	m, err := scaler.Decode(frames)
	if err != nil {
		p.t.Fatal(err)
	}
	return m
}

// expect returns the next message, of a type. It answers heartbeats and requests for objects.
func expect[M scaler.Message](p *peer) M {
	p.t.Helper()
	for {
		m := p.next()
		if m, ok := m.(M); ok {
			return m
		}
		switch m := m.(type) {
		case *scaler.Heartbeat:
			p.send(&scaler.HeartbeatEcho{})
		case *scaler.ObjectRequest:
			p.send(objectsOf(m))
		default:
			p.t.Fatalf("a message of type %s: %+v", scaler.TypeOf(m), m)
		}
	}
}

// objectsOf answers a request: an object's content is its id after the sign =, or 2,000 bytes.
func objectsOf(m *scaler.ObjectRequest) *scaler.ObjectResponse {
	r := &scaler.ObjectResponse{Kind: scaler.Content, Objects: scaler.Objects{IDs: m.IDs}}
	for _, id := range m.IDs {
		_, content, _ := bytes.Cut(id, b("="))
		if string(id) == "large" {
			content = make([]byte, 2000)
		}
		r.Names, r.Contents = append(r.Names, b("n")), append(r.Contents, content)
	}
	return r
}

func call1(id, function string, args ...string) *scaler.Task {
	task := &scaler.Task{ID: b(id), Source: b("client"), Function: b("=" + function)}
	for _, a := range args {
		task.Args = append(task.Args, scaler.Arg{Kind: scaler.ArgObject, ID: b("=" + a)})
	}
	return task
}

// work runs a worker for as long as the test, or until stop. It returns what Work returns.
func work(t *testing.T, cfg scaler.Config) (stop context.CancelCauseFunc, ended chan error) {
	t.Helper()
	ctx, stop := context.WithCancelCause(t.Context())
	ended = make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { ended <- scaler.Work(ctx, cfg) })
	t.Cleanup(func() { stop(nil); wg.Wait() })
	return stop, ended
}

type square struct{ X, Y float64 }

func testFunctions() scaler.Functions {
	return scaler.Functions{
		"echo":  func(_ context.Context, args [][]byte) ([]byte, error) { return args[0], nil },
		"panic": func(context.Context, [][]byte) ([]byte, error) { panic("no such shard") },
		"wait": func(ctx context.Context, _ [][]byte) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
		"norm": scaler.JSON(func(_ context.Context, s square) (float64, error) { return s.X*s.X + s.Y*s.Y, nil }),
	}
}
