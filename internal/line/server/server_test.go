package server

import (
	"bufio"
	"context"
	"encoding/json"
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
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/stacks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type (
	joined struct {
		inc string
		line.Joining
	}
	reported struct {
		inc                 string
		what                line.Report
		generation, commits uint64
	}
)

// job is a driver's rendezvous and a launcher, whose events a test awaits.
type job struct {
	t         *testing.T
	authority *identity.Authority
	lines     *Server
	log       logrus.FieldLogger
	logged    *logtest.Hook

	mu     sync.Mutex
	server *rendezvous.Server // nil: there is no driver
	push   *notify.Pusher

	joins   chan joined
	reports chan reported
	beats   chan line.Beat
	located chan line.StacksLine

	failures chan string
}

func (j *job) FailureReported(from identity.Subject, text string, noted func()) {
	defer noted()
	j.failures <- from.Incarnation + ": " + text
}

func (j *job) BackendReported(_ identity.Subject, _ uint64, _ string, noted func()) { noted() }

func (j *job) Joined(from identity.Subject, r line.Joining) {
	j.joins <- joined{from.Incarnation, r}
}

func (j *job) Reported(from identity.Subject, r line.Report, generation, commits uint64, noted func()) {
	defer noted()
	if r != line.Fetching {
		j.reports <- reported{from.Incarnation, r, generation, commits}
	}
}

func (j *job) Beaten(_ identity.Subject, b line.Beat) {
	select {
	case j.beats <- b:
	default:
	}
}

func (j *job) Heard(from identity.Subject, h line.Heard) {
	j.push.Heard(from.Incarnation, h.Seq, notify.Known{Generation: h.LostGeneration, Ranks: h.LostRanks}, h.Again)
}

func (j *job) Located(_ identity.Subject, s line.StacksLine) { j.located <- s }

// driver returns the driver of the job; nil: the job has no driver.
func (j *job) driver() *rendezvous.Server {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.server
}

func newJob(t *testing.T) *job {
	j := &job{t: t, joins: make(chan joined, 100), reports: make(chan reported, 100), beats: make(chan line.Beat, 1000),
		located: make(chan line.StacksLine, 1), failures: make(chan string, 10)}
	j.log, j.logged = logtest.NewNullLogger()
	var err error
	if j.authority, err = identity.NewAuthority("run"); err != nil {
		t.Fatal(err)
	}
	j.lines = New(Config{
		Up: func(incarnation string, text []byte, _ string) {
			if d := j.driver(); d != nil {
				d.Hear(incarnation, text, func() {})
			}
		},
		Stream: func(incarnation, protocol string, conn net.Conn) {
			if d := j.driver(); d != nil {
				d.Stream(context.Background(), incarnation, protocol, conn)
			}
			conn.Close()
		},
		Driver: func() bool { return j.driver() != nil },
		Log:    j.log,
	})
	j.push = notify.NewPusher(notify.PusherConfig{
		Update: func(workers []string, u notify.Update) { j.lines.Tell(workers, nil, line.Updated(u), nil) },
		Loss:   func(workers []string, l notify.Loss) { j.lines.Tell(workers, nil, line.Lost(l), nil) },
	})
	j.serve()
	return j
}

// serve starts a driver of the job that has these workers.
func (j *job) serve(incs ...string) {
	store := new(tcpstore.Store)
	server := rendezvous.NewServer(rendezvous.ServerConfig{
		Handler: j, Tell: j.lines.Tell, Log: j.log, Store: func(conn net.Conn) error { return tcpstore.Serve(conn, store) },
	})
	for _, inc := range incs {
		server.Admit(identity.Subject{Incarnation: inc})
	}
	j.mu.Lock()
	j.server = server
	j.mu.Unlock()
	j.lines.Standing(func(incarnation string, text []byte) { server.Hear(incarnation, text, func() {}) })
}

// end ends the driver.
func (j *job) end() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.server = nil
}

func subject(inc string, index int) identity.Subject {
	return identity.Subject{Role: identity.Worker, Host: "h", Index: index, Incarnation: inc}
}

// program is a worker, at its end of the socket.
type program struct {
	t      *testing.T
	store  string // from hello
	conn   net.Conn
	lines  *bufio.Scanner
	ended  chan struct{} // closed when the process has ended
	talked chan func()   // the result of Talk
	ask    context.CancelFunc
}

