package elastic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/line/server"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// testDriver is a minimal driver for real connections: it publishes a world when all wanted workers
// have joined, and sends an update when a new worker joins.
type testDriver struct {
	t         *testing.T
	authority *identity.Authority
	server    *rendezvous.Server
	pusher    *notify.Pusher
	lines     *server.Server
	talking   sync.WaitGroup

	mu      sync.Mutex
	wanted  []string // incarnations, by rank
	joined  map[string]line.Joining
	members map[string]bool
	world   plan.World
	seq     uint64
	reports []report
	over    chan string // "generation backend"
	arrived chan string // incarnations that join for the first time
}

func newTestDriver(t *testing.T, wanted ...string) *testDriver {
	t.Helper()
	others := goleak.IgnoreCurrent()                   // of workers that tests have abandoned
	t.Cleanup(func() { goleak.VerifyNone(t, others) }) // runs after the cleanup below
	authority, err := identity.NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	d := &testDriver{t: t, authority: authority, wanted: wanted, arrived: make(chan string, 10), over: make(chan string, 100),
		joined: make(map[string]line.Joining), members: make(map[string]bool)}
	d.lines = server.New(server.Config{
		Up:     func(incarnation string, text []byte, _ string) { d.server.Hear(incarnation, text, func() {}) },
		Stream: func(_, _ string, conn net.Conn) { conn.Close() },
		Driver: func() bool { return true },
	})
	d.server = rendezvous.NewServer(rendezvous.ServerConfig{Handler: d, Tell: d.lines.Tell})
	d.pusher = notify.NewPusher(notify.PusherConfig{
		Update: func(workers []string, u notify.Update) { d.lines.Tell(workers, nil, line.Updated(u), nil) },
		Loss:   func(workers []string, l notify.Loss) { d.lines.Tell(workers, nil, line.Lost(l), nil) },
	})
	t.Cleanup(d.talking.Wait)
	return d
}

// env returns the environment of the worker of an incarnation.
func (d *testDriver) env(incarnation string, index int) plan.Worker {
	d.t.Helper()
	creds, err := d.authority.Issue(identity.Subject{
		RunID: "run", Role: identity.Worker, Host: "h", Index: index, Incarnation: incarnation,
	})
	if err != nil {
		d.t.Fatal(err)
	}
	d.server.Admit(creds.Subject())
	slot := plan.Slot{SlotID: plan.SlotID{Host: "h", Index: index}, LocalSize: 1, CrossSize: 1}
	return plan.Worker{RunID: "run", Incarnation: incarnation, Slot: slot, Size: 1, Elastic: true,
		LauncherAddr: "127.0.0.1:1", Credentials: creds.ForWorker().Encode(), MasterAddr: "127.0.0.1", MasterPort: 1}
}

// driven starts the process of an incarnation's worker, and returns its meeting.
func (d *testDriver) driven(incarnation string, index int) (*driven, error) {
	env := d.env(incarnation, index)
	return newDriven(env, identity.Network{}, d.run(env))
}

// run runs the process of a worker, and returns the worker's end of its socket.
func (d *testDriver) run(env plan.Worker) net.Conn {
	near, far := net.Pipe()
	d.talking.Go(func() {
		cleanup := d.lines.Talk(env.Environ())(context.Background(), os.Getpid(), far)
		far.Close()
		cleanup()
	})
	return near
}

func (d *testDriver) Joined(from identity.Subject, j line.Joining) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.joined[from.Incarnation] = j
	d.members[from.Incarnation] = true
	if !slices.Contains(d.wanted, from.Incarnation) {
		d.wanted = append(d.wanted, from.Incarnation)
		d.arrived <- from.Incarnation
		d.seq++
		d.pusher.Push(slices.Collect(maps.Keys(d.members)), notify.Update{Seq: d.seq, Change: plan.Added, Generation: d.world.Generation})
	}
	d.publish()
}

func (d *testDriver) Reported(_ identity.Subject, r line.Report, generation, commits uint64, noted func()) {
	defer noted()
	d.mu.Lock()
	defer d.mu.Unlock()
	if new := (report{r, generation, commits}); !slices.Contains(d.reports, new) {
		d.reports = append(d.reports, new)
	}
}

