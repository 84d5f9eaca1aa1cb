package elastic

import (
	"context"
	"errors"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/plan"
)

// listener is a meeting in a world of two, whose other rank is the test. Its driver receives beats.
type listener struct {
	*script
	groups  []*collective.Group // of the newest world
	warning time.Duration
	follow  func(other *collective.Group) // what the other rank does in each world
	others  sync.WaitGroup
	made    atomic.Uint64 // connections

	mu    sync.Mutex
	deaf  error // result of each beat
	tries int
	beats []timedBeat

	looks atomic.Int64 // at what the process uses
}

type timedBeat struct {
	at time.Time
	line.Beat
}

func (m *listener) join(ctx context.Context, j line.Joining) (line.World, error) {
	w, err := m.script.join(ctx, j)
	if err == nil {
		w.Slots = append(w.Slots, plan.Slot{SlotID: plan.SlotID{Host: "other"}, Rank: 1, LocalSize: 1, CrossSize: 1})
	}
	return w, err
}

func (m *listener) connect(context.Context, line.World) (*collective.Group, error) {
	m.groups = collective.Local(2)
	if m.follow != nil {
		other := m.groups[1]
		m.others.Go(func() { m.follow(other) })
	}
	return m.groups[0], nil
}

func (m *listener) connections() uint64 { return m.made.Load() }

func (m *listener) operations() []collective.Operations { return nil }

func (m *listener) stallWarning() time.Duration { return m.warning }

func (m *listener) usage() *proc.Usage {
	m.looks.Add(1)
	return &proc.Usage{Resident: 1 << 20}
}

// TestUsage: usage returns what the process of a worker uses. If several workers share the process,
// it returns nil.
func TestUsage(t *testing.T) {
	if u := (&driven{pid: os.Getpid()}).usage(); u == nil || u.Resident == 0 {
		t.Errorf("%+v", u)
	}
	if u := (&driven{}).usage(); u != nil {
		t.Errorf("one worker of several in a process uses %+v", u)
	}
}

func (m *listener) Beat(_ context.Context, b line.Beat) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tries++
	if m.deaf == nil {
		m.beats = append(m.beats, timedBeat{time.Now(), b})
	}
	return m.deaf
}

// heard returns the beats since the last call.
func (m *listener) heard() []timedBeat {
	m.mu.Lock()
	defer m.mu.Unlock()
	heard := m.beats
	m.beats = nil
	return heard
}

func (m *listener) last(t *testing.T) line.Beat {
	t.Helper()
	heard := m.heard()
	if len(heard) == 0 {
		t.Fatal("no beat was heard")
	}
	return heard[len(heard)-1].Beat
}

// TestBeats: a worker beats once a second, at once when it has waited too long, and not after
// Close.
func TestBeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &listener{script: newScript()}
		w := start(t, m)
		synctest.Wait()
		// The operation begins between two beats and between two observations.
		<-time.After(10*time.Second + 400*time.Millisecond)
		if n := len(m.heard()); n < 10 || n > 12 {
			t.Errorf("%d beats in 10 s", n)
		}
		looks := m.looks.Load()
		if looks < 10 || looks > 12 {
			t.Errorf("the process was looked at %d times in 10 s", looks)
		}
		for range 20 { // a reset in which each phase is reported
			w.doing.hasNews()
			synctest.Wait()
		}
		if n, more := len(m.heard()), m.looks.Load()-looks; n < 20 || more > 1 {
			t.Errorf("%d beats at once look at the process %d times", n, more)
		}
		entered := time.Now()
		done := make(chan error)
		go func() { done <- collective.Barrier(t.Context(), w.Group()) }()
		<-time.After(8 * time.Second)
		var long []time.Duration
		for _, b := range m.heard() {
			if l := b.Lanes[0]; l.Waiting && l.For >= 5*time.Second {
				long = append(long, b.at.Sub(entered))
			}
		}
		if len(long) < 3 || long[0] < 5*time.Second || long[0] > 5*time.Second+300*time.Millisecond {
			t.Errorf("the driver heard of the wait after %v", long)
		}
		if err := collective.Barrier(t.Context(), m.groups[1]); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		var disk atomic.Uint64
		w.doing.last.Store(&disk)
		disk.Store(4711)
		m.heard()
		<-time.After(2 * time.Second)
		if b := m.last(t); b.Written != 4711 {
			t.Errorf("%d bytes of the last checkpoint were told", b.Written)
		}
		for _, loss := range []float64{0.5, 0.25} {
			if err := w.Report("loss", loss); err != nil {
				t.Error(err)
			}
		}
		m.heard()
		<-time.After(2 * time.Second)
		if b := m.last(t); !slices.Equal(b.Figures, []line.Figure{{Name: "loss", Value: 0.25}}) || b.Usage == nil || b.Usage.Resident == 0 {
			t.Errorf("figures %v, usage %+v", b.Figures, b.Usage)
		}
		if err := w.Report("the loss", 1); err == nil || !strings.Contains(err.Error(), "the loss") {
			t.Errorf("a name with a blank: %v", err)
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		m.heard()
		<-time.After(time.Minute)
		if n := len(m.heard()); n > 0 {
			t.Errorf("%d beats of a worker that is closed", n)
		}
		m.groups[1].Close()
	})
}

