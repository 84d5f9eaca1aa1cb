package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type (
	joined struct {
		inc string
		rendezvous.Joining
	}
	reported struct {
		inc                 string
		what                rendezvous.Report
		generation, commits uint64
	}
)

// job is a driver's rendezvous, whose events a test awaits.
type job struct {
	t         *testing.T
	authority *identity.Authority
	server    *rendezvous.Server
	own       *identity.Credentials // the driver's
	push      *notify.Pusher
	addr      string
	end       func() // ends the driver
	log       logrus.FieldLogger
	logged    *logtest.Hook

	joins   chan joined
	reports chan reported
	beats   chan rendezvous.Beat

	failures chan string
}

func (j *job) FailureReported(from identity.Subject, text string, noted func()) {
	defer noted()
	j.failures <- from.Incarnation + ": " + text
}

func (j *job) Joined(from identity.Subject, r rendezvous.Joining) {
	j.joins <- joined{from.Incarnation, r}
}

func (j *job) Reported(from identity.Subject, r rendezvous.Report, generation, commits uint64, noted func()) {
	defer noted()
	if r != rendezvous.Fetching {
		j.reports <- reported{from.Incarnation, r, generation, commits}
	}
}

func (j *job) Beaten(_ identity.Subject, b rendezvous.Beat) {
	select {
	case j.beats <- b:
	default:
	}
}

func newJob(t *testing.T) *job {
	j := &job{t: t, joins: make(chan joined, 100), reports: make(chan reported, 100), beats: make(chan rendezvous.Beat, 1000), failures: make(chan string, 10)}
	j.log, j.logged = logtest.NewNullLogger()
	var err error
	if j.authority, err = identity.NewAuthority("run"); err != nil {
		t.Fatal(err)
	}
	if j.own, err = j.authority.Issue(identity.Subject{Role: identity.Driver}); err != nil {
		t.Fatal(err)
	}
	j.serve("127.0.0.1:0")
	t.Cleanup(func() { j.end() })
	return j
}

// serve begins a driver of the job that has those workers.
func (j *job) serve(addr string, incs ...string) {
	ln, err := identity.Rendezvous.Listen(addr)
	if err != nil {
		j.t.Fatal(err)
	}
	j.addr = ln.Addr().String()
	store := new(tcpstore.Store)
	j.server = rendezvous.NewServer(rendezvous.ServerConfig{
		Credentials: j.own, Handler: j, Log: j.log, Store: func(conn net.Conn) error { return tcpstore.Serve(conn, store) },
	})
	for _, inc := range incs {
		j.server.Admit(identity.Subject{Incarnation: inc})
	}
	j.push = notify.NewPusher(notify.PusherConfig{Credentials: j.own, Log: j.log})
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() { _ = j.server.Serve(ctx, ln) })
	serving.Go(func() { _ = j.push.Run(ctx) })
	j.end = sync.OnceFunc(func() {
		cancel()
		serving.Wait()
	})
}

func subject(inc string, index int) identity.Subject {
	return identity.Subject{Role: identity.Worker, Host: "h", Index: index, Incarnation: inc}
}

// worker is a program at its end of the socket.
type worker struct {
	t      *testing.T
	store  string // that hello has told
	conn   net.Conn
	lines  *bufio.Scanner
	talked chan func() // what Talk has returned
	ask    context.CancelFunc
}

// start starts a worker that has said nothing.
func (j *job) start(inc string, index int) *worker {
	j.t.Helper()
	creds, err := j.authority.Issue(subject(inc, index))
	if err != nil {
		j.t.Fatal(err)
	}
	j.server.Admit(identity.Subject{Incarnation: inc})
	env := plan.Worker{
		RunID: "run", Incarnation: inc, Slot: plan.Slot{SlotID: plan.SlotID{Host: "h", Index: index}, LocalSize: 1, CrossSize: 1},
		Size: 1, DriverAddr: j.addr, Credentials: creds.Encode(),
	}
	near, far := net.Pipe()
	w := &worker{t: j.t, conn: near, lines: bufio.NewScanner(near), talked: make(chan func(), 1)}
	w.lines.Buffer(nil, 1<<24)
	ctx, cancel := context.WithCancel(context.Background())
	w.ask = cancel
	cfg := Config{Env: append(env.Environ(), "OTHER=1"), Log: j.log}
	if server := j.server; index%2 == 0 {
		cfg.Calls = func(_ context.Context, conn net.Conn) { server.ServeSocket(conn, subject(inc, index)) }
	}
	go func() {
		cleanup := cfg.Talk(ctx, os.Getpid(), far)
		far.Close()
		w.talked <- cleanup
	}()
	j.t.Cleanup(func() {
		w.end()
		cancel()
	})
	return w
}

