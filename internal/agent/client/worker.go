package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
)

// worker is the state of one worker: the requests about it, and which of them were sent on the
// current stream.
type worker struct {
	spec  *launch.Spec
	start *agentpb.Start
	known bool   // the agent has answered the start
	stop  int    // 1: it is to end, 2: at once
	taken uint64 // bytes of output passed on

	sentStart bool
	sentStop  int
	sentTaken uint64
	everSent  bool // on any stream
	toSend
	speech

	queue   []*event    // bounded by how far the agent may run ahead of taken
	ended   func(error) // Spec.Ended; nil after the call
	lost    error
	wake    wake.Flag
	resumed bool // an earlier driver has started it
}

// lostWorker returns the end of a worker whose agent can no longer be reached: whether and how the
// worker ended is unknown, and it counts as killed.
func lostWorker(why error) *launch.ExitError {
	killed := exitOfSignal(syscall.SIGKILL)
	killed.Lost, killed.Why = true, "its agent: "+why.Error()
	return killed
}

// Run implements launch.Launcher. A start error may wrap a *HostError. Run tries to reach an agent
// of the cluster for the time of a lease. An empty Dir is the driver's working directory, which
// must also exist on the host.
func (a *Agents) Run(ctx context.Context, s *launch.Spec, started func(pid int)) error {
	if err := context.Cause(ctx); err != nil && !s.Resumed {
		return launch.NewStartError(s, err)
	}
	finding := ctx
	if s.Resumed {
		finding = context.WithoutCancel(ctx) // even a worker that is to stop must be found first
	}
	for begun := time.Now(); ; {
		session, err := a.session(finding, s.Slot.Host, s.Resumed)
		switch {
		case s.Resumed && errors.Is(err, errNoAgent) && a.mayBeFound(begun):
			_ = retry.Pause(finding, findEvery)
			continue
		case err != nil && s.Resumed:
			return lostWorker(err)
		case err != nil:
			return launch.NewStartError(s, err)
		}
		err = session.run(ctx, s, started)
		if !errors.Is(err, errStale) {
			return err
		}
	}
}

// mayBeFound returns whether the cluster may find more hosts soon after the start of a driver:
// within a lease if none was found yet, else within findMore after the first.
func (a *Agents) mayBeFound(begun time.Time) bool {
	if a.cfg.Find == nil || time.Since(begun) >= a.cfg.Lease {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.foundFirst.IsZero() || time.Since(a.foundFirst) < findMore
}

// run is Agents.Run within this session. It returns errStale if the session is over.
func (s *session) run(ctx context.Context, spec *launch.Spec, started func(pid int)) error {
	w, err := newWorker(spec)
	if err != nil {
		return launch.NewStartError(spec, err)
	}
	if !s.add(w) {
		return errStale
	}
	defer s.remove(w)
	if s.startKnown(w) {
		s.goLive(w)
	}
	defer s.stopAfter(ctx, w, spec.Hurry, spec.More)()
	for {
		over, err := s.handle(ctx, w, started)
		if over {
			return err
		}
		select {
		case <-w.wake:
		case <-spec.Look:
			s.request(func() { w.look = true })
		}
	}
}

// handle handles the events of a worker. It returns whether the worker is over, and then the result
// of Run. It is a separate function so that its stack frame is free while run waits.
func (s *session) handle(ctx context.Context, w *worker, started func(pid int)) (over bool, err error) {
	spec := w.spec
	for {
		e, at, lost := s.take(w)
		switch {
		case e == nil && lost != nil:
			return true, s.lostError(ctx, spec, w, lost)
		case e == nil && s.withdraw(ctx, w):
			return true, launch.NewStartError(spec, context.Cause(ctx))
		case e == nil:
			return false, nil
		case e.GetStarted() != nil:
			if started != nil {
				started(int(e.GetStarted().GetPid()))
			}
			s.goLive(w)
		case e.GetDying() != nil:
			if spec.Dying != nil {
				spec.Dying(e.GetDying().GetWhat(), syscall.Signal(e.GetDying().GetSignal()))
			}
		case e.GetOutput() != nil:
			o := e.GetOutput()
			out := &spec.Stdout
			if o.GetStream() != stdoutStream {
				out = &spec.Stderr
			}
			passOn(spec, out, o.GetText(), at)
			s.passed(w, len(o.GetText()))
		default:
			s.goLive(w, e)
			if !s.a.cfg.Keep { // else Settle does it
				s.settle(e)
			}
			return true, exitOfEvent(spec, e.GetExited())
		}
		s.settle(e)
	}
}

// startKnown reports whether the earlier driver has already handled the start of the worker.
func (s *session) startKnown(w *worker) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return w.resumed && !slices.ContainsFunc(w.queue, func(e *event) bool { return e.GetStarted() != nil })
}