// TestConnectionsAreProgress: the quiet time of a connecting worker begins with its last
// connection.
func TestConnectionsAreProgress(t *testing.T) {
	m := &listener{script: newScript()}
	w := &Worker{meeting: m}
	p := newPulse(w, m)
	for _, step := range []struct {
		phase line.Phase
		made  uint64
		want  time.Duration
	}{
		{line.Connecting, 0, 0}, {0, 0, time.Second}, {0, 0, 2 * time.Second}, {0, 3, 0}, {0, 0, time.Second},
		{line.Training, 0, 0}, {0, 1, time.Second},
	} {
		if step.phase != 0 {
			w.doing.enter(step.phase)
		}
		m.made.Add(step.made)
		p.look(time.Second)
		if quiet := p.beat().Quiet; quiet != step.want {
			t.Errorf("%+v: quiet for %v", step, quiet)
		}
	}
}

// TestBeatsTellPhases: beats report the worker's phase and how long nothing has changed.
func TestBeatsTellPhases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &listener{script: newScript()}
		m.follow = func(g *collective.Group) { // the opening of a sync, the comparison after it, and a commit
			if _, err := collective.BroadcastBytes(context.Background(), g, nil, 0); err != nil {
				return
			}
			for _, words := range []int{2, 1} {
				if collective.AllReduce(context.Background(), g, make([]uint64, words), collective.Max) != nil {
					return
				}
			}
		}
		w := start(t, m)
		tell := func(phase line.Phase) (commits uint64) {
			t.Helper()
			<-time.After(10 * time.Second)
			b := m.last(t)
			if b.Phase != phase || b.Quiet < 8*time.Second || b.Quiet > 10*time.Second || b.Generation != w.Generation() {
				t.Errorf("%v for %v in generation %d, want %v for 10s in %d", b.Phase, b.Quiet, b.Generation, phase, w.Generation())
			}
			return b.Commits
		}
		tell(line.Outside)
		s := NewState(w, &slowPart{save: func() { tell(line.Saving) }, sync: func() { tell(line.Syncing) }})
		m.joins = []error{nil}
		s.OnReset(func() error {
			if n := tell(line.Resetting); n != 0 {
				t.Errorf("%d commits in the new world", n)
			}
			return nil
		})
		trained := 0
		err := Run(t.Context(), s, func(context.Context) error {
			if trained++; trained > 1 {
				return io.EOF
			}
			tell(line.Training)
			if err := s.Commit(); err != nil {
				return err
			}
			if n := tell(line.Training); n != s.Commits() || n == 0 {
				t.Errorf("%d commits, and it has %d", n, s.Commits())
			}
			m.others.Wait()
			m.groups[1].Abort(nil)
			return errGone
		})
		if !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		tell(line.Outside)
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		m.others.Wait()
		m.groups[1].Close()
	})
}

// slowPart is a part whose save takes long.
type slowPart struct {
	save, sync func()
	saves      int
}

func (p *slowPart) Save() error {
	if p.saves++; p.saves == 3 { // after those of Run's beginning and of the first sync
		p.save()
	}
	return nil
}

func (p *slowPart) Restore() error { return nil }

func (p *slowPart) Sync(context.Context, *collective.Group, int) error {
	p.sync()
	return nil
}

// TestStoppedIsNotWaiting: the time in which a process was stopped does not count as waiting.
func TestStoppedIsNotWaiting(t *testing.T) {
	groups := collective.Local(2)
	m := &listener{script: newScript()}
	w := &Worker{meeting: m}
	w.member.Store(&membership{group: groups[0]})
	w.doing.enter(line.Training)
	p := newPulse(w, m)
	var waiting sync.WaitGroup
	waiting.Go(func() { collective.Barrier(context.Background(), groups[0]) })
	for !groups[0].Progress()[0].Waiting {
	}
	p.look(time.Second)
	for range 4 {
		p.look(time.Second)
	}
	b := p.beat()
	want := line.Beat{Phase: line.Training, Quiet: 4 * time.Second,
		Lanes:   []line.Lane{{Operation: 1, Waiting: true, For: 4 * time.Second, What: "Barrier"}},
		Trained: new(false), Counters: &line.Counters{}, Usage: b.Usage}
	if !reflect.DeepEqual(b, want) {
		t.Errorf("%+v, want %+v", b, want)
	}
	groups[1].Abort(nil)
	waiting.Wait()
	if waits := p.look(time.Second); waits != 0 {
		t.Errorf("it waits for %v", waits)
	}
	groups[0].Close()
}

