package agent

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
)

const (
	sessionLen = 16
	// attachTimeout is how long a driver may take to name its session.
	attachTimeout = 5 * time.Second
)

// server serves the drivers that connect to one host: it holds their sessions, and the worker in
// each slot.
type server struct {
	local
	log     logrus.FieldLogger
	over    chan error                                                           // receives the reason when a session is over; nil: not used
	lines   logLines                                                             // for the driver that receives this agent's log
	inspect func(context.Context, *agentpb.InspectRequest) *agentpb.InspectReply // nil: refused
	audit   *audit.Recorder
	probing chan struct{} // holds one value for each probe in flight

	mu       sync.Mutex
	sessions map[string]*session // by run
	taken    map[int]*worker
	starts   uint64        // workers that were given a slot
	bad      []int         // slots whose devices have failed
	drained  error         // why no more workers are started; nil: they are
	news     chan struct{} // closed and replaced when a slot becomes free, a session is over, or all its events are acknowledged
	wg       sync.WaitGroup
}

// local describes the host and how workers are run on it.
type local struct {
	host     string
	slots    int
	launcher launch.Launcher
	runAs    RunAs // nil: workers run as this process's user
	guard    func(session, cgroups string) (io.Closer, error)
	listen   string // the address on which workers listen for each other; empty: the one their job sets
	program  string // this process's executable, which workers may run too; empty: unknown
	// The bound in bytes of each worker's output that is kept while no driver is attached.
	spoolSize int64
}

func newServer(host string, slots int, log logrus.FieldLogger) *server {
	program, err := os.Executable()
	if err != nil {
		log.WithError(err).Debug("agent: workers do not get the path of its program")
	}
	return &server{
		local: local{host: host, slots: slots, launcher: launch.Local{}, guard: startGuard, spoolSize: spoolSize, program: program},
		log:   log, probing: make(chan struct{}, mostProbes), audit: newRecorder(log, logrus.InfoLevel), sessions: make(map[string]*session), taken: make(map[int]*worker), news: make(chan struct{}),
	}
}