// inherited is the launcher's end of a socket that a process inherits.
type inherited struct {
	net.Conn
	ended chan struct{}
}

func (c inherited) Ended() <-chan struct{} { return c.ended }

// start starts a worker that has not sent anything yet.
func (j *job) start(inc string, index int) *program {
	j.t.Helper()
	creds, err := j.authority.Issue(subject(inc, index))
	if err != nil {
		j.t.Fatal(err)
	}
	j.driver().Admit(identity.Subject{Incarnation: inc})
	env := plan.Worker{
		RunID: "run", Incarnation: inc, Slot: plan.Slot{SlotID: plan.SlotID{Host: "h", Index: index}, LocalSize: 1, CrossSize: 1},
		Size: 1, LauncherAddr: "127.0.0.1:1", Credentials: creds.Encode(),
	}
	near, far := net.Pipe()
	w := &program{t: j.t, conn: near, lines: bufio.NewScanner(near), ended: make(chan struct{}), talked: make(chan func(), 1)}
	w.lines.Buffer(nil, 1<<24)
	ctx, cancel := context.WithCancel(context.Background())
	w.ask = cancel
	talk := j.lines.Talk(append(env.Environ(), "OTHER=1"))
	go func() {
		cleanup := talk(ctx, os.Getpid(), inherited{far, w.ended})
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
func (w *program) end() {
	w.conn.Close()
	if w.talked != nil {
		close(w.ended)
		(<-w.talked)()
		w.talked = nil
	}
}

func (w *program) do(line string) {
	w.t.Helper()
	if _, err := w.conn.Write([]byte(line + "\n")); err != nil {
		w.t.Fatal(err)
	}
}

// is reads the next line, which must be of this kind.
func (w *program) is(kind string) map[string]any {
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

// speaks starts a worker that has sent hello.
func (j *job) speaks(inc string, index int) *program {
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
	members := make([]line.Member, len(incs))
	for i, inc := range incs {
		w.Slots[i].SlotID = plan.SlotID{Host: "h", Index: i}
		members[i] = line.Member{Incarnation: inc, DataAddrs: []string{inc + ":1"}, Handle: []byte("of " + inc)}
	}
	if err := plan.Place(w.Slots); err != nil {
		j.t.Fatal(err)
	}
	j.driver().Publish(w, members, len(incs)-1, 3)
}

// TestWorlds: two workers join a world, and learn that a member is lost and that hosts have
// changed; one joins the next world and reports done.
func TestWorlds(t *testing.T) {
	j := newJob(t)
	a, b := j.speaks("a", 0), j.speaks("b", 1)
	a.do(`{"do":"join","handle":"of a","addresses":["10.0.0.1:5000"],"commits":0}`)
	b.do(`{"do":"join","unknown":{"x":[1]}}`)
	for range 2 {
		r := <-j.joins
		if r.After != 0 || r.Program != "test 1" {
			t.Errorf("%+v", r)
		}
		if r.inc == "a" && (r.Handle != "of a" || !slices.Equal(r.DataAddrs, []string{"10.0.0.1:5000"})) {
			t.Errorf("%+v", r)
		}
	}
	j.publish(4, "a", "b")
	for rank, w := range []*program{a, b} {
		l := w.is("world")
		members := l["members"].([]any)
		if l["generation"] != 4.0 || l["rank"] != float64(rank) || l["size"] != 2.0 || l["root"] != 1.0 || l["seq"] != 3.0 ||
			l["local_rank"] != float64(rank) || l["local_size"] != 2.0 || len(l["data_key"].(string)) != 64 ||
			l["handles"].([]any)[1] != "of b" || members[1].(map[string]any)["slot"] != 1.0 {
			t.Errorf("%v", l)
		}
	}
	for _, what := range []string{"committed", "committed", "draining"} {
		a.do(`{"do":"report","what":"` + what + `","commits":7}`)
	}
	for _, want := range []reported{{"a", line.Committed, 4, 7}, {"a", line.Draining, 4, 7}} {
		if r := <-j.reports; r != want {
			t.Errorf("%+v, want %+v", r, want)
		}
	}
	j.push.Push([]string{"a"}, notify.Update{Seq: 8, Change: plan.Added | plan.Removed, Generation: 4})
	if l := a.is("updated"); l["seq"] != 8.0 || len(l["change"].([]any)) != 2 {
		t.Errorf("%v", l)
	}
	j.push.PushLoss([]string{"a"}, notify.Loss{Generation: 4, Ranks: []int{1}})
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
	a.end() // done has been reported before the end
	select {
	case r := <-j.reports:
		if r != (reported{"a", line.Done, 5, 9}) {
			t.Errorf("%+v", r)
		}
	default:
		t.Error("the worker has ended, and its last report was not made")
	}
}

// TestLastWords: the error that a program reports is known when its end is reported.
func TestLastWords(t *testing.T) {
	j := newJob(t)
	for said, want := range map[string]string{
		`{"do":"report","what":"failed","error":"ValueError: bad\nsample","where":"train.py:34","commits":7}`: "a: ValueError: bad sample (train.py:34)",
		`{"do":"report","what":"failed","error":"` + strings.Repeat("x", 10000) + `"}`:                        "a: " + strings.Repeat("x", line.MaxError-3) + "…",
		`{"do":"report","what":"failed"}`: "a: an error without a text",
	} {
		a := j.speaks("a", 0)
		a.do(said)
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
	for why, err := range map[string]error{"removed": line.ErrRemoved, "finished": line.ErrFinished} {
		j := newJob(t)
		a := j.speaks("a", 0)
		a.do(`{"do":"join"}`)
		<-j.joins
		j.driver().Dismiss("a", err)
		if l := a.is("dismissed"); l["why"] != why || l["last"] != false {
			t.Errorf("%v", l)
		}
	}
}

// TestWiden: a worker that listens only on loopback is asked for other addresses.
func TestWiden(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	a.do(`{"do":"join","addresses":["127.0.0.1:5000"]}`)
	<-j.joins
	j.driver().Widen()
	a.is("widen")
	a.do(`{"do":"join","addresses":["127.0.0.1:5000","10.0.0.1:5000"]}`)
	if r := <-j.joins; len(r.DataAddrs) != 2 {
		t.Errorf("%+v", r)
	}
	j.publish(1, "a")
	a.is("world")
}

// TestBeats: the driver learns the phase of the program, and for how long it was quiet.
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
		if b.Phase == line.Training {
			if b.Generation != 1 || b.Commits != 12 || len(b.Lanes) != 1 || b.Lanes[0].Operation != 99 || !b.Lanes[0].Waiting || b.Lanes[0].What != "all_reduce" {
				t.Errorf("%+v", b)
			}
			break
		}
	}
	a.do(`{"do":"figures","figures":{"loss":0.5,"lr":null}}`)
	a.do(`{"do":"figures","figures":{"loss":0.25}}`)
	a.do(`{"do":"beat","phase":"saving","commits":12}`) // this is reported at once
	for b := range j.beats {
		if b.Phase != line.Saving {
			continue
		}
		if len(b.Figures) != 2 || b.Figures[0] != (line.Figure{Name: "loss", Value: 0.25}) || !math.IsNaN(b.Figures[1].Value) {
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
	<-j.joins
	j.lines.Tell([]string{"a"}, nil, []byte(`{"is":"stacks","id":3,"most_bytes":65536}`), nil)
	l := a.is("stacks")
	text, _ := json.Marshal("Thread 0x1 (most recent call first):\n  File \"train.py\", line 7 in step\n")
	a.do(`{"do":"stacks","id":` + jsonOf(l["id"]) + `,"text":` + string(text) + `}`)
	a.do(`{"do":"stacks","id":99,"text":"nobody has asked"}`)
	s := <-j.located
	w, err := stacks.Parse(s.Worker)
	if err != nil || s.ID != 3 || len(w.Goroutines) != 1 || w.Goroutines[0].Frames[0].Line != 7 {
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
	j.driver().Dismiss("a", line.ErrRemoved)
	a.is("dismissed")
}

// TestMistakes: the answer names the program's mistake; after a fatal one the talk ends.
func TestMistakes(t *testing.T) {
	j := newJob(t)
	for said, want := range map[string]string{
		`{"do":"hello","version":2}`: "version 2",
		`{"do":"join"}`:              "begin with hello",
		`no JSON`:                    "not a JSON object",
		"{\"do\":\"\xff\"}":          "UTF-8",
	} {
		w := j.start("a", 0)
		w.do(said)
		if l := w.is("error"); l["fatal"] != true || !strings.Contains(l["text"].(string), want) {
			t.Errorf("%s: %v", said, l)
		}
		if w.lines.Scan() {
			t.Errorf("%s: then %s", said, w.lines.Text())
		}
		w.end()
	}
	a := j.speaks("a", 0)
	for _, said := range []string{`{"do":"dance"}`, `{"do":"report","what":"x"}`, `{"do":"beat","phase":"x"}`, `{"do":"figures","figures":{"a b":1}}`} {
		a.do(said)
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

// TestNextDriver: a driver that takes over learns what a worker waits for, and sends it what it
// lacks.
func TestNextDriver(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	a.do(`{"do":"join","commits":7}`)
	<-j.joins
	j.end()
	j.serve("a")
	if r := <-j.joins; r.Commits != 7 {
		t.Errorf("%+v", r)
	}
	j.publish(1, "a")
	a.is("world")
	j.lines.mu.Lock()
	lines := j.lines.workers["a"].lines
	j.lines.workers["a"].lines = nil // what is sent is lost
	j.lines.mu.Unlock()
	j.push.Push([]string{"a"}, notify.Update{Seq: 8, Generation: 1})
	j.push.PushLoss([]string{"a"}, notify.Loss{Generation: 1, Ranks: []int{0}})
	j.lines.mu.Lock()
	j.lines.workers["a"].lines = lines
	j.lines.mu.Unlock()
	var said [][]byte
	j.lines.Standing(func(_ string, text []byte) { said = append(said, text) })
	for _, text := range said {
		j.driver().Hear("a", text, func() {})
	}
	a.is("updated")
	a.is("lost")
}

// TestAnswersToAnEarlierJoin: a driver that takes over can get a join that was answered before. Its
// answer to that join does not count as the answer to a later join.
func TestAnswersToAnEarlierJoin(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	a.do(`{"do":"join","addresses":["127.0.0.1:5000"]}`)
	<-j.joins
	j.driver().Widen()
	a.is("widen")
	a.do(`{"do":"join","addresses":["10.0.0.1:5000"]}`)
	<-j.joins
	j.driver().Hear("a", line.Up("join", line.Joining{DataAddrs: []string{"127.0.0.1:5000"}, CanWiden: true}), func() {})
	j.publish(4, "a") // waits for the worker's wide addresses
	a.do(`{"do":"dance"}`)
	a.is("error")
	j.driver().Hear("a", line.Up("join", line.Joining{DataAddrs: []string{"10.0.0.1:5000"}}), func() {})
	a.is("world")
	a.do(`{"do":"join","addresses":["10.0.0.1:5000"]}`)
	<-j.joins
	j.driver().Hear("a", line.Up("join", line.Joining{DataAddrs: []string{"10.0.0.1:5000"}}), func() {})
	j.publish(5, "a")
	j.driver().Hear("a", line.Up("join", line.Joining{After: 4, DataAddrs: []string{"10.0.0.1:5000"}}), func() {})
	if l := a.is("world"); l["generation"] != 5.0 {
		t.Errorf("%v", l)
	}
}

// TestSlowReader: a program that does not read blocks no sender, and later reads the newest update.
func TestSlowReader(t *testing.T) {
	j := newJob(t)
	a := j.speaks("a", 0)
	for seq := range uint64(1000) {
		j.push.Push([]string{"a"}, notify.Update{Seq: seq + 1, Generation: 1})
	}
	last := 0.0
	for last != 1000 {
		last = a.is("updated")["seq"].(float64)
	}
}

// TestSilence: the driver learns nothing of a worker that sends nothing.
func TestSilence(t *testing.T) {
	j := newJob(t)
	w := j.start("a", 0)
	w.end()
	if len(j.joins)+len(j.reports)+len(j.beats)+len(j.logged.AllEntries()) > 0 {
		t.Error("the driver has heard of it")
	}
}

func storeOf(l map[string]any) string {
	at := l["store"].(map[string]any)
	return net.JoinHostPort(at["host"].(string), jsonOf(at["port"]))
}

// TestStore: the programs of two workers share the driver's store. The next driver has another
// store at another port, and a worker's connections end with the worker.
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
	j.driver().Expel("b")
	if err := ofB.Wait(t.Context(), "never"); err == nil {
		t.Error("a worker that is gone still has the store")
	}
	j.end()
	j.serve("a")
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
