package notify

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
)

// relay has an agent's relay hear from a driver. The returned function ends that.
func (j *job) relay(r *Relay, driver string) (stop func()) {
	j.t.Helper()
	own := j.credentials(identity.Subject{Role: identity.Agent, Host: "h"})
	conn, err := wire.NewClient(driver, own.ClientTLS(identity.Subject{Role: identity.Driver}), time.Second)
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { conn.Close() })
	return j.start("Relay.Run", func(ctx context.Context) error {
		if err := r.Run(ctx, conn); ctx.Err() == nil {
			return err
		}
		return nil
	})
}

// socket is a worker's connection to its agent.
type socket struct {
	grpc.ClientConnInterface
	relay       *Relay
	incarnation string
}

func (s socket) Invoke(ctx context.Context, _ string, knows, news any, _ ...grpc.CallOption) error {
	what, err := s.relay.Hear(ctx, s.incarnation, knows.(*notifypb.HearRequest))
	if err != nil {
		return err
	}
	return proto.Unmarshal(what, news.(proto.Message))
}

// hearsBy has a worker hear by a relay. The returned function ends that.
func (j *job) hearsBy(r *Relay, inc string) (s *Service, stop func()) {
	j.t.Helper()
	s = NewService(nil)
	return s, j.start("Hear", func(ctx context.Context) error {
		s.Hear(ctx, func(ctx context.Context, _ string, do func(context.Context, grpc.ClientConnInterface) error) error {
			return do(ctx, socket{nil, r, inc})
		})
		return nil
	})
}

// hearsUntilWaiting has a worker hear by a relay that may not be hearing yet.
func (j *job) hearsUntilWaiting(r *Relay, inc string) {
	j.t.Helper()
	for {
		ended := make(chan error, 1)
		go func() {
			_, err := r.Hear(j.t.Context(), inc, &notifypb.HearRequest{})
			ended <- err
		}()
		select {
		case <-j.calls:
			return
		case err := <-ended:
			if !errors.Is(err, ErrEach) {
				j.t.Fatal(err)
			}
		}
	}
}

// await waits until so many workers do what the channel tells.
func await[T any](t *testing.T, what string, c <-chan T, count int) {
	t.Helper()
	for range count {
		take(t, what, c)
	}
}

// TestRelay: workers of an agent are told by its one call, of updates and of losses, and are not
// dialed. What comes while one does not call waits for its next call.
func TestRelay(t *testing.T) {
	const count = mostBegun + 200 // in several messages
	j := newJob(t)
	j.run()
	j.acks, j.calls = make(chan ack, count), make(chan string, count)
	r := NewRelay()
	var workers []*Service
	var targets []Target
	var stops []func()
	for i := range count {
		s, stop := j.hearsBy(r, strconv.Itoa(i))
		workers, stops = append(workers, s), append(stops, stop)
		targets = append(targets, Target{subject(strconv.Itoa(i)), "127.0.0.1:1"}) // nobody is there
	}
	driver, _ := j.driver()
	j.relay(r, driver)
	await(t, "call that waits", j.calls, count)
	j.pusher.Push(targets, update(1))
	await(t, "acknowledgement", j.acks, count)
	await(t, "call that waits", j.calls, count)
	j.pusher.PushLoss(targets, Loss{3, []int{2, 5}})
	await(t, "acknowledgement", j.acks, count)
	await(t, "call that waits", j.calls, count)
	for i, s := range workers {
		if loss, _ := s.Loss(); s.Latest() != update(1) || loss.Generation != 3 || !slices.Equal(loss.Ranks, []int{2, 5}) {
			t.Fatalf("worker %d: %+v, %+v", i, s.Latest(), loss)
		}
	}
	stops[0]()
	j.pusher.Push(targets, update(2))
	await(t, "acknowledgement", j.acks, count-1)
	await(t, "call that waits", j.calls, count-1)
	again, _ := j.hearsBy(r, "0")
	j.acked("0", 2)
	if again.Latest() != update(2) {
		t.Errorf("%+v", again.Latest())
	}
	if len(j.failures) > 0 {
		t.Error("some were dialed")
	}
}

// TestRelayAnswers: a second call of a worker takes the place of its first, and both end with the
// target, so that the worker calls again. A worker for which the agent does not speak is refused.
func TestRelayAnswers(t *testing.T) {
	j := newJob(t)
	j.run()
	r := NewRelay()
	driver, _ := j.driver()
	j.relay(r, driver)
	call := func(inc string) <-chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := r.Hear(context.Background(), inc, &notifypb.HearRequest{})
			ended <- err
		}()
		return ended
	}
	first := call("a")
	j.waits("a")
	second := call("a")
	if err := take(t, "first call", first); status.Code(err) != codes.Aborted {
		t.Error(err)
	}
	j.waits("a")
	j.pusher.Forget("a")
	if err := take(t, "second call", second); status.Code(err) != codes.Aborted {
		t.Error(err)
	}
	if err := take(t, "stranger's call", call("stranger")); status.Code(err) != codes.PermissionDenied {
		t.Error(err)
	}
}

