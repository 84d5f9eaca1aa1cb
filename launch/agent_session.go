package launch

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
)

const (
	// farewell is how long the end of a session may take.
	farewell = 2 * time.Second
	// attachTimeout is how long one try to attach may take.
	attachTimeout = 2 * time.Second
	// attachPatience is the same for an agent whose process is known to be there.
	attachPatience = 30 * time.Second
	// takeEvery and hearEvery are after how many bytes of output, and how many events, the agent is
	// told at once.
	takeEvery = 64 << 10
	hearEvery = 64
	// missedBeats is how many beats without an answer make a stream one that is broken.
	missedBeats = 3
	// looksPerBeat is how often a stream is looked at meanwhile.
	looksPerBeat = 4
	// stdoutStream is the number of stdout on the wire; stderr has the next.
	stdoutStream = 1
)

// errStale tells Run that its session ended before it could say anything, and that another may do
// better.
var errStale = errors.New("launch: the session is over")

// errMoved ends a stream whose other end must learn where the driver listens.
var errMoved = errors.New("launch: the driver listens elsewhere")

// agentSession is the driver's side of what the agent of one host does for it. It outlives the
// streams that carry it.
type agentSession struct {
	a *Agents
	place
	id   []byte
	beat time.Duration
	log  logrus.FieldLogger

	mu       sync.Mutex
	workers  map[string]*agentWorker // by incarnation
	heard    uint64                  // number of the last event
	open     []*agentEvent           // those that have not been dealt with, and what came after them
	told     uint64                  // the last event of which the agent has been told that it may forget it
	legacy   *legacy                 // of the driver before this one; nil: there was none, or the session is new
	takeOver bool                    // the next stream takes over from it
	port     int64                   // where the driver listens, as the stream's other end knows it
	contact  time.Time               // when the agent was last heard of
	looks    int                     // how often the stream was found silent since
	attached bool                    // ever
	over     error                   // set: nothing comes of the session any more
	finished bool                    // the agent shall end it
	fenced   bool                    // without grace, for its workers count as killed
	wake     chan struct{}           // of capacity 1: there may be something to say
}

// agentWorker is one worker and what must be said of it: what is wanted, and what this stream's
// other end has been told.
type agentWorker struct {
	spec  Spec
	start *wire.Start
	known bool   // the agent has answered the start
	stop  int    // 1: it shall end, 2: at once
	taken uint64 // bytes of output passed on

	saidStart bool
	saidStop  int
	saidTaken uint64
	everSaid  bool // on any stream
	more      bool // grace, which is to be said

	queue   []*agentEvent // bounded by how far the agent goes ahead of taken
	ended   func(error)   // Spec.Ended; nil once it was called
	lost    error
	wake    chan struct{} // of capacity 1
	resumed bool          // a driver before this one has started it
}

// agentEvent is an event that has come.
type agentEvent struct {
	*wire.FromAgent
	done bool // the agent may forget it
}

func newAgentSession(a *Agents, p place) *agentSession {
	id := make([]byte, 16)
	rand.Read(id)
	return &agentSession{
		a: a, place: p, id: id,
		beat:    min(a.Lease/10, time.Second),
		log:     a.Log.WithFields(logrus.Fields{"host": p.host, "agent": p.addr}),
		workers: make(map[string]*agentWorker),
		contact: time.Now(),
		wake:    make(chan struct{}, 1),
	}
}

// settle notes that the event has been dealt with.
func (s *agentSession) settle(e *agentEvent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done(e)
}

// done is settle; the lock is held.
func (s *agentSession) done(e *agentEvent) {
	e.done = true
	i := 0
	for i < len(s.open) && s.open[i].done {
		s.open[i] = nil
		i++
	}
	s.open = s.open[i:]
	if i > 0 && s.settled()-s.told >= hearEvery {
		poke(s.wake)
	}
}