// startGuard starts a guard that, once the agent is gone, kills the processes with the session's
// mark and those in the session's cgroups below cgroups, if that is not empty.
func startGuard(session, cgroups string) (io.Closer, error) {
	var prefixes []string
	if cgroups != "" {
		prefix, err := proc.CgroupsBelow(cgroups)
		if err != nil {
			return nil, err
		}
		prefixes = append(prefixes, prefix)
	}
	g, err := proc.StartGuard(sessionVariable, session, prefixes...)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// serve serves drivers on ln, which it closes, until ctx ends; then it ends all sessions, and
// returns when nothing is left of them.
func (srv *server) serve(ctx context.Context, ln *identity.Listener, creds *identity.Credentials) error {
	register := func(r grpc.ServiceRegistrar) { agentpb.RegisterAgentServer(r, service{srv: srv}) }
	defer context.AfterFunc(ctx, func() { srv.close(errShutdown) })()
	ln.OnRefused(func(from net.Addr, why error) { // it did not authenticate as a driver
		srv.note(audit.Who{From: from.String()}, "connect", "", audit.Refused(why))
	})
	connects := wire.Raw{Protocol: wire.ConnectProtocol, Handle: srv.connect}
	err := wire.Serve(ctx, wire.MaxStart, ln, creds.ServerTLS(identity.Driver), register, connects)
	srv.close(errShutdown)
	srv.wg.Wait()
	if err != nil {
		return fmt.Errorf("agent: serving drivers: %w", err)
	}
	return nil
}

// close ends all sessions and refuses new ones.
func (srv *server) close(why error) {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	srv.drained = why
	for _, s := range srv.sessions {
		s.end(why)
	}
}

// drain refuses new sessions and workers.
func (srv *server) drain() {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	srv.drained = errors.New("the host is draining")
}

// stop asks all workers to end, and kills them if kill is set. The sessions stay, so that drivers
// learn the ends of their workers, and that the agent caused them.
func (srv *server) stop(kill bool) {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	for _, w := range srv.taken {
		w.evicted = true
		w.cancel(errShutdown)
		if kill {
			w.kill()
		}
	}
}

// setBad kills the workers in slots whose devices have failed, which counts as a failure of those
// workers, and refuses new ones there.
func (srv *server) setBad(slots []int) {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	srv.bad = slots
	for _, i := range slots {
		if w := srv.taken[i]; w != nil {
			srv.log.Warnf("agent: slot %d: its device has failed: killing process %d", i, w.pid)
			w.kill() // before cancel: a worker that is asked to end might exit with 0
			w.cancel(errors.New("its device has failed"))
		}
	}
}

// changed wakes all that wait for free slots, sessions or acknowledgements; the lock is held.
func (srv *server) changed() {
	close(srv.news)
	srv.news = make(chan struct{})
}

// busy returns the number of taken slots and of sessions, and a channel that is closed when they
// change.
func (srv *server) busy() (slots, sessions int, change <-chan struct{}) {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	return len(srv.taken), len(srv.sessions), srv.news
}

// occupied is like busy, for slots alone.
func (srv *server) occupied() (slots int, change <-chan struct{}) {
	slots, _, change = srv.busy()
	return slots, change
}

// used returns the number of slots that have workers, by run.
func (srv *server) used() map[string]uint32 {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	used := make(map[string]uint32)
	for _, w := range srv.taken {
		used[w.s.run]++
	}
	return used
}

// unacknowledged returns the number of events and ends of workers that drivers have not
// acknowledged and still may, and a channel that is closed when it falls.
func (srv *server) unacknowledged() (n int, change <-chan struct{}) {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	for _, s := range srv.sessions {
		if s.why != nil {
			continue // acknowledgements of its driver are ignored
		}
		n += len(s.events)
		for _, w := range s.workers {
			if !w.over || w.exit != nil {
				n++
			}
		}
	}
	return n, srv.news
}

// take gives the worker its slot, or returns the reason why not; the lock is held.
func (srv *server) take(w *worker) error {
	i := w.id.Index
	switch holder := srv.taken[i]; {
	case srv.drained != nil:
		return srv.drained
	case w.s.refusal != nil:
		return w.s.refusal
	case i >= srv.slots:
		return fmt.Errorf("slot %d is out of range: host %s has %d slots", i, srv.host, srv.slots)
	case slices.Contains(srv.bad, i):
		return fmt.Errorf("the device of slot %d of host %s has failed", i, srv.host)
	case holder != nil:
		return &takenError{i, srv.host, holder.incarnation, holder.s.run, holder.pid}
	}
	srv.taken[i] = w
	srv.starts++
	return nil
}

// takenError says that another worker has the slot.
type takenError struct {
	slot                   int
	host, incarnation, run string
	pid                    int
}

func (e *takenError) Error() string {
	return fmt.Sprintf("slot %d of host %s is taken by worker %s of run %s, process %d", e.slot, e.host, e.incarnation, e.run, e.pid)
}

// free releases the slot of a worker; the lock is held.
func (srv *server) free(w *worker) {
	delete(srv.taken, w.id.Index)
	srv.changed()
}

// grantTo returns what the driver may do with the session that m begins. It may block on a
// directory service, so the lock must not be held. A driver that resumes a session begins none.
func (srv *server) grantTo(driver identity.Subject, m *agentpb.Attach) grant {
	g := grant{driver: driver}
	if srv.runAs == nil || m.GetResume() {
		return g
	}
	rule, err := srv.runAs.For(driver)
	if err == nil {
		g.as = &rule
	}
	g.refusal = err
	return g
}

// attach finds the session of the driver's run that m names, or begins it, and makes l its stream.
func (srv *server) attach(
	g grant, by audit.Who, m *agentpb.Attach, l *link, near netip.Addr,
) (*session, *agentpb.Attached, error) {
	driver := g.driver
	lease := time.Duration(m.GetLeaseMs()) * time.Millisecond
	id := string(m.GetSession())
	if len(id) != sessionLen || lease < client.MinLease || lease > client.MaxOrphan {
		return nil, nil, status.Errorf(codes.InvalidArgument, "an attach with a session of %d bytes and a lease of %v", len(id), lease)
	}
	if v := m.GetLines(); v != line.Version && !(m.GetTakeOver() && m.GetTerm() == 0) {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "the driver speaks version %d of the lines of workers, and this agent "+
			"version %d: the hvdrun of the agent's host and that of the job must be of one version", v, line.Version)
	}
	srv.mu.Lock()
	defer srv.mu.Unlock()
	s := srv.sessions[driver.RunID]
	if s != nil && (s.driver.User != driver.User || s.driver.UID != driver.UID) {
		return nil, nil, status.Errorf(codes.PermissionDenied, "the run is of user %q, and not of %q", s.driver.User, driver.User)
	}
	ends := m.GetTakeOver() && m.GetTerm() == 0 // not a driver: see client.EndRun
	if s != nil && m.GetTerm() < s.term && !ends {
		return nil, nil, status.Error(codes.PermissionDenied, "another driver has taken over the run")
	}
	taken := m.GetTakeOver() && s != nil && s.why == nil
	known := s != nil && s.id == id || taken
	switch {
	case known && s.why != nil:
		return nil, nil, status.Errorf(codes.NotFound, "the session is over: %v", s.why)
	case !known && m.GetResume():
		return nil, nil, status.Error(codes.NotFound, "the agent does not know the session: it was restarted, or the session is over")
	case !known && srv.drained != nil:
		return nil, nil, status.Error(codes.Unavailable, srv.drained.Error())
	case !known && s != nil:
		// A run has one driver for each term. It has given up a session that it does not name.
		s.end(errTakenOver)
		s.killAll()
		return nil, nil, status.Error(codes.Unavailable, "the last session of the run is being ended")
	case !known:
		var err error
		if s, err = srv.begin(g, id, lease); err != nil {
			return nil, nil, cannot(err)
		}
	}
	heard, answer := m.GetHeard(), &agentpb.Attached{}
	if m.GetTakeOver() {
		heard, answer = s.handOver()
	}
	answer.Lines = line.Version
	if heard > s.sent {
		return nil, nil, status.Errorf(codes.InvalidArgument, "event %d was heard, but only %d were sent", heard, s.sent)
	}
	heard = max(heard, s.acknowledged()) // a late attach may know less than was acknowledged since
	if err := s.openDoor(near, m.GetCredentials()); err != nil {
		return nil, nil, cannot(err)
	}
	if taken {
		s.log.Info("agent: another driver has taken over")
	}
	s.by, s.term, l.ends = by, max(s.term, m.GetTerm()), ends
	s.attach(l, heard)
	s.repeat()
	return s, answer, nil
}

