package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
)

// kept is a launcher whose workers outlive the driver: Run finds them again.
type kept struct {
	mu      sync.Mutex
	workers map[string]*keptWorker
	starts  int
	settled []string
	terms   []uint64 // of the drivers that have taken over
	noted   time.Time
}

var _ launch.Keeper = (*kept)(nil)

type keptWorker struct {
	spec  *launch.Spec
	exit  chan error
	taken chan struct{} // closed when another driver's Run has taken the place of this one's
}

func (k *kept) Run(ctx context.Context, s *launch.Spec, started func(int)) error {
	k.mu.Lock()
	w := k.workers[s.Incarnation]
	fresh := w == nil
	switch {
	case fresh && s.Resumed:
		k.mu.Unlock()
		return &launch.ExitError{Code: 137, Signal: syscall.SIGKILL, Lost: true, Why: "nobody knows it"}
	case fresh:
		k.starts++
		w = &keptWorker{spec: s, exit: make(chan error, 1)}
		k.workers[s.Incarnation] = w
	default:
		close(w.taken)
	}
	w.taken = make(chan struct{})
	taken := w.taken
	k.mu.Unlock()
	if fresh {
		started(42)
	}
	select {
	case err := <-w.exit:
		return err
	case <-taken:
		return errors.New("another driver has it") // nobody receives this error
	case <-ctx.Done():
		return &launch.ExitError{Code: 143, Signal: 15}
	}
}

func (k *kept) Adopt(incarnations []string, term uint64, _ time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.terms = append(k.terms, term)
	for id := range k.workers {
		if !slices.Contains(incarnations, id) {
			delete(k.workers, id)
		}
	}
}

func (k *kept) Noted(at time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.noted = at
}

func (k *kept) Settle(incarnation string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.settled = append(k.settled, incarnation)
	delete(k.workers, incarnation)
}

// in returns the worker of a slot.
func (k *kept) in(t *testing.T, slot string) *keptWorker {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, w := range k.workers {
		if w.spec.Slot.String() == slot {
			return w
		}
	}
	t.Fatalf("no worker is in %s", slot)
	return nil
}

// drive runs a loop with k's workers.
func (k *kept) drive(t *testing.T, ctx context.Context, l *loop) *testJob {
	j := &testJob{result: make(chan error, 1)}
	j.begin(t, ctx, l)
	return j
}