// settled is the number of the last event that the agent may forget, with all before it; the lock
// is held.
func (s *agentSession) settled() uint64 { return s.heard - uint64(len(s.open)) }

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// run is Agents.Run, in this session.
func (s *agentSession) run(ctx context.Context, spec Spec, started func(pid int)) error {
	w, err := newAgentWorker(spec)
	if err != nil {
		return startError(spec, err)
	}
	if !s.add(w) {
		return errStale
	}
	defer s.remove(w)
	defer context.AfterFunc(ctx, func() { s.stop(w, 1) })()
	if spec.Hurry != nil || spec.More != nil {
		defer s.hurry(ctx, w, spec)()
	}
	outs := [2]io.Writer{spec.Stdout, spec.Stderr}
	for {
		events, at, lost := s.take(w)
		for _, e := range events {
			switch {
			case e.GetStarted() != nil:
				if started != nil {
					started(int(e.GetStarted().GetPid()))
				}
			case e.GetDying() != nil:
				if spec.Dying != nil {
					spec.Dying(e.GetDying().GetWhat())
				}
			case e.GetOutput() != nil:
				o := e.GetOutput()
				passOn(spec, &outs[o.GetStream()-stdoutStream], o.GetText(), at)
				at = s.passed(w, len(o.GetText()))
			default:
				if !s.a.Keep { // else Settle settles it
					s.settle(e)
				}
				return exitOfEvent(spec, e.GetExited())
			}
			s.settle(e)
		}
		switch {
		case len(events) > 0:
			continue
		case lost != nil:
			return s.lostError(ctx, spec, w, lost)
		case s.withdraw(ctx, w):
			return startError(spec, context.Cause(ctx))
		}
		<-w.wake
	}
}

// tellEnd tells of the worker's end where the event is that; the lock is held.
func (w *agentWorker) tellEnd(s *agentSession, e *agentEvent) {
	exit := e.GetExited()
	if exit == nil || w.ended == nil {
		return
	}
	s.a.keep(s, w.start.GetIncarnation(), e)
	w.ended(exitOfEvent(w.spec, exit))
	w.ended = nil
}

// hurry ends a worker's grace, once ctx has ended, when somebody is in a hurry, and has it begin
// anew when it is to; release waits for that to be over.
func (s *agentSession) hurry(ctx context.Context, w *agentWorker, spec Spec) (release func()) {
	done := make(chan struct{})
	var waiting sync.WaitGroup
	waiting.Go(func() {
		select {
		case <-ctx.Done():
		case <-done:
			return
		}
		for {
			select {
			case <-spec.Hurry:
				s.stop(w, 2)
				return
			case <-spec.More:
				s.extend(w)
			case <-done:
				return
			}
		}
	})
	return func() {
		close(done)
		waiting.Wait()
	}
}

// passOn passes on text before which there were so many bytes of output. Each line is told of by
// itself: a driver that is killed, and another that goes on where the last word of it was, repeat
// no more than the line between the two.
func passOn(spec Spec, w *io.Writer, text []byte, at uint64) {
	old := min(uint64(len(text)), spec.PassedBefore-min(spec.PassedBefore, at))
	at, text = at+old, text[old:]
	for len(text) > 0 {
		end := lineEnd(text)
		if end == 0 || spec.Passed == nil || *w == nil { // nobody reads it any more
			end = len(text)
		}
		pass(w, text[:end])
		at, text = at+uint64(end), text[end:]
		if spec.Passed != nil {
			spec.Passed(at)
		}
	}
}

// pass writes the text, unless a write has failed before.
func pass(w *io.Writer, text []byte) {
	if *w == nil || len(text) == 0 {
		return
	}
	if _, err := (*w).Write(text); err != nil {
		*w = nil
	}
}