// goLive passes on the lines that the worker has sent, and lets later lines be passed on at once.
// Then it reports the worker's end, if that is in the queue or among the events taken from it. The
// caller has reported the worker's start to the driver.
func (s *session) goLive(w *worker, taken ...*event) {
	for {
		s.mu.Lock()
		lines := w.lines
		w.lines = nil
		if len(lines) == 0 {
			w.live = true
			for _, e := range slices.Concat(taken, w.queue) {
				w.reportEnd(s, e)
			}
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		for _, e := range lines {
			s.passLine(w, e)
		}
	}
}

// hearLine takes a line of the worker. Until the worker is live the line waits. Otherwise hearLine
// returns a function that passes it on, to be called without the lock. The lock is held.
func (s *session) hearLine(w *worker, e *event) (deliver func()) {
	if w.live {
		return func() { s.passLine(w, e) }
	}
	w.lines = append(w.lines, e)
	return nil
}

// passLine passes a line of the worker to Spec.Line.
func (s *session) passLine(w *worker, e *event) {
	if w.spec.Line == nil {
		s.settle(e)
		return
	}
	w.spec.Line(e.GetLine().GetText(), func() { s.settle(e) })
}

// reportEnd calls Spec.Ended if the event is the worker's end and all lines before it are passed
// on; the lock is held.
func (w *worker) reportEnd(s *session, e *event) {
	exit := e.GetExited()
	if exit == nil || w.ended == nil || !w.live {
		return
	}
	if s.a.cfg.Keep {
		s.a.ends.Store(w.start.GetIncarnation(), keptEnd{s, e})
	}
	w.ended(exitOfEvent(w.spec, exit))
	w.ended = nil
}

// stopAfter stops the worker once ctx has ended. Then closing hurry ends its grace period at once,
// and each value of more starts it again. release waits until all of this has ended.
func (s *session) stopAfter(ctx context.Context, w *worker, hurry, more <-chan struct{}) (release func()) {
	done, over := make(chan struct{}), make(chan struct{})
	unwatch := context.AfterFunc(ctx, func() {
		defer close(over)
		s.stop(w, 1)
		for {
			select {
			case <-hurry:
				s.stop(w, 2)
				return
			case <-more:
				s.request(func() { w.more = true })
			case <-done:
				return
			}
		}
	})
	return func() {
		if close(done); !unwatch() {
			<-over
		}
	}
}

// passOn passes on text, whose first byte is number at of the output. It calls Spec.Passed after
// each line, so that a driver that resumes after the last call repeats at most one line.
func passOn(spec *launch.Spec, w *io.Writer, text []byte, at uint64) {
	old := min(uint64(len(text)), spec.PassedBefore-min(spec.PassedBefore, at))
	at, text = at+old, text[old:]
	for len(text) > 0 {
		end := launch.LineEnd(text)
		if end == 0 || spec.Passed == nil || *w == nil { // without a reader, lines do not matter
			end = len(text)
		}
		if *w != nil {
			if _, err := (*w).Write(text[:end]); err != nil {
				*w = nil // later text is dropped
			}
		}
		at, text = at+uint64(end), text[end:]
		if spec.Passed != nil {
			spec.Passed(at)
		}
	}
}

// speech holds the lines that a worker has sent.
type speech struct {
	lines []*event // lines that wait until the worker is live
	live  bool     // the driver knows that the worker runs: lines are passed on at once
}

// toSend holds further requests about a worker, each sent once.
type toSend struct {
	more    bool // start the grace period again
	look    bool
	signals []syscall.Signal
}

func newWorker(s *launch.Spec) (*worker, error) {
	dir := s.Dir
	if dir == "" {
		var err error
		if dir, err = os.Getwd(); err != nil {
			return nil, fmt.Errorf("working directory: %w", err)
		}
	}
	m := &agentpb.Start{
		Incarnation: s.Incarnation, Slot: uint32(s.Slot.Index), Directory: []byte(dir),
		GraceMs: uint32(max(0, min(s.Grace.Milliseconds(), 1<<31))), CoreLimit: s.CoreLimit,
	}
	if s.Incarnation == "" {
		return nil, errors.New("a worker of an agent needs an incarnation")
	}
	for _, word := range s.Command {
		m.Command = append(m.Command, []byte(word))
	}
	for _, entry := range s.Env {
		m.Environment = append(m.Environment, []byte(entry))
	}
	if n := proto.Size(m); n > wire.MaxStart-1024 {
		return nil, fmt.Errorf("command and environment have %d bytes, and Linux starts no program with more than %d: "+
			"leave variables out (in Kubernetes by enableServiceLinks: false, else by env -u NAME)", n, 6<<20)
	}
	ended := s.Ended
	if ended == nil {
		ended = func(error) {}
	}
	return &worker{
		spec: s, ended: ended, start: m, wake: wake.New(), resumed: s.Resumed, everSent: s.Resumed, known: s.Resumed,
	}, nil
}

func exitOfEvent(spec *launch.Spec, e *agentpb.Exited) error {
	switch {
	case e.GetStartError() != "":
		err := launch.NewStartError(spec, errors.New(e.GetStartError()))
		err.Evicted, err.TakenBy = e.GetEvicted(), e.GetTakenBy()
		return err
	case e.GetStuckPid() != 0:
		after := time.Duration(e.GetStuckMs()) * time.Millisecond
		return &launch.UnkillableError{PID: int(e.GetStuckPid()), State: e.GetStuckState(), After: after}
	case e.GetSignal() != 0:
		killed := exitOfSignal(syscall.Signal(e.GetSignal()))
		killed.Evicted, killed.Said, killed.Why = e.GetEvicted(), e.GetSaid(), e.GetWhy()
		return killed
	case e.GetCode() != 0:
		return &launch.ExitError{Code: int(e.GetCode()), Evicted: e.GetEvicted(), Said: e.GetSaid(), Why: e.GetWhy()}
	}
	return nil
}

func exitOfSignal(sig syscall.Signal) *launch.ExitError {
	return &launch.ExitError{Code: 128 + int(sig), Signal: sig}
}

func (s *session) lostError(ctx context.Context, spec *launch.Spec, w *worker, why error) error {
	s.mu.Lock()
	attached, said := s.attached, w.everSent
	s.mu.Unlock()
	switch {
	case said:
		return lostWorker(why)
	case ctx.Err() != nil:
		return launch.NewStartError(spec, context.Cause(ctx))
	case attached:
		return errStale
	}
	if _, answers := why.(*refusal); answers {
		return launch.NewStartError(spec, fmt.Errorf("the agent at %s: %w", s.addr, why))
	}
	return launch.NewStartError(spec, fmt.Errorf("the agent at %s cannot be reached: %w", s.addr, why))
}

// add adds a worker to the session, and returns false if the session is over.
func (s *session) add(w *worker) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over != nil {
		return false
	}
	s.workers[w.start.Incarnation] = w
	s.a.routes.Store(w.start.Incarnation, s)
	if !s.takesOver() {
		s.claim(w)
	}
	s.wake.Set()
	return true
}

