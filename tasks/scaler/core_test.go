package scaler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var begin = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

// echoFunc returns its first argument.
func echoFunc(_ context.Context, args [][]byte) ([]byte, error) { return args[0], nil }

func testCore(t *testing.T, change func(*Config)) *core {
	t.Helper()
	cfg := Config{Address: "tcp://h:1", Functions: Functions{"echo": echoFunc}}
	if change != nil {
		change(&cfg)
	}
	if err := cfg.fill(); err != nil {
		t.Fatal(err)
	}
	c := newCore(cfg, begin)
	c.connected(begin, b("w1"), nil, usage{pid: 7})
	if got := kinds(c.take().send); got != "HB" {
		t.Fatalf("a worker begins with %s", got)
	}
	return c
}

func kinds(all []outgoing) string {
	var names []string
	for _, m := range all {
		names = append(names, m.kind())
	}
	return strings.Join(names, " ")
}

func newTask(id string, priority int32, args ...string) *task {
	task := &task{ID: b(id), Source: b("client"), Flags: taskFlags{Priority: priority}, Function: b("f")}
	for _, a := range args {
		task.Args = append(task.Args, argument{argObject, b(a)})
	}
	return task
}

// answer sends a core the objects of a request.
func answer(c *core, r *objectRequest, contents map[string]string) {
	m := &objectResponse{Kind: contentFound, objects: objects{IDs: r.IDs}}
	for _, id := range r.IDs {
		if content, ok := contents[string(id)]; ok {
			m.Names = append(m.Names, b("n"))
			m.Contents = append(m.Contents, b(content))
		}
	}
	c.message(begin, m)
}

var contents = map[string]string{"f": "echo", "a": "1", "b": "2"}

// running returns a core that runs task t.
func running(t *testing.T, change func(*Config)) (*core, uint64) {
	t.Helper()
	c := testCore(t, change)
	c.message(begin, newTask("t", 0, "a"))
	answer(c, c.take().send[0].(*objectRequest), contents)
	a := c.take()
	if len(a.start) != 1 || string(a.start[0].args[0]) != "1" {
		t.Fatalf("%+v", a)
	}
	return c, a.start[0].run
}

// TestObjectBeforeResult: the result's object is sent before the result that names it.
func TestObjectBeforeResult(t *testing.T) {
	c, run := running(t, nil)
	c.finished(run, b("out"), nil, profile{Duration: 1})
	a := c.take()
	if kinds(a.send) != "OI TR" {
		t.Fatal(kinds(a.send))
	}
	object, result := a.send[0].(*objectInstruction), a.send[1].(*taskResult)
	if string(object.User) != "client" || string(object.Contents[0]) != "out" || result.Status != success || !equal(result.Results, object.IDs) {
		t.Errorf("%+v, %+v", object, result)
	}
	if id := object.IDs[0]; len(id) != 24 || !bytes.Equal(id[:8], objectID(b("client"), nil)[:8]) {
		t.Errorf("the result's id is %x", id)
	}
}

func TestFailures(t *testing.T) {
	for _, c := range []struct {
		name, function, want string
	}{
		{"pickle", "\x80\x05\x95\x01\x02", "NotImplementedError"},
		{"unknown", "other", "LookupError"},
		{"JSON", `"other"`, "LookupError"},
		{"no JSON", `"echo`, "ValueError"},
		{"empty", "", "ValueError"},
		{"long", strings.Repeat("a", 256), "ValueError"},
	} {
		core := testCore(t, nil)
		core.message(begin, newTask("t", 0))
		answer(core, core.take().send[0].(*objectRequest), map[string]string{"f": c.function})
		a := core.take()
		if kinds(a.send) != "OI TR" || a.send[1].(*taskResult).Status != failed {
			t.Fatalf("%s: %s", c.name, kinds(a.send))
		}
		if got := a.send[0].(*objectInstruction).Contents[0]; !bytes.Contains(got, b("cbuiltins\n"+c.want+"\n")) {
			t.Errorf("%s: %q", c.name, got)
		}
		if len(core.jobs)+core.fetched+len(core.runs) != 0 || core.store.objects["f"].users != 0 {
			t.Errorf("%s: something is left: %+v", c.name, core)
		}
	}
	c, run := running(t, nil)
	c.finished(run, nil, errors.New("bad shard"), profile{})
	if got := c.take().send[0].(*objectInstruction).Contents[0]; !bytes.Equal(got, exception("RuntimeError", "bad shard")) {
		t.Errorf("%q", got)
	}
}

