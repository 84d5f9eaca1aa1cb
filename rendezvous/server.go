package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
)

// Handler hears what the workers say. Its methods are called from the goroutines of the
// connections, several at a time, and must not block for long; they may call the Server's methods.
type Handler interface {
	// Joined tells of a join that has to wait: one that no published world and no dismissal
	// answers. A worker that repeats its join is heard again. A world that is published at the same
	// moment may answer the join before it is heard here; j.After is below its generation then, and
	// there is nothing to do.
	Joined(from identity.Subject, j Joining)
	// Reported tells of a report; one that was repeated on the way is heard twice.
	Reported(from identity.Subject, r Report, generation, commits uint64)
}

// BeatHandler is a Handler that also hears the workers' beats.
type BeatHandler interface {
	Handler
	// Beaten tells of a beat: about one a second from each worker.
	Beaten(from identity.Subject, b Beat)
}

// ServerConfig says who the server is and who listens to it.
type ServerConfig struct {
	// Credentials are the driver's.
	Credentials *identity.Credentials
	// Handler hears of joins and reports. Nil: nobody does.
	Handler Handler
	// Log takes refusals. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Server is the driver's side: it knows the current world and the joins that wait. Its methods may
// be called from several goroutines at once, before, during and after Serve.
type Server struct {
	cfg ServerConfig

	mu        sync.Mutex
	closed    bool
	current   *published
	waiting   map[string]*waiter // by incarnation
	dismissed map[string]*wire.JoinReply
}

// published is the current world, in the form in which it is sent. It never changes, so that all
// replies share it.
type published struct {
	generation uint64
	root       uint32
	seq        uint64
	ranks      map[string]uint32 // by incarnation
	members    []byte            // a wire.Members
}

// waiter is a Join that waits. Whoever takes it out of Server.waiting answers it, once.
type waiter struct {
	after  uint64
	answer chan answer // of capacity 1
}

type answer struct {
	reply *wire.JoinReply
	err   error
}

// NewServer returns a server without a world. It starts nothing.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	return &Server{cfg: cfg, waiting: make(map[string]*waiter), dismissed: make(map[string]*wire.JoinReply)}
}

// Serve answers workers of the job on ln, which it closes, until ctx ends; it is called once. Then
// every waiting join is released (the clients see that the driver is unavailable), and Serve
// returns nil when all handlers have. It returns an error when ln fails.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	register := func(r grpc.ServiceRegistrar) { wire.RegisterRendezvousServer(r, service{s: s}) }
	if err := wire.Serve(ctx, ln, s.cfg.Credentials.ServerTLS(identity.Worker), register, s.release); err != nil {
		return fmt.Errorf("rendezvous: %w", err)
	}
	return nil
}

var errStopping = status.Error(codes.Unavailable, "the driver stops")

func (s *Server) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for inc, w := range s.waiting {
		delete(s.waiting, inc)
		w.answer <- answer{err: errStopping}
	}
}

