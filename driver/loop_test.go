package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// testJob is a loop with simulated workers, rendezvous and notifications, in a synctest bubble.
type testJob struct {
	*loop
	mu        sync.Mutex
	running   map[string]*fakeWorker // by "host:slot"
	report    chan struct{}          // closed when the launcher reports starts; nil: at once
	published []plan.World
	dismissed []string
	pushed    []notify.Update
	losses    []notify.Loss
	events    []job.EventName
	slots     []job.PublishedSlot // of the last world_published
	out       bytes.Buffer
	result    chan error
}

type fakeWorker struct {
	spec *launch.Spec
	exit chan error
	says chan string // printed before anything else happens to it
}

// Run is the job's launcher: its worker ends when the test requests it, or 1 s after it was asked
// to.
func (j *testJob) Run(ctx context.Context, s *launch.Spec, started func(int)) error {
	w := &fakeWorker{spec: s, exit: make(chan error, 1), says: make(chan string, 1)}
	j.mu.Lock()
	j.running[s.Slot.String()] = w
	j.mu.Unlock()
	defer func() {
		j.mu.Lock()
		delete(j.running, s.Slot.String())
		j.mu.Unlock()
	}()
	if j.report != nil {
		<-j.report
	}
	started(42)
	select {
	case text := <-w.says:
		printed := make(chan struct{})
		go func() {
			fmt.Fprint(s.Stdout, text)
			close(printed)
		}()
		defer func() { <-printed }()
	case err := <-w.exit:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-w.exit:
		s.Ended(err)
		return err
	case <-ctx.Done():
		<-time.After(time.Second)
		err := &launch.ExitError{Code: 143, Signal: 15}
		s.Ended(err)
		return err
	}
}

func (j *testJob) Publish(w plan.World, _ []line.Member, _ int, _ uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.published = append(j.published, w)
}

func (j *testJob) Dismiss(id string, _ error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.dismissed = append(j.dismissed, id)
}

func (*testJob) Admit(identity.Subject)                {}
func (*testJob) Hear(_ string, _ []byte, noted func()) { noted() }

// Stream serves a connection until the other end closes it or ctx ends.
func (*testJob) Stream(ctx context.Context, _, _ string, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	_, _ = io.Copy(io.Discard, conn)
}

func (*testJob) Expel(string) {}

// pushed makes the job a pusher of notifications.
type pushed struct{ *testJob }

func (pushed) Heard(string, uint64, notify.Known, bool) {}

func (j *testJob) Push(_ []string, u notify.Update) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.pushed = append(j.pushed, u)
}

func (j *testJob) PushLoss(_ []string, l notify.Loss) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.losses = append(j.losses, l)
}

func (j *testJob) Forget(string) {}

func newJob(t *testing.T, ctx context.Context, cfg Config) *testJob {
	t.Helper()
	return newReportedJob(t, ctx, cfg, nil)
}