// TestMissingObjects: an answer that lacks an object does not say which. The core requests the
// objects again, each alone, and only the task that needs the missing one fails.
func TestMissingObjects(t *testing.T) {
	c := testCore(t, func(cfg *Config) { cfg.Slots = 2 })
	c.message(begin, newTask("t", 0, "a", "gone"))
	c.message(begin, newTask("u", 0, "a"))
	a := c.take()
	if kinds(a.send) != "OR" || len(a.send[0].(*objectRequest).IDs) != 3 {
		t.Fatalf("%s", kinds(a.send))
	}
	answer(c, a.send[0].(*objectRequest), contents)
	a = c.take()
	if kinds(a.send) != "OR OR OR" || len(a.start) != 0 {
		t.Fatalf("%s, %d starts", kinds(a.send), len(a.start))
	}
	for _, m := range a.send {
		answer(c, m.(*objectRequest), contents)
	}
	a = c.take()
	if kinds(a.send) != "OI TR" || string(a.send[1].(*taskResult).ID) != "t" || a.send[1].(*taskResult).Status != failed {
		t.Errorf("%s", kinds(a.send))
	}
	if len(a.start) != 1 || string(a.start[0].args[0]) != "1" {
		t.Errorf("starts %+v", a.start)
	}
	answer(c, &objectRequest{IDs: [][]byte{b("f")}}, contents) // nobody has asked for it
	if a := c.take(); len(a.send) != 0 || len(a.note) != 1 {
		t.Errorf("%+v", a)
	}
}

// TestObjectTooLarge: objects that are too large in one message are requested one by one; one that
// is too large alone fails its task.
func TestObjectTooLarge(t *testing.T) {
	c := testCore(t, nil)
	c.message(begin, newTask("t", 0, "a", "b"))
	c.take()
	c.tooLarge(errors.New("too large"))
	a := c.take()
	if kinds(a.send) != "OR OR OR" {
		t.Fatal(kinds(a.send))
	}
	answer(c, a.send[0].(*objectRequest), contents)
	c.tooLarge(errors.New("too large"))
	a = c.take()
	if kinds(a.send) != "OI TR" || !bytes.Contains(a.send[0].(*objectInstruction).Contents[0], b("MemoryError")) {
		t.Errorf("%s", kinds(a.send))
	}
	answer(c, &objectRequest{IDs: [][]byte{b("b")}}, contents)
	if a := c.take(); len(a.note) != 0 || len(c.requests) != 0 || len(c.jobs) != 0 {
		t.Errorf("%+v", a)
	}
}

// TestCache: objects are fetched once, dropped when the scheduler says so, and evicted when the
// cache is full.
func TestCache(t *testing.T) {
	c, run := running(t, func(cfg *Config) { cfg.Cache = 8 })
	c.message(begin, &objectInstruction{Kind: deleteObjects, User: b("w1"), objects: objects{IDs: [][]byte{b("a"), b("unknown")}}})
	if c.store.objects["a"] == nil {
		t.Error("an object goes while a task uses it")
	}
	c.finished(run, nil, nil, profile{})
	c.take()
	if c.store.objects["a"] != nil || c.store.objects["f"] == nil || c.store.bytes != 4 {
		t.Errorf("after the task: %d bytes", c.store.bytes)
	}
	c.message(begin, newTask("u", 0, "big"))
	a := c.take()
	if kinds(a.send) != "OR" || len(a.send[0].(*objectRequest).IDs) != 1 {
		t.Fatal("the function is fetched again")
	}
	answer(c, a.send[0].(*objectRequest), map[string]string{"big": "larger than the cache"})
	c.finished(c.take().start[0].run, nil, nil, profile{})
	if c.store.objects["big"] != nil || c.store.bytes > 8 {
		t.Errorf("%d objects of %d bytes are left", len(c.store.objects), c.store.bytes)
	}
}