// config returns the configuration of a job on host a that passes its events to events.
func (k *kept) config(t *testing.T, events func(job.Event)) Config {
	log := logrus.New()
	log.SetOutput(io.Discard)
	cfg, err := Config{
		RunID: "kept", Command: []string{"train"}, Launcher: k, Log: log, Events: events,
		Source: discovery.Fixed{{Name: "a", Slots: 2}}, Size: job.Size{NP: 2, Min: 1, Elastic: true},
		Journal: filepath.Join(t.TempDir(), "journal"), Output: &launch.Output{},
	}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func (j *testJob) joined(k *kept, t *testing.T, slot string, after uint64) {
	t.Helper()
	j.Joined(identity.Subject{Incarnation: k.in(t, slot).spec.Incarnation}, line.Joining{After: after})
	synctest.Wait()
}

// TestLoopIsResumed: a driver dies after it has recorded a worker's death and before it has
// reacted. Another one resumes the job: it takes over the other worker, publishes the last world
// again, and forms the next one.
func TestLoopIsResumed(t *testing.T) {
	k := &kept{workers: map[string]*keptWorker{}}
	synctest.Test(t, func(t *testing.T) {
		var told []job.EventName
		dead, buried := false, make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		cfg := k.config(t, func(e job.Event) {
			if dead {
				<-buried
				return
			}
			told = append(told, e.Name)
		})
		l := newLoop(cfg)
		l.job = decide.JobRecord{Version: decide.JournalVersion, Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}
		if err := l.writer.begin(cfg, l.job); err != nil {
			t.Fatal(err)
		}
		first := k.drive(t, ctx, l)
		defer func() {
			close(buried)
			cancel()
			<-first.result
		}()
		first.joined(k, t, "a:0", 0)
		first.joined(k, t, "a:1", 0)
		lost := k.in(t, "a:1").spec.Incarnation
		dead = true
		k.in(t, "a:1").exit <- &launch.ExitError{Code: 137, Signal: 9}
		synctest.Wait()

		// The lock is released when its process ends, but this process continues.
		b, err := os.ReadFile(cfg.Journal)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Journal += ".after"
		if err := os.WriteFile(cfg.Journal, b, 0o600); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Minute)
		if s, err := InspectStatus(cfg.Journal); err != nil || s.Goodput.Seconds < 60 {
			t.Errorf("without a driver, %v s are accounted for: %v", s.Goodput.Seconds, err)
		}
		var replayed, later []job.EventName
		p := &decide.Replay{Told: func(e job.Event) { replayed = append(replayed, e.Name) }}
		cfg.Events = func(e job.Event) { later = append(later, e.Name) }
		j, run, err := journal.Open(cfg.Journal, p.Next)
		if err != nil {
			t.Fatal(err)
		}
		l, err = takeOver(cfg, run, p)
		if err != nil {
			t.Fatal(err)
		}
		l.writer.take(cfg, j)
		second := k.drive(t, t.Context(), l)
		if !slices.Equal(k.terms, []uint64{1}) || l.m.Term() != 1 {
			t.Errorf("the second driver has the term %d, and takes over with %v", l.m.Term(), k.terms)
		}
		if len(second.published) != 1 || second.published[0].Generation != 1 || second.published[0].Size() != 2 {
			t.Fatalf("published %v, want world 1 again", second.published)
		}
		if want := append(told, job.WorkerExited, job.Excluded, job.Reset); fmt.Sprint(replayed) != fmt.Sprint(want) {
			t.Errorf("replayed %v, want %v", replayed, want)
		}
		if at := k.noted; !at.Equal(p.Machine.Last()) {
			t.Errorf("agents are told of records up to %v, the last synced step was at %v", at, p.Machine.Last())
		}
		second.joined(k, t, "a:0", 1)
		if len(second.published) != 2 || second.published[1].Generation != 2 || second.published[1].Size() != 1 {
			t.Fatalf("published %v, want world 2 of the survivor", second.published)
		}
		// The exclusion ended before the second driver started.
		if k.starts != 3 || k.in(t, "a:1").spec.Incarnation == lost || k.in(t, "a:1").spec.Resumed {
			t.Errorf("%d starts, in a:1 there is %+v", k.starts, k.in(t, "a:1").spec)
		}
		w := k.in(t, "a:0") // the worker in a:1 has not joined, and is stopped at the end
		second.Reported(identity.Subject{Incarnation: w.spec.Incarnation}, line.Done, 2, 3, func() {})
		w.exit <- nil
		if err := <-second.result; err != nil {
			t.Errorf("the job ended with %v", err)
		}
		if later[0] != job.Resumed || later[len(later)-1] != job.JobDone || len(k.workers) != 0 {
			t.Errorf("the second driver tells %v, and leaves %d workers", later, len(k.workers))
		}
		l.closeJournal()
		if err := Resume(t.Context(), cfg); !errors.Is(err, job.ErrFinished) {
			t.Errorf("a job that has ended: %v", err)
		}
		about, err := Inspect(cfg.Journal)
		if err != nil || !about.Finished || about.Running || about.Result != nil || about.Generation != 2 || about.RunID != "kept" {
			t.Errorf("%+v, %v", about, err)
		}
	})
}

// copied is a mirror that keeps all records in memory.
type copied struct {
	records [][]byte
	synced  int // records at the last Sync
	behind  bool
}

func (c *copied) Append(payload []byte) { c.records = append(c.records, slices.Clone(payload)) }
func (c *copied) Replace(records [][]byte) {
	c.records, c.behind = slices.Clone(records), false
}
func (c *copied) SetBehind()    { c.behind = true }
func (c *copied) Sync()         { c.synced = len(c.records) }
func (c *copied) State() string { return "" }