// cannot returns the status of a session that cannot begin: Unavailable if a retry may succeed
// soon, FailedPrecondition if something on the host has to change first.
func cannot(err error) error {
	err = proc.ExplainDescriptors(err)
	for _, passes := range []error{unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.EADDRINUSE, unix.EINTR} {
		if errors.Is(err, passes) {
			return status.Errorf(codes.Unavailable, "%s: %v", client.CannotBegin, err)
		}
	}
	return status.Errorf(codes.FailedPrecondition, "%s: %v", client.CannotBegin, err)
}

// begin begins a session; the lock is held.
func (srv *server) begin(g grant, id string, lease time.Duration) (*session, error) {
	driver := g.driver
	s := &session{
		srv: srv, id: id, run: driver.RunID, lease: lease, grant: g,
		log:        srv.log.WithFields(logrus.Fields{"run": driver.RunID, "session": hex.EncodeToString([]byte(id[:4]))}),
		attachment: attachment{contact: time.Now()},
		workers:    make(map[string]*worker),
		room:       sync.NewCond(&srv.mu),
		ending:     make(chan struct{}), ended: make(chan struct{}),
	}
	if driver.User != "" || driver.UID != "" {
		s.log = s.log.WithFields(logrus.Fields{"user": driver.User, "uid": driver.UID})
	}
	cgroups := ""
	if s.as != nil {
		cgroups = s.as.Cgroup
		s.log.Infof("agent: workers run as user %s", s.as.As.Name)
	}
	var err error
	if s.guard, err = srv.guard(hex.EncodeToString([]byte(id)), cgroups); err != nil {
		return nil, err
	}
	s.newLines()
	srv.sessions[s.run] = s
	srv.wg.Go(s.live)
	s.log.Info("agent: a driver began a session")
	return s, nil
}