func newAgentWorker(s Spec) (*agentWorker, error) {
	dir := s.Dir
	if dir == "" {
		var err error
		if dir, err = os.Getwd(); err != nil {
			return nil, fmt.Errorf("working directory: %w", err)
		}
	}
	m := &wire.Start{
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
	if n := proto.Size(m); n > wire.MaxMessage-1024 {
		return nil, fmt.Errorf("command and environment have %d bytes; an agent takes %d", n, wire.MaxMessage-1024)
	}
	ended := s.Ended
	if ended == nil {
		ended = func(error) {}
	}
	return &agentWorker{
		spec: s, ended: ended, start: m, wake: make(chan struct{}, 1), resumed: s.Resumed, everSaid: s.Resumed, known: s.Resumed,
	}, nil
}

func exitOfEvent(spec Spec, e *wire.Exited) error {
	switch {
	case e.GetStartError() != "":
		err := startError(spec, errors.New(e.GetStartError()))
		err.Evicted = e.GetEvicted()
		return err
	case e.GetStuckPid() != 0:
		after := time.Duration(e.GetStuckMs()) * time.Millisecond
		return &UnkillableError{PID: int(e.GetStuckPid()), State: e.GetStuckState(), After: after}
	case e.GetSignal() != 0:
		return &ExitError{Code: 128 + int(e.GetSignal()), Signal: syscall.Signal(e.GetSignal()), Evicted: e.GetEvicted()}
	case e.GetCode() != 0:
		return &ExitError{Code: int(e.GetCode()), Evicted: e.GetEvicted()}
	}
	return nil
}

func exitOfSignal(sig syscall.Signal) error { return &ExitError{Code: 128 + int(sig), Signal: sig} }

func (s *agentSession) lostError(ctx context.Context, spec Spec, w *agentWorker, why error) error {
	s.mu.Lock()
	attached, said := s.attached, w.everSaid
	s.mu.Unlock()
	switch {
	case said:
		return &LostError{Host: s.host, Addr: s.addr, Err: why}
	case ctx.Err() != nil:
		return startError(spec, context.Cause(ctx))
	case attached:
		return errStale
	}
	return startError(spec, fmt.Errorf("the agent at %s cannot be reached: %w", s.addr, why))
}

// add takes a worker in, unless the session is over.
func (s *agentSession) add(w *agentWorker) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over != nil {
		return false
	}
	s.workers[w.start.Incarnation] = w
	if !s.takeOver {
		s.claim(w)
	}
	poke(s.wake)
	return true
}

func (s *agentSession) remove(w *agentWorker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.workers, w.start.Incarnation)
	for _, e := range w.queue {
		s.done(e)
	}
	poke(s.wake) // the agent may forget it too
}

// withdraw takes back a worker that shall end before the agent has been told of it, and tells
// whether it could.
func (s *agentSession) withdraw(ctx context.Context, w *agentWorker) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() == nil || w.everSaid {
		return false
	}
	w.known = true // due says nothing of it any more
	return true
}

func (s *agentSession) stop(w *agentWorker, how int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.stop = max(w.stop, how)
	poke(s.wake)
	poke(w.wake) // it may be taken back
}

// extend has the worker's grace begin anew.
func (s *agentSession) extend(w *agentWorker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.more = true
	poke(s.wake)
}

func (s *agentSession) killAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		w.stop = 2
	}
	poke(s.wake)
}

func (s *agentSession) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished = true
	poke(s.wake)
}

// take returns what has come for the worker, how many bytes of output came before, and why nothing
// more will come.
func (s *agentSession) take(w *agentWorker) (events []*agentEvent, at uint64, lost error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	events = w.queue
	w.queue = nil
	return events, w.taken, w.lost
}

// passed notes that so many bytes of output more have been passed on, and returns how many that
// makes.
func (s *agentSession) passed(w *agentWorker, n int) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.taken += uint64(n)
	if w.taken-w.saidTaken >= takeEvery {
		poke(s.wake)
	}
	return w.taken
}

