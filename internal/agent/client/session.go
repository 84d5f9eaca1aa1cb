package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

const (
	// endPatience bounds the end of a session.
	endPatience = 2 * time.Second
	// killPatience bounds the time until an agent reports the end of workers that are killed. An
	// agent that can be reached reports a process that cannot be killed after proc.KillPatience.
	killPatience = proc.KillPatience + 5*time.Second
	// attachTimeout bounds the first attempt to attach; the bound of each later attempt is twice
	// that of the one before. An agent that lacks processor time answers late, and an attempt that
	// is abandoned costs it as much as one that it answers.
	attachTimeout = 2 * time.Second
	// attachPatience is the bound of every attempt if the agent's process is known to exist.
	attachPatience = 30 * time.Second
	// takeEvery and ackEvery are the bytes of output and the number of events after which an
	// acknowledgement is sent at once.
	takeEvery = 64 << 10
	ackEvery  = 64
	// missedBeats is the number of unanswered beats after which a stream counts as broken.
	missedBeats = 3
	// findEvery is the pause between two calls of Config.Find for the same host. findMore is how
	// long Run continues the calls after the cluster's first agent was found, if an earlier driver
	// started the worker.
	findEvery = 20 * time.Millisecond
	findMore  = 500 * time.Millisecond
	// findNew is how long the cluster's agent of a new host is looked up before a job agent is
	// started there.
	findNew = time.Second
	// looksPerBeat is how many times per beat a stream is checked for silence.
	looksPerBeat = 4
	// tellEvery is the shortest time between two log lines about streams that fail for the same
	// reason.
	tellEvery = 5 * time.Second
	// stdoutStream is the number of stdout on the wire; stderr is the next number.
	stdoutStream = 1
)

// CannotBegin is the prefix of an agent's answer that it cannot begin a session.
const CannotBegin = "it cannot begin a session"

// refusal is the reason why an agent that answers has begun no session.
type refusal struct{ error }

// errStale tells Run that its session ended before the worker was added to it: Run retries with
// another session.
var errStale = errors.New("agent: the session is over")

// errNoAgent: no agent is known on the host, and none may be started.
var errNoAgent = errors.New("has no agent")

// session is the driver's side of its relation with the agent of one host. It outlives the streams
// that carry it.
type session struct {
	a *Agents
	place
	id   []byte
	beat time.Duration
	log  logrus.FieldLogger

	mu      sync.Mutex
	workers map[string]*worker // by incarnation
	inbox
	before *predecessor // the earlier driver; nil: there was none, or the session is new
	term   uint64       // the driver's number among the drivers of the run
	carried
	over error     // why the session is over; nil: it is not
	end  ending    // what the agent is to do with the session
	wake wake.Flag // there may be messages to send
}

// carried is the state of the streams that carry a session.
type carried struct {
	attached bool               // a stream has attached at least once
	decided  chan struct{}      // closed when a stream first attaches or the session is over
	carries  bool               // a stream is attached now
	contact  time.Time          // when a stream was last known to carry all that is sent
	looks    int                // checks for silence since the last message
	echoes   int                // beats that the agent has answered on the stream
	tries    int                // failed attempts to attach since the last success
	noted    int64              // the time of the last synced record that was sent to the agent
	doorAs   string             // the agent's credentials for its workers, encoded; empty: none
	tells    []*agentpb.ToAgent // lines for workers, and stops of unknown workers, to be sent
}

// ending is what the agent is to do with a session.
type ending int

const (
	ongoing  ending = iota
	finished        // end it: workers end with their grace period
	fenced          // end it at once: its workers count as killed
)

// inbox holds the events that a session has received.
type inbox struct {
	heard uint64   // number of the last event received
	open  []*event // from the first event that is not settled
	told  uint64   // number of the last event acknowledged
}

// event is an event that a session has received.
type event struct {
	*agentpb.FromAgent
	done bool // the agent may forget it
}