// newReportedJob is like newJob, with a launcher that reports starts once report is closed.
func newReportedJob(t *testing.T, ctx context.Context, cfg Config, report chan struct{}) *testJob {
	t.Helper()
	j := &testJob{running: map[string]*fakeWorker{}, report: report, result: make(chan error, 1)}
	log := logrus.New()
	log.SetOutput(io.Discard)
	cfg.Command, cfg.RunID, cfg.Launcher, cfg.Log = []string{"train"}, "loop", j, log
	cfg.Events = func(e job.Event) {
		j.events = append(j.events, e.Name)
		for _, f := range e.Fields {
			if slots, ok := f.Value.([]job.PublishedSlot); ok {
				j.slots = slots
			}
		}
	}
	if cfg.Output == nil {
		cfg.Output = &launch.Output{Stdout: &j.out, Stderr: &j.out}
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	j.begin(t, ctx, newLoop(cfg))
	return j
}

// begin runs the loop.
func (j *testJob) begin(t *testing.T, ctx context.Context, l *loop) {
	t.Helper()
	j.loop = l
	j.loop.meet, j.loop.push, j.loop.say = j, pushed{j}, func([]string, []uint32, []byte, []byte) {}
	var err error
	if j.loop.credentials, err = identity.NewAuthority(l.cfg.RunID); err != nil {
		t.Fatal(err)
	}
	if j.loop.workers, err = j.loop.credentials.Issue(identity.Subject{Role: identity.Worker}); err != nil {
		t.Fatal(err)
	}
	side, cancel := context.WithCancel(context.Background())
	j.loop.openStreams(side)
	go func() {
		j.loop.wg.Go(func() { j.loop.discover(side, nil) })
		err := j.loop.run(ctx)
		cancel()
		j.loop.wg.Wait()
		j.loop.finishOutput()
		j.result <- err
	}()
	synctest.Wait()
}

func (j *testJob) worker(t *testing.T, slot string) *fakeWorker {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.running[slot]
	if w == nil {
		t.Fatalf("no worker runs in %s", slot)
	}
	return w
}

func (j *testJob) joins(t *testing.T, after uint64, slots ...string) {
	t.Helper()
	for _, slot := range slots {
		j.Joined(identity.Subject{Incarnation: j.worker(t, slot).spec.Incarnation}, line.Joining{After: after})
	}
	synctest.Wait()
}

func TestLoopRunsAJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJob(t, context.Background(), Config{
			Source: discovery.Fixed{{Name: "a", Slots: 2}}, Size: job.Size{NP: 2, Min: 1, Elastic: true},
		})
		j.joins(t, 0, "a:0", "a:1")
		if len(j.published) != 1 || j.published[0].Size() != 2 {
			t.Fatalf("published %v, want one world of 2", j.published)
		}
		env := j.worker(t, "a:1").spec.Env
		for _, want := range []string{"HOROVOD_RANK=1", "HOROVOD_SIZE=2", "HVD_SLOT=1", "HVD_RUN_ID=loop"} {
			if !slices.Contains(env, want) {
				t.Errorf("the environment of a:1 has no %s", want)
			}
		}
		for _, slot := range []string{"a:0", "a:1"} {
			j.Reported(identity.Subject{Incarnation: j.worker(t, slot).spec.Incarnation}, line.Done, 1, 3, func() {})
			j.worker(t, slot).exit <- nil
		}
		if err := <-j.result; err != nil {
			t.Errorf("the job ended with %v", err)
		}
		if last := j.events[len(j.events)-1]; last != job.JobDone {
			t.Errorf("the last event is %s", last)
		}
	})
}

// TestLastWords: what a worker has sent before it ended is read, however late it arrives.
func TestLastWords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJob(t, context.Background(), Config{
			Source: discovery.Fixed{{Name: "a", Slots: 2}}, Size: job.Size{NP: 2, Min: 1, Elastic: true},
		})
		near, far := net.Pipe()
		w := j.worker(t, "a:0")
		over := make(chan struct{})
		go func() {
			defer close(over)
			w.spec.Stream(line.TasksProtocol, far)
		}()
		j.joins(t, 0, "a:0", "a:1")
		err := &launch.ExitError{Code: 137, Signal: 9}
		w.spec.Ended(err)
		w.exit <- err
		synctest.Wait()
		if _, err := near.Write([]byte("last words")); err != nil {
			t.Errorf("the connection of a worker that has ended: %v", err)
		}
		j.worker(t, "a:1").exit <- err
		<-j.result
		<-over
	})
}

func TestLoopLabelsOutputByCurrentRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJob(t, context.Background(), Config{
			Source: discovery.Fixed{{Name: "a", Slots: 2}}, Size: job.Size{NP: 2, Min: 1, Elastic: true},
		})
		j.joins(t, 0, "a:0", "a:1")
		survivor := j.worker(t, "a:1")
		fmt.Fprintln(survivor.spec.Stdout, "before")
		j.worker(t, "a:0").exit <- &launch.ExitError{Code: 137, Signal: 9}
		synctest.Wait()
		j.joins(t, 1, "a:1")
		fmt.Fprintln(survivor.spec.Stdout, "after")
		if got, want := j.out.String(), "[1]<stdout>:before\n[0]<stdout>:after\n"; got != want {
			t.Errorf("output %q, want %q", got, want)
		}
		survivor.exit <- &launch.ExitError{Code: 3}
		var worker *job.WorkerError
		if err := <-j.result; !errors.As(err, &worker) || worker.Exit.Code != 3 {
			t.Errorf("the job ended with %v, want the survivor's exit", err)
		}
	})
}

func TestLoopStopsEverythingOnCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(context.Background())
		j := newJob(t, ctx, Config{
			Source: discovery.Fixed{{Name: "a", Slots: 3}}, Size: job.Size{NP: 3, Min: 1, Elastic: true},
		})
		j.joins(t, 0, "a:0")
		cause := errors.New("enough")
		cancel(cause)
		if err := <-j.result; !errors.Is(err, cause) {
			t.Errorf("Run returned %v, want the cause", err)
		}
		if len(j.running) > 0 {
			t.Errorf("%d workers still run", len(j.running))
		}
	})
}

// TestHostThatNeverAnswers: the job ends although a launcher accepts a worker and never reports
// that it has started or ended.
func TestHostThatNeverAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		report := make(chan struct{})
		j := newReportedJob(t, ctx, Config{
			Source: discovery.Fixed{{Name: "a", Slots: 2}}, Size: job.Size{NP: 2, Min: 2},
			Timeouts: job.Timeouts{Drain: 3 * time.Second},
		}, report)
		defer func() {
			close(report)
			<-time.After(2 * time.Second) // then the job is stopped
			synctest.Wait()
		}()
		cancel()
		begin := time.Now()
		if err := <-j.result; !errors.Is(err, context.Canceled) {
			t.Errorf("the job ended with %v", err)
		}
		if took := time.Since(begin); took > 34*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// TestStopComesFirst: a worker that ends because the job is stopped has not failed, even if the
// loop receives both events at once.
func TestStopComesFirst(t *testing.T) {
	for range 30 { // which of the two is received first was random
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(context.Background())
			j := newJob(t, ctx, Config{Source: discovery.Fixed{{Name: "a", Slots: 1}}, Size: job.Size{NP: 1}})
			j.joins(t, 0, "a:0")
			held := make(chan struct{})
			j.asks <- func() { <-held }
			cause := errors.New("enough")
			cancel(cause)
			j.worker(t, "a:0").exit <- &launch.ExitError{Code: 137, Signal: 9}
			synctest.Wait()
			close(held)
			if err := <-j.result; !errors.Is(err, cause) {
				t.Fatalf("the job ended with %v, want the cause", err)
			}
		})
	}
}

// TestLoopGivesTimeToWrite: as long as a worker's last checkpoint grows, its grace starts again, a
// few times per grace.
func TestLoopGivesTimeToWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		j := newJob(t, ctx, Config{Source: discovery.Fixed{{Name: "a", Slots: 1}}, Size: job.Size{NP: 1, Elastic: true}})
		j.joins(t, 0, "a:0")
		w := j.worker(t, "a:0")
		from := identity.Subject{Incarnation: w.spec.Incarnation}
		cancel()
		synctest.Wait()
		j.Reported(from, line.Writing, 1, 7, func() {})
		grew := func(written uint64) int {
			j.Beaten(from, line.Beat{Generation: 1, Phase: line.Saving, Written: written})
			synctest.Wait()
			select {
			case <-w.spec.More:
				return 1
			default:
				return 0
			}
		}
		if grew(0) != 0 || grew(1) != 1 || grew(2) != 0 {
			t.Error("it was not given time once")
		}
		j.stalls.grace = time.Millisecond
		<-time.After(100 * time.Millisecond)
		if grew(2) != 1 || grew(2) != 0 {
			t.Error("what has grown later was not looked at once")
		}
		<-j.result
	})
}

func TestLoopKeepsDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		j := newJob(t, context.Background(), Config{
			Source:   discovery.Fixed{{Name: "a", Slots: 1}},
			Size:     job.Size{NP: 2, Min: 1, Elastic: true},
			Timeouts: job.Timeouts{Elastic: 90 * time.Second},
		})
		if err := <-j.result; !errors.Is(err, job.ErrNotEnoughSlots) {
			t.Errorf("the job ended with %v", err)
		}
		if d := time.Since(begin); d < 90*time.Second || d > 91*time.Second {
			t.Errorf("it took %v", d)
		}
	})
}

