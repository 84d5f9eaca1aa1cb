package rendezvous

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/carry"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

// OtherService is another service of the driver for workers.
type OtherService interface {
	// Register adds it to a server. caller returns the worker that makes a call, or a status of
	// gRPC for one that may not.
	Register(r grpc.ServiceRegistrar, caller func(context.Context) (identity.Subject, error))
	// Carried returns its methods for workers whose calls their agent carries.
	Carried() map[string]carry.Method
}

// ServeSocket serves a worker of this machine over the launcher's end of its socket, and closes
// that. It blocks until the socket is closed, and until Serve has begun.
func (s *Server) ServeSocket(conn net.Conn, worker identity.Subject) { s.sockets.Take(conn, worker) }

// Serve serves workers of the job, and agents that carry their calls, on ln until ctx ends; it
// closes ln and must be called once. Then it fails every waiting join as unavailable, and returns
// nil once all handlers have returned. It returns an error if ln fails.
func (s *Server) Serve(ctx context.Context, ln *identity.Listener) error {
	register := func(r grpc.ServiceRegistrar) {
		rendezvouspb.RegisterRendezvousServer(r, service{s: s})
		if s.cfg.Also != nil {
			s.cfg.Also.Register(r, s.caller)
		}
	}
	registerAgents := func(r grpc.ServiceRegistrar) {
		carry.Register(r, carry.ServerConfig{Worker: s.of, Methods: s.carried(), Done: s.done})
	}
	raw := []wire.Raw{{
		Of: func(peer tls.ConnectionState) bool {
			who, err := identity.SubjectOf(peer)
			return err == nil && who.Role == identity.Agent
		},
		Handle: func(_ context.Context, conn net.Conn, peer tls.ConnectionState) {
			who, _ := identity.SubjectOf(peer) // Of has read it
			s.agents.Take(conn, who)
		},
	}}
	if s.cfg.Tasks != nil {
		raw = append(raw, wire.Raw{Protocol: wire.TasksProtocol, Handle: s.tasks})
	}
	if s.cfg.Store != nil {
		raw = append(raw, wire.Raw{Protocol: wire.StoreProtocol, Handle: s.store})
	}
	var known sync.WaitGroup
	defer known.Wait()
	side, cancel := context.WithCancel(ctx)
	defer cancel()
	known.Go(func() { _ = s.sockets.Serve(side, register, s.release) })
	known.Go(func() { _ = s.agents.Serve(side, registerAgents, s.release) })
	if err := wire.Serve(ctx, ln, s.cfg.Credentials.ServerTLS(identity.Worker, identity.Agent), register, s.release, raw...); err != nil {
		return fmt.Errorf("rendezvous: %w", err)
	}
	return nil
}

// tasks hands on the connection of a worker that belongs to the job.
func (s *Server) tasks(ctx context.Context, conn net.Conn, peer tls.ConnectionState) {
	from, err := identity.SubjectOf(peer)
	if err == nil {
		_, err = s.belongs(from)
	}
	if err != nil {
		s.cfg.Log.Debugf("rendezvous: a connection for tasks is refused: %v", err)
		conn.Close()
		return
	}
	if err := s.cfg.Tasks.Handle(ctx, conn, from); err != nil && ctx.Err() == nil {
		s.cfg.Log.Debugf("rendezvous: tasks of %v: %v", from, err)
	}
}

var errStopping = status.Error(codes.Unavailable, "the driver is stopping")

func (s *Server) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		defer close(s.done) // after the answers
	}
	for inc, w := range s.waiting {
		delete(s.waiting, inc)
		w.answer(nil, errStopping)
	}
}

// caller returns the worker that makes a call, or an error for one that may not.
func (s *Server) caller(ctx context.Context) (identity.Subject, error) {
	from, known := wire.KnownCaller(ctx).(identity.Subject)
	if !known {
		var err error
		if from, err = wire.Caller(ctx, identity.SubjectOf); err != nil {
			return from, err
		}
	}
	return s.belongs(from)
}

// of returns the worker with that incarnation, if the agent speaks for it, as for those of its own
// host only.
func (s *Server) of(agent identity.Subject, incarnation string) (identity.Subject, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	worker, ok := s.admitted[incarnation]
	if !ok || worker.Host != agent.Host {
		return agent, errExpelled
	}
	return worker, nil
}

// belongs returns an error for a worker that does not belong to the job, or not any more.
func (s *Server) belongs(from identity.Subject) (identity.Subject, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.admitted[from.Incarnation]; !ok {
		return from, errExpelled
	}
	return from, nil
}

func (s *Server) look(from identity.Subject, _ *rendezvouspb.LookRequest) (*rendezvouspb.World, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.dismissed[from.Incarnation] != nil:
		return nil, status.Error(codes.PermissionDenied, "this worker was dismissed")
	case s.current == nil:
		return &rendezvouspb.World{}, nil
	}
	return s.current.world(0, s.current.key.ForVisits()), nil
}