// serve keeps the session up, over as many streams as it takes, until it is finished or lost. One
// that is lost is ended at the agent as soon as that can be reached, or with it where it is a child
// of this process: what an agent has started does not outlive it.
func (s *agentSession) serve(ctx context.Context) {
	var reason error // of the last try that was not cut short
	for {
		err := s.stream(ctx)
		if ctx.Err() != nil || s.isFinished() {
			s.lose(errors.New("the launcher was closed"))
			return
		}
		if reason == nil || status.Code(err) != codes.Canceled {
			reason = err
		}
		if why, over := s.hopeless(reason); why != nil {
			s.lose(why)
			switch {
			case s.kill != nil:
				s.kill()
			case !over:
				s.fence(s.a.fences)
			}
			return
		}
		if errors.Is(err, errMoved) {
			continue
		}
		s.log.Debugf("launch: the stream to the agent broke, and is made anew: %v", err)
		pauseFor(ctx, s.beat/5)
	}
}

// fence tells the agent that its workers have been given up, so that it kills them, or finds out
// that it is gone.
func (s *agentSession) fence(ctx context.Context) {
	s.mu.Lock()
	s.finished, s.fenced = true, true
	s.mu.Unlock()
	given := time.Now()
	for pause := s.a.Lease / 10; ctx.Err() == nil && s.there() == nil && time.Since(given) < s.a.Orphan; {
		err := s.stream(ctx)
		if _, over := s.hopeless(err); over || err == nil {
			s.log.Infof("launch: the agent has heard that it was given up")
			return
		}
		pauseFor(ctx, pause)
		pause = min(2*pause, 5*time.Second)
	}
}

func pauseFor(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func (s *agentSession) isFinished() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.finished
}

func (s *agentSession) isFenced() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fenced
}

// hopeless returns why there is no use in another stream, after err has ended the last, and whether
// the agent itself has said so.
func (s *agentSession) hopeless(err error) (why error, over bool) {
	s.mu.Lock()
	silent := time.Since(s.contact)
	s.mu.Unlock()
	switch status.Code(err) {
	case codes.NotFound, codes.PermissionDenied, codes.Unimplemented, codes.InvalidArgument:
		return errors.New(status.Convert(err).Message()), true
	}
	switch {
	case errors.Is(err, errNoAnswer), s.vital != nil && silent >= patientLeases*s.a.Lease && s.wanted() && s.gone() == nil:
		return fmt.Errorf("%w for %v", errNoAnswer, silent.Round(time.Millisecond)), false
	case s.vital == nil && silent >= s.a.Lease:
		return fmt.Errorf("nothing was heard of it for %v: %s", silent.Round(time.Millisecond), status.Convert(err).Message()), false
	}
	return s.gone(), false
}

// gone returns an error where others know that the agent is not there any more, or that another is
// in its place.
func (s *agentSession) gone() error {
	if err := s.there(); err != nil {
		return fmt.Errorf("it is silent, and %w", err)
	}
	return nil
}

// lose ends the session for all that still wait for something of it.
func (s *agentSession) lose(why error) {
	s.a.forget(s)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = why
	if len(s.workers) > 0 {
		s.log.Warnf("launch: the agent is lost, and its %d workers with it: %v", len(s.workers), why)
	}
	for _, w := range s.workers {
		w.lost = why
		if w.ended != nil && w.everSaid {
			w.ended(&LostError{Host: s.host, Addr: s.addr, Err: why})
			w.ended = nil
		}
		poke(w.wake)
	}
}

