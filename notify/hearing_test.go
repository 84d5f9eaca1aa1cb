package notify

import (
	"context"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/carry"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
)

// caller returns who makes a call of the driver.
func caller(ctx context.Context) (identity.Subject, error) {
	return wire.Caller(ctx, identity.SubjectOf)
}

// driver serves Hear, and returns its address. Workers are not dialed from now on, unless the test
// has set for how long they may be silent. The returned function ends that.
func (j *job) driver() (addr string, stop func()) {
	j.t.Helper()
	if j.pusher.patience == 0 {
		j.pusher.patience = time.Hour
	}
	ln := listen(j.t, "127.0.0.1:0")
	conf := j.pusher.cfg.Credentials.ServerTLS(identity.Worker)
	register := func(r grpc.ServiceRegistrar) { j.pusher.Register(r, caller) }
	stop = j.start("Serve", func(ctx context.Context) error { return wire.Serve(ctx, ln, conf, register, func() {}) })
	return ln.Addr().String(), stop
}

// dial returns a worker's connection to the driver.
func (j *job) dial(inc, driver string) *grpc.ClientConn {
	j.t.Helper()
	conn, err := wire.NewClient(driver, j.credentials(subject(inc)).ClientTLS(identity.Subject{Role: identity.Driver}), time.Second)
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { conn.Close() })
	return conn
}

// hears has a service hear by a connection. The returned function ends that.
func (j *job) hears(s *Service, conn *grpc.ClientConn) (stop func()) {
	return j.start("Hear", func(ctx context.Context) error {
		s.Hear(ctx, func(ctx context.Context, _ string, do func(context.Context, grpc.ClientConnInterface) error) error {
			return do(ctx, conn)
		})
		return nil
	})
}

// waits waits until a call of the worker does.
func (j *job) waits(inc string) {
	j.t.Helper()
	if got := take(j.t, "call that waits", j.calls); got != inc {
		j.t.Fatalf("%s calls", got)
	}
}

// TestHear: a worker that calls is told by its calls, of updates and of losses, and is not dialed.
func TestHear(t *testing.T) {
	j := newJob(t)
	j.run()
	driver, _ := j.driver()
	s := NewService(j.credentials(subject("a")))
	stop := j.hears(s, j.dial("a", driver))
	j.waits("a")
	to := Target{subject("a"), "127.0.0.1:1"} // nobody is there
	j.pusher.Push([]Target{to}, update(1))
	j.acked("a", 1)
	if got := s.Latest(); got != update(1) {
		t.Errorf("got %+v", got)
	}
	j.pusher.PushLoss([]Target{to}, Loss{3, []int{2}})
	j.acked("a", 1)
	if got, _ := s.Loss(); got.Generation != 3 || len(got.Ranks) != 1 {
		t.Errorf("got %+v", got)
	}
	j.pusher.Push([]Target{to}, update(1)) // no news
	j.pusher.Push([]Target{to}, update(2))
	j.acked("a", 2)
	if len(j.failures) > 0 || j.pusher.targets["a"].dialed {
		t.Error("it was dialed")
	}
	// What comes while it does not call waits for its next call.
	stop()
	j.pusher.Push([]Target{to}, update(3))
	j.hears(s, j.dial("a", driver))
	j.acked("a", 3)
}

// TestFirstCall: a worker that has never called this driver, which may have taken over, has time to
// call before it is dialed.
func TestFirstCall(t *testing.T) {
	j := newJob(t)
	driver, _ := j.driver()
	j.run()
	j.pusher.Push([]Target{{subject("a"), "127.0.0.1:1"}}, update(1)) // nobody is there
	s := NewService(j.credentials(subject("a")))
	j.hears(s, j.dial("a", driver))
	j.acked("a", 1)
	if got := s.Latest(); got != update(1) || len(j.failures) > 0 || j.pusher.targets["a"].dialed {
		t.Errorf("got %+v, or was dialed", got)
	}
}

// TestHearAfterDialing: a worker that is dialed, in vain, is told by its first call.
func TestHearAfterDialing(t *testing.T) {
	j := newJob(t)
	j.run()
	j.pusher.Push([]Target{j.silent("a")}, update(1))
	driver, _ := j.driver()
	s := NewService(j.credentials(subject("a")))
	j.hears(s, j.dial("a", driver))
	j.acked("a", 1)
	if got := s.Latest(); got != update(1) {
		t.Errorf("got %+v", got)
	}
}

// TestSilentHearer: a worker that has called and does not call again is dialed after a while, until
// it calls.
func TestSilentHearer(t *testing.T) {
	j := newJob(t)
	j.pusher.patience = time.Millisecond
	j.run()
	s, to := j.service("a", "127.0.0.1:0")
	driver, _ := j.driver()
	other := NewService(j.credentials(subject("a")))
	stop := j.hears(other, j.dial("a", driver))
	j.waits("a")
	j.pusher.Push([]Target{to}, update(1))
	j.acked("a", 1)
	stop()
	j.pusher.Push([]Target{to}, update(2))
	j.acked("a", 2)
	if got := s.Latest(); got != update(2) {
		t.Errorf("got %+v", got)
	}
	j.hears(s, j.dial("a", driver))
	j.waits("a")
	dialed := func() bool {
		target := j.pusher.targets["a"]
		target.mu.Lock()
		defer target.mu.Unlock()
		return target.dialed
	}
	for dialed() {
		runtime.Gosched()
	}
}