// carried returns the methods for workers whose calls their agent carries.
func (s *Server) carried() map[string]carry.Method {
	methods := map[string]carry.Method{
		rendezvouspb.Rendezvous_Join_FullMethodName:   carry.Later(s.join),
		rendezvouspb.Rendezvous_Report_FullMethodName: carry.Later(s.report),
		rendezvouspb.Rendezvous_Look_FullMethodName:   carry.AtOnce(s.look),
		rendezvouspb.Rendezvous_Beat_FullMethodName:   carry.AtOnce(s.beat),
	}
	if s.cfg.Also != nil {
		maps.Copy(methods, s.cfg.Also.Carried())
	}
	return methods
}

// service implements the gRPC service, apart from Server's own methods.
type service struct {
	rendezvouspb.UnimplementedRendezvousServer
	s *Server
}

func (v service) Join(ctx context.Context, req *rendezvouspb.JoinRequest) (*rendezvouspb.JoinReply, error) {
	return answerCallerLater(ctx, v.s, req, v.s.join)
}

func (v service) Report(ctx context.Context, req *rendezvouspb.ReportRequest) (*rendezvouspb.ReportReply, error) {
	return answerCallerLater(ctx, v.s, req, v.s.report)
}

func (v service) Look(ctx context.Context, req *rendezvouspb.LookRequest) (*rendezvouspb.World, error) {
	return answerCaller(ctx, v.s, req, v.s.look)
}

func (v service) Beat(ctx context.Context, req *rendezvouspb.BeatRequest) (*rendezvouspb.BeatReply, error) {
	return answerCaller(ctx, v.s, req, v.s.beat)
}

// answerCaller has a call answered for the worker that makes it.
func answerCaller[Q, R any](ctx context.Context, s *Server, req Q, answer func(identity.Subject, Q) (*R, error)) (*R, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	return answer(from, req)
}

// answerCallerLater is answerCaller for a call that may wait for its answer.
func answerCallerLater[Q, R any](
	ctx context.Context, s *Server, req Q, begin func(identity.Subject, Q, func(*R, error)) (giveUp func()),
) (*R, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	type answer struct {
		reply *R
		err   error
	}
	answered := make(chan answer, 1)
	giveUp := begin(from, req, func(reply *R, err error) { answered <- answer{reply, err} })
	select {
	case a := <-answered:
		return a.reply, a.err
	case <-ctx.Done():
		if giveUp != nil {
			giveUp()
		}
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

var reportsFromWire = map[rendezvouspb.Report]Report{
	rendezvouspb.Report_REPORT_DONE: Done, rendezvouspb.Report_REPORT_LEAVING: Leaving, rendezvouspb.Report_REPORT_COMMITTED: Committed,
	rendezvouspb.Report_REPORT_DRAINING: Draining, rendezvouspb.Report_REPORT_FETCHING: Fetching,
	rendezvouspb.Report_REPORT_WRITING: Writing, rendezvouspb.Report_REPORT_WRITTEN: Written, rendezvouspb.Report_REPORT_NOT_WRITTEN: NotWritten,
}

// report begins the call Report of a worker, as join does. It waits for the Handler.
func (s *Server) report(from identity.Subject, req *rendezvouspb.ReportRequest, answer func(*rendezvouspb.ReportReply, error)) (giveUp func()) {
	noted := func() { answer(&rendezvouspb.ReportReply{}, nil) }
	backend, failed := req.GetReport() == rendezvouspb.Report_REPORT_BACKEND, req.GetReport() == rendezvouspb.Report_REPORT_FAILED
	r, known := reportsFromWire[req.GetReport()]
	var err error
	switch {
	case backend:
		err = checkBackend(req.GetBackend())
	case failed:
		err = checkError(req.GetError())
	case !known:
		err = fmt.Errorf("%d is not a report", req.GetReport())
	}
	if err != nil {
		answer(nil, s.invalid(from, "report", err))
		return nil
	}
	b, takesBackends := s.cfg.Handler.(BackendHandler)
	f, takesFailures := s.cfg.Handler.(FailureHandler)
	switch {
	case backend && takesBackends:
		b.BackendReported(from, req.GetGeneration(), req.GetBackend(), noted)
	case failed && takesFailures:
		f.FailureReported(from, req.GetError(), noted)
	case known && s.cfg.Handler != nil:
		s.cfg.Handler.Reported(from, r, req.GetGeneration(), req.GetCommits(), noted)
	default:
		noted()
	}
	return nil
}

func (s *Server) invalid(from identity.Subject, what string, err error) error {
	s.cfg.Log.Warnf("rendezvous: refused the %s of %v: %v", what, from, err)
	return status.Errorf(codes.InvalidArgument, "%s: %v", what, err)
}