func (d *testDriver) BackendReported(_ identity.Subject, generation uint64, backend string, noted func()) {
	defer noted()
	d.over <- fmt.Sprint(generation, " ", backend)
}

func (*testDriver) FailureReported(_ identity.Subject, _ string, noted func()) { noted() }
func (*testDriver) Beaten(identity.Subject, line.Beat)                         {}
func (*testDriver) Located(identity.Subject, line.StacksLine)                  {}

func (d *testDriver) Heard(from identity.Subject, h line.Heard) {
	d.pusher.Heard(from.Incarnation, h.Seq, notify.Known{Generation: h.LostGeneration, Ranks: h.LostRanks}, h.Again)
}

// lost removes a worker.
func (d *testDriver) lost(incarnation string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pusher.Forget(incarnation)
	delete(d.members, incarnation)
	delete(d.joined, incarnation)
	d.wanted = slices.DeleteFunc(d.wanted, func(o string) bool { return o == incarnation })
	d.publish()
}

func (d *testDriver) publish() {
	members, root, slots := []line.Member(nil), -1, []plan.Slot(nil)
	for r, name := range d.wanted {
		j, here := d.joined[name]
		if !here {
			return
		}
		if root < 0 && j.HoldsState {
			root = r
		}
		members = append(members, line.Member{Incarnation: name, DataAddrs: j.DataAddrs})
		slots = append(slots, plan.Slot{
			SlotID: plan.SlotID{Host: "h", Index: r}, Rank: r, LocalRank: r, LocalSize: len(d.wanted), CrossSize: 1,
		})
	}
	d.world = plan.World{Generation: d.world.Generation + 1, Slots: slots}
	clear(d.joined)
	d.server.Publish(d.world, members, max(root, 0), d.seq)
}