// TestWaitsBeginAnewInEachWorld: an operation of a new world is not confused with the operation
// that has the same number in the previous world. A beat reports an observation for the world in
// which it was made.
func TestWaitsBeginAnewInEachWorld(t *testing.T) {
	m := &listener{script: newScript()}
	w := &Worker{meeting: m}
	p := newPulse(w, m)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	enter := func(generation uint64) {
		groups := collective.Local(2)
		t.Cleanup(func() { groups[0].Close() })
		t.Cleanup(func() { groups[1].Close() })
		w.entering.Store(generation)
		w.member.Store(&membership{world: line.World{World: plan.World{Generation: generation}}, group: groups[0]})
		w.doing.enter(line.Training)
		waiting.Go(func() { collective.Barrier(context.Background(), groups[0]) })
		for !groups[0].Progress()[0].Waiting {
		}
		m.groups = groups
	}
	enter(1)
	for range 5 {
		p.look(time.Second)
	}
	m.groups[1].Abort(nil)
	enter(2)
	if b := p.beat(); b.Generation != 1 || b.Lanes[0].For != 4*time.Second {
		t.Errorf("before the next look: %+v", b)
	}
	if longest := p.look(time.Second); longest != 0 {
		t.Errorf("the new world waits for %v", longest)
	}
	if b := p.beat(); b.Generation != 2 || b.Lanes[0].Operation != 1 || b.Lanes[0].For != 0 {
		t.Errorf("after it: %+v", b)
	}
	m.groups[1].Abort(nil)
}

// TestBeatsOfManyGroups: a beat includes the group of all ranks, and the groups with the longest
// waits.
func TestBeatsOfManyGroups(t *testing.T) {
	w := &Worker{}
	p := newPulse(w, &listener{script: newScript()})
	for id := range uint64(40) {
		p.lanes[id] = &laneSeen{Progress: collective.Progress{Lane: id, Waiting: id%2 == 1}, since: time.Duration(id) * time.Second}
	}
	b := p.beat()
	if len(b.Lanes) != line.MaxLanes || b.Lanes[0].ID != 0 {
		t.Fatalf("%+v", b.Lanes)
	}
	for i, l := range b.Lanes[1:] {
		if want := uint64(39 - 2*i); l.ID != want || !l.Waiting {
			t.Errorf("place %d: %+v, want lane %d", i+1, l, want)
		}
	}
}

// TestBeatsWithoutDriver: a worker that is not connected to its driver sends no beats. A driver
// that does not answer is called no more often than one that answers. After the connection is back,
// a beat is sent at once.
func TestBeatsWithoutDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &listener{script: newScript(), warning: 2 * time.Second, deaf: context.DeadlineExceeded}
		w := start(t, m)
		<-time.After(10 * time.Second)
		m.mu.Lock()
		if m.tries > 12 {
			t.Errorf("%d beats in 10 s", m.tries)
		}
		m.deaf = line.ErrNotConnected
		m.mu.Unlock()
		<-time.After(10 * time.Second)
		m.mu.Lock()
		m.deaf = nil
		m.mu.Unlock()
		<-time.After(300 * time.Millisecond)
		if len(m.heard()) != 1 {
			t.Error("a driver that is back hears nothing at once")
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		m.groups[1].Close()
	})
}

// TestBeatsOfManyWorkers: in a world of 300 each worker beats every third second, and at once when
// it waits too long.
func TestBeatsOfManyWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &listener{script: newScript()}
		w := start(t, m)
		wide := *w.member.Load()
		wide.world.Slots = append(wide.world.Slots, make([]plan.Slot, 298)...)
		w.member.Store(&wide)
		<-time.After(2 * time.Second)
		m.heard()
		<-time.After(30 * time.Second)
		if n := len(m.heard()); n < 9 || n > 11 {
			t.Errorf("%d beats in 30 s", n)
		}
		began := time.Now()
		waiting := make(chan error)
		go func() { waiting <- collective.Barrier(t.Context(), m.groups[0]) }()
		<-time.After(usualWarning + time.Second)
		synctest.Wait()
		told := slices.ContainsFunc(m.heard(), func(b timedBeat) bool {
			return b.at.Sub(began) >= usualWarning && len(b.Lanes) == 1 && b.Lanes[0].For >= usualWarning-time.Second
		})
		if !told {
			t.Error("nobody hears of a wait")
		}
		m.groups[1].Close()
		<-waiting
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestWarningsAndPauses: the interval of beats is short enough for the warning.
func TestWarningsAndPauses(t *testing.T) {
	for _, c := range []struct{ set, warning, every, pause time.Duration }{
		{0, 5 * time.Second, time.Second, time.Second / 4},
		{-1, 0, time.Second, time.Second / 4},
		{time.Second, time.Second, time.Second / 2, time.Second / 8},
		{time.Hour, time.Hour, time.Second, time.Second / 4},
		{time.Millisecond, time.Millisecond, time.Millisecond / 2, leastPause},
	} {
		p := newPulse(&Worker{}, &listener{warning: c.set})
		if p.warning != c.warning || p.every != c.every || p.pause != c.pause {
			t.Errorf("%v: warning after %v, beats every %v, looks every %v", c.set, p.warning, p.every, p.pause)
		}
	}
}