// stream attaches to the session by a connection of its own, for the last one may be dead, and
// carries it until something breaks; nil after a good end.
func (s *agentSession) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tlsConf := s.credentials.ClientTLS(identity.Subject{Role: identity.Agent, Host: s.host})
	conn, err := wire.NewClient(s.addr, tlsConf, time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	late := time.AfterFunc(s.attachLimit(), cancel)
	defer late.Stop()
	stream, err := wire.NewAgentClient(conn).Session(ctx)
	if err != nil {
		return err
	}
	_ = stream.Send(&wire.ToAgent{What: &wire.ToAgent_Attach{Attach: s.attach()}}) // where it fails, Recv says why
	answer, err := stream.Recv()
	if err != nil {
		return err
	}
	if !late.Stop() {
		return errors.New("the agent took too long to answer")
	}
	s.heardFrom(answer.GetAttached())
	s.log.Debugf("launch: attached to session %s", hex.EncodeToString(s.id[:4]))
	broken := make(chan error, 1)
	go func() { broken <- s.listen(stream) }()
	err = s.talk(stream, broken)
	if err != nil {
		cancel()
		<-broken
	}
	return err
}

// attachLimit is how long a try to attach may take: no longer than the agent is waited for. Where
// only the end of its process is an end, another try would find it no faster.
func (s *agentSession) attachLimit() time.Duration {
	if s.vital != nil {
		return attachPatience
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	limit := min(attachTimeout, s.a.Lease)
	if left := s.a.Lease - time.Since(s.contact); left > 0 {
		limit = min(limit, left)
	}
	return limit
}

// attach begins a stream: what was said on the one before may be lost.
func (s *agentSession) attach() *wire.Attach {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		w.saidStart, w.saidStop, w.saidTaken = false, 0, 0
	}
	s.told = s.settled() // what was heard, and is not settled, comes again, and is known then
	s.port = s.a.driverPort.Load()
	return &wire.Attach{
		Session: s.id, Resume: s.attached, TakeOver: s.takeOver, Heard: s.told,
		LeaseMs: uint32(s.a.Orphan.Milliseconds()), DriverPort: uint32(s.port), KnowsDying: true,
	}
}

func (s *agentSession) heardFrom(answer *wire.Attached) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attached, s.contact, s.looks = true, time.Now(), 0
	if s.takeOver {
		s.takenOver(answer)
	}
}

// talk says what there is to say, and beats, until the stream is broken. It receives from broken,
// once, where it returns nil; then the agent has closed the stream because the session was to end.
func (s *agentSession) talk(stream grpc.BidiStreamingClient[wire.ToAgent, wire.FromAgent], broken chan error) error {
	look := time.NewTicker(s.lookEvery())
	defer look.Stop()
	var beaten time.Time
	ending := false
	for {
		messages, finished := s.due(time.Since(beaten) >= s.beat)
		if s.moved() { // after due: nothing that was wanted later is started there
			return errMoved
		}
		for _, m := range messages {
			if m.GetBeat() != nil {
				beaten = time.Now()
			}
			if err := stream.Send(m); err != nil {
				err = <-broken // the other direction knows why
				broken <- err
				return err
			}
		}
		if finished && !ending {
			ending = true
			_ = stream.Send(&wire.ToAgent{What: &wire.ToAgent_End{End: &wire.End{Now: s.isFenced()}}})
		}
		select {
		case err := <-broken:
			broken <- err
			if ending && errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case <-s.wake:
		case <-look.C:
			if err := s.silent(); err != nil {
				return err
			}
		}
	}
}

// silent returns an error where the stream may be open, but nothing comes of it. It counts its
// calls and not the time: of a machine so busy that this process did not run for long, what the
// agent has said waits to be read.
func (s *agentSession) silent() error {
	s.mu.Lock()
	s.looks++
	looks, since := s.looks, time.Since(s.contact)
	s.mu.Unlock()
	if s.vital != nil {
		return s.quiet(looks, since)
	}
	if looks > missedBeats*looksPerBeat {
		return fmt.Errorf("nothing was heard of the agent for %v", since.Round(time.Millisecond))
	}
	if looks > looksPerBeat*3/2 {
		return s.gone()
	}
	return nil
}

// moved tells whether the driver listens elsewhere than the agent was told.
func (s *agentSession) moved() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.port != s.a.driverPort.Load()
}