// failing is a source that fails from a certain call on.
type failing struct {
	hosts []plan.Host
	from  int
	calls int
}

func (f *failing) Discover(context.Context) ([]plan.Host, error) {
	f.calls++
	if f.calls >= f.from {
		return nil, errors.New("the scheduler is down")
	}
	return f.hosts, nil
}

func TestLoopEndsWhenTheFirstDiscoveryFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJob(t, context.Background(), Config{Source: &failing{from: 1}, Size: job.Size{NP: 1}})
		err := <-j.result
		if !errors.Is(err, job.ErrDiscovery) || !strings.Contains(err.Error(), "the scheduler is down") {
			t.Errorf("the job ended with %v", err)
		}
	})
}

func TestLoopOutlivesALaterFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJob(t, context.Background(), Config{
			Source: &failing{hosts: []plan.Host{{Name: "a", Slots: 1}}, from: 2}, Size: job.Size{NP: 1, Elastic: true},
		})
		j.joins(t, 0, "a:0")
		<-time.After(5 * time.Second)
		synctest.Wait()
		if !slices.Contains(j.events, job.DiscoveryFailed) {
			t.Error("the failure is in no event")
		}
		j.Reported(identity.Subject{Incarnation: j.worker(t, "a:0").spec.Incarnation}, line.Done, 1, 3, func() {})
		j.worker(t, "a:0").exit <- nil
		if err := <-j.result; err != nil {
			t.Errorf("the job ended with %v", err)
		}
	})
}

// frozen is a terminal that accepts nothing until it is thawed.
type frozen struct {
	thawed chan struct{}
	text   bytes.Buffer
}

func (f *frozen) Write(b []byte) (int, error) {
	<-f.thawed
	return f.text.Write(b)
}

// frozenJob is a job on a:0 to a:2 whose output is not read; a:1 has printed a line.
func frozenJob(t *testing.T, ctx context.Context) (*testJob, *frozen) {
	f := &frozen{thawed: make(chan struct{})}
	j := newJob(t, ctx, Config{
		Source: discovery.Fixed{{Name: "a", Slots: 3}}, Size: job.Size{NP: 3, Min: 1, Elastic: true},
		Output: &launch.Output{Stdout: f, Stderr: &bytes.Buffer{}},
	})
	j.joins(t, 0, "a:0", "a:1", "a:2")
	j.worker(t, "a:1").says <- "one\n"
	synctest.Wait()
	return j, f
}

// TestFrozenOutput: if the output is not read, a death is still noticed and the job continues.
// Nothing is lost if reading resumes.
func TestFrozenOutput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, f := frozenJob(t, context.Background())
		dead := j.worker(t, "a:1")
		dead.exit <- &launch.ExitError{Code: 137, Signal: 9}
		<-time.After(outputGrace)
		synctest.Wait()
		if !slices.Contains(j.events, job.WorkerExited) {
			t.Fatalf("the death of a worker whose output is not read is unknown: %v", j.events)
		}
		j.joins(t, 1, "a:0", "a:2")
		if len(j.published) != 2 || j.published[1].Size() != 2 {
			t.Fatalf("published %v, want a world of the other two", j.published)
		}
		if w := j.worker(t, "a:1"); w == dead {
			<-time.After(2 * time.Second) // the slot is excluded for this time
			synctest.Wait()
		}
		if j.worker(t, "a:1") == dead {
			t.Error("no other worker was started in a:1")
		}
		for _, slot := range []string{"a:0", "a:2"} {
			j.Reported(identity.Subject{Incarnation: j.worker(t, slot).spec.Incarnation}, line.Done, 2, 3, func() {})
			j.worker(t, slot).exit <- nil
		}
		<-time.After(time.Second)
		close(f.thawed)
		if err := <-j.result; err != nil {
			t.Errorf("the job ended with %v", err)
		}
		if got, want := f.text.String(), "[1]<stdout>:one\n"; got != want {
			t.Errorf("the output is %q, want %q", got, want)
		}
	})
}