func (s *session) remove(w *worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.workers, w.start.Incarnation)
	s.a.routes.Delete(w.start.Incarnation)
	for _, e := range slices.Concat(w.queue, w.lines) {
		s.done(e)
	}
	s.wake.Set() // the agent may forget it too
}

// withdraw cancels the start of a worker that is to end, if the request to start it has not been
// sent, and returns whether it did.
func (s *session) withdraw(ctx context.Context, w *worker) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() == nil || w.everSent {
		return false
	}
	w.known = true // due sends nothing more about it
	return true
}

// stop asks the worker to end: 1 with its grace period, 2 at once.
func (s *session) stop(w *worker, how int) {
	s.request(func() { w.stop = max(w.stop, how) })
	w.wake.Set() // run may withdraw it
}

// due returns the messages that have not been sent on this stream yet.
func (s *session) due(beat bool) (messages []*agentpb.ToAgent, end ending) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// The beat comes first: the agent learns of a journal record before it gets the requests that
	// follow from the record.
	noted := s.a.noted.Load()
	if settled := s.settled(); beat || settled-s.told >= ackEvery || noted > s.noted {
		s.told, s.noted = settled, noted
		messages = append(messages, &agentpb.ToAgent{What: &agentpb.ToAgent_Beat{Beat: &agentpb.Beat{Heard: settled, Noted: noted}}})
	}
	messages, s.tells = append(messages, s.tells...), nil
	for inc, w := range s.workers {
		if !w.known && !w.sentStart {
			w.sentStart, w.everSent = true, true
			messages = append(messages, &agentpb.ToAgent{What: &agentpb.ToAgent_Start{Start: w.start}})
		}
		if w.stop > w.sentStop && w.everSent {
			w.sentStop = w.stop
			messages = append(messages, &agentpb.ToAgent{What: &agentpb.ToAgent_Stop{
				Stop: &agentpb.Stop{Incarnation: inc, Now: w.stop == 2},
			}})
		}
		if w.more && w.sentStop == 1 {
			w.more = false
			messages = append(messages, &agentpb.ToAgent{What: &agentpb.ToAgent_Stop{Stop: &agentpb.Stop{Incarnation: inc, More: true}}})
		}
		if w.look && w.everSent {
			w.look = false
			messages = append(messages, &agentpb.ToAgent{What: &agentpb.ToAgent_Look{Look: &agentpb.Look{Incarnation: inc}}})
		}
		for _, sig := range w.signals {
			messages = append(messages, &agentpb.ToAgent{What: &agentpb.ToAgent_Signal{
				Signal: &agentpb.Signal{Incarnation: inc, Signal: uint32(sig)},
			}})
		}
		w.signals = nil
		if w.taken-w.sentTaken >= takeEvery || beat && w.taken > w.sentTaken {
			w.sentTaken = w.taken
			messages = append(messages, &agentpb.ToAgent{What: &agentpb.ToAgent_Taken{
				Taken: &agentpb.Taken{Incarnation: inc, Bytes: w.taken},
			}})
		}
	}
	return messages, s.end
}