// TestCallsThatEnd: a second call takes the place of the first; both end with the target, and calls
// end with Run.
func TestCallsThatEnd(t *testing.T) {
	j := newJob(t)
	stop := j.run()
	driver, _ := j.driver()
	conn := j.dial("a", driver)
	call := func() <-chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := notifypb.NewHearingClient(conn).Hear(context.Background(), &notifypb.HearRequest{})
			ended <- err
		}()
		return ended
	}
	first := call()
	j.waits("a")
	second := call()
	if err := take(t, "first call", first); status.Code(err) != codes.Aborted {
		t.Error(err)
	}
	j.pusher.Forget("a")
	if err := take(t, "second call", second); status.Code(err) != codes.Aborted {
		t.Error(err)
	}
	third := call()
	j.waits("a")
	stop()
	if err := take(t, "third call", third); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
}

// TestStrangerHears: who ends a call without ever having joined leaves nothing.
func TestStrangerHears(t *testing.T) {
	j := newJob(t)
	j.run()
	driver, stopDriver := j.driver()
	stop := j.hears(NewService(nil), j.dial("a", driver))
	j.waits("a")
	stop()
	stopDriver()
	if len(j.pusher.targets) > 0 {
		t.Error("the target stays")
	}
}

// TestHearCarried: a worker whose calls its agent carries is told what those are told that call by
// themselves, and the bytes of what is the same for many are shared. A call is answered once.
func TestHearCarried(t *testing.T) {
	j := newJob(t)
	j.run()
	j.acks, j.calls = make(chan ack, 10), make(chan string, 10)
	hear := j.pusher.Carried()[notifypb.Hearing_Hear_FullMethodName]
	answers := make(chan carry.Reply, 10)
	call := func(inc string, knows *notifypb.HearRequest) func() {
		req, err := proto.Marshal(knows)
		if err != nil {
			t.Fatal(err)
		}
		return hear(subject(inc), req, func(r carry.Reply) { answers <- r })
	}
	call("a", &notifypb.HearRequest{})
	call("b", &notifypb.HearRequest{})
	j.pusher.Push([]Target{{subject("a"), ""}, {subject("b"), ""}}, update(1))
	first, second := take(t, "answer", answers), take(t, "answer", answers)
	var told notifypb.HostsUpdatedRequest
	if err := proto.Unmarshal(first.Shared, &told); err != nil || told.GetSeq() != 1 || &first.Shared[0] != &second.Shared[0] {
		t.Errorf("%v, %v; %v", &told, err, second)
	}
	call("a", &notifypb.HearRequest{Seq: 1})
	giveUp := call("a", &notifypb.HearRequest{Seq: 1}) // takes the place of the other
	if r := take(t, "answer", answers); status.Code(r.Err) != codes.Aborted {
		t.Errorf("%v", r)
	}
	giveUp()
	call("b", &notifypb.HearRequest{Seq: 1})
	j.pusher.Push([]Target{{subject("b"), ""}}, update(2))
	if r := take(t, "answer", answers); r.Err != nil || &r.Shared[0] == &first.Shared[0] {
		t.Errorf("%v", r)
	}
	j.pusher.Forget("b")
	if len(answers) > 0 || len(j.pusher.targets) > 0 {
		t.Errorf("%d more answers, %d targets", len(answers), len(j.pusher.targets))
	}
}

// TestForgottenMeanwhile: a call of a target that is forgotten as it begins does not wait.
func TestForgottenMeanwhile(t *testing.T) {
	p := newJob(t).pusher
	of := p.hearer(subject("a"))
	p.Forget("a")
	if _, known := of.hear(p, &notifypb.HearRequest{}, &waitingCall{}); known {
		t.Fatal("it waits")
	}
}

func TestKnownTo(t *testing.T) {
	w := state{update: update(3), loss: Loss{5, []int{1, 2}}}
	for _, c := range []struct {
		req  *notifypb.HearRequest
		want bool
	}{
		{&notifypb.HearRequest{}, false},
		{&notifypb.HearRequest{Seq: 3, LostGeneration: 5, LostRanks: 2}, true},
		{&notifypb.HearRequest{Seq: 2, LostGeneration: 5, LostRanks: 2}, false},
		{&notifypb.HearRequest{Seq: 3, LostGeneration: 5, LostRanks: 1}, false},
		{&notifypb.HearRequest{Seq: 3, LostGeneration: 4, LostRanks: 9}, false},
		{&notifypb.HearRequest{Seq: 1 << 63, LostGeneration: 1 << 63, LostRanks: 1<<32 - 1}, true},
	} {
		if got := w.knownTo(c.req); got != c.want {
			t.Errorf("%v: %v", c.req, got)
		}
	}
	if !(state{}).knownTo(&notifypb.HearRequest{}) {
		t.Error("something is new although there is nothing")
	}
}