// TestRelayOfTheNextDriver: calls that wait wait at the next driver, and there is nothing left of
// them at the last. For a driver that cannot hear for all, each call is answered with that.
func TestRelayOfTheNextDriver(t *testing.T) {
	j := newJob(t)
	stopPusher := j.run()
	r := NewRelay()
	driver, stopDriver := j.driver()
	stop := j.relay(r, driver)
	s, _ := j.hearsBy(r, "a")
	j.waits("a")
	stop()
	stopPusher()
	stopDriver()
	if len(j.pusher.targets) > 0 {
		t.Error("the target stays")
	}

	next := newJob(t)
	next.authority = j.authority
	next.pusher.cfg.Credentials = j.pusher.cfg.Credentials
	next.run()
	driver, _ = next.driver()
	stop = next.relay(r, driver)
	next.waits("a")
	next.pusher.Push([]Target{{subject("a"), "127.0.0.1:1"}}, update(4))
	next.acked("a", 4)
	if s.Latest() != update(4) {
		t.Errorf("%+v", s.Latest())
	}
	stop()

	ln := listen(t, "127.0.0.1:0")
	conf := j.pusher.cfg.Credentials.ServerTLS(identity.Agent)
	j.start("Serve", func(ctx context.Context) error {
		return wire.Serve(ctx, ln, conf, func(grpc.ServiceRegistrar) {}, func() {})
	})
	old, err := wire.NewClient(ln.Addr().String(), j.credentials(identity.Subject{Role: identity.Agent}).ClientTLS(identity.Subject{Role: identity.Driver}), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	waits := make(chan error, 1)
	go func() {
		_, err := r.Hear(t.Context(), "c", &notifypb.HearRequest{})
		waits <- err
	}()
	if err := r.Run(t.Context(), old); !errors.Is(err, ErrEach) {
		t.Error(err)
	}
	if err := take(t, "call that waits", waits); !errors.Is(err, ErrEach) {
		t.Error(err)
	}
	if _, err := r.Hear(t.Context(), "b", &notifypb.HearRequest{}); !errors.Is(err, ErrEach) {
		t.Error(err)
	}
	driver, _ = next.driver()
	next.relay(r, driver)
	next.hearsUntilWaiting(r, "d")
}

// TestForgottenMeanwhile: a call of a target that is forgotten as it begins does not wait.
func TestForgottenMeanwhile(t *testing.T) {
	p := newJob(t).pusher
	of := p.hearer(subject("a"))
	p.Forget("a")
	a := newAgentCall()
	c := a.add("a")
	w, known := of.hear(p, &notifypb.HearRequest{}, c)
	if known {
		t.Fatal("it waits")
	}
	c.answer(w)
	if n := a.take(); len(n) != 1 || len(n[0].GetWhat()) > 0 || n[0].GetRefused() {
		t.Errorf("%v", n)
	}
}

// TestRelayOfNobody: where no worker waits, as when all have ended before their driver, the driver
// is not called.
func TestRelayOfNobody(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := NewRelay()
	cancelled, end := context.WithCancel(t.Context())
	end()
	if _, err := r.Hear(cancelled, "a", &notifypb.HearRequest{}); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx, nil) }() // a call would panic
	cancel()
	if err := take(t, "end of Run", ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestRelayCloses: Close ends calls that wait, and those that come later.
func TestRelayCloses(t *testing.T) {
	r := NewRelay()
	ended := make(chan error, 1)
	go func() {
		_, err := r.Hear(t.Context(), "a", &notifypb.HearRequest{})
		ended <- err
	}()
	<-r.wake
	r.Close()
	_, err := r.Hear(t.Context(), "a", &notifypb.HearRequest{})
	for _, err := range []error{err, take(t, "call that waits", ended)} {
		if status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
	}
}

// deaf is an agent, or a worker that plays one, that says much and reads nothing.
type deaf struct {
	grpc.BidiStreamingServer[notifypb.WaitingWorkers, notifypb.News]
	ctx  context.Context
	said *notifypb.WaitingWorkers
}

func (d deaf) Context() context.Context                { return d.ctx }
func (d deaf) Recv() (*notifypb.WaitingWorkers, error) { return d.said, nil }

// TestDeafAgent: what an agent is told and does not read takes a bounded amount of memory.
func TestDeafAgent(t *testing.T) {
	d := deaf{ctx: t.Context(), said: &notifypb.WaitingWorkers{}}
	for range 1000 {
		d.said.Begin = append(d.said.Begin, &notifypb.WaitingWorker{Incarnation: "stranger"})
	}
	a := newAgentCall()
	err := hearing{p: newJob(t).pusher, who: callers{}}.listen(d, a)
	if status.Code(err) != codes.ResourceExhausted || a.unsent > mostUnsent+len(d.said.Begin) {
		t.Errorf("%v, with %d that are not told", err, a.unsent)
	}
	a.take()
	if a.isFull() {
		t.Error("it is full after all is sent")
	}
}

// TestNews: workers that are told the same at about the same time are told by one message.
func TestNews(t *testing.T) {
	a := newAgentCall()
	ranks := []int{1}
	one, other := state{update: update(1), loss: Loss{2, ranks}}, state{update: update(1), loss: Loss{2, []int{1}}}
	for inc, w := range map[string]state{"a": one, "b": one, "c": other} {
		a.add(inc).answer(w)
	}
	d := a.add("d")
	d.end()
	d.answer(one) // it is over
	var of [][]string
	for _, n := range a.take() {
		slices.Sort(n.Incarnations)
		of = append(of, n.Incarnations)
	}
	slices.SortFunc(of, slices.Compare)
	if len(of) != 3 || !slices.Equal(of[0], []string{"a", "b"}) || len(a.take()) > 0 {
		t.Errorf("%q", of)
	}
}
