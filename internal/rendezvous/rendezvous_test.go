package rendezvous

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type joined struct {
	from identity.Subject
	j    Joining
}

type reported struct {
	from                identity.Subject
	r                   Report
	generation, commits uint64
}

// recorder forwards the server's calls. Its buffer exceeds the needs of every test.
type recorder struct {
	joins   chan joined
	reports chan reported
	over    chan chosen

	failures chan string
}

type chosen struct {
	from       identity.Subject
	generation uint64
	backend    string
}

func (r recorder) Joined(from identity.Subject, j Joining) { r.joins <- joined{from, j} }
func (r recorder) Reported(from identity.Subject, rep Report, generation, commits uint64, noted func()) {
	defer noted()
	r.reports <- reported{from, rep, generation, commits}
}

func (r recorder) BackendReported(from identity.Subject, generation uint64, backend string, noted func()) {
	defer noted()
	r.over <- chosen{from, generation, backend}
}

func (r recorder) FailureReported(_ identity.Subject, text string, noted func()) {
	defer noted()
	r.failures <- text
}

// job is a driver's server with its authority.
type job struct {
	t         testing.TB
	authority *identity.Authority
	heard     recorder
	server    *Server
	pusher    *notify.Pusher
	addr      string
	stop      func()             // ends Serve and waits for it
	admitted  []identity.Subject // workers
}

func quiet() logrus.FieldLogger {
	l := logrus.New()
	l.SetOutput(io.Discard)
	return l
}

func newJob(t testing.TB) *job {
	t.Helper()
	a, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := identity.Rendezvous.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	j := &job{t: t, authority: a, addr: ln.Addr().String()}
	j.serve(ln)
	return j
}

func (j *job) credentials(s identity.Subject) *identity.Credentials {
	j.t.Helper()
	c, err := j.authority.Issue(s)
	if err != nil {
		j.t.Fatal(err)
	}
	if s.Role == identity.Worker {
		j.admitted = append(j.admitted, s)
		j.server.Admit(s)
	}
	return c
}

func (j *job) serve(ln *identity.Listener) {
	j.heard = recorder{make(chan joined, 1000), make(chan reported, 1000), make(chan chosen, 1000), make(chan string, 1000)}
	driver := j.credentials(identity.Subject{Role: identity.Driver})
	j.pusher = notify.NewPusher(notify.PusherConfig{Credentials: driver, Log: quiet()})
	j.server = NewServer(ServerConfig{Credentials: driver, Handler: j.heard, Also: j.pusher, Log: quiet()})
	for _, s := range j.admitted {
		j.server.Admit(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- j.server.Serve(ctx, ln) }()
	go func() { done <- j.pusher.Run(ctx) }()
	stopped := false
	j.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := errors.Join(<-done, <-done); err != nil {
			j.t.Errorf("Serve: %v", err)
		}
	}
	j.t.Cleanup(func() { j.stop() })
}

func slotOf(inc string) identity.Subject {
	return identity.Subject{Role: identity.Worker, Host: "host-" + inc, Index: 1, Incarnation: inc}
}

func (j *job) client(inc string) *Client {
	j.t.Helper()
	c, err := NewClient(ClientConfig{Addr: j.addr, Credentials: j.credentials(slotOf(inc))})
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { c.Close() })
	return c
}

// publish publishes a world of these incarnations.
func (j *job) publish(generation uint64, root int, seq uint64, incs ...string) {
	w := plan.World{Generation: generation}
	var members []Member
	for r, inc := range incs {
		w.Slots = append(w.Slots, plan.Slot{
			SlotID: plan.SlotID{Host: "host-" + inc, Index: 1}, Rank: r, LocalSize: 1, CrossRank: r, CrossSize: len(incs),
		})
		members = append(members, Member{Incarnation: inc, DataAddrs: []string{inc + ":1", inc + ":2"}})
	}
	j.server.Publish(w, members, root, seq)
}

type answer struct {
	reply *rendezvouspb.JoinReply
	err   error
}

// arrive makes the call Join of a worker.
func (j *job) arrive(inc string, req *rendezvouspb.JoinRequest) <-chan answer {
	answered := make(chan answer, 1)
	j.server.join(slotOf(inc), req, func(reply *rendezvouspb.JoinReply, err error) { answered <- answer{reply, err} })
	return answered
}

type result struct {
	w   World
	err error
}

func join(c *Client, j Joining) <-chan result {
	return joinCtx(context.Background(), c, j)
}