// TestMirror: the mirror gets each record of the journal, and has all of them before a world is
// published and before the job ends.
func TestMirror(t *testing.T) {
	k := &kept{workers: map[string]*keptWorker{}}
	synctest.Test(t, func(t *testing.T) {
		m := &copied{}
		cfg := k.config(t, func(job.Event) {})
		cfg.Mirror = m
		l := newLoop(cfg)
		l.job = decide.JobRecord{Version: decide.JournalVersion, Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}
		if err := l.writer.begin(cfg, l.job); err != nil {
			t.Fatal(err)
		}
		check := func(when string) {
			t.Helper()
			b, err := os.ReadFile(cfg.Journal)
			if err != nil {
				t.Fatal(err)
			}
			var want [][]byte
			if _, _, err := journal.Read(bytes.NewReader(b), func(payload []byte) error {
				want = append(want, slices.Clone(payload))
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if !slices.EqualFunc(m.records, want, bytes.Equal) || m.behind {
				t.Errorf("%s the mirror has %d records, behind: %v; the journal %d", when, len(m.records), m.behind, len(want))
			}
			if m.synced == 0 || m.synced != len(want) {
				t.Errorf("%s %d of %d records were synced", when, m.synced, len(want))
			}
		}
		d := k.drive(t, t.Context(), l)
		d.joined(k, t, "a:0", 0)
		d.joined(k, t, "a:1", 0)
		check("when the world is published")
		for _, slot := range []string{"a:0", "a:1"} {
			w := k.in(t, slot)
			d.Reported(identity.Subject{Incarnation: w.spec.Incarnation}, line.Done, 1, 3, func() {})
			synctest.Wait()
			w.exit <- nil
		}
		if err := <-d.result; err != nil {
			t.Errorf("the job ended with %v", err)
		}
		check("when the job has ended")
		l.closeJournal()
	})
}

// away is a mirror that cannot be written to until back is closed.
type away struct {
	copied
	back chan struct{}
}

func (a *away) Sync() { <-a.back }

func (a *away) State() string {
	select {
	case <-a.back:
		return ""
	default:
		return "the mirror is away"
	}
}

// TestMirrorIsAway: while a world waits for the mirror, the status and the metrics report this
// wait.
func TestMirrorIsAway(t *testing.T) {
	k := &kept{workers: map[string]*keptWorker{}}
	synctest.Test(t, func(t *testing.T) {
		m := &away{back: make(chan struct{})}
		cfg := k.config(t, func(job.Event) {})
		cfg.Mirror, cfg.Meter = m, &Meter{}
		l := newLoop(cfg)
		l.writer.keep(cfg)
		if err := l.writer.k.Create(); err != nil {
			t.Fatal(err)
		}
		d := k.drive(t, t.Context(), l)
		d.joined(k, t, "a:0", 0)
		d.joined(k, t, "a:1", 0)
		text, err := (*controlled)(l).Status(t.Context())
		var s job.Status
		if err == nil {
			err = json.Unmarshal(text, &s)
		}
		if err != nil || s.Journal != m.State() {
			t.Errorf("the status of the journal is %q, %v", s.Journal, err)
		}
		if measured, err := cfg.Meter.Read(t.Context()); err != nil || !measured.Journal.Behind {
			t.Errorf("the metrics: %+v, %v", measured.Journal, err)
		}
		if len(d.published) != 0 {
			t.Error("a world is published that the mirror does not have")
		}
		close(m.back)
		synctest.Wait()
		if len(d.published) != 1 {
			t.Errorf("%d worlds are published, want 1", len(d.published))
		}
		k.finish(t, d)
		l.closeJournal()
	})
}

// TestJournalFails: a journal that cannot be written is abandoned, and the job continues.
func TestJournalFails(t *testing.T) {
	k := &kept{workers: map[string]*keptWorker{}}
	synctest.Test(t, func(t *testing.T) {
		cfg := k.config(t, func(job.Event) {})
		l := newLoop(cfg)
		l.job = decide.JobRecord{Version: decide.JournalVersion, Size: cfg.Size}
		if err := l.writer.begin(cfg, l.job); err != nil {
			t.Fatal(err)
		}
		var said strings.Builder
		l.writer.log.(*logrus.Logger).SetOutput(&said)
		broken, err := journal.Create(cfg.Journal+".broken", cfg.RunID)
		if err != nil {
			t.Fatal(err)
		}
		broken.Close()
		l.writer.k.Take(broken)
		j := k.drive(t, t.Context(), l)
		j.joined(k, t, "a:0", 0)
		j.joined(k, t, "a:1", 0)
		if len(j.published) != 1 {
			t.Errorf("published %v", j.published)
		}
		if _, err := os.Stat(cfg.Journal); !errors.Is(err, os.ErrNotExist) || !strings.Contains(said.String(), "cannot be resumed") {
			t.Errorf("the journal: %v; the log: %q", err, said.String())
		}
		k.finish(t, j)
	})
}

// finish makes the workers in a:0 and a:1 report done and exit cleanly, and the job succeed.
func (k *kept) finish(t *testing.T, j *testJob) {
	t.Helper()
	for _, slot := range []string{"a:0", "a:1"} {
		j.Reported(identity.Subject{Incarnation: k.in(t, slot).spec.Incarnation}, line.Done, 1, 3, func() {})
		k.in(t, slot).exit <- nil
	}
	if err := <-j.result; err != nil {
		t.Errorf("the job ended with %v", err)
	}
}

// hasFinished closes the journal of a job that has ended, and checks that the journal records the
// end.
func hasFinished(t *testing.T, l *loop) {
	t.Helper()
	l.closeJournal()
	if about, err := Inspect(l.cfg.Journal); err != nil || !about.Finished {
		t.Errorf("at the end: %+v, %v", about, err)
	}
}

// fullDisk returns a directory on a small disk, and a function that fills it up.
func fullDisk(t *testing.T, size string) (disk string, fill func(t *testing.T) (ballast string)) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a file system that is filled")
	}
	disk = t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(disk, unix.MNT_DETACH) })
	return disk, func(t *testing.T) string {
		ballast := filepath.Join(disk, "ballast")
		f, err := os.Create(ballast)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for size := 64 << 10; size > 0; {
			if _, err := f.Write(make([]byte, size)); err != nil {
				size /= 2
			}
		}
		return ballast
	}
}