// end ends the process and waits for its proxy.
func (w *worker) end() {
	w.conn.Close()
	if w.talked != nil {
		(<-w.talked)()
		w.talked = nil
	}
}

func (w *worker) do(line string) {
	w.t.Helper()
	if _, err := w.conn.Write([]byte(line + "\n")); err != nil {
		w.t.Fatal(err)
	}
}

// is reads the next line, which must be of that kind.
func (w *worker) is(kind string) map[string]any {
	w.t.Helper()
	if !w.lines.Scan() {
		w.t.Fatalf("%s: the socket has ended: %v", kind, w.lines.Err())
	}
	var line map[string]any
	if err := json.Unmarshal(w.lines.Bytes(), &line); err != nil {
		w.t.Fatal(err)
	}
	if line["is"] != kind {
		w.t.Fatalf("%s, want %s", w.lines.Text(), kind)
	}
	return line
}

// speaks starts a worker that has said hello.
func (j *job) speaks(inc string, index int) *worker {
	w := j.start(inc, index)
	w.do(`{"do":"hello","version":1,"program":"test 1"}`)
	h := w.is("hello")
	w.store = storeOf(h)
	if h["run"] != "run" || h["host"] != "h" || h["slot"] != float64(index) || h["incarnation"] != inc || h["version"] != 1.0 {
		j.t.Errorf("%v", h)
	}
	return w
}

func (j *job) publish(generation uint64, incs ...string) {
	w := plan.World{Generation: generation, Slots: make([]plan.Slot, len(incs))}
	members := make([]rendezvous.Member, len(incs))
	for i, inc := range incs {
		w.Slots[i].SlotID = plan.SlotID{Host: "h", Index: i}
		members[i] = rendezvous.Member{Incarnation: inc, DataAddrs: []string{inc + ":1"}, Handle: []byte("of " + inc)}
	}
	if err := plan.Place(w.Slots); err != nil {
		j.t.Fatal(err)
	}
	j.server.Publish(w, members, len(incs)-1, 3)
}

// TestWorlds: two workers come to a world, hear that it is lost and that hosts have changed; one
// comes to the next, and is done.
func TestWorlds(t *testing.T) {
	j := newJob(t)
	a, b := j.speaks("a", 0), j.speaks("b", 1)
	a.do(`{"do":"join","handle":"of a","addresses":["10.0.0.1:5000"],"commits":0}`)
	b.do(`{"do":"join","unknown":{"x":[1]}}`)
	addrs := make(map[string]string)
	for range 2 {
		r := <-j.joins
		if r.After != 0 || r.Program != "test 1" || r.NotifyAddr == "" {
			t.Errorf("%+v", r)
		}
		addrs[r.inc] = r.NotifyAddr
		if r.inc == "a" && (string(r.Handle) != "of a" || !slices.Equal(r.DataAddrs, []string{"10.0.0.1:5000"})) {
			t.Errorf("%+v", r)
		}
	}
	j.publish(4, "a", "b")
	for rank, w := range []*worker{a, b} {
		l := w.is("world")
		members := l["members"].([]any)
		if l["generation"] != 4.0 || l["rank"] != float64(rank) || l["size"] != 2.0 || l["root"] != 1.0 || l["seq"] != 3.0 ||
			l["local_rank"] != float64(rank) || l["local_size"] != 2.0 || len(l["data_key"].(string)) != 64 ||
			l["handles"].([]any)[1] != "of b" || members[1].(map[string]any)["slot"] != 1.0 {
			t.Errorf("%v", l)
		}
	}
	for _, line := range []string{"committed", "committed", "draining"} {
		a.do(`{"do":"report","what":"` + line + `","commits":7}`)
	}
	for _, want := range []reported{{"a", rendezvous.Committed, 4, 7}, {"a", rendezvous.Draining, 4, 7}} {
		if r := <-j.reports; r != want {
			t.Errorf("%+v, want %+v", r, want)
		}
	}
	target := notify.Target{Subject: subject("a", 0), Addr: addrs["a"]}
	j.push.Push([]notify.Target{target}, notify.Update{Seq: 8, Change: plan.Added | plan.Removed, Generation: 4})
	if l := a.is("updated"); l["seq"] != 8.0 || len(l["change"].([]any)) != 2 {
		t.Errorf("%v", l)
	}
	j.push.PushLoss([]notify.Target{target}, notify.Loss{Generation: 4, Ranks: []int{1}})
	if l := a.is("lost"); l["generation"] != 4.0 || l["ranks"].([]any)[0] != 1.0 {
		t.Errorf("%v", l)
	}
	b.end()
	a.do(`{"do":"join","commits":9,"holds_state":true,"trained":false,"lost":[1],"cause":"gone"}`)
	if r := <-j.joins; r.After != 4 || r.Commits != 9 || !r.HoldsState || r.Trained == nil || *r.Trained || r.Lost[0] != 1 || r.Cause != "gone" {
		t.Errorf("%+v", r)
	}
	j.publish(5, "a")
	a.is("world")
	a.do(`{"do":"report","what":"done","commits":9}`)
	a.end() // done has been reported when the end is told
	select {
	case r := <-j.reports:
		if r != (reported{"a", rendezvous.Done, 5, 9}) {
			t.Errorf("%+v", r)
		}
	default:
		t.Error("the worker has ended, and its last report was not made")
	}
}