func newSession(a *Agents, p place) *session {
	id := make([]byte, 16)
	rand.Read(id)
	return &session{
		a: a, place: p, id: id,
		beat:    min(a.cfg.Lease/10, time.Second),
		log:     a.cfg.Log.WithFields(logrus.Fields{"host": p.host, "agent": p.addr}),
		workers: make(map[string]*worker),
		carried: carried{contact: time.Now(), decided: make(chan struct{})},
		wake:    wake.New(),
	}
}

// settle records that the event has been handled.
func (s *session) settle(e *event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done(e)
}

// done is like settle, with the lock held.
func (s *session) done(e *event) {
	e.done = true
	i := 0
	for i < len(s.open) && s.open[i].done {
		s.open[i] = nil
		i++
	}
	s.open = s.open[i:]
	if i > 0 && s.settled()-s.told >= ackEvery {
		s.wake.Set()
	}
}

// settled returns the number of the last event that the agent may forget, with all before it; the
// lock is held.
func (in *inbox) settled() uint64 { return in.heard - uint64(len(in.open)) }

// request changes what the session is to do, and wakes its stream.
func (s *session) request(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.wake.Set()
}

// serve carries the session over one stream after the other until it is finished or lost. The
// workers of a lost session must not outlive it: serve kills an agent that is a child of this
// process, and fences any other.
func (s *session) serve(ctx context.Context) {
	var reason error // of the last attempt that was not cancelled
	failures := retry.Row{Least: tellEvery}
	for {
		if s.process != nil && s.process.Stopped() { // it accepts no stream
			s.continueProcess()
		}
		before := s.heardAt()
		err := s.stream(ctx)
		if ctx.Err() != nil || s.isFinished() {
			s.lose(errClosed)
			return
		}
		if reason == nil || status.Code(err) != codes.Canceled {
			reason = err
		}
		if why, over := s.hopeless(reason); why != nil {
			if refused(reason) {
				why = &refusal{why}
			}
			s.lose(why)
			switch {
			case s.kill != nil:
				s.kill()
			case !over:
				s.fence(ctx)
			}
			return
		}
		s.tellOf(reason, &failures, !s.heardAt().Equal(before))
		_ = retry.Pause(ctx, s.beat/5)
	}
}

// tellOf logs the reason why there is no stream: at debug level if the stream broke a moment ago,
// since a new one usually attaches at once, else as a warning.
func (s *session) tellOf(err error, failures *retry.Row, carried bool) {
	if carried {
		failures.Ended()
	}
	s.mu.Lock()
	quiet := s.attached && time.Since(s.contact) < s.a.cfg.Lease/4
	s.mu.Unlock()
	if quiet {
		s.log.Debugf("agent: the stream to the agent broke and is opened again: %v", err)
		return
	}
	now := time.Now()
	if !failures.Failed(now, err) {
		return
	}
	if more, tell := s.a.streams.Pass(now); tell {
		s.log.Warnf("agent: no stream to the agent, %d failures in %v, trying again: %s%s",
			failures.Failures(), failures.For(now).Round(time.Second), status.Convert(err).Message(), more)
	}
}

// heardAt returns when a stream was last known to carry all that is sent.
func (s *session) heardAt() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.contact
}

// fence tries to attach and to make the agent kill its workers, which are given up. It ends when
// the agent has done so or is known to be gone, and after Config.Orphan at the latest. The first
// attempt is made even if the agent is said to be gone, which may be wrong, and Close waits for it,
// since the job may be about to end.
func (s *session) fence(ctx context.Context) {
	s.mu.Lock()
	s.end, s.tries = fenced, 0
	s.mu.Unlock()
	given := time.Now()
	backoff := retry.Backoff{First: s.a.cfg.Lease / 10, Most: 5 * time.Second}
	for tries := 1; ; tries++ {
		err := s.stream(ctx)
		if _, over := s.hopeless(err); over || err == nil {
			s.log.Infof("agent: the agent has ended the session that was given up")
			return
		}
		ctx = s.a.open
		if retry.Pause(ctx, backoff.After(tries)) != nil || s.there() != nil || time.Since(given) >= s.a.cfg.Orphan {
			return
		}
	}
}

func (s *session) isFinished() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end != ongoing
}