func TestPriorities(t *testing.T) {
	c, run := running(t, nil)
	for _, task := range []*task{newTask("first", 0, "a"), newTask("low", 5, "a"), newTask("urgent", -1, "a"), newTask("second", 0, "a")} {
		c.message(begin, task)
	}
	var got []string
	for range 4 {
		c.finished(run, nil, nil, profile{})
		run = c.take().start[0].run
		got = append(got, string(c.runs[run].task.ID))
	}
	if want := []string{"first", "urgent", "second", "low"}; !slices.Equal(got, want) { // the first one had its objects already
		t.Errorf("the order is %v", got)
	}
}

func TestCancel(t *testing.T) {
	status := func(a actions) string {
		text := ""
		for _, m := range a.send {
			if r, ok := m.(*taskResult); ok {
				text += fmt.Sprintf("%s %c ", r.ID, r.Status)
			}
		}
		return text + fmt.Sprint(len(a.stop))
	}
	c, run := running(t, nil)
	c.message(begin, newTask("q", 0, "a"))
	c.message(begin, newTask("r", 0, "a"))
	for _, step := range []struct {
		cancel taskCancel
		want   string
	}{
		{taskCancel{ID: b("r"), Force: true}, "r C 0"},
		{taskCancel{ID: b("r"), Force: true}, "0"}, // it was given back already: no second answer
		{taskCancel{ID: b("r")}, "r N 0"},          // a client waits for this answer
		{taskCancel{ID: b("q")}, "q C 0"},          // its objects were here already
		{taskCancel{ID: b("t")}, "1"},              // answered when its call returns
		{taskCancel{ID: b("never"), Force: true}, "never N 0"},
	} {
		c.message(begin, &step.cancel)
		if got := status(c.take()); got != step.want {
			t.Errorf("%+v: %s, want %s", step.cancel, got, step.want)
		}
	}
	c.finished(run, b("late"), nil, profile{})
	if got := status(c.take()); got != "t C 0" {
		t.Errorf("the canceled task ends with %s", got)
	}

	c, run = running(t, nil)
	c.message(begin, &taskCancel{ID: b("t"), Force: true, Retrieve: true})
	a := c.take()
	if got := status(a); got != "t C 1" || len(a.send[0].(*taskResult).Results) != 6 {
		t.Errorf("forced: %s, %+v", got, a)
	}
	c.message(begin, newTask("t", 0, "a")) // the same task again, before its call has returned
	if a := c.take(); len(a.start) != 0 {
		t.Error("the slot is taken twice")
	}
	c.finished(run, b("late"), nil, profile{})
	if a := c.take(); kinds(a.send) != "" || len(a.start) != 1 {
		t.Errorf("%s, %d starts", kinds(a.send), len(a.start))
	}
}

// TestHeartbeats: a heartbeat follows the last one after a fixed time, never before the echo of
// that one, and earlier if many bytes of results wait for its echo.
func TestHeartbeats(t *testing.T) {
	c := testCore(t, nil)
	look := func() usage { return usage{} }
	at := func(d time.Duration) string {
		c.tick(begin.Add(d), look)
		return kinds(c.take().send)
	}
	if got := at(10 * time.Second); got != "" {
		t.Errorf("%s without an echo", got)
	}
	c.message(begin.Add(100*time.Microsecond), &heartbeatEcho{})
	if got := at(time.Second); got != "" {
		t.Errorf("%s too early", got)
	}
	c.tick(begin.Add(2*time.Second), look)
	if m := c.take().send[0].(*heartbeat); m.LatencyUS != 50 || len(m.Processors) != 1 || m.Queued != 0 || m.Locked {
		t.Errorf("%+v", m)
	}
	c.message(begin.Add(2*time.Second), &heartbeatEcho{})
	c.report(&objectInstruction{Kind: createObjects, objects: objects{Contents: [][]byte{make([]byte, maxHeld)}}}, &taskResult{ID: b("t")})
	c.take()
	if got := at(2*time.Second + 1); got != "HB" {
		t.Errorf("%q with %d bytes of results", got, c.held)
	}
	c.message(begin.Add(3*time.Second), &heartbeatEcho{})
	if c.held != 0 || len(c.sent) != 0 {
		t.Errorf("%d bytes are held", c.held)
	}
	at(6 * time.Second)
	c.tick(begin.Add(36*time.Second), look)
	if !c.take().broken {
		t.Error("a silent scheduler is still waited for")
	}
	if c.gone(begin.Add(302*time.Second)) || !c.gone(begin.Add(303*time.Second)) {
		t.Error("the scheduler is given up at another time")
	}
}