// TestLastWords: what a program says of its error is known when its end is told.
func TestLastWords(t *testing.T) {
	j := newJob(t)
	for line, want := range map[string]string{
		`{"do":"report","what":"failed","error":"ValueError: bad\nsample","where":"train.py:34","commits":7}`: "a: ValueError: bad sample (train.py:34)",
		`{"do":"report","what":"failed","error":"` + strings.Repeat("x", 10000) + `"}`:                        "a: " + strings.Repeat("x", rendezvous.MaxError-3) + "…",
		`{"do":"report","what":"failed"}`: "a: an error without a text",
	} {
		a := j.speaks("a", 0)
		a.do(line)
		a.end()
		select {
		case got := <-j.failures:
			if got != want {
				t.Errorf("%q, want %q", got, want)
			}
		default:
			t.Errorf("the worker has ended, and nobody knows %q", want)
		}
	}
}

func TestDismissal(t *testing.T) {
	for why, err := range map[string]error{"removed": rendezvous.ErrRemoved, "finished": rendezvous.ErrFinished} {
		j := newJob(t)
		a := j.speaks("a", 0)
		a.do(`{"do":"join"}`)
		<-j.joins
		j.server.Dismiss("a", err)
		if l := a.is("dismissed"); l["why"] != why || l["last"] != false {
			t.Errorf("%v", l)
		}
	}
}

// TestWiden: a worker whose addresses are those of loopback is asked for others.
func TestWiden(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	a.do(`{"do":"join","addresses":["127.0.0.1:5000"]}`)
	<-j.joins
	j.server.Widen()
	a.is("widen")
	a.do(`{"do":"join","addresses":["127.0.0.1:5000","10.0.0.1:5000"]}`)
	if r := <-j.joins; len(r.DataAddrs) != 2 {
		t.Errorf("%+v", r)
	}
	j.publish(1, "a")
	a.is("world")
}

// TestBeats: the driver learns where the program is, with how long it was quiet.
func TestBeats(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	a.do(`{"do":"join"}`)
	<-j.joins
	j.publish(1, "a")
	a.is("world")
	a.do(`{"do":"beat","phase":"training","commits":12,"operation":{"number":99,"what":"all_reduce","waiting":true}}`)
	used := false
	for b := range j.beats {
		used = used || b.Usage != nil && b.Usage.Resident > 0
		if b.Phase == rendezvous.Training {
			if b.Generation != 1 || b.Commits != 12 || len(b.Lanes) != 1 || b.Lanes[0].Operation != 99 || !b.Lanes[0].Waiting || b.Lanes[0].What != "all_reduce" {
				t.Errorf("%+v", b)
			}
			break
		}
	}
	a.do(`{"do":"figures","figures":{"loss":0.5,"lr":null}}`)
	a.do(`{"do":"figures","figures":{"loss":0.25}}`)
	a.do(`{"do":"beat","phase":"saving","commits":12}`) // is told at once
	for b := range j.beats {
		if b.Phase != rendezvous.Saving {
			continue
		}
		if len(b.Figures) != 2 || b.Figures[0] != (rendezvous.Figure{Name: "loss", Value: 0.25}) || !math.IsNaN(b.Figures[1].Value) {
			t.Errorf("%+v", b.Figures)
		}
		if !used {
			t.Error("no beat has told what the process uses")
		}
		break
	}
}

// TestStacks: the driver asks a worker for its stacks, and gets those of the program.
func TestStacks(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	a.do(`{"do":"join"}`)
	r := <-j.joins
	go func() {
		l := a.is("stacks")
		text, _ := json.Marshal("Thread 0x1 (most recent call first):\n  File \"train.py\", line 7 in step\n")
		a.do(`{"do":"stacks","id":` + strings.TrimSuffix(jsonOf(l["id"]), ".0") + `,"text":` + string(text) + `}`)
	}()
	w, err := notify.Stacks(t.Context(), j.own, notify.Target{Subject: subject("a", 0), Addr: r.NotifyAddr})
	if err != nil || len(w.Goroutines) != 1 || w.Goroutines[0].Frames[0].Line != 7 {
		t.Errorf("%+v, %v", w, err)
	}
}

func jsonOf(v any) string {
	b, _ := json.Marshal(v)
	return string(b)
}