// TestJournalHasRoom: the journal has reserved space, so another driver could resume the job at any
// time while the disk is full.
func TestJournalHasRoom(t *testing.T) {
	disk, fill := fullDisk(t, "4m")
	k := &kept{workers: map[string]*keptWorker{}}
	synctest.Test(t, func(t *testing.T) {
		cfg := k.config(t, func(job.Event) {})
		cfg.Journal = filepath.Join(disk, "journal")
		l := newLoop(cfg)
		l.job = decide.JobRecord{Version: decide.JournalVersion, Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}
		if err := l.writer.begin(cfg, l.job); err != nil {
			t.Fatal(err)
		}
		fill(t)
		j := k.drive(t, t.Context(), l)
		why := strings.Repeat("the disk is full, ", 1000)
		for i := range 200 {
			j.post(decide.SourceStale{Cause: decide.Cause{Err: fmt.Errorf("%s%d", why, i)}})
			if i == 100 {
				j.joined(k, t, "a:0", 0)
				j.joined(k, t, "a:1", 0)
			}
			synctest.Wait()
			if i%10 != 9 {
				continue
			}
			if about, err := Inspect(cfg.Journal); err != nil || i > 100 && about.Workers != 2 || i > 100 && about.Generation != 1 {
				t.Fatalf("after %d events: %+v, %v", i, about, err)
			}
		}
		if size := l.writer.k.Size(); size > 2*journalSize {
			t.Errorf("the journal has %d bytes", size)
		}
		k.finish(t, j)
		hasFinished(t, l)
		if left, err := os.ReadDir(disk); err != nil || len(left) != 2 { // the ballast is the other file
			t.Errorf("%d files are left, %v", len(left), err)
		}
	})
}

// TestJournalFullDisk: the disk is full for a while, and no space is reserved. The job continues
// and reports it; meanwhile its journal cannot be resumed, and it is complete again once there is
// space.
func TestJournalFullDisk(t *testing.T) {
	disk, fill := fullDisk(t, "64k")
	k := &kept{workers: map[string]*keptWorker{}}
	synctest.Test(t, func(t *testing.T) {
		cfg := k.config(t, func(job.Event) {})
		cfg.Journal = filepath.Join(disk, "journal")
		l := newLoop(cfg)
		l.job = decide.JobRecord{Version: decide.JournalVersion, Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}
		if err := l.writer.begin(cfg, l.job); err != nil {
			t.Fatal(err)
		}
		state := func() string {
			var s job.Status
			text, err := (*controlled)(l).Status(t.Context())
			if err := errors.Join(err, json.Unmarshal(text, &s)); err != nil {
				t.Fatal(err)
			}
			return s.Journal
		}
		var said strings.Builder
		l.writer.log.(*logrus.Logger).SetOutput(&said)
		l.writer.log.(*logrus.Logger).SetLevel(logrus.ErrorLevel)
		ballast := fill(t)
		j := k.drive(t, t.Context(), l)
		for i := range 200 { // more than is left of the last page
			j.post(decide.SourceStale{Cause: decide.Cause{Err: fmt.Errorf("the disk is full, %d", i)}})
		}
		j.joined(k, t, "a:0", 0)
		j.joined(k, t, "a:1", 0)
		<-time.After(3 * time.Second)
		synctest.Wait()
		if len(j.published) != 1 || !strings.Contains(state(), "no space left") || strings.Count(said.String(), "\n") != 1 {
			t.Errorf("published %v, the journal is %q, the log: %s", j.published, state(), said.String())
		}
		if about, err := Inspect(cfg.Journal); !errors.Is(err, journal.ErrBehind) || !about.Running {
			t.Errorf("while it lacks records: %+v, %v", about, err)
		}
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		<-time.After(2 * time.Second)
		synctest.Wait()
		if got := state(); got != "" {
			t.Errorf("with room, the journal is %q", got)
		}
		if about, err := Inspect(cfg.Journal); err != nil || about.Generation != 1 || about.Workers != 2 {
			t.Errorf("with room: %+v, %v", about, err)
		}
		k.finish(t, j)
		hasFinished(t, l)
	})
}