// hear handles a message of the agent. If deliver is not nil, the caller calls it without the lock.
func (s *session) hear(m *agentpb.FromAgent) (deliver func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looks = 0
	if m.GetBeat() != nil {
		s.echoes++
	}
	// A path that drops large packets carries the small answer to a stream's first messages. A
	// message after the second beat proves that all that was sent before has arrived, in both
	// directions.
	if s.echoes >= 2 || m.GetNumber() > s.heard {
		s.contact = time.Now()
	}
	if l := m.GetLog(); l != nil && s.logs {
		s.logLine(l)
		return nil, nil
	}
	if o := m.GetOpened(); o != nil {
		s.connect(o)
		return nil, nil
	}
	if l := m.GetLine(); l != nil && m.GetNumber() == 0 {
		if w := s.workers[l.GetIncarnation()]; w != nil {
			return s.hearLine(w, &event{FromAgent: m}), nil
		}
		return nil, nil
	}
	switch {
	case m.GetNumber() == 0 || m.GetNumber() <= s.heard:
		return nil, nil // not an event, or one that an earlier stream delivered
	case m.GetNumber() != s.heard+1:
		return nil, fmt.Errorf("the agent sent event %d after event %d", m.GetNumber(), s.heard)
	}
	s.heard++
	event := &event{FromAgent: m}
	s.open = append(s.open, event)
	incarnation := ""
	switch e := m.GetWhat().(type) {
	case *agentpb.FromAgent_Started:
		incarnation = e.Started.GetIncarnation()
	case *agentpb.FromAgent_Exited:
		incarnation = e.Exited.GetIncarnation()
	case *agentpb.FromAgent_Dying:
		incarnation = e.Dying.GetIncarnation()
	case *agentpb.FromAgent_Line:
		incarnation = e.Line.GetIncarnation()
	case *agentpb.FromAgent_Output:
		incarnation = e.Output.GetIncarnation()
		if n := e.Output.GetStream(); n != stdoutStream && n != stdoutStream+1 {
			return nil, fmt.Errorf("the agent sent output of stream %d, which does not exist", n)
		}
	default:
		return nil, errors.New("the agent sent an event of an unknown kind")
	}
	switch w := s.workers[incarnation]; {
	case w != nil:
		if !w.known {
			w.known, w.start = true, &agentpb.Start{Incarnation: incarnation} // command and environment need not be sent again
		}
		switch {
		case m.GetLine() != nil:
			return s.hearLine(w, event), nil
		case m.GetStarted() != nil:
			w.live = false
		}
		w.queue = append(w.queue, event)
		w.reportEnd(s, event)
		w.wake.Set()
	case s.before != nil && s.before.awaited[incarnation]:
		s.before.queues[incarnation] = append(s.before.queues[incarnation], event)
	default:
		s.done(event) // of an unknown worker
	}
	return nil, nil
}

// take removes and returns the first event of the worker's queue, or nil. at is the number of
// output bytes before it, and lost the reason why no more will come. Later events stay in the
// queue, where goLive finds the worker's end, because passing on output may block forever.
func (s *session) take(w *worker) (e *event, at uint64, lost error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.known { // the agent has command and environment: free them
		w.spec.Env, w.spec.Talk = nil, nil
	}
	if len(w.queue) > 0 {
		e, w.queue[0] = w.queue[0], nil
		w.queue = w.queue[1:]
	}
	return e, w.taken, w.lost
}

// passed notes that n more bytes of output have been passed on.
func (s *session) passed(w *worker, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.taken += uint64(n)
	if w.taken-w.sentTaken >= takeEvery {
		s.wake.Set()
	}
}