// A job with real connections grows from two workers to three and loses its first.
func TestDrivenJob(t *testing.T) {
	d := newTestDriver(t, "a", "b")
	var procs sync.WaitGroup
	sums, steps := make(map[string]int64), make(map[string]int)
	var mu sync.Mutex
	var run func(name string, index int)
	run = func(name string, index int) {
		m, err := d.driven(name, index)
		if err != nil {
			t.Error(err)
			return
		}
		w, err := newWorker(context.Background(), m).arrive(context.Background())
		if err != nil {
			t.Error(err)
			return
		}
		step, second, third, sum, data := 0, 0, 0, []int64{int64(index)}, []int64{0}
		s := NewState(w, Value("step", &step), Tensor("sum", sum))
		err = Run(context.Background(), s, func(ctx context.Context) error {
			for ; w.Generation() < 3 || third < 5; step++ {
				if w.Generation() == 3 {
					third++
				}
				if w.Rank() == 0 && step == 5 && w.Generation() == 1 {
					procs.Go(func() { run("c", 2) })
					<-d.arrived
				}
				if w.Generation() == 2 {
					if second++; name == "a" && second > 3 {
						return errors.New("killed")
					}
				}
				w.Group().TellBackend("ipc", "it is best")
				w.Group().TellBackend("what no driver takes", "")
				data[0] = 1
				if err := collective.AllReduce(ctx, w.Group(), data, collective.Sum); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
				sum[0] += data[0]
				if err := s.Commit(); err != nil {
					step++ // the step is done, whether the hosts have changed or not
					return err
				}
			}
			return nil
		})
		if name == "a" {
			if err == nil || err.Error() != "killed" {
				t.Errorf("a: %v", err)
			}
			d.lost("a")
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		mu.Lock()
		sums[name], steps[name] = sum[0], step
		mu.Unlock()
		if err := w.Close(); err != nil {
			t.Errorf("%s: close: %v", name, err)
		}
	}
	procs.Go(func() { run("a", 0) })
	procs.Go(func() { run("b", 1) })
	procs.Wait()
	if sums["b"] != sums["c"] || steps["b"] != steps["c"] || steps["b"] < 5 || sums["b"] < 2*int64(steps["b"]) {
		t.Errorf("sums %v, steps %v", sums, steps)
	}
	over := make(map[string]bool)
	for len(over) < 3 { // the last report may be read after its worker has ended
		over[<-d.over] = true
	}
	if want := map[string]bool{"1 ipc": true, "2 ipc": true, "3 ipc": true}; !maps.Equal(over, want) {
		t.Errorf("reports of backends: %v", over)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, want := range []struct {
		what       line.Report
		generation uint64
	}{
		{line.Committed, 1}, {line.Committed, 2}, {line.Committed, 3},
		{line.Leaving, 2}, {line.Done, 3},
	} {
		if !slices.ContainsFunc(d.reports, func(r report) bool { return r.what == want.what && r.generation == want.generation }) {
			t.Errorf("no report of %v in generation %d: %v", want.what, want.generation, d.reports)
		}
	}
}

// tell reports dead ranks of a generation to the known workers.
func (d *testDriver) tell(generation uint64, ranks ...int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pusher.PushLoss(slices.Collect(maps.Keys(d.members)), notify.Loss{Generation: generation, Ranks: ranks})
}

// A peer stops responding while its connections stay open: an operation that waits for it ends when
// the driver reports the peer as dead.
func TestLossIsTold(t *testing.T) {
	d := newTestDriver(t, "a", "b")
	workers := make([]*Worker, 2)
	var procs sync.WaitGroup
	for index, name := range []string{"a", "b"} {
		procs.Go(func() {
			m, err := d.driven(name, index)
			if err == nil {
				workers[index], err = newWorker(context.Background(), m).arrive(context.Background())
			}
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	procs.Wait()
	if t.Failed() {
		t.FailNow()
	}
	ended := make(chan error, 1)
	go func() { ended <- collective.Barrier(context.Background(), workers[0].Group()) }()
	d.tell(1, 1)
	err := <-ended
	var aborted *collective.AbortedError
	if !errors.As(err, &aborted) || aborted.Generation != 1 || !slices.Equal(aborted.Dead, []int{1}) {
		t.Errorf("the operation ended with %v", err)
	}
	for _, w := range workers {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A loss reported for the world that is being connected ends the connecting. It does not affect
// later worlds, although a worker often gets the report only in the next one.
func TestLossWhileConnecting(t *testing.T) {
	d := newTestDriver(t, "a", "b", "c")
	silent, err := d.driven("c", 2)
	if err != nil {
		t.Fatal(err)
	}
	var procs sync.WaitGroup
	for index, name := range []string{"a", "b"} {
		procs.Go(func() {
			m, err := d.driven(name, index)
			if err != nil {
				t.Error(err)
				return
			}
			w, err := newWorker(context.Background(), m).arrive(context.Background())
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
			if w.Generation() != 2 || w.Size() != 2 {
				t.Errorf("%s: %+v", name, *w.member.Load())
			}
			err = Run(context.Background(), NewState(w), func(ctx context.Context) error {
				return collective.Barrier(ctx, w.Group())
			})
			if err = errors.Join(err, w.Close()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	if _, err := silent.join(t.Context(), line.Joining{}); err != nil {
		t.Error(err)
	}
	d.mu.Lock()
	d.wanted = []string{"a", "b"}
	d.mu.Unlock()
	d.tell(1, 2)
	procs.Wait()
	if err := silent.close(); err != nil {
		t.Error(err)
	}
}

// A worker that dies between joining and connecting costs the others one more join.
func TestDeathBeforeConnect(t *testing.T) {
	d := newTestDriver(t, "a", "b", "c")
	var procs sync.WaitGroup
	for index, name := range []string{"a", "b"} {
		procs.Go(func() {
			m, err := d.driven(name, index)
			if err != nil {
				t.Error(err)
				return
			}
			w, err := newWorker(context.Background(), m).arrive(context.Background())
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
			if w.Generation() != 2 || w.Size() != 2 || w.Rank() != index {
				t.Errorf("%s: %+v", name, *w.member.Load())
			}
			err = Run(context.Background(), NewState(w), func(context.Context) error { return nil })
			if err = errors.Join(err, w.Close()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	m, err := d.driven("c", 2)
	if err != nil {
		t.Fatal(err)
	}
	if w, err := m.join(t.Context(), line.Joining{}); err != nil || w.Rank != 2 {
		t.Errorf("%+v, %v", w, err)
	}
	if err := m.close(); err != nil {
		t.Error(err)
	}
	d.lost("c")
	procs.Wait()
}

// Only the lowest rank that is not reported dead warns that a world could not be entered.
func TestLogUnconnected(t *testing.T) {
	for rank, want := range []logrus.Level{logrus.DebugLevel, logrus.WarnLevel, logrus.DebugLevel} {
		log, hook := logtest.NewNullLogger()
		log.SetLevel(logrus.DebugLevel)
		w := &Worker{log: log}
		world := line.World{World: plan.World{Generation: 4, Slots: make([]plan.Slot, 3)}, Rank: rank}
		w.logUnconnected(world, &collective.AbortedError{Generation: 4, Dead: []int{0}, Cause: errors.New("refused")})
		said, err := hook.LastEntry().String()
		if err != nil || hook.LastEntry().Level != want || !strings.Contains(said, "refused") || !strings.Contains(said, "generation=4") {
			t.Errorf("rank %d: %s %v", rank, said, err)
		}
	}
}

// TestInitByTheEnvironment: a process that has not inherited its socket connects to the launcher's
// address from the environment.
func TestInitByTheEnvironment(t *testing.T) {
	d := newTestDriver(t, "a")
	own, err := d.authority.Issue(identity.Subject{Role: identity.Agent, Host: "h"})
	if err != nil {
		t.Fatal(err)
	}
	door, err := server.OpenDoor(d.lines, identity.Network{}, "127.0.0.1:0", own)
	if err != nil {
		t.Fatal(err)
	}
	defer door.Close()
	env := d.env("a", 0)
	env.LauncherAddr = door.Addr()
	process := d.run(env)
	defer process.Close()
	for _, pair := range env.Environ() {
		name, value, _ := strings.Cut(pair, "=")
		t.Setenv(name, value)
	}
	w, err := Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if w.Host() != "h" || w.Size() != 1 || w.Generation() != 1 {
		t.Errorf("%+v", *w.member.Load())
	}
	if _, err := Init(t.Context()); err == nil || !strings.Contains(err.Error(), "Init was called before") {
		t.Errorf("a second Init: %v", err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	process.Close()
	d.talking.Wait() // everything that the worker has sent is handled before its end
	d.mu.Lock()
	defer d.mu.Unlock()
	if want := []report{{line.Leaving, 1, 0}}; !slices.Equal(d.reports, want) {
		t.Errorf("said %v, want %v", d.reports, want)
	}
}

func TestInitRefusesABadEnvironment(t *testing.T) {
	d := newTestDriver(t)
	for name, change := range map[string]func(*plan.Worker){
		"elastic: credentials":              func(w *plan.Worker) { w.Credentials = "none" },
		"elastic: launcher nowh":            func(w *plan.Worker) { w.LauncherAddr = "nowhere" },
		"elastic: HVD_COLLECTIVE_ALGORITHM": func(w *plan.Worker) { w.Algorithm = "fastest" },
	} {
		env := d.env("a", 0)
		change(&env)
		if _, err := newDriven(env, identity.Network{}, nil); err == nil || !strings.HasPrefix(err.Error(), name) {
			t.Errorf("%s…: %v", name, err)
		}
	}
	t.Setenv("HVD_LAUNCHER_ADDR", "127.0.0.1:1")
	if _, err := Init(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "elastic: environment: ") {
		t.Errorf("half an environment: %v", err)
	}
}

func TestDataListenAddr(t *testing.T) {
	local := netip.MustParseAddr("127.0.0.1")
	for addr, want := range map[netip.Addr]string{
		local:                              "127.0.0.1:0",
		netip.IPv6Loopback():               "[::1]:0",
		netip.MustParseAddr("192.0.2.1"):   "",
		netip.MustParseAddr("2001:db8::1"): "",
	} {
		if got, err := dataListenAddr("", addr); got != want || err != nil {
			t.Errorf("%v: %q, want %q, %v", addr, got, want, err)
		}
	}
	for asked, want := range map[string]string{
		"127.0.0.2": "127.0.0.2:0",
		"127.0.0.1": "127.0.0.1:0",
		"0.0.0.0":   "",
		"::":        "",
	} {
		if got, err := dataListenAddr(asked, local); got != want || err != nil {
			t.Errorf("asked for %s: %q, want %q, %v", asked, got, want, err)
		}
	}
	if _, err := dataListenAddr("eth0", local); err == nil {
		t.Error("an interface is taken for an address")
	}
}
