package agent

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/launch"
)

const (
	sessionLen = 16
	// attachTimeout is how long a driver may take to say which session it is about.
	attachTimeout = 5 * time.Second
	// unproven is how many connections may be in a handshake.
	unproven = 64
)

// steward serves the drivers that come to one host: it keeps their sessions, and who is in which
// slot.
type steward struct {
	host     string
	slots    int
	launcher launch.Launcher
	guard    func(session string) (io.Closer, error)
	log      logrus.FieldLogger
	// Where output is kept for a driver that is not there, and how many bytes of it for each
	// worker.
	spoolDir  string
	spoolSize int64

	over    chan error                                                     // receives why a session is over; nil: nobody asks
	lines   *logLines                                                      // for a driver that keeps this agent's log; nil: none does
	inspect func(context.Context, *wire.InspectRequest) *wire.InspectReply // nil: it is not known

	mu       sync.Mutex
	sessions map[string]*session // by run
	taken    map[int]*worker
	bad      []int         // slots whose devices have failed
	drained  error         // set: no worker is started any more
	news     chan struct{} // closed, and made anew, when a slot becomes free, a session is over, or its driver has heard all
	wg       sync.WaitGroup
}

func newSteward(host string, slots int, log logrus.FieldLogger) *steward {
	return &steward{
		host: host, slots: slots, launcher: launch.Local{}, guard: startGuard, log: log,
		sessions: make(map[string]*session), taken: make(map[int]*worker), spoolSize: spoolSize, news: make(chan struct{}),
	}
}

// startGuard starts what kills those who carry the session's mark once the agent is gone.
func startGuard(session string) (io.Closer, error) {
	g, err := launch.StartGuardOf(sessionVariable, session)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// serve answers drivers on ln, which it closes, until ctx ends; then all sessions are ended, and it
// returns when nothing is left of them.
func (st *steward) serve(ctx context.Context, ln net.Listener, creds *identity.Credentials) error {
	register := func(r grpc.ServiceRegistrar) { wire.RegisterAgentServer(r, service{st: st}) }
	release := func() { st.close(errShutdown) }
	err := wire.ServeGuarded(ctx, ln, creds.ServerTLS(identity.Driver), unproven, register, release)
	st.close(errShutdown)
	st.wg.Wait()
	if err != nil {
		return fmt.Errorf("agent: serving drivers: %w", err)
	}
	return nil
}

// close ends all sessions, and lets none begin.
func (st *steward) close(why error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.drained = why
	for _, s := range st.sessions {
		s.end(why)
	}
}

// drain lets nothing be started any more.
func (st *steward) drain() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.drained = errors.New("the host is draining")
}

// stop asks all workers to end; kill ends them. Their sessions go on, so that drivers hear of it,
// and of whose doing it was.
func (st *steward) stop(kill bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, w := range st.taken {
		w.evicted = true
		w.cancel(errShutdown)
		if kill {
			w.kill()
		}
	}
}

// setBad kills the workers of slots whose devices have failed, which counts as their failure, and
// starts none there.
func (st *steward) setBad(slots []int) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.bad = slots
	for _, i := range slots {
		if w := st.taken[i]; w != nil {
			st.log.Warnf("agent: slot %d: its device has failed: killing process %d", i, w.pid)
			w.kill() // first: one that is only asked might leave as if of its own accord
			w.cancel(errors.New("its device has failed"))
		}
	}
}

// changed wakes those that wait for slots to be free or sessions to be over; the lock is held.
func (st *steward) changed() {
	close(st.news)
	st.news = make(chan struct{})
}

// busy returns the number of slots that are taken and of sessions, and a channel that is closed
// when it changes.
func (st *steward) busy() (slots, sessions int, change <-chan struct{}) {
	st.mu.Lock()
	defer st.mu.Unlock()
	return len(st.taken), len(st.sessions), st.news
}

// occupied is busy, of slots alone.
func (st *steward) occupied() (slots int, change <-chan struct{}) {
	slots, _, change = st.busy()
	return slots, change
}

