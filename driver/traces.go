package driver

import (
	"fmt"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
)

// Trace describes the time from the first sign that a world had to be left, or from the start of
// the job, until the first commit of the next world.
type Trace struct {
	// Generation is the generation of the next world; 0: none was published.
	Generation uint64
	// Cause says what led to it.
	Cause string
	// Spans are its parts. The first span covers the whole trace, and is the parent of the others.
	Spans []Span
}

// Span is a part of a Trace. All times are by the driver's clock: workers report how long ago a
// phase was, not times.
type Span struct {
	Name string
	// Role is the party of the span: "driver", "agent" or "worker".
	Role string
	// Host and Slot are the worker's; Host is empty for the driver. Rank is the rank in the next
	// world, negative if it is unknown.
	Host       string
	Slot, Rank int
	Start, End time.Time
	// Error is the reason for a failure; empty: the span did not fail.
	Error string
}

const (
	// mostTraced is the number of workers for which a trace has spans: starting workers, and
	// members in the order of their ranks.
	mostTraced = 64
	// mostSpans bounds a trace.
	mostSpans = 1024
	// traceWait is how long to wait for the spans of workers after the first commit, in addition to
	// two heartbeat intervals.
	traceWait = 3 * time.Second
)

// tracer builds traces from the machine's inputs and actions, and from the phases that workers
// report on their way into a world. Its methods are safe for concurrent use.
type tracer struct {
	mu      sync.Mutex
	workers map[string]*tracedWorker
	size    int      // of the current world
	open    *tracing // the trace that is being built; nil: none
	done    []Trace
}

// tracedWorker is a worker with the times of its start.
type tracedWorker struct {
	host           string
	slot, rank     int
	generation     uint64
	wanted, forked time.Time
}

// tracing is a trace that is not complete.
type tracing struct {
	Trace
	traced  map[string]bool      // workers with spans
	left    map[string]time.Time // times of joins since the trace began
	last    time.Time            // time of the last join
	awaited map[string]bool      // members of the next world that have not reported phases
	commit  time.Time            // time of the first commit in the next world
}

func newTracer() *tracer { return &tracer{workers: map[string]*tracedWorker{}} }

// begin begins a trace, unless a trace is open and its world has not been published yet.
func (t *tracer) begin(now time.Time, cause string) {
	if o := t.open; o != nil {
		if o.Generation == 0 {
			return
		}
		t.finish(now, "another reset began")
	}
	t.open = &tracing{traced: map[string]bool{}, left: map[string]time.Time{}, awaited: map[string]bool{}}
	t.open.Cause = cause
	t.open.Spans = []Span{{Name: "reset", Role: "driver", Rank: -1, Start: now}}
}

// add adds a span of the worker id, or of the driver if id is empty.
func (t *tracer) add(id string, s Span) {
	o := t.open
	s.Rank = -1
	if w := t.workers[id]; w != nil {
		if !o.traced[id] && len(o.traced) >= mostTraced {
			return
		}
		o.traced[id] = true
		s.Host, s.Slot, s.Rank = w.host, w.slot, w.rank
	}
	if len(o.Spans) < mostSpans {
		o.Spans = append(o.Spans, s)
	}
}

// step records a step of the machine, which lasted from began to now.
func (t *tracer) step(began, now time.Time, inputs []decide.Input, actions []decide.Action) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, in := range inputs {
		t.input(began, in)
	}
	for _, a := range actions {
		switch a := a.(type) {
		case decide.StartWorker:
			t.workers[a.ID] = &tracedWorker{host: a.Slot.Host, slot: a.Slot.Index, rank: -1, wanted: now}
			if t.size == 0 {
				t.begin(began, "the job starts")
			}
		case decide.NotifyWorkers:
			t.begin(began, "hosts were "+a.Change.String())
			t.add("", Span{Name: "notify", Role: "driver", Start: began, End: now})
		case decide.StopWorker:
			if w := t.workers[a.ID]; w != nil && w.generation != 0 && t.open != nil && t.open.Generation == 0 {
				t.add(a.ID, Span{Name: "stop worker", Role: "agent", Start: now, End: now})
			}
		case decide.PublishWorld:
			t.published(began, now, a)
		case decide.FinishJob:
			if t.open != nil && t.open.Generation == 0 {
				t.finish(now, "the job ended")
			}
		}
	}
}

// input records what an input shows, before the machine's actions.
func (t *tracer) input(now time.Time, in decide.Input) {
	switch e := in.(type) {
	case decide.WorkerForked:
		if w := t.workers[e.ID]; w != nil {
			if w.forked = now; t.open != nil && !w.wanted.IsZero() {
				t.add(e.ID, Span{Name: "start process", Role: "agent", Start: w.wanted, End: now})
			}
		}
	case decide.WorkerJoined:
		t.joined(now, e)
	case decide.WorkerDying:
		t.death(now, e.ID, e.What)
	case decide.WorkerHung:
		t.death(now, e.ID, "held up the job: "+e.What)
	case decide.WorkerEnded:
		w := t.workers[e.ID]
		if w != nil && w.generation != 0 && (e.Exit.Code != 0 || e.Exit.Signal != 0) {
			t.death(now, e.ID, fmt.Sprintf("exit status %d", e.Exit.Code))
		}
		delete(t.workers, e.ID)
	case decide.WorkerReported:
		if o := t.open; o != nil && e.Report == decide.ReportCommitted && e.Generation == o.Generation && o.commit.IsZero() {
			o.commit = now
		}
	}
}