// TestConnectionBreaks: results that the scheduler may not have are sent again after a
// reconnection, others are not. Then the scheduler may give the worker's other tasks to others. A
// running call continues, and its result counts.
func TestConnectionBreaks(t *testing.T) {
	c, run := running(t, nil)
	c.message(begin, &heartbeatEcho{})
	c.finished(run, b("confirmed"), nil, profile{})
	c.tick(begin.Add(2*time.Second), func() usage { return usage{} })
	c.message(begin.Add(2*time.Second), newTask("u", 0, "a"))
	run = c.take().start[0].run
	c.finished(run, b("lost"), nil, profile{})
	c.message(begin.Add(2*time.Second), newTask("v", 0, "a"))
	c.message(begin.Add(2*time.Second), newTask("w", 0, "a"))
	c.message(begin.Add(2*time.Second), &heartbeatEcho{}) // for the heartbeat before u was done
	run = c.take().start[0].run

	c.disconnected()
	if len(c.jobs) != 1 || len(c.runs) != 1 || c.fetched != 0 || len(c.queued)+len(c.ready) != 0 {
		t.Fatalf("%d tasks are left", len(c.jobs))
	}
	c.connected(begin.Add(3*time.Second), b("w2"), b("w1"), usage{})
	a := c.take()
	if kinds(a.send) != "OI TR DR HB" || string(a.send[0].(*objectInstruction).Contents[0]) != "lost" || string(a.send[2].(*disconnectRequest).Worker) != "w1" {
		t.Fatalf("%s: %+v", kinds(a.send), a.send)
	}
	c.message(begin.Add(3*time.Second), newTask("v", 0, "a")) // the same task again: it runs already
	if a := c.take(); kinds(a.send) != "" || len(a.start) != 0 {
		t.Errorf("%s, %d starts", kinds(a.send), len(a.start))
	}
	c.disconnected()
	c.finished(run, b("while away"), nil, profile{})
	if a := c.take(); len(a.send) != 0 {
		t.Errorf("%s without a connection", kinds(a.send))
	}
	c.connected(begin.Add(4*time.Second), b("w3"), b("w2"), usage{})
	if got := kinds(c.take().send); got != "OI TR OI TR DR HB" {
		t.Errorf("%s", got)
	}
	c.message(begin.Add(4*time.Second), &heartbeatEcho{})
	if len(c.sent) != 0 || c.held != 0 || c.store.objects["a"].users != 0 {
		t.Errorf("%d results are held", len(c.sent))
	}
}

