package driver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// tracedJob is a tracer with a simulated clock.
type tracedJob struct {
	*tracer
	now time.Time
}

func (j *tracedJob) after(d time.Duration) *tracedJob { j.now = j.now.Add(d); return j }

func (j *tracedJob) in(in decide.Input, actions ...decide.Action) {
	j.step(j.now, j.now.Add(time.Millisecond), []decide.Input{in}, actions)
}

func startOf(id, host string) decide.StartWorker {
	return decide.StartWorker{ID: id, Slot: plan.Slot{SlotID: plan.SlotID{Host: host}}}
}

func publish(generation uint64, ids ...string) decide.PublishWorld {
	w := decide.PublishWorld{World: plan.World{Generation: generation}}
	for _, id := range ids {
		w.Members = append(w.Members, decide.NewWorker(id))
	}
	return w
}

func way(generation uint64, ago ...time.Duration) *line.Beat {
	b := &line.Beat{Generation: generation}
	for i, p := range []line.Phase{line.Joins, line.Connecting, line.Syncing, line.Training, line.Saving}[:len(ago)] {
		b.Entered = append(b.Entered, line.Entered{Phase: p, Ago: ago[i]})
	}
	return b
}

// TestTrace: a reset after a death is one trace. It contains the parts of the driver, an agent and
// the workers, which all lie within it.
func TestTrace(t *testing.T) {
	const s = time.Second
	j := &tracedJob{newTracer(), time.Unix(1000, 0)}
	j.in(decide.HostsFound{}, startOf("a", "h1"), startOf("b", "h2"))
	j.after(s).in(decide.WorkerForked{ID: "a"})
	j.in(decide.WorkerForked{ID: "b"})
	j.after(s).in(decide.WorkerJoined{ID: "a"})
	j.after(s).in(decide.WorkerJoined{ID: "b"}, publish(1, "a", "b"))
	j.after(2 * s).in(decide.WorkerReported{ID: "a", Report: decide.ReportCommitted, Generation: 1})
	if got := j.take(j.now, false); got != nil {
		t.Fatalf("the workers have told nothing yet: %+v", got)
	}
	j.beat(j.now, "a", way(1, 4*s, 2*s, 1500*time.Millisecond, s, 0))
	j.beat(j.now, "b", way(1, 4*s, 2*s, 1500*time.Millisecond, s, 0))
	j.beat(j.now, "b", way(1, 4*s, 2*s, 1500*time.Millisecond, s, 0)) // a second time
	first := j.take(j.now, false)
	j.check(t, first, 1, "the job starts", "agent start process h1", "worker start program h2", "driver decide and publish",
		"worker connect h1", "worker sync h2", "worker first step h1")
	j.after(60 * s).in(decide.WorkerEnded{ID: "b", Exit: job.Exit{Code: 137, Signal: 9}})
	j.after(s).in(decide.WorkerJoined{ID: "a", Join: decide.Join{After: 1, Cause: "a peer is gone"}}, publish(2, "a"))
	j.after(s).in(decide.WorkerReported{ID: "a", Report: decide.ReportCommitted, Generation: 2})
	j.beat(j.now, "a", way(2, 90*s, s, 300*time.Millisecond, 200*time.Millisecond, 0)) // it reports that it joined long before
	j.check(t, j.take(j.now, false), 2, "h2:0 exit status 137", "driver death seen h2", "worker leave world h1", "driver wait for the world h1",
		"worker connect h1", "worker first step h1")
	if j.open != nil {
		t.Error("something goes on")
	}
	// The trace waits only some heartbeats for a worker that reports nothing; the next reset ends
	// the first trace.
	j.after(s).in(decide.WorkerJoined{ID: "a", Join: decide.Join{After: 2, Cause: "hosts were added"}}, publish(3, "a"))
	j.after(s).in(decide.WorkerJoined{ID: "a", Join: decide.Join{After: 3, Cause: "hosts were added"}}, publish(4, "a"))
	j.after(s).in(decide.WorkerReported{ID: "a", Report: decide.ReportCommitted, Generation: 4})
	if got := j.take(j.now, false); len(got) != 1 || got[0].Generation != 3 || got[0].Spans[0].Error == "" {
		t.Errorf("%+v", got)
	}
	j.after(traceWait + 3*s)
	if got := j.take(j.now, false); len(got) != 1 || got[0].Generation != 4 || got[0].Spans[0].Error != "" {
		t.Errorf("%+v", got)
	}
}

// check checks that there is one trace, and its parts.
func (j *tracedJob) check(t *testing.T, all []Trace, generation uint64, cause string, wants ...string) {
	t.Helper()
	if len(all) != 1 || all[0].Generation != generation || all[0].Cause != cause {
		t.Fatalf("%+v", all)
	}
	var text strings.Builder
	root := all[0].Spans[0]
	for _, s := range all[0].Spans {
		fmt.Fprintf(&text, "%s %s %s\n", s.Role, s.Name, s.Host)
		if s.End.Before(s.Start) || s.Start.Before(root.Start) || s.End.After(root.End) {
			t.Errorf("%+v is not within %+v", s, root)
		}
	}
	for _, want := range wants {
		if strings.Count(text.String(), want) != 1 {
			t.Errorf("%q occurs %d times in\n%s", want, strings.Count(text.String(), want), text.String())
		}
	}
}

// TestTraceOfMany: the trace of a world of a thousand workers is bounded.
func TestTraceOfMany(t *testing.T) {
	j := &tracedJob{newTracer(), time.Unix(1000, 0)}
	var ids []string
	for i := range 1000 {
		id := fmt.Sprint("w", i)
		ids = append(ids, id)
		j.in(decide.HostsFound{}, startOf(id, "h"))
		j.in(decide.WorkerForked{ID: id})
		j.in(decide.WorkerJoined{ID: id})
	}
	j.in(decide.DeadlinePassed{}, publish(1, ids...))
	j.after(time.Second).in(decide.WorkerReported{ID: "w0", Report: decide.ReportCommitted, Generation: 1})
	for _, id := range ids {
		j.beat(j.now, id, way(1, 4, 3, 2, 1, 0))
		j.beat(j.now, id, &line.Beat{Generation: 1, Entered: make([]line.Entered, 1)})
	}
	got := j.take(j.now, false)
	if len(got) != 1 || len(got[0].Spans) > mostSpans {
		t.Errorf("%d traces", len(got))
	}
	for range 100 {
		j.begin(j.now, "x")
		j.open.Generation = 9
	}
	if len(j.done) > mostDone {
		t.Errorf("%d traces wait", len(j.done))
	}
	if got := j.take(j.now, true); len(got) > mostDone+1 {
		t.Errorf("%d traces", len(got))
	}
}