// hopeless returns the reason why another stream is useless after err has ended the last one, or
// nil, and whether the agent itself reported that reason.
func (s *session) hopeless(err error) (why error, over bool) {
	s.mu.Lock()
	silent := time.Since(s.contact)
	s.mu.Unlock()
	switch status.Code(err) {
	case codes.NotFound, codes.PermissionDenied, codes.Unimplemented, codes.InvalidArgument, codes.FailedPrecondition:
		return errors.New(status.Convert(err).Message()), true
	}
	switch {
	case errors.Is(err, errNoAnswer), s.process != nil && silent >= patientLeases*s.a.cfg.Lease && s.wanted() && s.gone() == nil:
		return fmt.Errorf("%w for %v", errNoAnswer, silent.Round(time.Millisecond)), false
	case s.process != nil && silent >= s.a.cfg.Lease && refused(err):
		return fmt.Errorf("for %v %s", silent.Round(time.Millisecond), status.Convert(err).Message()), false
	case s.process == nil && silent >= s.a.cfg.Lease:
		return fmt.Errorf("%s for %v: %s", s.deaf(), silent.Round(time.Millisecond), status.Convert(err).Message()), false
	}
	return s.gone(), false
}

// deaf describes the silence of the agent.
func (s *session) deaf() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.attached && s.tries == 0 {
		return "it accepts connections, but nothing else that is sent arrives (does the path drop large packets because an MTU is too large?)"
	}
	return "nothing was heard from it"
}

// refused returns whether the error is an agent's answer that it cannot begin the session. An agent
// that answers does not lack processor time.
func refused(err error) bool {
	code := status.Code(err)
	return (code == codes.Unavailable || code == codes.FailedPrecondition) &&
		strings.HasPrefix(status.Convert(err).Message(), CannotBegin)
}

// gone returns an error if place.there reports that the agent no longer exists or was replaced.
func (s *session) gone() error {
	if err := s.there(); err != nil {
		return fmt.Errorf("it is silent, and %w", err)
	}
	return nil
}

// errClosed ends a session whose launcher was closed. Nothing is lost then, although the session
// may have workers whose output nobody has read.
var errClosed = errors.New("the launcher was closed")

// lose ends the session with a reason, and wakes all that wait for it.
func (s *session) lose(why error) {
	s.a.forget(s)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = why
	s.decide()
	if len(s.workers) > 0 && why != errClosed {
		s.log.Warnf("agent: the agent is lost, and its %d workers with it: %v", len(s.workers), why)
	}
	for _, w := range s.workers {
		w.lost = why
		if w.ended != nil && w.everSent {
			w.ended(lostWorker(why))
			w.ended = nil
		}
		w.wake.Set()
	}
}

// stream attaches to the session over a new connection, since the last one may be dead, and carries
// the session until the connection breaks. It returns nil after an orderly end.
func (s *session) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tlsConf := s.credentials.ClientTLS(identity.Subject{Role: identity.Agent, Host: s.host})
	conn, err := wire.NewClient(s.addr, tlsConf)
	if err != nil {
		return err
	}
	defer conn.Close()
	late := time.AfterFunc(s.attachLimit(), cancel)
	defer late.Stop()
	stream, err := agentpb.NewAgentClient(conn).Session(ctx)
	if err != nil {
		return err
	}
	_ = stream.Send(&agentpb.ToAgent{What: &agentpb.ToAgent_Attach{Attach: s.attach()}}) // if it fails, Recv returns the reason
	answer, err := stream.Recv()
	if err != nil {
		return err
	}
	if !late.Stop() {
		return errors.New("the agent took too long to answer")
	}
	if v := answer.GetAttached().GetLines(); v != line.Version {
		return status.Errorf(codes.FailedPrecondition, "the agent speaks version %d of the lines of workers, and this driver version %d: "+
			"the hvdrun of the agent's host and that of the job must be of one version", v, line.Version)
	}
	s.heardFrom(answer.GetAttached())
	defer s.leaves()
	s.log.Debugf("agent: attached to session %s", hex.EncodeToString(s.id[:4]))
	broken := make(chan error, 1)
	go func() { broken <- s.listen(stream) }()
	err = s.talk(stream, broken)
	if err != nil {
		cancel()
		<-broken
	}
	return err
}

