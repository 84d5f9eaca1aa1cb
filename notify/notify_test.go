package notify

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type ack struct {
	incarnation string
	seq         uint64
}

// job is an authority and a driver's pusher.
type job struct {
	t         testing.TB
	authority *identity.Authority
	pusher    *Pusher
	acks      chan ack
	calls     chan string // of whom a call waits
	failures  chan string // what the pusher logs
}

// Write receives the lines of the pusher's log.
func (j *job) Write(line []byte) (int, error) {
	select {
	case j.failures <- string(line):
	default:
	}
	return len(line), nil
}

func newJob(t testing.TB) *job {
	t.Helper()
	a, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	j := &job{t: t, authority: a, acks: make(chan ack, 1000), calls: make(chan string, 1000), failures: make(chan string, 1000)}
	log := logrus.New()
	log.SetOutput(j)
	j.pusher = NewPusher(PusherConfig{
		Credentials: j.credentials(identity.Subject{Role: identity.Driver}),
		Log:         log,
		Timeout:     time.Minute, // impatient shortens it
	})
	j.pusher.retry, j.pusher.patience = time.Millisecond, 0
	j.pusher.acked = func(incarnation string, seq uint64) { j.acks <- ack{incarnation, seq} }
	j.pusher.waits = func(incarnation string) { j.calls <- incarnation }
	return j
}

// impatient makes attempts time out soon; connecting continues between them.
func (j *job) impatient() { j.pusher.cfg.Timeout = 100 * time.Millisecond }

func (j *job) credentials(s identity.Subject) *identity.Credentials {
	j.t.Helper()
	c, err := j.authority.Issue(s)
	if err != nil {
		j.t.Fatal(err)
	}
	return c
}

// start runs f until the end of the test or a call of the returned function, which waits for it.
func (j *job) start(what string, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			j.t.Errorf("%s: %v", what, err)
		}
	})
	j.t.Cleanup(stop)
	return stop
}

func (j *job) run() (stop func()) { return j.start("Run", j.pusher.Run) }

func subject(inc string) identity.Subject {
	return identity.Subject{Role: identity.Worker, Host: "h", Index: 2, Incarnation: inc}
}

func listen(t testing.TB, addr string) *identity.Listener {
	t.Helper()
	ln, err := identity.Notify.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// service starts a worker's service.
func (j *job) service(inc, addr string) (*Service, Target) {
	j.t.Helper()
	ln := listen(j.t, addr)
	s := NewService(j.credentials(subject(inc)))
	j.start("Serve", func(ctx context.Context) error { return s.Serve(ctx, ln) })
	return s, Target{subject(inc), ln.Addr().String()}
}

// silent is a target that accepts connections but does not respond, like a process that hangs.
func (j *job) silent(inc string) Target {
	ln := listen(j.t, "127.0.0.1:0")
	j.t.Cleanup(func() { ln.Close() })
	return Target{subject(inc), ln.Addr().String()}
}

// take receives a value, or fails the test after a generous time.
func take[T any](t testing.TB, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-sandbox.Expired():
		t.Fatalf("%s: nothing came", what)
		panic("unreachable")
	}
}

func (j *job) acked(inc string, seq uint64) {
	j.t.Helper()
	if got := take(j.t, "acknowledgement", j.acks); got != (ack{inc, seq}) {
		j.t.Fatalf("acknowledged: %+v, want %s %d", got, inc, seq)
	}
}

func update(seq uint64) Update {
	return Update{Seq: seq, Change: plan.Added | plan.Removed, Generation: seq + 100}
}