// untold returns how much there is that drivers have not heard yet and may still hear, and a
// channel that is closed when it is less.
func (st *steward) untold() (n int, change <-chan struct{}) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, s := range st.sessions {
		if s.why != nil {
			continue // what its driver says is not heeded any more
		}
		n += len(s.events)
		for _, w := range s.workers {
			if !w.over || w.last != nil {
				n++
			}
		}
	}
	return n, st.news
}

// take gives a slot to the worker, or says who has it; the lock is held.
func (st *steward) take(w *worker) error {
	i := w.id.Index
	switch holder := st.taken[i]; {
	case st.drained != nil:
		return st.drained
	case i >= st.slots:
		return fmt.Errorf("slot %d is out of range: host %s has %d slots", i, st.host, st.slots)
	case slices.Contains(st.bad, i):
		return fmt.Errorf("the device of slot %d of host %s has failed", i, st.host)
	case holder != nil:
		return fmt.Errorf("slot %d of host %s is taken by worker %s of run %s, process %d",
			i, st.host, holder.incarnation, holder.s.run, holder.pid)
	}
	st.taken[i] = w
	return nil
}

// free gives the slot of a worker back; the lock is held.
func (st *steward) free(w *worker) {
	delete(st.taken, w.id.Index)
	st.changed()
}

// attach finds the session of the run that the driver means, or begins it, and makes l its stream.
func (st *steward) attach(run string, m *wire.Attach, l *link, near, far netip.Addr) (*session, *wire.Attached, error) {
	lease := time.Duration(m.GetLeaseMs()) * time.Millisecond
	id := string(m.GetSession())
	if len(id) != sessionLen || lease < launch.MinLease || lease > launch.MaxOrphan {
		return nil, nil, status.Errorf(codes.InvalidArgument, "an attach with a session of %d bytes and a lease of %v", len(id), lease)
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.sessions[run]
	taken := m.GetTakeOver() && s != nil && s.why == nil
	known := s != nil && s.id == id || taken
	switch {
	case known && s.why != nil:
		return nil, nil, status.Errorf(codes.NotFound, "the session is over: %v", s.why)
	case !known && m.GetResume():
		return nil, nil, status.Error(codes.NotFound, "the agent does not know the session: it was restarted, or the session is over")
	case !known && st.drained != nil:
		return nil, nil, status.Error(codes.Unavailable, st.drained.Error())
	case !known && s != nil:
		// There is one driver of a run. What it does not speak of any more it has given up.
		s.end(errTakenOver)
		s.killAll()
		return nil, nil, status.Error(codes.Unavailable, "the last session of the run is being ended")
	case !known:
		var err error
		if s, err = st.begin(run, id, lease); err != nil {
			return nil, nil, status.Error(codes.Unavailable, err.Error())
		}
	}
	heard, answer := m.GetHeard(), &wire.Attached{}
	if m.GetTakeOver() {
		heard, answer = s.handOver()
	}
	if heard > s.sent {
		return nil, nil, status.Errorf(codes.InvalidArgument, "event %d was heard, but only %d were sent", heard, s.sent)
	}
	if err := s.towards(near, far, m.GetDriverPort()); err != nil {
		return nil, nil, status.Error(codes.Unavailable, err.Error())
	}
	s.knowsDying = m.GetKnowsDying()
	if taken {
		s.log.Info("agent: another driver has taken over")
	}
	s.attach(l, heard)
	return s, answer, nil
}

// begin begins a session; the lock is held.
func (st *steward) begin(run, id string, lease time.Duration) (*session, error) {
	guard, err := st.guard(hex.EncodeToString([]byte(id)))
	if err != nil {
		return nil, err
	}
	s := &session{
		st: st, id: id, run: run, lease: lease, guard: guard,
		log:     st.log.WithFields(logrus.Fields{"run": run, "session": hex.EncodeToString([]byte(id[:4]))}),
		contact: time.Now(),
		workers: make(map[string]*worker),
		room:    sync.NewCond(&st.mu),
		ending:  make(chan struct{}), ended: make(chan struct{}),
	}
	st.sessions[run] = s
	st.wg.Go(s.live)
	s.log.Info("agent: a driver began a session")
	return s, nil
}

// service keeps the methods of the wire out of steward's.
type service struct {
	wire.UnimplementedAgentServer
	st *steward
}

// Session carries one stream of a session.
func (v service) Session(stream grpc.BidiStreamingServer[wire.ToAgent, wire.FromAgent]) error {
	from, err := caller(stream.Context())
	if err != nil {
		return err
	}
	// Recv ends when this handler has returned, so the goroutine that receives is waited for by the
	// steward.
	said, failed, stop := make(chan *wire.ToAgent), make(chan error, 1), make(chan struct{})
	defer close(stop)
	v.st.wg.Go(func() { failed <- receive(stream, said, stop) })
	var first *wire.ToAgent
	patience := time.NewTimer(attachTimeout)
	defer patience.Stop()
	select {
	case first = <-said:
	case err := <-failed:
		return err
	case <-patience.C:
	}
	if first.GetAttach() == nil {
		return status.Error(codes.InvalidArgument, "a stream begins with an attach")
	}
	near, far := wire.PeerAddrs(stream.Context())
	l := &link{wake: make(chan struct{}, 1), gone: make(chan struct{})}
	s, answer, err := v.st.attach(from.RunID, first.GetAttach(), l, near, far)
	if err != nil {
		return err
	}
	defer s.detach(l)
	if err := stream.Send(&wire.FromAgent{What: &wire.FromAgent_Attached{Attached: answer}}); err != nil {
		return err
	}
	return s.carry(l, stream, said, failed)
}

func receive(
	stream grpc.BidiStreamingServer[wire.ToAgent, wire.FromAgent], said chan<- *wire.ToAgent, stop <-chan struct{},
) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		select {
		case said <- m:
		case <-stop:
			return nil
		}
	}
}