func joinCtx(ctx context.Context, c *Client, j Joining) <-chan result {
	ch := make(chan result, 1)
	go func() {
		var w World
		p, err := c.Join(ctx, j)
		if err == nil {
			w, err = p.World()
		}
		ch <- result{w, err}
	}()
	return ch
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

// none fails the test if a value has arrived.
func none[T any](t testing.TB, what string, ch <-chan T) {
	t.Helper()
	select {
	case v := <-ch:
		t.Fatalf("%s: %v", what, v)
	default:
	}
}

func (j *job) world(what string, ch <-chan result, generation uint64, rank int) World {
	j.t.Helper()
	r := take(j.t, what, ch)
	if r.err != nil || r.w.Generation != generation || r.w.Rank != rank {
		j.t.Fatalf("%s: generation %d, rank %d, %v; want generation %d, rank %d",
			what, r.w.Generation, r.w.Rank, r.err, generation, rank)
	}
	return r.w
}

func TestJoinWaitsForPublish(t *testing.T) {
	j := newJob(t)
	a, b := j.client("a"), j.client("b")
	said := Joining{
		After: 0, Commits: 7, HoldsState: true, DataAddrs: []string{"1.2.3.4:5", "[::1]:6"}, NotifyAddr: "1.2.3.4:7", Cause: "why",
	}
	one := join(a, said)
	if got := take(t, "joined", j.heard.joins); !reflect.DeepEqual(got.j, said) {
		t.Errorf("heard %+v, want %+v", got.j, said)
	} else if want := slotOf("a"); got.from.Host != want.Host || got.from.Index != 1 || got.from.Incarnation != "a" {
		t.Errorf("heard it from %v", got.from)
	}
	two := join(b, Joining{})
	take(t, "joined", j.heard.joins)
	none(t, "an answer before a world", one)
	j.publish(1, 1, 9, "a", "b")
	w := j.world("a", one, 1, 0)
	want := World{
		World: plan.World{Generation: 1, Slots: []plan.Slot{
			{SlotID: plan.SlotID{Host: "host-a", Index: 1}, Rank: 0, LocalSize: 1, CrossRank: 0, CrossSize: 2},
			{SlotID: plan.SlotID{Host: "host-b", Index: 1}, Rank: 1, LocalSize: 1, CrossRank: 1, CrossSize: 2},
		}},
		Rank: 0, SyncRoot: 1, Seq: 9, Key: w.Key, columns: w.columns,
	}
	if !reflect.DeepEqual(w, want) {
		t.Errorf("got %+v\nwant %+v", w, want)
	}
	if got, want := w.DataAddrs(), [][]string{{"a:1", "a:2"}, {"b:1", "b:2"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("addresses %q, want %q", got, want)
	}
	j.world("b", two, 1, 1)
}

// A join that arrives after its world was published, or again because the answer was lost, is
// answered in the same way at once, without a call of the handler.
func TestJoinAfterPublish(t *testing.T) {
	j := newJob(t)
	j.publish(1, 0, 0, "a")
	for range 3 {
		j.world("a", join(j.client("a"), Joining{}), 1, 0)
	}
	none(t, "heard of an answered join", j.heard.joins)
}

func TestGenerations(t *testing.T) {
	j := newJob(t)
	a, b, c := j.client("a"), j.client("b"), j.client("c")
	j.publish(1, 0, 0, "a", "b")
	j.world("a", join(a, Joining{}), 1, 0)
	// b has not fetched world 1 when world 2 comes: it gets the newest. c waits: world 1 is not its
	// own.
	wc := join(c, Joining{})
	take(t, "joined", j.heard.joins)
	wa := join(a, Joining{After: 1})
	take(t, "joined", j.heard.joins)
	none(t, "a member was given the world it has left", wa)
	j.publish(2, 0, 0, "b", "a", "c")
	j.world("a", wa, 2, 1)
	j.world("b", join(b, Joining{}), 2, 0)
	j.world("c", wc, 2, 2)
	// A worker ahead of the published world waits for a newer one, and so does one that is not a
	// member.
	ahead := join(a, Joining{After: 3})
	take(t, "joined", j.heard.joins)
	j.publish(3, 0, 0, "a")
	none(t, "answered with an old world", ahead)
	outside := join(b, Joining{After: 2})
	take(t, "joined", j.heard.joins)
	j.publish(4, 0, 0, "a", "b")
	j.world("a", ahead, 4, 0)
	j.world("b", outside, 4, 1)
	// An older world changes nothing.
	j.publish(4, 0, 0, "c")
	j.publish(3, 0, 0, "c")
	j.world("a", join(a, Joining{After: 3}), 4, 0)
}

func TestPublishPanics(t *testing.T) {
	s := NewServer(ServerConfig{Log: quiet()})
	for name, f := range map[string]func(){
		"members":   func() { s.Publish(plan.World{Generation: 1, Slots: make([]plan.Slot, 2)}, make([]Member, 1), 0, 0) },
		"root":      func() { s.Publish(plan.World{Generation: 1, Slots: make([]plan.Slot, 1)}, make([]Member, 1), 1, 0) },
		"dismissal": func() { s.Dismiss("a", io.EOF) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

func TestDismiss(t *testing.T) {
	for _, why := range []error{ErrRemoved, ErrLast, ErrFinished} {
		j := newJob(t)
		a := j.client("a")
		waiting := join(a, Joining{})
		take(t, "joined", j.heard.joins)
		j.server.Dismiss("a", fmt.Errorf("wrapped: %w", why))
		if r := take(t, "while waiting", waiting); !errors.Is(r.err, why) {
			t.Errorf("while waiting: %v", r.err)
		}
		j.publish(1, 0, 0, "a")
		if r := take(t, "later", join(a, Joining{})); !errors.Is(r.err, why) {
			t.Errorf("later: %v", r.err)
		}
		j.server.Dismiss("b", why)
		if r := take(t, "before", join(j.client("b"), Joining{})); !errors.Is(r.err, why) {
			t.Errorf("before the join: %v", r.err)
		}
		none(t, "heard of a dismissed worker", j.heard.joins)
	}
}

func TestSecondJoinSupersedes(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	first := join(c, Joining{})
	take(t, "joined", j.heard.joins)
	second := join(c, Joining{Commits: 1})
	if r := take(t, "the first join", first); !errors.Is(r.err, ErrSuperseded) {
		t.Errorf("the first join: %v", r.err)
	}
	if got := take(t, "joined", j.heard.joins); got.j.Commits != 1 {
		t.Errorf("heard %+v", got)
	}
	none(t, "the second join", second)
	j.publish(1, 0, 0, "a")
	j.world("a", second, 1, 0)
}

// A join superseded by a delayed earlier attempt of itself is repeated.
func TestJoinOutlivesItsOwnGhost(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	got := join(c, Joining{})
	take(t, "joined", j.heard.joins)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ghost := make(chan error, 1)
	go func() {
		_, err := c.rpc.Join(ctx, Joining{}.toWire())
		ghost <- err
	}()
	if err := take(t, "the ghost", ghost); status.Code(err) != codes.Aborted {
		t.Errorf("the ghost: %v", err)
	}
	j.publish(1, 0, 0, "a")
	j.world("a", got, 1, 0)
}

func TestJoinCancelled(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	got := joinCtx(ctx, c, Joining{})
	take(t, "joined", j.heard.joins)
	cancel(cause)
	if r := take(t, "cancelled", got); !errors.Is(r.err, cause) {
		t.Errorf("got %v", r.err)
	}
	// The client still works.
	got = join(c, Joining{})
	take(t, "joined", j.heard.joins)
	j.publish(1, 0, 0, "a")
	j.world("a", got, 1, 0)
}

func TestClosedClient(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	got := join(c, Joining{})
	take(t, "joined", j.heard.joins)
	c.Close()
	if r := take(t, "closed", got); r.err == nil {
		t.Error("a join outlived its client")
	}
	if r := take(t, "closed", join(c, Joining{})); r.err == nil || errors.As(r.err, new(*UnreachableError)) {
		t.Errorf("got %v", r.err)
	}
}

// The end of the server fails every join; clients then reconnect to the next server at the address.
func TestServerStopsAndReturns(t *testing.T) {
	j := newJob(t)
	const n = 5
	var results []<-chan result
	var incs []string
	for i := range n {
		incs = append(incs, fmt.Sprint("w", i))
		results = append(results, join(j.client(incs[i]), Joining{}))
		take(t, "joined", j.heard.joins)
	}
	j.stop()
	for _, r := range results {
		none(t, "gave up at once", r)
	}
	ln, err := identity.Rendezvous.Listen(j.addr)
	if err != nil {
		t.Fatal(err)
	}
	j.serve(ln)
	for range n {
		take(t, "joined again", j.heard.joins)
	}
	j.publish(1, 0, 0, incs...)
	for i, r := range results {
		j.world(incs[i], r, 1, i)
	}
}

func TestStopReleasesWaiters(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	err := make(chan error, 1)
	go func() {
		_, e := c.rpc.Join(context.Background(), Joining{}.toWire())
		err <- e
	}()
	take(t, "joined", j.heard.joins)
	j.stop()
	if e := take(t, "released", err); status.Code(e) != codes.Unavailable {
		t.Errorf("got %v", e)
	}
	if e := take(t, "answer", j.arrive("b", &rendezvouspb.JoinRequest{})).err; status.Code(e) != codes.Unavailable {
		t.Errorf("a join after the end: %v", e)
	}
}

func TestDriverAppearsLate(t *testing.T) {
	j := newJob(t)
	j.stop()
	c := j.client("a")
	got := join(c, Joining{})
	for s := c.conn.GetState(); s != connectivity.TransientFailure; s = c.conn.GetState() {
		c.conn.WaitForStateChange(context.Background(), s)
	}
	ln, err := identity.Rendezvous.Listen(j.addr)
	if err != nil {
		t.Fatal(err)
	}
	j.serve(ln)
	take(t, "joined", j.heard.joins)
	j.publish(1, 0, 0, "a")
	j.world("a", got, 1, 0)
}

func TestUnreachable(t *testing.T) {
	j := newJob(t)
	j.stop()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // connects, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for addr, why := range map[string]string{j.addr: "refused", silent.Addr().String(): ""} {
		c, err := NewClient(ClientConfig{
			Addr: addr, Credentials: j.credentials(slotOf("a")), Patience: 150 * time.Millisecond,
		})
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Join(context.Background(), Joining{})
		var u *UnreachableError
		if !errors.As(err, &u) || u.Addr != addr || u.Err == nil || u.For < 150*time.Millisecond {
			t.Errorf("%s: %v", addr, err)
		} else if !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v does not say %q", addr, err, why)
		}
		if err := c.Report(context.Background(), Done, 1, 1); !errors.As(err, &u) {
			t.Errorf("report: %v", err)
		}
		c.Close()
	}
}

// A driver that was reached once may be absent for long, but not for ever.
func TestAbsence(t *testing.T) {
	for _, test := range []struct {
		absence time.Duration
		returns bool
	}{{0, true}, {400 * time.Millisecond, false}} {
		j := newJob(t)
		cfg := ClientConfig{Addr: j.addr, Credentials: j.credentials(slotOf("a")), Absence: test.absence}
		c, err := NewClient(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.Report(context.Background(), Committed, 1, 1); err != nil {
			t.Fatal(err)
		}
		c.cfg.Patience = time.Millisecond
		got := join(c, Joining{})
		take(t, "joined", j.heard.joins)
		j.stop()
		if !test.returns {
			var u *UnreachableError
			if r := take(t, "given up", got); !errors.As(r.err, &u) || u.For < test.absence {
				t.Errorf("got %v", r.err)
			}
			continue
		}
		<-time.After(300 * time.Millisecond)
		ln, err := identity.Rendezvous.Listen(j.addr)
		if err != nil {
			t.Fatal(err)
		}
		j.serve(ln)
		take(t, "joined again", j.heard.joins)
		j.publish(1, 0, 0, "a")
		j.world("a", got, 1, 0)
	}
}

func TestReport(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	for _, r := range []Report{Done, Leaving, Committed, Draining, Fetching, Writing, Written, NotWritten} {
		if err := c.Report(context.Background(), r, 3, 8); err != nil {
			t.Fatal(err)
		}
		got := take(t, "reported", j.heard.reports)
		if got.from.Incarnation != "a" || got.r != r || got.generation != 3 || got.commits != 8 {
			t.Errorf("%v: heard %+v", r, got)
		}
	}
	if err := c.Report(context.Background(), 0, 1, 1); err == nil {
		t.Error("reported nothing")
	}
	_, err := c.rpc.Report(context.Background(), &rendezvouspb.ReportRequest{Report: 77})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("an unknown report: %v", err)
	}
}

func TestReportBackend(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	for _, name := range []string{"nccl", "ipc+hosts", "x-2.1_b", strings.Repeat("n", maxBackend)} {
		if err := c.ReportBackend(context.Background(), 3, name); err != nil {
			t.Fatal(err)
		}
		if got := take(t, "reported", j.heard.over); got.from.Incarnation != "a" || got.generation != 3 || got.backend != name {
			t.Errorf("%s: heard %+v", name, got)
		}
	}
	for _, name := range []string{"", "two words", "NCCL", "a\nb", "\xff", "\u00e9", strings.Repeat("n", maxBackend+1)} {
		if err := c.ReportBackend(context.Background(), 3, name); err == nil {
			t.Errorf("%q was reported", name)
		}
		req := &rendezvouspb.ReportRequest{Report: rendezvouspb.Report_REPORT_BACKEND, Generation: 3, Backend: name}
		if _, err := c.rpc.Report(context.Background(), req); err == nil {
			t.Errorf("the server took %q", name)
		}
	}
	if len(j.heard.over) > 0 {
		t.Errorf("heard %+v", <-j.heard.over)
	}
}

// TestReportFailure: what a program says of its error arrives in one line that a log can show.
func TestReportFailure(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	for text, want := range map[string]string{
		"ValueError: bad sample (train.py:34)": "ValueError: bad sample (train.py:34)",
		"two\nlines\x1b[2J\t":                  "two lines [2J",
		strings.Repeat("é", MaxError):          strings.Repeat("é", MaxError/2-2) + "…",
	} {
		if err := c.ReportFailure(context.Background(), text); err != nil {
			t.Fatal(err)
		}
		if got := take(t, "reported", j.heard.failures); got != want || len(got) > MaxError {
			t.Errorf("%q: heard %q", text, got)
		}
	}
	if err := c.ReportFailure(context.Background(), "\n"); err == nil {
		t.Error("nothing was reported")
	}
	for _, text := range []string{"", "a\nb", "\xff", strings.Repeat("n", MaxError+1)} {
		if _, err := c.rpc.Report(context.Background(), &rendezvouspb.ReportRequest{Report: rendezvouspb.Report_REPORT_FAILED, Error: text}); err == nil {
			t.Errorf("the server took %q", text)
		}
	}
	none(t, "heard", j.heard.failures)
}

func TestBounds(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	ctx := context.Background()
	for name, req := range map[string]*rendezvouspb.JoinRequest{
		"addresses": {DataAddresses: make([]string, maxAddrs+1)},
		"address":   {DataAddresses: []string{strings.Repeat("a", maxAddr+1)}},
		"notify":    {NotifyAddress: strings.Repeat("a", maxAddr+1)},
		"cause":     {Cause: strings.Repeat("c", maxCause+1)},
		"handle":    {Handle: make([]byte, MaxHandle+1)},
		"program":   {Program: "a\nb"},
	} {
		if _, err := c.rpc.Join(ctx, req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.rpc.Join(ctx, &rendezvouspb.JoinRequest{Cause: strings.Repeat("c", wire.MaxMessage)}); status.Code(err) !=
		codes.ResourceExhausted {
		t.Errorf("a big message: %v", err)
	}
	none(t, "heard of a bad join", j.heard.joins)
	if _, err := c.Join(ctx, Joining{DataAddrs: make([]string, maxAddrs+1)}); err == nil {
		t.Error("the client sends too many addresses")
	}
	got := join(c, Joining{Cause: strings.Repeat("é", maxCause) + "\xff", DataAddrs: make([]string, maxAddrs)})
	if heard := take(t, "joined", j.heard.joins); len(heard.j.Cause) != maxCause || len(heard.j.DataAddrs) != maxAddrs {
		t.Errorf("cause of %d bytes, %d addresses", len(heard.j.Cause), len(heard.j.DataAddrs))
	}
	j.publish(1, 0, 0, "a")
	j.world("a", got, 1, 0)
}

// TestHandles: the members of a world get each other's handles, which are bounded together.
func TestHandles(t *testing.T) {
	j := newJob(t)
	a := join(j.client("a"), Joining{Handle: []byte("of a")})
	b := join(j.client("b"), Joining{})
	take(t, "joined", j.heard.joins)
	take(t, "joined", j.heard.joins)
	w := plan.World{Generation: 1, Slots: []plan.Slot{{SlotID: plan.SlotID{Host: "h"}}, {SlotID: plan.SlotID{Host: "h", Index: 1}}}}
	if err := plan.Place(w.Slots); err != nil {
		t.Fatal(err)
	}
	j.server.Publish(w, []Member{{Incarnation: "b"}, {Incarnation: "a", Handle: []byte("of a")}}, 0, 0)
	for _, got := range []<-chan result{a, b} {
		r := take(t, "a world", got)
		if h := r.w.Handles(); r.err != nil || len(h) != 2 || len(h[0]) != 0 || string(h[1]) != "of a" {
			t.Errorf("%q, %v", h, r.err)
		}
	}
	var h handles
	h.of = make(map[string]int)
	for i := range maxHandles / MaxHandle {
		if err := h.take(fmt.Sprint(i), MaxHandle); err != nil {
			t.Fatal(err)
		}
	}
	if h.take("more", 1) == nil || h.take("0", MaxHandle) != nil {
		t.Error("the bound of all handles does not hold, or a worker counts twice")
	}
	_ = h.take("0", 0)
	if err := h.take("more", MaxHandle); err != nil {
		t.Error(err)
	}
}

func TestAnswersThatMakeNoSense(t *testing.T) {
	good := func(change func(*rendezvouspb.World)) *rendezvouspb.World {
		w := &rendezvouspb.World{Generation: 3, Rank: 1, Size: 2, DataKey: make([]byte, 32)}
		change(w)
		return w
	}
	if p, err := placeFromWire(good(func(*rendezvouspb.World) {}), 2, nil); err != nil || p.Rank != 1 {
		t.Fatalf("%+v, %v", p, err)
	}
	for name, w := range map[string]*rendezvouspb.World{
		"nothing":          nil,
		"old":              good(func(w *rendezvouspb.World) { w.Generation = 2 }),
		"key":              good(func(w *rendezvouspb.World) { w.DataKey = w.DataKey[1:] }),
		"rank":             good(func(w *rendezvouspb.World) { w.Rank = 2 }),
		"root":             good(func(w *rendezvouspb.World) { w.SyncRoot = 2 }),
		"too many members": good(func(w *rendezvouspb.World) { w.Size = maxMembers + 1 }),
		"from nothing":     good(func(w *rendezvouspb.World) { w.Difference = []byte("x") }),
	} {
		if _, err := placeFromWire(w, 2, nil); err == nil || !strings.HasPrefix(err.Error(), "rendezvous: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMembersThatMakeNoSense(t *testing.T) {
	good := func(change func(*rendezvouspb.Members)) *rendezvouspb.Members {
		m := &rendezvouspb.Members{
			Hosts: []string{"a"}, Counts: []uint32{2}, Indices: []uint32{0, 1}, AddressCounts: []uint32{1, 1},
			AddressStarts: []uint32{0, 0}, AddressPorts: []uint32{7, 0}, Starts: []string{"x"},
		}
		change(m)
		return m
	}
	read := func(m *rendezvouspb.Members) (World, error) {
		text, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return Place{Generation: 3, Size: 2, members: &members{size: 2, whole: text}}.World()
	}
	if w, err := read(good(func(*rendezvouspb.Members) {})); err != nil ||
		!reflect.DeepEqual(w.DataAddrs(), [][]string{{"x:7"}, {"x"}}) || w.Slots[1].LocalRank != 1 {
		t.Fatalf("%+v, %v", w, err)
	}
	for name, m := range map[string]*rendezvouspb.Members{
		"nobody":             {},
		"three":              good(func(m *rendezvouspb.Members) { m.Indices, m.Counts[0] = []uint32{0, 1, 2}, 3 }),
		"huge slot":          good(func(m *rendezvouspb.Members) { m.Indices[0] = 1 << 31 }),
		"a slot twice":       good(func(m *rendezvouspb.Members) { m.Indices[1] = 0 }),
		"no counts":          good(func(m *rendezvouspb.Members) { m.Counts = nil }),
		"few slots":          good(func(m *rendezvouspb.Members) { m.Counts[0] = 1 }),
		"many slots":         good(func(m *rendezvouspb.Members) { m.Counts[0] = math.MaxUint32 }),
		"few address counts": good(func(m *rendezvouspb.Members) { m.AddressCounts = m.AddressCounts[:1] }),
		"few addresses":      good(func(m *rendezvouspb.Members) { m.AddressCounts[0] = 2 }),
		"many addresses":     good(func(m *rendezvouspb.Members) { m.AddressCounts[0] = 0 }),
		"few ports":          good(func(m *rendezvouspb.Members) { m.AddressPorts = m.AddressPorts[:1] }),
		"no such start":      good(func(m *rendezvouspb.Members) { m.AddressStarts[1] = 1 }),
		"huge port":          good(func(m *rendezvouspb.Members) { m.AddressPorts[0] = 1 << 16 }),
		"too many addresses": good(func(m *rendezvouspb.Members) {
			m.AddressStarts, m.AddressPorts = make([]uint32, maxAddresses+1), make([]uint32, maxAddresses+1)
		}),
		"long addresses": good(func(m *rendezvouspb.Members) { m.Starts[0] = strings.Repeat("x", maxText/2) }),
		"a rank of too many addresses": good(func(m *rendezvouspb.Members) {
			m.AddressStarts, m.AddressPorts = make([]uint32, maxAddrs+2), make([]uint32, maxAddrs+2)
			m.AddressCounts[0] = maxAddrs + 1
		}),
	} {
		if _, err := read(m); err == nil || !strings.HasPrefix(err.Error(), "rendezvous: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := (Place{Generation: 3, Size: 2, members: &members{size: 2, whole: []byte{0xff}}}).World(); err == nil {
		t.Error("a malformed message was taken")
	}
}

// TestWorldArrives: all kinds of slots and addresses survive encoding.
func TestWorldArrives(t *testing.T) {
	ids := []plan.SlotID{{Host: "b", Index: 3}, {Host: "b", Index: 1}, {Host: "a"}, {Host: "b", Index: 2}, {Host: "", Index: 7}}
	slots, err := plan.Assign(ids, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	addrs := [][]string{
		{"10.0.0.1:5", "[::1]:5", ""}, nil, {":", ":0", ":1", "a:01", "a:65535", "a:65536", "a:+1", "a:1_0", "a: 1"}, {"", ""}, {"a", "a:1:2", "é:9"},
	}
	w := again(t, World{World: plan.World{Generation: 5, Slots: slots}, Rank: 4, SyncRoot: 2, Seq: 9}, addrs)
	if !reflect.DeepEqual(w.DataAddrs(), addrs) || !slices.Equal(w.Slots, slots) || w.Rank != 4 || w.SyncRoot != 2 || w.Seq != 9 {
		t.Errorf("%+v arrived, with %q", w, w.DataAddrs())
	}
}

// A stranger that is not a worker of this job gets no answer, and the server goes on.
func TestStrangers(t *testing.T) {
	j := newJob(t)
	j.publish(1, 0, 0, "a")
	other := newJob(t)
	toDriver := identity.Subject{Role: identity.Driver}
	noCert := j.credentials(slotOf("a")).ClientTLS(toDriver)
	noCert.Certificates, noCert.GetClientCertificate = nil, nil
	blind := func(c *identity.Credentials) *tls.Config {
		conf := c.ClientTLS(toDriver)
		conf.InsecureSkipVerify, conf.VerifyConnection = true, nil
		return conf
	}
	for name, conf := range map[string]*tls.Config{
		"no certificate": noCert,
		"another job":    blind(other.credentials(slotOf("a"))),
		"a driver":       blind(j.credentials(toDriver)),
	} {
		conn, err := grpc.NewClient(j.addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)), grpc.WithNoProxy())
		if err != nil {
			t.Fatal(err)
		}
		reply, err := rendezvouspb.NewRendezvousClient(conn).Join(context.Background(), &rendezvouspb.JoinRequest{})
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v, %v", name, reply, err)
		}
		conn.Close()
	}
	for _, said := range []string{
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", "GET / HTTP/1.1\r\n\r\n",
		strings.Repeat("\x16\x03\x01\xff\xff", 1000),
	} {
		conn, err := net.Dial("tcp", j.addr)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(sandbox.Limit())
		go io.WriteString(conn, said)
		answer, err := io.ReadAll(conn) // ends because the server hangs up
		if errors.Is(err, os.ErrDeadlineExceeded) || len(answer) > 64 {
			t.Errorf("plaintext %.8q was answered with %d bytes, %v", said, len(answer), err)
		}
		conn.Close()
	}
	// A connection that sends nothing holds up neither the others nor the end.
	silent, err := net.Dial("tcp", j.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	j.world("a", join(j.client("a"), Joining{}), 1, 0)
	began := time.Now()
	j.stop()
	if d := time.Since(began); d > time.Minute {
		t.Errorf("the end took %v", d)
	}
	none(t, "heard a stranger", j.heard.joins)
}

// A worker of this job does not talk to another job's driver, nor to a worker posing as a driver.
func TestFalseDriver(t *testing.T) {
	j, other := newJob(t), newJob(t)
	c, err := NewClient(ClientConfig{
		Addr: other.addr, Credentials: j.credentials(slotOf("a")), Patience: 5 * time.Second, // in which a handshake has failed
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Join(context.Background(), Joining{})
	if !errors.As(err, new(*UnreachableError)) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("another job's driver: %v", err)
	}
	none(t, "heard", other.heard.joins)
}

// Many workers and many generations: no worker misses a world or gets a wrong one.
func TestManyGenerations(t *testing.T) {
	j := newJob(t)
	const workers, generations = 4, 10
	var incs []string
	done := make(chan error, workers)
	for i := range workers {
		inc := fmt.Sprint("w", i)
		incs = append(incs, inc)
		c := j.client(inc)
		go func() {
			for g := range uint64(generations) {
				w, err := c.Join(context.Background(), Joining{After: g, Commits: g})
				if err != nil || w.Generation != g+1 || w.Rank != (i+int(g))%workers {
					done <- fmt.Errorf("%s after %d: generation %d, rank %d, %v", inc, g, w.Generation, w.Rank, err)
					return
				}
			}
			done <- nil
		}()
	}
	for g := range uint64(generations) {
		for range workers {
			if got := take(t, "joined", j.heard.joins); got.j.After != g {
				t.Fatalf("generation %d: heard a join after %d", g, got.j.After)
			}
		}
		turned := make([]string, workers)
		for i := range incs {
			turned[(i+int(g))%workers] = incs[i]
		}
		j.publish(g+1, 0, 0, turned...)
	}
	for range workers {
		if err := take(t, "worker", done); err != nil {
			t.Error(err)
		}
	}
}

// BenchmarkPublish measures the delivery of a world to all waiting members, each of which receives
// all members. It reports the time per member.
func BenchmarkPublish(b *testing.B) {
	for _, n := range []int{4, 100, 300, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { benchmarkPublish(b, n) })
	}
}

func benchmarkPublish(b *testing.B, n int) {
	j := newJob(b)
	ids, members := make([]plan.SlotID, n), make([]Member, n)
	var clients []*Client
	for i := range n {
		ids[i] = plan.SlotID{Host: fmt.Sprintf("host%04d", i/8), Index: i % 8}
		host := fmt.Sprintf("10.0.%d.%d", i/8/256, i/8%256)
		members[i] = Member{Incarnation: fmt.Sprint("w", i), DataAddrs: []string{fmt.Sprint(host, ":", 40000+i%8), fmt.Sprint("127.0.0.1:", 40000+i%8)}}
		clients = append(clients, j.client(members[i].Incarnation))
	}
	slots, err := plan.Assign(ids, 0, 0)
	if err != nil {
		b.Fatal(err)
	}
	got := make(chan error, n)
	var g uint64
	for b.Loop() {
		b.StopTimer()
		for _, c := range clients {
			go func() {
				_, err := c.Join(b.Context(), Joining{After: g})
				got <- err
			}()
		}
		for range clients {
			<-j.heard.joins
		}
		g++
		b.StartTimer()
		j.server.Publish(plan.World{Generation: g, Slots: slots}, members, 0, 0)
		for range clients {
			if err := <-got; err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*n), "µs/worker")
}

// BenchmarkWorld measures decoding the answer with a thousand members and their addresses.
func BenchmarkWorld(b *testing.B) {
	const n = 1000
	ids, all := make([]plan.SlotID, n), make([]Member, n)
	for i := range n {
		ids[i] = plan.SlotID{Host: fmt.Sprintf("host%04d", i/8), Index: i % 8}
		all[i].DataAddrs = []string{fmt.Sprintf("10.0.%d.%d:%d", i/8/256, i/8%256, 40000+i%8), fmt.Sprintf("127.0.0.1:%d", 40000+i%8)}
	}
	slots, err := plan.Assign(ids, 0, 0)
	if err != nil {
		b.Fatal(err)
	}
	text, err := proto.Marshal(membersToWire(plan.World{Generation: 1, Slots: slots}, all))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		w, err := Place{Generation: 1, Size: n, members: &members{size: n, whole: text}}.World()
		if err != nil {
			b.Fatal(err)
		}
		w.DataAddrs()
	}
	b.ReportMetric(float64(len(text)), "bytes")
}

// TestExpelled: a certificate of the job opens nothing once its worker has been expelled, nor if it
// was never admitted.
func TestExpelled(t *testing.T) {
	j := newJob(t)
	gone, unknown := j.client("a"), j.client("b")
	j.server.Expel("b")
	j.publish(1, 0, 0, "a")
	j.world("a", join(gone, Joining{}), 1, 0)
	waits := join(gone, Joining{After: 1})
	<-j.heard.joins
	j.server.Expel("a")
	const refusal = "this worker does not belong to the job any more"
	if o := <-waits; o.err == nil || !strings.Contains(o.err.Error(), refusal) {
		t.Errorf("a join that waits: %v", o.err)
	}
	for name, c := range map[string]*Client{"expelled": gone, "never admitted": unknown} {
		_, joined := c.Join(t.Context(), Joining{After: 1})
		_, looked := c.Look(t.Context())
		for what, err := range map[string]error{
			"join": joined, "look": looked, "report": c.Report(t.Context(), Done, 1, 0), "beat": c.Beat(t.Context(), Beat{Generation: 1}),
			"backend": c.ReportBackend(t.Context(), 1, "nccl"),
		} {
			if err == nil || !strings.Contains(err.Error(), refusal) {
				t.Errorf("%s of one that is %s: %v", what, name, err)
			}
		}
	}
	select {
	case r := <-j.heard.reports:
		t.Errorf("the handler has heard %+v", r)
	default:
	}
}

// TestLookHidesTheKey: who looks gets the key of visits, not that of the members.
func TestLookHidesTheKey(t *testing.T) {
	j := newJob(t)
	member, guest := j.client("a"), j.client("b")
	j.publish(1, 0, 0, "a")
	place, err := member.Join(t.Context(), Joining{})
	if err != nil {
		t.Fatal(err)
	}
	world, err := place.World()
	if err != nil {
		t.Fatal(err)
	}
	seen, err := guest.Look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(seen.Key.Bytes(), world.Key.ForVisits().Bytes()) || bytes.Equal(seen.Key.Bytes(), world.Key.Bytes()) {
		t.Error("another key")
	}
	j.server.Dismiss("b", ErrRemoved)
	if _, err := guest.Look(t.Context()); err == nil || !strings.Contains(err.Error(), "was dismissed") {
		t.Errorf("a dismissed worker looks: %v", err)
	}
}