// Publish makes w the current world, with its members by rank, its sync root and the number of the
// last notification it takes account of. The slots of w are as plan.Place makes them. It releases
// the joins of members that wait for a newer generation than theirs. It panics where members and w
// differ in size or root is no rank of w; a world that is not newer than the current one is
// ignored. It keeps none of its arguments and never blocks.
func (s *Server) Publish(w plan.World, members []Member, root int, seq uint64) {
	if len(members) != w.Size() || root < 0 || root >= w.Size() {
		panic(fmt.Sprintf("rendezvous: a world of %d slots, %d members and root %d", w.Size(), len(members), root))
	}
	shared, err := proto.Marshal(membersToWire(w, members))
	if err != nil {
		panic(fmt.Sprintf("rendezvous: a world that cannot be sent: %v", err)) // names and addresses have been checked
	}
	p := &published{
		generation: w.Generation, root: uint32(root), seq: seq,
		ranks:   make(map[string]uint32, len(members)),
		members: shared,
	}
	for r, m := range members {
		p.ranks[m.Incarnation] = uint32(r)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil && w.Generation <= s.current.generation {
		s.cfg.Log.Errorf("rendezvous: world %d is not newer than world %d: ignored", w.Generation, s.current.generation)
		return
	}
	s.current = p
	for inc := range p.ranks {
		if waiting, ok := s.waiting[inc]; ok {
			if reply := p.reply(inc, waiting.after); reply != nil {
				delete(s.waiting, inc)
				waiting.answer <- answer{reply: reply}
			}
		}
	}
}

// reply returns nil where the world does not answer a join of inc after that generation.
func (p *published) reply(inc string, after uint64) *wire.JoinReply {
	if p == nil || p.generation <= after {
		return nil
	}
	rank, ok := p.ranks[inc]
	if !ok {
		return nil
	}
	return &wire.JoinReply{Outcome: &wire.JoinReply_World{World: p.world(rank)}}
}

func (p *published) world(rank uint32) *wire.World {
	return &wire.World{
		Generation: p.generation, Rank: rank, SyncRoot: p.root, Seq: p.seq, Size: uint32(len(p.ranks)), Members: p.members,
	}
}

// Dismiss answers the join of a worker that waits, and any later one, with why: ErrRemoved, ErrLast
// or ErrFinished; it panics for another error. The last dismissal of a worker counts, and no world
// is given to it any more. Dismiss never blocks.
func (s *Server) Dismiss(incarnation string, why error) {
	var d wire.Dismissal
	switch {
	case errors.Is(why, ErrRemoved):
		d = wire.Dismissal_DISMISSAL_REMOVED
	case errors.Is(why, ErrFinished):
		d = wire.Dismissal_DISMISSAL_FINISHED
	default:
		panic(fmt.Sprintf("rendezvous: %v is no dismissal", why))
	}
	reply := &wire.JoinReply{Outcome: &wire.JoinReply_Dismissal{Dismissal: d}, Last: errors.Is(why, ErrLast)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dismissed[incarnation] = reply
	if w, ok := s.waiting[incarnation]; ok {
		delete(s.waiting, incarnation)
		w.answer <- answer{reply: reply}
	}
}

// arrive returns the answer to a join or the waiter that will have it.
func (s *Server) arrive(inc string, after uint64) (*wire.JoinReply, *waiter, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errStopping
	}
	if old, ok := s.waiting[inc]; ok {
		delete(s.waiting, inc)
		old.answer <- answer{err: status.Error(codes.Aborted, "superseded by another join of the same worker")}
	}
	if reply, ok := s.dismissed[inc]; ok {
		return reply, nil, nil
	}
	if reply := s.current.reply(inc, after); reply != nil {
		return reply, nil, nil
	}
	w := &waiter{after: after, answer: make(chan answer, 1)}
	s.waiting[inc] = w
	return nil, w, nil
}

// gone takes out the join of a caller that waits no longer.
func (s *Server) gone(inc string, w *waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting[inc] == w {
		delete(s.waiting, inc)
	}
}

// service keeps the methods of the wire out of Server's.
type service struct {
	wire.UnimplementedRendezvousServer
	s *Server
}

func (v service) Join(ctx context.Context, req *wire.JoinRequest) (*wire.JoinReply, error) {
	s := v.s
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	if err := validate(req); err != nil {
		return nil, s.invalid(from, "join", err)
	}
	reply, w, err := s.arrive(from.Incarnation, req.GetAfterGeneration())
	if w == nil {
		return reply, err
	}
	if s.cfg.Handler != nil {
		s.cfg.Handler.Joined(from, joiningFromWire(req))
	}
	select {
	case a := <-w.answer:
		return a.reply, a.err
	case <-ctx.Done():
		s.gone(from.Incarnation, w)
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

func (v service) Look(ctx context.Context, _ *wire.LookRequest) (*wire.World, error) {
	if _, err := v.s.caller(ctx); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	if v.s.current == nil {
		return &wire.World{}, nil
	}
	return v.s.current.world(0), nil
}

var reportsFromWire = map[wire.Report]Report{
	wire.Report_REPORT_DONE: Done, wire.Report_REPORT_LEAVING: Leaving, wire.Report_REPORT_COMMITTED: Committed,
	wire.Report_REPORT_DRAINING: Draining, wire.Report_REPORT_FETCHING: Fetching,
	wire.Report_REPORT_OVER_NCCL: OverNCCL, wire.Report_REPORT_OVER_IPC: OverIPC,
	wire.Report_REPORT_OVER_IPC_HOSTS: OverIPCHosts, wire.Report_REPORT_OVER_STAGING: OverStaging,
	wire.Report_REPORT_WRITING: Writing, wire.Report_REPORT_WRITTEN: Written, wire.Report_REPORT_NOT_WRITTEN: NotWritten,
}

func (v service) Report(ctx context.Context, req *wire.ReportRequest) (*wire.ReportReply, error) {
	from, err := v.s.caller(ctx)
	if err != nil {
		return nil, err
	}
	r, ok := reportsFromWire[req.GetReport()]
	if !ok {
		return nil, v.s.invalid(from, "report", fmt.Errorf("%d is no report", req.GetReport()))
	}
	if v.s.cfg.Handler != nil {
		v.s.cfg.Handler.Reported(from, r, req.GetGeneration(), req.GetCommits())
	}
	return &wire.ReportReply{}, nil
}

// caller says who calls, from the certificate of the connection.
func (s *Server) caller(ctx context.Context) (identity.Subject, error) {
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

func (s *Server) invalid(from identity.Subject, what string, err error) error {
	s.cfg.Log.Warnf("rendezvous: refused the %s of %v: %v", what, from, err)
	return status.Errorf(codes.InvalidArgument, "%s: %v", what, err)
}