func TestPush(t *testing.T) {
	j := newJob(t)
	s, to := j.service("a", "127.0.0.1:0")
	if got := s.Latest(); got != (Update{}) {
		t.Errorf("before any: %+v", got)
	}
	j.pusher.Push([]Target{to}, update(1)) // before Run
	j.run()
	j.acked("a", 1)
	if got := s.Latest(); got != update(1) {
		t.Errorf("got %+v", got)
	}
	withdrawn := Update{Seq: 5}
	for _, u := range []Update{update(4), withdrawn} {
		j.pusher.Push([]Target{to}, u)
		j.acked("a", u.Seq)
		if got := s.Latest(); got != u {
			t.Errorf("got %+v", got)
		}
	}
	// Only newer updates are sent: the next acknowledgement is that of 6.
	j.pusher.Push([]Target{to}, update(5))
	j.pusher.Push([]Target{to}, update(2))
	j.pusher.Push([]Target{to}, update(6))
	j.acked("a", 6)
	if len(j.acks) != 0 {
		t.Error("more acknowledgements than updates")
	}
}

func TestServiceKeepsTheHighest(t *testing.T) {
	s := NewService(nil)
	for _, step := range []struct{ heard, want uint64 }{{0, 0}, {3, 3}, {2, 3}, {3, 3}, {7, 7}, {1, 7}} {
		s.hear(update(step.heard))
		if got := s.Latest().Seq; got != step.want {
			t.Errorf("after %d: %d, want %d", step.heard, got, step.want)
		}
	}
	s.hear(Update{Seq: 7})
	if s.Latest() != update(7) {
		t.Error("the same number again has changed the update")
	}
	var wg sync.WaitGroup
	for i := range uint64(8) {
		wg.Go(func() {
			var last uint64
			for n := range uint64(100) {
				s.hear(update(n*8 + i))
				got := s.Latest().Seq
				if got < max(last, n*8+i) {
					t.Errorf("%d after %d", got, last)
				}
				last = got
			}
		})
	}
	wg.Wait()
	if got := s.Latest(); got != update(799) {
		t.Errorf("in the end %+v", got)
	}
}

func TestServiceKeepsTheLatestLoss(t *testing.T) {
	s := NewService(nil)
	for n, step := range []struct {
		heard Loss
		news  bool
	}{
		{Loss{}, false},
		{Loss{3, []int{1}}, true},
		{Loss{3, []int{1}}, false},
		{Loss{3, []int{1, 2}}, true},
		{Loss{3, []int{1}}, false},
		{Loss{2, []int{0, 1, 2}}, false},
		{Loss{4, []int{0}}, true},
		{Loss{3, []int{1, 2, 4}}, false},
	} {
		before, more := s.Loss()
		s.hearLoss(step.heard)
		news := false
		select {
		case <-more:
			news = true
		default:
		}
		want := before
		if step.news {
			want = step.heard
		}
		if got, _ := s.Loss(); news != step.news || got.Generation != want.Generation || !slices.Equal(got.Ranks, want.Ranks) {
			t.Errorf("step %d: %+v, news %v; want %+v, %v", n, got, news, want, step.news)
		}
	}
}