// TestLeave: the launcher's request to end is passed on, and does not end the talk.
func TestLeave(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	a.ask()
	a.is("leave")
	a.do(`{"do":"join"}`)
	<-j.joins
	j.server.Dismiss("a", rendezvous.ErrRemoved)
	a.is("dismissed")
}

// TestMistakes: a mistake of the program is named; those after which nothing can follow end the
// talk.
func TestMistakes(t *testing.T) {
	j := newJob(t)
	for line, want := range map[string]string{
		`{"do":"hello","version":2}`: "version 2",
		`{"do":"join"}`:              "before hello",
		`no JSON`:                    "not a JSON object",
		"{\"do\":\"\xff\"}":          "UTF-8",
	} {
		w := j.start("a", 0)
		w.do(line)
		if l := w.is("error"); l["fatal"] != true || !strings.Contains(l["text"].(string), want) {
			t.Errorf("%s: %v", line, l)
		}
		if w.lines.Scan() {
			t.Errorf("%s: then %s", line, w.lines.Text())
		}
		w.end()
	}
	a := j.speaks("a", 0)
	for _, line := range []string{`{"do":"dance"}`, `{"do":"report","what":"x"}`, `{"do":"beat","phase":"x"}`, `{"do":"figures","figures":{"a b":1}}`} {
		a.do(line)
		if l := a.is("error"); l["fatal"] != false {
			t.Errorf("%v", l)
		}
	}
	a.do(`{"do":"join"}`)
	<-j.joins
	a.do(`{"do":"join"}`)
	if l := a.is("error"); l["fatal"] != false || !strings.Contains(l["text"].(string), "before the last one") {
		t.Errorf("%v", l)
	}
}

// TestReportsWithoutDriver: however many reports wait for a driver that is away, the program's
// lines are read; of each kind the newest is made for the next driver, and the rest end with the
// program.
func TestReportsWithoutDriver(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 1)
	a.do(`{"do":"join"}`)
	<-j.joins
	j.publish(1, "a")
	a.is("world")
	tell := func() {
		for i := range 40 {
			a.do(fmt.Sprintf(`{"do":"report","what":"writing","commits":%d}`, i))
			a.do(fmt.Sprintf(`{"do":"report","what":"draining","commits":%d}`, i))
		}
		a.do(`{"do":"dance"}`)
		a.is("error")
	}
	j.end()
	tell()
	j.serve(j.addr, "a")
	made := map[rendezvous.Report]int{}
	for last := (reported{}); last.what != rendezvous.Draining || last.commits != 39; {
		last = <-j.reports
		made[last.what]++
	}
	if made[rendezvous.Writing] > 2 || made[rendezvous.Draining] > 2 {
		t.Errorf("%v were made; of each kind one may be under way, and one wait", made)
	}
	j.end()
	tell()
	a.end()
}

// TestSilence: for a worker that says nothing, nothing is done.
func TestSilence(t *testing.T) {
	j := newJob(t)
	w := j.start("a", 0)
	w.end()
	if len(j.joins)+len(j.reports)+len(j.beats)+len(j.logged.AllEntries()) > 0 {
		t.Error("the driver has heard of it")
	}
}

func storeOf(line map[string]any) string {
	at := line["store"].(map[string]any)
	return net.JoinHostPort(at["host"].(string), jsonOf(at["port"]))
}

// TestStore: the programs of two workers share the driver's store. That of the next driver is
// another, at another port, and the connections of a worker end with it.
func TestStore(t *testing.T) {
	j := newJob(t)
	a, b := j.speaks("a", 0), j.speaks("b", 1)
	of := func(addr string) *tcpstore.Client {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c, err := tcpstore.NewClient(conn, false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	ofA, ofB := of(a.store), of(b.store)
	if err := ofA.Set(t.Context(), "g1/k", []byte("v")); err != nil {
		t.Fatal(err)
	}
	if v, err := ofB.Get(t.Context(), "g1/k"); err != nil || string(v) != "v" {
		t.Errorf("%q, %v", v, err)
	}
	a.do(`{"do":"join"}`)
	<-j.joins
	j.publish(1, "a")
	if at := storeOf(a.is("world")); at != a.store {
		t.Errorf("the store of hello is at %s, that of the world at %s", a.store, at)
	}
	j.server.Expel("b")
	if err := ofB.Wait(t.Context(), "never"); err == nil {
		t.Error("a worker that is gone still has the store")
	}
	j.end()
	j.serve(j.addr, "a")
	a.do(`{"do":"join"}`)
	<-j.joins
	j.publish(2, "a")
	at := storeOf(a.is("world"))
	if at == a.store {
		t.Error("the store of another driver is at the same port")
	}
	if there, err := of(at).Check(t.Context(), "g1/k"); err != nil || there {
		t.Errorf("%v, %v", there, err)
	}
}