// due returns the messages that this stream's other end has not been told yet.
func (s *agentSession) due(beat bool) (messages []*wire.ToAgent, finished bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	told := s.port == s.a.driverPort.Load()
	for inc, w := range s.workers {
		if !w.known && !w.saidStart && told {
			w.saidStart, w.everSaid = true, true
			messages = append(messages, &wire.ToAgent{What: &wire.ToAgent_Start{Start: w.start}})
		}
		if w.stop > w.saidStop && w.everSaid {
			w.saidStop = w.stop
			messages = append(messages, &wire.ToAgent{What: &wire.ToAgent_Stop{
				Stop: &wire.Stop{Incarnation: inc, Now: w.stop == 2},
			}})
		}
		if w.more && w.saidStop == 1 {
			w.more = false
			messages = append(messages, &wire.ToAgent{What: &wire.ToAgent_Stop{Stop: &wire.Stop{Incarnation: inc, More: true}}})
		}
		if w.taken-w.saidTaken >= takeEvery || beat && w.taken > w.saidTaken {
			w.saidTaken = w.taken
			messages = append(messages, &wire.ToAgent{What: &wire.ToAgent_Taken{
				Taken: &wire.Taken{Incarnation: inc, Bytes: w.taken},
			}})
		}
	}
	if settled := s.settled(); beat || settled-s.told >= hearEvery {
		s.told = settled
		messages = append(messages, &wire.ToAgent{What: &wire.ToAgent_Beat{Beat: &wire.Beat{Heard: settled}}})
	}
	return messages, s.finished
}

// listen hands on what comes until the stream ends.
func (s *agentSession) listen(stream grpc.BidiStreamingClient[wire.ToAgent, wire.FromAgent]) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := s.hear(m); err != nil {
			return err
		}
	}
}

func (s *agentSession) hear(m *wire.FromAgent) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.contact, s.looks = time.Now(), 0
	if l := m.GetLog(); l != nil && s.logs {
		s.logLine(l)
		return nil
	}
	switch {
	case m.GetNumber() == 0 || m.GetNumber() <= s.heard:
		return nil // no event, or one that came by an earlier stream
	case m.GetNumber() != s.heard+1:
		return fmt.Errorf("event %d after event %d", m.GetNumber(), s.heard)
	}
	s.heard++
	event := &agentEvent{FromAgent: m}
	s.open = append(s.open, event)
	incarnation := ""
	switch e := m.GetWhat().(type) {
	case *wire.FromAgent_Started:
		incarnation = e.Started.GetIncarnation()
	case *wire.FromAgent_Exited:
		incarnation = e.Exited.GetIncarnation()
	case *wire.FromAgent_Dying:
		incarnation = e.Dying.GetIncarnation()
	case *wire.FromAgent_Output:
		incarnation = e.Output.GetIncarnation()
		if n := e.Output.GetStream(); n != stdoutStream && n != stdoutStream+1 {
			return fmt.Errorf("output of stream %d", n)
		}
	default:
		return errors.New("an event of an unknown kind")
	}
	switch w := s.workers[incarnation]; {
	case w != nil:
		w.known = true
		w.queue = append(w.queue, event)
		w.tellEnd(s, event)
		poke(w.wake)
	case s.legacy != nil && s.legacy.expects(incarnation):
		s.legacy.queues[incarnation] = append(s.legacy.queues[incarnation], event)
	default:
		s.done(event) // nobody waits for it
	}
	return nil
}

// logLine passes on what an agent logs.
func (s *agentSession) logLine(l *wire.Log) {
	text := l.GetText()
	switch logrus.Level(l.GetLevel()) {
	case logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel:
		s.log.Error(text)
	case logrus.WarnLevel:
		s.log.Warn(text)
	case logrus.InfoLevel:
		s.log.Info(text)
	default:
		s.log.Debug(text)
	}
}
