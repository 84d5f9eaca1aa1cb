package scheduler

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/test/follow"
)

func silent() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

// wired is a peer that is connected to a scheduler.
type wired struct {
	t    *testing.T
	l    *link.Link[*taskspb.ToTasks]
	news chan *taskspb.FromTasks
	wg   sync.WaitGroup
}

func connectTo(t *testing.T, s *Scheduler, h *taskspb.TasksHello) *wired {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	w := &wired{t: t, l: link.New(near, func() *taskspb.ToTasks { return &taskspb.ToTasks{} }), news: make(chan *taskspb.FromTasks, 100_000)}
	w.wg.Go(func() {
		_ = s.Handle(context.Background(), far, identity.Subject{Role: identity.Worker, Incarnation: h.GetHost()})
	})
	w.wg.Go(func() {
		defer close(w.news)
		for r := link.NewReader(near); ; {
			m := &taskspb.FromTasks{}
			if r.Read(m) != nil {
				return
			}
			w.news <- m
		}
	})
	w.l.Say(func(m *taskspb.ToTasks) { m.Hello = h })
	t.Cleanup(w.end)
	return w
}

func (w *wired) end() {
	w.l.Close()
	w.wg.Wait()
}

func (w *wired) say(add func(*taskspb.ToTasks)) { w.l.Say(add) }

// until blocks until a message satisfies is.
func (w *wired) until(is func(*taskspb.FromTasks) bool) {
	w.t.Helper()
	for m := range w.news {
		if is(m) {
			return
		}
	}
	w.t.Fatal("the connection has ended")
}

var (
	oneGroup = &taskspb.TaskGroup{Function: &taskspb.TaskFunction{Name: "f", Hash: []byte("12345678")}, Demand: []*taskspb.Amount{{Name: "cpu", Milli: 1000}}}
	aClient  = &taskspb.TasksHello{Session: 7, Host: "client"}
	aWorker  = &taskspb.TasksHello{
		Session: 9, Worker: true, Host: "worker", Functions: []*taskspb.TaskFunction{oneGroup.Function}, Offers: []*taskspb.Amount{{Name: "cpu", Milli: 1000}},
	}
)

// crashed returns a scheduler that continues with a copy of the journal as it is on disk now.
func crashed(t *testing.T, path string) *Scheduler {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	again := filepath.Join(t.TempDir(), "journal")
	if err := os.WriteFile(again, text, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Config{Run: "r", Journal: again, Log: silent()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func number(n uint64) []byte { return fmt.Appendf(nil, "result %d", n) }

// work completes the next n tasks of a worker and ignores others that arrive with them.
func (w *wired) work(n int) {
	w.t.Helper()
	w.until(func(m *taskspb.FromTasks) bool {
		for _, a := range m.GetAsks() {
			w.say(func(m *taskspb.ToTasks) {
				m.Leases = append(m.Leases, &taskspb.LeaseAnswer{Group: a.GetGroup(), Granted: true})
			})
		}
		for _, p := range m.GetPushes() {
			if n--; n < 0 {
				return true
			}
			w.say(func(m *taskspb.ToTasks) {
				m.Dones = append(m.Dones, &taskspb.TaskDone{Of: p.GetOf(), Result: &taskspb.TaskResult{State: 3, Inlined: number(p.GetOf().GetN())}})
			})
		}
		return n <= 0
	})
}

// TestJournal: what was acknowledged survives a crash, whichever peers come back: the tasks run,
// the client gets the results that it has not taken, and those that it has taken are gone.
func TestJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	s := New(Config{Run: "r", Journal: path, Log: silent()})
	t.Cleanup(s.Close)
	c := connectTo(t, s, aClient)
	const n = 100
	c.say(func(m *taskspb.ToTasks) {
		m.Groups = append(m.Groups, oneGroup)
		for i := range uint64(n) {
			m.Submits = append(m.Submits, &taskspb.SubmitTask{N: i + 1, Priority: -int32(i)})
		}
	})
	c.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == n })
	w := connectTo(t, s, aWorker)
	w.work(40)
	told := map[uint64]bool{}
	c.until(func(m *taskspb.FromTasks) bool {
		for _, r := range m.GetTold() {
			told[r.GetN()] = true
		}
		return len(told) >= 40
	})
	c.say(func(m *taskspb.ToTasks) { m.Releases = []uint64{1, 2, 3, 4, 5} })
	w.say(func(m *taskspb.ToTasks) { m.Leaving = true })
	w.until(func(m *taskspb.FromTasks) bool { return m.GetHeard() >= 40 })
	c.say(func(m *taskspb.ToTasks) { m.Submits = []*taskspb.SubmitTask{{N: n + 1}} }) // the releases are written first
	c.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == n+1 })

	again := crashed(t, path)
	if s := again.status(); s.Suspended < n+1-len(told)-10 {
		t.Errorf("%d tasks go on, of %d that had %d results", s.Suspended, n+1, len(told))
	}
	second := proto.CloneOf(aWorker)
	second.Session = 10
	w = connectTo(t, again, second)
	w.work(n + 1 - len(told))
	c = connectTo(t, again, aClient)
	results := map[uint64]string{}
	c.until(func(m *taskspb.FromTasks) bool {
		for _, r := range m.GetTold() {
			results[r.GetN()] = string(r.GetResult().GetInlined())
		}
		return len(results) >= n+1-5
	})
	for i := uint64(6); i <= n+1; i++ {
		if results[i] != string(number(i)) {
			t.Errorf("task %d: %q", i, results[i])
		}
	}
	c.say(func(m *taskspb.ToTasks) { m.Left = true })
	c.end()
	if !follow.Await(t, func() bool {
		again.mu.Lock()
		defer again.mu.Unlock()
		return again.peers[aClient.GetSession()] == nil && len(again.q.Tasks(aClient.GetSession())) == 0
	}) {
		t.Error("a client of the journal is known after it has left")
	}
}