// A loss and an update are sent together, and neither replaces the other.
func TestPushLoss(t *testing.T) {
	j := newJob(t)
	s, to := j.service("a", "127.0.0.1:0")
	j.run()
	loss := func(want Loss) {
		t.Helper()
		if got, _ := s.Loss(); got.Generation != want.Generation || !slices.Equal(got.Ranks, want.Ranks) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	_, more := s.Loss()
	j.pusher.PushLoss([]Target{to}, Loss{3, []int{2}})
	j.acked("a", 0)
	take(t, "the news", more)
	loss(Loss{3, []int{2}})
	j.pusher.PushLoss([]Target{to}, Loss{2, []int{1}}) // neither is newer,
	j.pusher.PushLoss([]Target{to}, Loss{3, []int{2}})
	j.pusher.Push([]Target{to}, update(1)) // so this is acknowledged next
	j.acked("a", 1)
	loss(Loss{3, []int{2}})
	j.pusher.PushLoss([]Target{to}, Loss{3, []int{0, 2}})
	j.acked("a", 1)
	loss(Loss{3, []int{0, 2}})
	if got := s.Latest(); got != update(1) {
		t.Errorf("the update became %+v", got)
	}
}

// A loss is repeated until it is acknowledged.
func TestRefusedLossIsRepeated(t *testing.T) {
	j := newJob(t)
	ln := listen(t, "127.0.0.1:0")
	l := j.listener("a", ln)
	for range 3 {
		l.fail <- status.Error(codes.Unavailable, "not now")
	}
	j.run()
	j.pusher.PushLoss([]Target{{subject("a"), ln.Addr().String()}}, Loss{1, []int{1}})
	j.acked("a", 0)
	if len(l.heard) != 4 {
		t.Errorf("heard it %d times", len(l.heard))
	}
	if !strings.Contains(take(t, "log", j.failures), "the loss of generation 1") {
		t.Error("the log does not say what was not acknowledged")
	}
}

func TestPushToManyDespiteOneThatHangs(t *testing.T) {
	j := newJob(t)
	j.impatient()
	stop := j.run()
	targets := []Target{j.silent("hung")}
	services := map[string]*Service{}
	for _, inc := range []string{"a", "b", "c"} {
		s, to := j.service(inc, "127.0.0.1:0")
		services[inc] = s
		targets = append(targets, to)
	}
	push := func(seq uint64) {
		t.Helper()
		j.pusher.Push(targets, update(seq))
		heard := map[string]bool{}
		for range services {
			a := take(t, "acknowledgement", j.acks)
			if a.seq != seq {
				t.Errorf("acknowledged: %+v", a)
			}
			heard[a.incarnation] = true
		}
		for inc, s := range services {
			if !heard[inc] || s.Latest() != update(seq) {
				t.Errorf("%s: %+v", inc, s.Latest())
			}
		}
	}
	for seq := range uint64(3) {
		push(seq + 1)
	}
	for !strings.Contains(take(t, "log", j.failures), "worker h/2 (hung) at "+targets[0].Addr+" has not acknowledged update 3") {
	}
	// Another one that fails comes last: it could have taken the one line of some seconds.
	targets = append(targets, Target{subject("wrong"), "no such address"})
	push(4)
	stop() // waits for all, the hung one too
}

func TestRetryUntilTheServiceAppears(t *testing.T) {
	j := newJob(t)
	j.impatient()
	ln := listen(t, "127.0.0.1:0")
	addr := ln.Addr().String()
	ln.Close()
	j.run()
	j.pusher.Push([]Target{{subject("a"), addr}}, update(1))
	for range 2 {
		line := take(t, "failure", j.failures)
		if !strings.Contains(line, "update 1") || !strings.Contains(line, "h/2 (a)") {
			t.Errorf("logged %s", line)
		}
	}
	s, _ := j.service("a", addr)
	j.acked("a", 1)
	if s.Latest() != update(1) {
		t.Errorf("got %+v", s.Latest())
	}
}

// listener is a service that records all requests.
type listener struct {
	notifypb.UnimplementedNotificationServer
	heard chan uint64
	fail  chan error // an error in it is the next answer
}

func (l listener) HostsUpdated(_ context.Context, req *notifypb.HostsUpdatedRequest) (*notifypb.HostsUpdatedReply, error) {
	l.heard <- req.GetSeq()
	select {
	case err := <-l.fail:
		return nil, err
	default:
		return &notifypb.HostsUpdatedReply{}, nil
	}
}

func (j *job) listener(inc string, ln *identity.Listener) listener {
	l := listener{heard: make(chan uint64, 1000), fail: make(chan error, 10)}
	conf := j.credentials(subject(inc)).ServerTLS(identity.Driver)
	register := func(r grpc.ServiceRegistrar) { notifypb.RegisterNotificationServer(r, l) }
	j.start("Serve", func(ctx context.Context) error { return wire.Serve(ctx, ln, conf, register, func() {}) })
	return l
}

// Updates superseded before the service is up never reach it.
func TestOvertakenUpdatesAreNotSent(t *testing.T) {
	j := newJob(t)
	ln := listen(t, "127.0.0.1:0")
	to := Target{subject("a"), ln.Addr().String()}
	j.run()
	j.pusher.Push([]Target{to}, update(1))
	conn, err := ln.Accept() // the pusher is at it, in vain
	if err != nil {
		t.Fatal(err)
	}
	j.pusher.Push([]Target{to}, update(2))
	j.pusher.Push([]Target{to}, update(3))
	l := j.listener("a", ln)
	conn.Close()
	j.acked("a", 3)
	if got := <-l.heard; got != 3 || len(l.heard) != 0 {
		t.Errorf("heard %d, and %d more", got, len(l.heard))
	}
}

func TestRefusedUpdateIsRepeated(t *testing.T) {
	j := newJob(t)
	ln := listen(t, "127.0.0.1:0")
	l := j.listener("a", ln)
	for _, code := range []codes.Code{codes.Internal, codes.Canceled, codes.Unavailable} {
		l.fail <- status.Error(code, "not now")
	}
	j.run()
	j.pusher.Push([]Target{{subject("a"), ln.Addr().String()}}, update(1))
	j.acked("a", 1)
	if len(l.heard) != 4 {
		t.Errorf("heard it %d times", len(l.heard))
	}
}

func TestForgetStopsRetries(t *testing.T) {
	j := newJob(t)
	j.impatient()
	to := j.silent("a")
	j.pusher.Push([]Target{to}, update(1))
	ended := make(chan struct{})
	go func() { // what Run does for each target
		defer close(ended)
		j.pusher.serve(context.Background(), j.pusher.targets["a"])
	}()
	take(t, "failure", j.failures)
	take(t, "failure", j.failures)
	j.pusher.Forget("a")
	take(t, "end of the target's goroutine", ended)
	j.pusher.Forget("a")
	j.pusher.Forget("nobody")
	if len(j.pusher.targets) != 0 {
		t.Error("the target is not forgotten")
	}
	// A target forgotten before Run starts is not notified; one that is pushed to again is.
	s, to := j.service("b", "127.0.0.1:0")
	j.pusher.Push([]Target{to}, update(1))
	j.pusher.Forget("b")
	j.pusher.Push([]Target{to}, update(2))
	j.run()
	j.acked("b", 2)
	if s.Latest() != update(2) {
		t.Errorf("got %+v", s.Latest())
	}
}

func TestTargetMoves(t *testing.T) {
	j := newJob(t)
	j.run()
	old := j.silent("a")
	j.pusher.Push([]Target{old}, update(3))
	s, to := j.service("a", "127.0.0.1:0")
	j.pusher.Push([]Target{to}, update(3))
	j.acked("a", 3)
	if s.Latest() != update(3) {
		t.Errorf("got %+v", s.Latest())
	}
}

// A target's address may be reused by another worker, which must not receive the target's
// notifications.
func TestAnotherWorkerAtTheAddress(t *testing.T) {
	j := newJob(t)
	j.impatient()
	j.run()
	s, to := j.service("b", "127.0.0.1:0")
	j.pusher.Push([]Target{{subject("a"), to.Addr}}, update(1))
	take(t, "failure", j.failures)
	if s.Latest() != (Update{}) || len(j.acks) != 0 {
		t.Errorf("the wrong worker was told %+v", s.Latest())
	}
}

func call(conf *tls.Config, addr string, req *notifypb.HostsUpdatedRequest) error {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)), grpc.WithNoProxy())
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = notifypb.NewNotificationClient(conn).HostsUpdated(context.Background(), req)
	return err
}