// service separates the gRPC methods from those of the server.
type service struct {
	agentpb.UnimplementedAgentServer
	srv *server
}

// Session carries one stream of a session.
func (v service) Session(stream grpc.BidiStreamingServer[agentpb.ToAgent, agentpb.FromAgent]) error {
	from, by, err := caller(stream.Context())
	if err != nil {
		return err
	}
	// Recv ends when this handler has returned, so the gRPC server waits for the receiving
	// goroutine.
	said, failed, stop := make(chan *agentpb.ToAgent), make(chan error, 1), make(chan struct{})
	defer close(stop)
	v.srv.wg.Go(func() { failed <- receive(stream, said, stop) })
	var first *agentpb.ToAgent
	patience := time.NewTimer(attachTimeout)
	defer patience.Stop()
	select {
	case first = <-said:
	case err := <-failed:
		return err
	case <-patience.C:
	}
	if first.GetAttach() == nil {
		err := status.Error(codes.InvalidArgument, "a stream begins with an attach")
		v.srv.recordAttach(by, nil, err)
		return err
	}
	near, _ := wire.PeerAddrs(stream.Context())
	l := &link{wake: wake.New(), gone: make(chan struct{})}
	g := v.srv.grantTo(from, first.GetAttach())
	if err := stream.Context().Err(); err != nil {
		return status.FromContextError(err).Err() // the driver has abandoned the stream
	}
	s, answer, err := v.srv.attach(g, by, first.GetAttach(), l, near)
	v.srv.recordAttach(by, first.GetAttach(), err)
	if err != nil {
		return err
	}
	defer s.detach(l)
	if err := stream.Send(&agentpb.FromAgent{What: &agentpb.FromAgent_Attached{Attached: answer}}); err != nil {
		return err
	}
	return s.carry(l, stream, said, failed)
}

func receive(
	stream grpc.BidiStreamingServer[agentpb.ToAgent, agentpb.FromAgent], said chan<- *agentpb.ToAgent, stop <-chan struct{},
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

// carry sends and receives until the stream breaks, another replaces it, or the session is over.
func (s *session) carry(
	l *link, stream grpc.BidiStreamingServer[agentpb.ToAgent, agentpb.FromAgent], said <-chan *agentpb.ToAgent, failed <-chan error,
) error {
	for {
		events, beats := s.pending(l)
		for _, b := range beats {
			if err := stream.Send(&agentpb.FromAgent{What: &agentpb.FromAgent_Beat{Beat: b}}); err != nil {
				return err
			}
		}
		for _, e := range append(events, s.srv.lines.take()...) {
			if err := stream.Send(e); err != nil {
				return err
			}
		}
		select {
		case <-s.srv.lines.wake:
		case <-l.wake:
		case m := <-said:
			if err := s.handle(l, m); err != nil {
				s.recordViolation(m, err)
				s.log.Warnf("agent: the driver violates the protocol: %v", err)
				return status.Error(codes.InvalidArgument, err.Error())
			}
		case err := <-failed:
			s.log.Debugf("agent: the stream broke: %v", err)
			return err
		case <-l.gone:
			return status.Error(codes.Aborted, "another stream has taken the place of this one")
		case <-s.ended:
			return s.finish(l, stream)
		}
	}
}

// finish sends the last events of a session that is over.
func (s *session) finish(l *link, stream grpc.BidiStreamingServer[agentpb.ToAgent, agentpb.FromAgent]) error {
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

// Inspect describes the host.
func (v service) Inspect(ctx context.Context, r *agentpb.InspectRequest) (*agentpb.InspectReply, error) {
	_, by, err := caller(ctx)
	if err == nil && v.srv.inspect == nil {
		err = status.Error(codes.Unimplemented, "this agent does not describe its host")
	}
	if err != nil {
		v.srv.note(by, "inspect", "", audit.Refused(statusText(err)))
		return nil, err
	}
	how := ""
	if targets := len(r.GetTargets()); targets > 0 {
		how = fmt.Sprintf("tries to connect to %d agents", targets)
	}
	v.srv.note(by, "inspect", how, audit.Done)
	reply := v.srv.inspect(ctx, r)
	if len(r.GetTargets()) == 0 {
		reply.Used = v.srv.used()
	}
	return reply, nil
}