// status returns the counts of a status.
func (s *Scheduler) status() (of struct{ Suspended, Running, Ready, Waiting int }) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.q.Status(s.alarm.at)
	of.Suspended, of.Running, of.Ready, of.Waiting = q.Suspended, q.Running, q.Ready, q.Waiting
	return of
}

// TestJournalIsBounded: however much goes through the journal, it is not much larger than its live
// records.
func TestJournalIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	s := New(Config{Run: "r", Journal: path, Log: silent()})
	t.Cleanup(s.Close)
	c := connectTo(t, s, aClient)
	w := connectTo(t, s, aWorker)
	c.say(func(m *taskspb.ToTasks) { m.Groups = append(m.Groups, oneGroup) })
	args := make([]byte, 1<<20)
	n := uint64(200)
	if testing.Short() {
		n = leastCompacted/uint64(len(args)) + 6
	}
	for i := range n {
		c.say(func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, &taskspb.SubmitTask{N: i + 1, Args: args}) })
		w.work(1)
		c.until(func(m *taskspb.FromTasks) bool { return len(m.GetTold()) > 0 })
		c.say(func(m *taskspb.ToTasks) { m.Releases = append(m.Releases, i+1) })
	}
	if !follow.Await(t, func() bool {
		f, err := os.Open(path)
		if err != nil {
			return false
		}
		defer f.Close()
		_, end, err := journal.Read(f, func([]byte) error { return nil })
		return err == nil && end < leastCompacted
	}) {
		t.Error("the journal is not compacted")
	}
	c.say(func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, &taskspb.SubmitTask{N: n + 1}) })
	c.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == n+1 })
	if again := crashed(t, path); again.q.Suspended() > 1 {
		t.Errorf("%d finished tasks are left", again.q.Suspended())
	}
}