// carry sends and receives until the stream breaks, another takes its place, or the session is
// over.
func (s *session) carry(
	l *link, stream grpc.BidiStreamingServer[wire.ToAgent, wire.FromAgent], said <-chan *wire.ToAgent, failed <-chan error,
) error {
	for {
		events, beats := s.pending(l)
		for _, b := range beats {
			if err := stream.Send(&wire.FromAgent{What: &wire.FromAgent_Beat{Beat: b}}); err != nil {
				return err
			}
		}
		for _, e := range append(events, s.st.lines.take()...) {
			if err := stream.Send(e); err != nil {
				return err
			}
		}
		select {
		case <-s.st.lines.news():
		case <-l.wake:
		case m := <-said:
			if err := s.heed(l, m); err != nil {
				s.log.Warnf("agent: the driver does not know the protocol: %v", err)
				return status.Error(codes.InvalidArgument, err.Error())
			}
		case err := <-failed:
			s.log.Debugf("agent: the stream broke: %v", err)
			return err
		case <-l.gone:
			return status.Error(codes.Aborted, "another stream has taken the place of this one")
		case <-s.ended:
			return s.farewell(l, stream)
		}
	}
}

// farewell sends the last events of a session that is over.
func (s *session) farewell(l *link, stream grpc.BidiStreamingServer[wire.ToAgent, wire.FromAgent]) error {
	for {
		events, _ := s.pending(l)
		if len(events) == 0 {
			break
		}
		for _, e := range events {
			if err := stream.Send(e); err != nil {
				return err
			}
		}
	}
	if errors.Is(s.why, errEnd) {
		return nil
	}
	return status.Errorf(codes.NotFound, "the session is over: %v", s.why)
}

// Inspect tells what the host is like.
func (v service) Inspect(ctx context.Context, r *wire.InspectRequest) (*wire.InspectReply, error) {
	if v.st.inspect == nil {
		return nil, status.Error(codes.Unimplemented, "there is nothing to ask of this agent")
	}
	return v.st.inspect(ctx, r), nil
}

// caller says which driver calls, from the certificate of the connection.
func caller(ctx context.Context) (identity.Subject, error) {
	cs, ok := wire.PeerTLS(ctx)
	if !ok {
		return identity.Subject{}, status.Error(codes.Unauthenticated, "no certificate")
	}
	from, err := identity.SubjectOf(cs)
	if err != nil {
		return identity.Subject{}, status.Error(codes.Unauthenticated, err.Error())
	}
	return from, nil
}