func TestStrangers(t *testing.T) {
	j, other := newJob(t), newJob(t)
	s, to := j.service("a", "127.0.0.1:0")
	driver := identity.Subject{Role: identity.Driver}
	noCert := j.credentials(driver).ClientTLS(to.Subject)
	noCert.GetClientCertificate = nil
	blind := func(c *identity.Credentials) *tls.Config {
		conf := c.ClientTLS(to.Subject)
		conf.InsecureSkipVerify, conf.VerifyConnection = true, nil
		return conf
	}
	req := &notifypb.HostsUpdatedRequest{Seq: 9}
	for name, conf := range map[string]*tls.Config{
		"no certificate":       noCert,
		"another job's driver": blind(other.credentials(driver)),
		"a worker":             blind(j.credentials(subject("b"))),
		"itself":               blind(j.credentials(subject("a"))),
	} {
		if err := call(conf, to.Addr, req); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, said := range []string{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", strings.Repeat("\x00", 1<<16)} {
		conn, err := net.Dial("tcp", to.Addr)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(sandbox.Limit())
		go io.WriteString(conn, said)
		if answer, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) || len(answer) > 64 {
			t.Errorf("plaintext was answered with %d bytes, %v", len(answer), err)
		}
		conn.Close()
	}
	genuine := j.credentials(driver).ClientTLS(to.Subject)
	if err := call(genuine, to.Addr, &notifypb.HostsUpdatedRequest{Seq: 9, Change: 4}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a change that is none: %v", err)
	}
	big := &notifypb.HostsUpdatedRequest{Seq: 9}
	big.ProtoReflect().SetUnknown(append([]byte{0x7a, 0x80, 0x80, 0x80, 0x01}, make([]byte, 2<<20)...)) // field 15: 2 MiB
	if err := call(genuine, to.Addr, big); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a big message: %v", err)
	}
	if s.Latest() != (Update{}) {
		t.Errorf("a stranger was heard: %+v", s.Latest())
	}
	if err := call(genuine, to.Addr, req); err != nil || s.Latest().Seq != 9 {
		t.Errorf("the driver: %v", err)
	}
}