// TestDiskFull: the scheduler acknowledges nothing that it could not write, and all of it once
// there is room.
func TestDiskFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	s := New(Config{Run: "r", Journal: path, Log: silent()})
	t.Cleanup(s.Close)
	c := connectTo(t, s, aClient)
	c.say(func(m *taskspb.ToTasks) {
		m.Groups = append(m.Groups, oneGroup)
		m.Submits = append(m.Submits, &taskspb.SubmitTask{N: 1})
	})
	c.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == 1 })
	small := old
	small.Cur = 8 << 10
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &small); err != nil {
		t.Fatal(err)
	}
	restore := sync.OnceFunc(func() { _ = unix.Setrlimit(unix.RLIMIT_FSIZE, &old) })
	defer restore()
	args := make([]byte, 100<<10)
	const n = mostUnwritten/(100<<10) + 20
	for i := range uint64(n) {
		sub := &taskspb.SubmitTask{N: i + 2, Args: args}
		_ = c.l.Send(sub, func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, sub) })
	}
	if !follow.Await(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.recorder.lost && s.recorder.why != nil
	}) {
		t.Fatal("the disk is not full")
	}
	if again := crashed(t, path); again.q.Suspended() != 1 {
		t.Errorf("%d tasks are written", again.q.Suspended())
	}
	for len(c.news) > 0 {
		if m := <-c.news; m.GetAccepted() > 1 { // there may be warnings that no worker is there
			t.Errorf("acknowledged: %v", m)
		}
	}
	restore()
	c.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == n+1 })
	if again := crashed(t, path); again.q.Suspended() != n+1 {
		t.Errorf("%d tasks are written, of %d", again.q.Suspended(), n+1)
	}
}

// replayed returns a scheduler that has read these records.
func replayed(all ...[]byte) (*Scheduler, error) {
	s := New(Config{Log: silent()})
	r := replay{s: s}
	for _, b := range all {
		if err := r.next(b); err != nil {
			s.Close()
			return nil, err
		}
	}
	return s, nil
}

// snapshot returns the records of a snapshot.
func (s *Scheduler) snapshot() (all [][]byte) {
	(&recorder{s: s}).snapshot(func(b []byte) bool {
		all = append(all, b)
		return true
	})
	return all
}