// TestRandom: a scheduler of many tasks takes some back and sends them again, while connections
// break and lose messages in flight. In the end every task has a correct result, each connection
// carries at most one answer for each time that it sent a task, and no state is left.
func TestRandom(t *testing.T) {
	for seed := range uint64(300) {
		s := &model{t: t, r: rand.New(rand.NewPCG(seed, 1)), tasks: 40, open: make(map[string]bool), given: make(map[string]int), results: make(map[string]string)}
		s.run(seed)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// model is a scheduler with one worker.
type model struct {
	t       *testing.T
	r       *rand.Rand
	c       *core
	tasks   int
	open    map[string]bool   // tasks without a result
	given   map[string]int    // on this connection, minus answers
	results map[string]string // objects of results
	runs    []start
	wire    []outgoing // messages to the scheduler
	id      int
	joined  bool // the scheduler knows the connection
	now     time.Time
}

func (s *model) run(seed uint64) {
	s.now = begin
	s.c = testCore(s.t, func(cfg *Config) {
		cfg.Slots = 1 + int(seed%3)
		cfg.Cache = 6
	})
	for i := range s.tasks {
		s.open[fmt.Sprintf("task %d", i)] = true
	}
	for steps := 0; len(s.open) > 0 && !s.t.Failed(); steps++ {
		if steps > 100_000 {
			s.t.Fatalf("%d tasks have no result", len(s.open))
		}
		s.step()
	}
	for len(s.runs) > 0 || len(s.c.jobs) > 0 || len(s.wire) > 0 {
		s.finish()
		s.perform()
		s.deliver()
	}
	if len(s.c.runs)+s.c.fetched+len(s.c.queued)+len(s.c.ready)+len(s.c.wanted) > 0 || s.c.store.bytes > 6 {
		s.t.Errorf("left: %+v", s.c)
	}
	for _, o := range s.c.store.objects {
		if o.users != 0 {
			s.t.Errorf("object %s has %d users", o.id, o.users)
		}
	}
}

func (s *model) step() {
	s.now = s.now.Add(time.Duration(s.r.IntN(100)) * time.Millisecond)
	open := slices.Sorted(maps.Keys(s.open))
	id := open[s.r.IntN(len(open))]
	what := s.r.IntN(12)
	if what < 5 && !s.joined {
		what = 11
	}
	switch what {
	case 0, 1, 2:
		if s.given[id] == 0 {
			s.given[id]++
			s.c.message(s.now, newTask(id, int32(s.r.IntN(3)), "arg "+id[5:]))
		}
	case 3:
		if s.given[id] > 0 {
			s.c.message(s.now, &taskCancel{ID: b(id), Force: true})
		}
	case 4:
		if s.r.IntN(4) == 0 {
			s.c.message(s.now, &objectInstruction{Kind: deleteObjects, objects: objects{IDs: [][]byte{b("f"), b("arg " + id[5:])}}})
		}
	case 5:
		if s.r.IntN(8) == 0 {
			s.cut()
		}
	case 6:
		s.c.tick(s.now, func() usage { return usage{} })
	case 7, 8:
		s.finish()
	default:
		s.deliver()
	}
	s.perform()
}

func (s *model) perform() {
	a := s.c.take()
	s.wire = append(s.wire, a.send...)
	s.runs = append(s.runs, a.start...)
	if len(s.c.runs) > s.c.cfg.Slots {
		s.t.Errorf("%d calls in %d slots", len(s.c.runs), s.c.cfg.Slots)
	}
}

func (s *model) finish() {
	if len(s.runs) == 0 {
		return
	}
	i := s.r.IntN(len(s.runs))
	r := s.runs[i]
	s.runs = slices.Delete(s.runs, i, i+1)
	s.c.finished(r.run, append(b("result of "), r.args[0]...), nil, profile{})
}

// cut breaks the connection and loses the messages in flight. The worker reconnects at once.
func (s *model) cut() {
	s.wire, s.joined = nil, false
	s.c.disconnected()
	s.c.take()
	s.finish()
	old := fmt.Appendf(nil, "w%d", s.id)
	s.id++
	s.c.connected(s.now, fmt.Appendf(nil, "w%d", s.id), old, usage{})
}

// deliver makes the scheduler handle the next message.
func (s *model) deliver() {
	if len(s.wire) == 0 {
		return
	}
	m := s.wire[0]
	s.wire = s.wire[1:]
	switch m := m.(type) {
	case *heartbeat:
		s.joined = true
		s.c.message(s.now, &heartbeatEcho{})
	case *disconnectRequest:
		clear(s.given)
	case *objectRequest:
		all := map[string]string{"f": "echo"}
		for _, id := range m.IDs {
			if string(id) != "f" {
				all[string(id)] = string(id)
			}
		}
		answer(s.c, m, all)
	case *objectInstruction:
		s.results[string(m.IDs[0])] = string(m.Contents[0])
	case *taskResult:
		id := string(m.ID)
		if !s.open[id] {
			return // a call of an earlier connection has the result already
		}
		switch m.Status {
		case success:
			if got, ok := s.results[string(m.Results[0])]; !ok || got != "result of arg "+id[5:] {
				s.t.Errorf("%s has the result %q", id, got)
			}
			delete(s.open, id)
		case canceled:
			if s.given[id]--; s.given[id] < 0 {
				s.t.Errorf("%s is given back twice", id)
			}
			return
		case notFound:
			if s.given[id] > 0 {
				s.t.Errorf("%s is with the worker, which denies it", id)
			}
			return
		default:
			s.t.Errorf("%s: status %c", id, m.Status)
		}
		s.given[id] = 0
	}
}