// Neither a service nor a pusher delays the other's end, whatever is in progress.
func TestEnds(t *testing.T) {
	j := newJob(t)
	j.impatient()
	ln := listen(t, "127.0.0.1:0")
	s := NewService(j.credentials(subject("a")))
	stopService := j.start("Serve", func(ctx context.Context) error { return s.Serve(ctx, ln) })
	stopRun := j.run()
	j.pusher.Push([]Target{{subject("a"), ln.Addr().String()}}, update(1))
	j.acked("a", 1)
	stranger, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	stopService()
	j.pusher.Push([]Target{{subject("a"), ln.Addr().String()}}, update(2))
	take(t, "failure", j.failures)
	stopRun()
	broken := listen(t, "127.0.0.1:0")
	broken.Close()
	if err := s.Serve(context.Background(), broken); err == nil || !strings.HasPrefix(err.Error(), "notify: ") {
		t.Errorf("on a closed listener: %v", err)
	}
}

// TestNoTimersAfterRun: no target is to be dialed once Run has ended, also one that is pushed to
// later.
func TestNoTimersAfterRun(t *testing.T) {
	j := newJob(t)
	stopRun := j.run()
	j.pusher.Push([]Target{{subject("a"), "127.0.0.1:1"}}, update(1))
	stopRun()
	j.pusher.Push([]Target{{subject("b"), "127.0.0.1:1"}}, update(1))
	j.pusher.mu.Lock()
	defer j.pusher.mu.Unlock()
	for _, to := range j.pusher.targets {
		to.mu.Lock()
		if to.late != nil {
			t.Errorf("%v has a timer", to.Subject)
		}
		to.mu.Unlock()
	}
}

// BenchmarkPush measures from Push to the acknowledgements of four workers.
func BenchmarkPush(b *testing.B) {
	j := newJob(b)
	j.run()
	var targets []Target
	for _, inc := range []string{"a", "b", "c", "d"} {
		_, to := j.service(inc, "127.0.0.1:0")
		targets = append(targets, to)
	}
	var seq uint64
	for b.Loop() {
		seq++
		j.pusher.Push(targets, update(seq))
		for range targets {
			<-j.acks
		}
	}
}