// TestSnapshotOfReleased: a snapshot contains a released task that another one needs, even if many
// records are between them, or if one is released or the other submitted while the snapshot is
// written.
func TestSnapshotOfReleased(t *testing.T) {
	record := func(m *taskspb.TasksRecord) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	submitted := func(n uint64, needs ...uint64) *taskspb.TaskSubmitted {
		return &taskspb.TaskSubmitted{Client: 7, Task: &taskspb.SubmitTask{N: n, Args: make([]byte, recordAt/2), Options: &taskspb.TaskOptions{Needs: needs}}}
	}
	over := func(n uint64) *taskspb.TaskOver {
		return &taskspb.TaskOver{Client: 7, N: n, Result: &taskspb.TaskResult{State: 3}}
	}
	released := func(n uint64) *taskspb.TaskName { return &taskspb.TaskName{Client: 7, N: n} }
	s, err := replayed(
		record(&taskspb.TasksRecord{
			Clients: []*taskspb.TaskClient{{Session: 7}}, Groups: []*taskspb.TaskGroup{oneGroup},
			Submits: []*taskspb.TaskSubmitted{submitted(1), submitted(2), submitted(3), submitted(5), submitted(6, 1)},
			Overs:   []*taskspb.TaskOver{over(1), over(5)}, Releases: []*taskspb.TaskName{released(1)},
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	meanwhile := record(&taskspb.TasksRecord{Submits: []*taskspb.TaskSubmitted{submitted(7, 5)}, Releases: []*taskspb.TaskName{released(5)}})
	var all [][]byte
	(&recorder{s: s}).snapshot(func(b []byte) bool {
		if len(all) == 0 {
			if err := (&replay{s: s}).next(meanwhile); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, b)
		return true
	})
	again, err := replayed(append(all, meanwhile)...)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if got, want := fmt.Sprint(again.q.All()), "[{7 1} {7 2} {7 3} {7 5} {7 6} {7 7}]"; got != want {
		t.Errorf("of a snapshot of %d records, the tasks %v are read, not %v", len(all), got, want)
	}
}

// FuzzJournal: any journal can be read to its end, and a snapshot of what was read is read as the
// same.
func FuzzJournal(f *testing.F) {
	for _, m := range []*taskspb.TasksRecord{
		{Clients: []*taskspb.TaskClient{{Session: 1}}, Groups: []*taskspb.TaskGroup{oneGroup}, Submits: []*taskspb.TaskSubmitted{
			{Client: 1, Task: &taskspb.SubmitTask{N: 1}}, {Client: 1, Task: &taskspb.SubmitTask{N: 2, Options: &taskspb.TaskOptions{Needs: []uint64{1}}}},
		}, Overs: []*taskspb.TaskOver{{Client: 1, N: 1, Result: &taskspb.TaskResult{State: 3, Size: 5, Value: make([]byte, 32)}}}, Releases: []*taskspb.TaskName{{Client: 1, N: 1}}},
		{Clients: []*taskspb.TaskClient{{Session: 1}}, Uses: []*taskspb.TaskUse{{Client: 1, Value: make([]byte, 32), Size: 1, Put: true}}, Gone: []uint64{1}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		s, err := replayed(payload)
		if err != nil {
			return
		}
		defer s.Close()
		again, err := replayed(s.snapshot()...)
		if err != nil {
			t.Fatalf("the snapshot: %v", err)
		}
		defer again.Close()
		if a, b := s.q.All(), again.q.All(); fmt.Sprint(a) != fmt.Sprint(b) {
			t.Fatalf("%v is read as %v", a, b)
		} else if a, b := s.q.Released(a), again.q.Released(b); fmt.Sprint(a) != fmt.Sprint(b) {
			t.Fatalf("%v were released, and %v are read as such", a, b)
		}
		for _, id := range s.q.All() {
			a, _ := s.q.Saved(id)
			b, _ := again.q.Saved(id)
			a.Group, b.Group = nil, nil
			if fmt.Sprintf("%+v %+v", a, a.Options) != fmt.Sprintf("%+v %+v", b, b.Options) && fmt.Sprint(a.Result) != fmt.Sprint(b.Result) {
				t.Fatalf("%+v is read as %+v", a, b)
			}
		}
		s.held = true
		s.resumeTasks()
	})
}

// TestFailureIsWritten: tasks that were reported to a client as failed or cancelled are failed or
// cancelled for a scheduler that continues with the journal on disk.
func TestFailureIsWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	s := New(Config{Run: "r", Journal: path, Log: silent()})
	t.Cleanup(s.Close)
	c := connectTo(t, s, aClient)
	c.say(func(m *taskspb.ToTasks) { m.Groups = append(m.Groups, oneGroup) })
	for n := uint64(1); n < 30; n += 3 {
		c.say(func(m *taskspb.ToTasks) {
			needs := func(n uint64) *taskspb.TaskOptions { return &taskspb.TaskOptions{Needs: []uint64{n}} }
			m.Submits = append(m.Submits, &taskspb.SubmitTask{N: n}, &taskspb.SubmitTask{N: n + 1, Options: needs(n)}, &taskspb.SubmitTask{N: n + 2, Options: needs(n + 1)})
		})
		c.until(func(m *taskspb.FromTasks) bool { return m.GetAccepted() == n+2 })
		c.say(func(m *taskspb.ToTasks) { m.Cancels = append(m.Cancels, &taskspb.CancelTask{N: n}) })
		told := 0
		c.until(func(m *taskspb.FromTasks) bool { told += len(m.GetTold()); return told == 3 })
		if again := crashed(t, path); again.q.Suspended() != 0 {
			t.Fatalf("%d tasks go on of which the client was told that they do not", again.q.Suspended())
		}
	}
}

// TestFailureUnwritten: a client learns of failed tasks even if the journal cannot be written.
func TestFailureUnwritten(t *testing.T) {
	s := New(Config{Run: "r", Journal: filepath.Join(t.TempDir(), "none", "journal"), Log: silent()})
	t.Cleanup(s.Close)
	c := connectTo(t, s, aClient)
	c.say(func(m *taskspb.ToTasks) {
		m.Groups = append(m.Groups, oneGroup)
		m.Submits = append(m.Submits, &taskspb.SubmitTask{N: 1}, &taskspb.SubmitTask{N: 2})
		m.Cancels = append(m.Cancels, &taskspb.CancelTask{N: 1})
	})
	c.until(func(m *taskspb.FromTasks) bool { return len(m.GetTold()) == 1 })
	c.say(func(m *taskspb.ToTasks) { m.Cancels = append(m.Cancels, &taskspb.CancelTask{N: 2}) })
	c.until(func(m *taskspb.FromTasks) bool { return len(m.GetTold()) == 1 })
}