// death records, once, that a member of the world was found to be lost.
func (t *tracer) death(now time.Time, id, what string) {
	w := t.workers[id]
	if w == nil || w.generation == 0 {
		return
	}
	t.begin(now, fmt.Sprintf("%s:%d %s", w.host, w.slot, what))
	t.add(id, Span{Name: "death seen", Role: "driver", Start: now, End: now, Error: what})
	w.generation = 0
}

func (t *tracer) joined(now time.Time, e decide.WorkerJoined) {
	w := t.workers[e.ID]
	if w == nil {
		return
	}
	if e.Join.After != 0 && e.Join.After == w.generation {
		t.begin(now, e.Join.Cause)
	}
	o := t.open
	if o == nil || o.Generation != 0 {
		return
	}
	if _, again := o.left[e.ID]; again {
		return
	}
	o.left[e.ID], o.last = now, now
	switch {
	case e.Join.After == 0 && !w.forked.IsZero():
		t.add(e.ID, Span{Name: "start program", Role: "worker", Start: w.forked, End: now})
	case e.Join.After != 0:
		t.add(e.ID, Span{Name: "leave world", Role: "worker", Start: o.Spans[0].Start, End: now})
	}
}

func (t *tracer) published(began, now time.Time, a decide.PublishWorld) {
	if t.open == nil || t.open.Generation != 0 {
		t.begin(began, "a world was published")
	}
	o := t.open
	if t.size = len(a.Members); o.Generation == 0 {
		o.Generation = a.World.Generation
	}
	if !o.last.IsZero() && began.After(o.last) {
		t.add("", Span{Name: "wait after the last join", Role: "driver", Start: o.last, End: began})
	}
	t.add("", Span{Name: "decide and publish", Role: "driver", Start: began, End: now})
	for r, m := range a.Members {
		w := t.workers[m.ID()]
		if w == nil {
			continue // a worker of the previous driver
		}
		w.rank, w.generation = r, a.World.Generation
		if from, is := o.left[m.ID()]; is {
			t.add(m.ID(), Span{Name: "wait for the world", Role: "driver", Start: from, End: now})
		}
		if len(o.traced) < mostTraced || o.traced[m.ID()] {
			o.traced[m.ID()], o.awaited[m.ID()] = true, true
		}
	}
}

// beat adds the spans of the phases that a worker reports on its way into the world.
func (t *tracer) beat(now time.Time, id string, b *line.Beat) {
	t.mu.Lock()
	defer t.mu.Unlock()
	o, w := t.open, t.workers[id]
	if o == nil || w == nil || len(b.Entered) == 0 || b.Generation != o.Generation || !o.awaited[id] {
		return
	}
	delete(o.awaited, id)
	begun := o.Spans[0].Start
	for i, e := range b.Entered[:len(b.Entered)-1] {
		name, is := wayNames[e.Phase]
		from, to := now.Add(-e.Ago), now.Add(-b.Entered[i+1].Ago)
		if !is || to.Before(from) || from.Before(begun) {
			continue // before this reset, or inconsistent
		}
		t.add(id, Span{Name: name, Role: "worker", Start: from, End: to})
	}
}

// wayNames are the names of the spans of the phases that a worker passes through.
var wayNames = map[line.Phase]string{
	line.Joins: "join", line.Connecting: "connect", line.Syncing: "sync", line.Training: "first step",
	line.Resetting: "OnReset", line.Fetches: "fetch state", line.Outside: "outside of elastic.Run",
}

// take returns the completed traces. The open trace is complete if all awaited workers have
// reported their phases or had enough time to, or if end is set, which means that the job has
// ended.
func (t *tracer) take(now time.Time, end bool) []Trace {
	t.mu.Lock()
	defer t.mu.Unlock()
	if o := t.open; o != nil && !o.commit.IsZero() {
		wait := traceWait + 2*time.Duration(line.BeatSpacing(t.size))*time.Second
		if len(o.awaited) == 0 || now.Sub(o.commit) >= wait {
			t.finish(now, "")
		}
	}
	if end && t.open != nil {
		t.finish(now, "the job ended")
	}
	done := t.done
	t.done = nil
	return done
}

// finish closes the open trace. The trace ends at the first commit, or at now with the error why if
// there was none.
func (t *tracer) finish(now time.Time, why string) {
	o := t.open
	t.open = nil
	root := &o.Spans[0]
	if root.End, root.Error = o.commit, ""; o.commit.IsZero() {
		root.End, root.Error = now, why
	}
	for _, s := range o.Spans[1:] {
		if s.End.After(root.End) {
			root.End = s.End
		}
	}
	if len(t.done) < mostDone {
		t.done = append(t.done, o.Trace)
	}
}

// mostDone is the number of complete traces kept until take returns them; further ones are dropped.
const mostDone = 16

// handTraces passes complete traces to Config.Traces, if it is set.
func (l *loop) handTraces(end bool) {
	if l.cfg.Traces == nil {
		return
	}
	for _, trace := range l.traces.take(l.clock.now(), end) {
		l.cfg.Traces(trace)
	}
}