// attachLimit counts an attempt to attach and returns its time limit, which does not exceed the
// rest of the lease. If the agent's process is on this machine, the limit is always attachPatience.
func (s *session) attachLimit() time.Duration {
	if s.process != nil {
		return attachPatience
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tries++
	limit := retry.Backoff{First: attachTimeout, Most: min(16*attachTimeout, s.a.cfg.Lease)}.After(s.tries)
	if left := s.a.cfg.Lease - time.Since(s.contact); left > 0 {
		limit = min(limit, left)
	}
	return limit
}

// attach returns the first message of a stream. It marks everything sent on the last stream as
// unsent, since it may be lost.
func (s *session) attach() *agentpb.Attach {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		w.sentStart, w.sentStop, w.sentTaken = false, 0, 0
	}
	s.noted = 0
	s.told = s.settled() // the agent sends unsettled events again; hear drops those it has
	if s.doorAs == "" && s.a.cfg.Authority != nil {
		own, err := s.a.cfg.Authority.Issue(identity.Subject{Role: identity.Agent, Host: s.host})
		if err != nil { // the host's name is too long for a certificate
			s.log.Warnf("agent: its workers need the sockets that they inherit: %v", err)
		} else {
			s.doorAs = own.Encode()
		}
	}
	begun := s.attached || s.end == fenced && !s.takesOver() // a fence must not begin a new session
	return &agentpb.Attach{
		Session: s.id, Resume: begun, TakeOver: s.takesOver(), Heard: s.told,
		LeaseMs: uint32(s.a.cfg.Orphan.Milliseconds()), Term: s.term,
		Credentials: s.doorAs, Lines: line.Version,
	}
}

func (s *session) heardFrom(answer *agentpb.Attached) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.attached {
		s.contact = time.Now()
	}
	s.attached, s.carries, s.looks, s.tries, s.echoes = true, true, 0, 0, 0
	s.decide()
	if s.takesOver() {
		s.takenOver(answer)
	}
	s.stopUnknown()
}

// decide closes decided: the session has begun, or never will; the lock is held.
func (s *session) decide() {
	select {
	case <-s.decided:
	default:
		close(s.decided)
	}
}

// begun blocks until the session has begun, or returns the reason why it has not.
func (s *session) begun(ctx context.Context) error {
	select {
	case <-s.decided:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}

// talk sends messages and beats until the stream is broken. It returns nil if the agent has closed
// the stream because the session was to end. The value that it receives from broken is in broken
// again when it returns.
func (s *session) talk(stream grpc.BidiStreamingClient[agentpb.ToAgent, agentpb.FromAgent], broken chan error) error {
	look := time.NewTicker(s.lookEvery())
	defer look.Stop()
	var beaten time.Time
	ended := false
	for {
		messages, end := s.due(time.Since(beaten) >= s.beat)
		for _, m := range messages {
			if m.GetBeat() != nil {
				beaten = time.Now()
			}
			if err := stream.Send(m); err != nil {
				err = <-broken // the receiving side has the reason
				broken <- err
				return err
			}
		}
		if end != ongoing && !ended {
			ended = true
			_ = stream.Send(&agentpb.ToAgent{What: &agentpb.ToAgent_End{End: &agentpb.End{Now: end == fenced}}})
		}
		select {
		case err := <-broken:
			broken <- err
			if ended && errors.Is(err, io.EOF) {
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

// listen handles the messages of the agent until the stream ends.
func (s *session) listen(stream grpc.BidiStreamingClient[agentpb.ToAgent, agentpb.FromAgent]) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		deliver, err := s.hear(m)
		if err != nil {
			return err
		}
		if deliver != nil {
			deliver()
		}
	}
}

// leaves records that no stream is attached: until one is, lines for workers are dropped.
func (s *session) leaves() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.carries, s.tells = false, nil
}

// logLine logs a line of the agent's log.
func (s *session) logLine(l *agentpb.Log) {
	text := l.GetText()
	switch logrus.Level(l.GetLevel()) {
	case logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel:
		s.log.Error(text)
	case logrus.WarnLevel:
		s.log.Warn(text)
	default:
		s.log.Debug(text)
	}
}