// TestFrozenEnd: if the output is not read, the job still ends in bounded time, and at once if the
// user stops it a second time.
func TestFrozenEnd(t *testing.T) {
	for _, hurry := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			j, f := frozenJob(t, ctx)
			defer synctest.Wait()
			defer close(f.thawed)
			cancel()
			if hurry {
				j.cfg.Output.Hurry()
			}
			begin := time.Now()
			if err := <-j.result; !errors.Is(err, context.Canceled) {
				t.Errorf("the job ended with %v", err)
			}
			if took, most := time.Since(begin), 12*time.Second; took > most || hurry && took > 2*time.Second {
				t.Errorf("hurry %v: it took %v", hurry, took)
			}
			if err := j.cfg.Output.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestExitOf: an unkillable process differs from one ended by SIGKILL, though both count as killed.
func TestExitOf(t *testing.T) {
	stuck := &launch.UnkillableError{PID: 7, After: 10 * time.Second}
	if e := exitOf(stuck); !e.Unkillable || e.Code != 137 || e.Err == nil {
		t.Errorf("%+v", e)
	}
	if e := exitOf(&launch.ExitError{Code: 137, Signal: syscall.SIGKILL}); e.Unkillable || e.Signal != syscall.SIGKILL {
		t.Errorf("%+v", e)
	}
}

// noSource is a source of hosts that is never called.
type noSource struct{}

func (noSource) Discover(context.Context) ([]plan.Host, error) { return nil, nil }

// TestReportsAreTheSame: the machine's reports have the same numbers as the rendezvous'.
func TestReportsAreTheSame(t *testing.T) {
	for is, want := range map[line.Report]decide.Report{
		line.Done: decide.ReportDone, line.Leaving: decide.ReportLeaving,
		line.Committed: decide.ReportCommitted, line.Draining: decide.ReportDraining,
		line.Fetching: decide.ReportFetching, line.Writing: decide.ReportWriting,
		line.Written: decide.ReportWritten, line.NotWritten: decide.ReportNotWritten,
	} {
		if decide.Report(is) != want {
			t.Errorf("report %d is taken for %d, want %d", is, decide.Report(is), want)
		}
	}
	for why, want := range map[decide.Dismissal]error{
		decide.DismissRemoved: line.ErrRemoved, decide.DismissLast: line.ErrLast,
		decide.DismissFinished: line.ErrFinished,
	} {
		if !errors.Is(dismissals[why], want) {
			t.Errorf("%v is told as %v", why, dismissals[why])
		}
	}
}

// TestGather: waiting inputs of workers are passed to one step, up to a bound and up to the first
// of another kind.
func TestGather(t *testing.T) {
	for name, c := range map[string]struct {
		first  decide.Input
		others []decide.Input
		want   int // inputs of the step
	}{
		"one":         {decide.WorkerJoined{ID: "a"}, nil, 1},
		"all":         {decide.WorkerJoined{ID: "a"}, []decide.Input{decide.WorkerForked{ID: "b"}, decide.WorkerEnded{ID: "c"}}, 3},
		"a command":   {decide.WorkerEnded{ID: "a"}, []decide.Input{decide.Commanded{}, decide.WorkerEnded{ID: "c"}}, 2},
		"hosts first": {decide.HostsFound{}, []decide.Input{decide.WorkerJoined{ID: "a"}}, 1},
		"too many":    {decide.WorkerReported{ID: "a"}, slices.Repeat([]decide.Input{decide.WorkerReported{ID: "b"}}, 2*mostAtOnce), mostAtOnce},
	} {
		events := make(chan posted, len(c.others))
		for _, in := range c.others {
			events <- posted{input: in}
		}
		if got := gather(nil, posted{input: c.first}, events); len(got) != c.want || len(events) != len(c.others)+1-c.want {
			t.Errorf("%s: %d inputs in the step and %d left, want %d and %d", name, len(got), len(events), c.want, len(c.others)+1-c.want)
		}
	}
}
