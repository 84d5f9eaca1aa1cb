package rendezvous

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/carry"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/plan"
)

// Handler receives the workers' calls. Its methods are called concurrently from the goroutines of
// connections and must not block for long; they may call the Server's methods.
type Handler interface {
	// Joined is called for a join that has to wait because no published world and no dismissal
	// answers it. A repeated join calls it again. A world that is published concurrently may answer
	// the join before the call; j.After is below its generation then, and there is nothing to do.
	Joined(from identity.Subject, j Joining)
	// Reported is called for a report, twice if the report was repeated.
	Reported(from identity.Subject, r Report, generation, commits uint64)
}

// BeatHandler is a Handler that also receives heartbeats.
type BeatHandler interface {
	Handler
	// Beaten is called for a heartbeat: about once a second from each worker.
	Beaten(from identity.Subject, b Beat)
}

// BackendHandler is a Handler that also receives reports of backends.
type BackendHandler interface {
	Handler
	// BackendReported is called with the collective backend of the devices of a generation: a name
	// of 1 to 32 of the characters a-z, 0-9, '+', '-', '.' and '_'. It is called twice if the
	// report was repeated.
	BackendReported(from identity.Subject, generation uint64, backend string)
}

// ServerConfig configures a Server.
type ServerConfig struct {
	// Credentials are the driver's credentials.
	Credentials *identity.Credentials
	// Handler receives joins and reports. Nil: they are not passed on.
	Handler Handler
	// DataKey returns the key of data connections of a generation. Nil: a random one for each.
	DataKey func(generation uint64) identity.DataKey
	// Tasks takes the connections of workers that run or submit tasks. Nil: they are refused.
	Tasks Tasks
	// Also is another service for the same workers. Nil: there is none.
	Also OtherService
	// Store serves a connection of a worker to a store for programs in other languages, until the
	// worker closes it. Nil: they are refused.
	Store func(conn net.Conn) error
	// Log receives refused requests. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// OtherService is another service of the driver for workers.
type OtherService interface {
	// Register adds it to a server. caller returns the worker that makes a call, or a status of
	// gRPC for one that may not.
	Register(r grpc.ServiceRegistrar, caller func(context.Context) (identity.Subject, error))
	// Carried returns its methods for workers whose calls their agent carries.
	Carried() map[string]carry.Method
}

// Tasks is a scheduler of tasks.
type Tasks interface {
	// Handle serves a connection of a worker until it ends, or ctx does; it closes it.
	Handle(ctx context.Context, conn net.Conn, from identity.Subject) error
	// Expel says that the process of a worker has ended. It must not block.
	Expel(incarnation string)
	// Ended is Expel, and returns the functions whose tasks the process ran when it ended, at most
	// 8; none where it was told to end, which is stopped. It blocks while what the process has said
	// is read, 2 s at most.
	Ended(incarnation string, stopped bool) []string
	// Train says which workers have a place in the current world. It must not block.
	Train(incarnations []string)
}

// Server holds the current world and the joins that wait. It answers only workers that Admit has
// named: a certificate of the job is not enough, because it outlives its worker. Its methods are
// safe for concurrent use, before, during and after Serve.
type Server struct {
	cfg ServerConfig

	mu        sync.Mutex
	closed    bool
	current   *published
	waiting   map[string]*waiter // by incarnation
	dismissed map[string]*rendezvouspb.JoinReply
	admitted  map[string]identity.Subject // by incarnation
	handles   handles
	stores    stores
	widening

	sockets *wire.Known   // of workers
	agents  *wire.Known   // each carries the calls of its host's workers
	done    chan struct{} // closed when the server stops
}

// handles counts the bytes of the handles of all workers.
type handles struct {
	of    map[string]int // by incarnation
	total int
}

// take notes the length of a worker's handle, unless that is too much; 0 forgets it.
func (h *handles) take(inc string, length int) error {
	total := h.total - h.of[inc] + length
	if length > 0 && total > maxHandles {
		return fmt.Errorf("handles of %d bytes together; at most %d", total, maxHandles)
	}
	h.total = total
	if length == 0 {
		delete(h.of, inc)
	} else {
		h.of[inc] = length
	}
	return nil
}

// widening is what a Server knows of workers that listen on loopback alone. It is empty as long as
// all workers are on one machine.
type widening struct {
	wide bool // workers on other machines take part
	// asked are those that were asked to listen on other addresses, with all that they have since;
	// nil as long as they have not joined again.
	asked map[string][]string
	held  *world // published, but some of its members have not joined again; nil: none
}

// world is what Publish is given.
type world struct {
	plan.World
	members []Member
	root    int
	seq     uint64
}

// published is the current world in wire format. It is immutable, so all replies share it.
type published struct {
	generation uint64
	root       uint32
	seq        uint64
	ranks      map[string]uint32 // by incarnation
	members    []byte            // columns, encoded
	columns    *rendezvouspb.Members
	key        identity.DataKey
	store      uint64
	number     uint64 // of the members: another driver has others
	// difference from the members with the number base, encoded; nil: it is not worth while.
	difference []byte
	base       uint64
}

// waiter is a Join that waits. Removing it from Server.waiting obliges the remover to answer it,
// once.
type waiter struct {
	after  uint64
	has    uint64                               // number of the members that the worker has; 0: none
	narrow bool                                 // its worker listens on loopback alone, and need not
	answer func(*rendezvouspb.JoinReply, error) // must not block
}

type answer struct {
	reply *rendezvouspb.JoinReply
	err   error
}

// NewServer returns a server without a world. It starts nothing.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.DataKey == nil {
		cfg.DataKey = func(uint64) identity.DataKey { return identity.NewDataKey() }
	}
	return &Server{
		cfg: cfg, waiting: make(map[string]*waiter), dismissed: make(map[string]*rendezvouspb.JoinReply), admitted: make(map[string]identity.Subject),
		sockets: wire.NewKnown(), agents: wire.NewKnown(), done: make(chan struct{}),
		stores: newStores(), widening: widening{asked: make(map[string][]string)}, handles: handles{of: make(map[string]int)},
	}
}

// Admit lets a worker call the server, until Expel. It needs the subject's incarnation and host.
func (s *Server) Admit(worker identity.Subject) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.admitted[worker.Incarnation] = worker
}

// Expel refuses a worker from now on, whatever its credentials: its process has ended, or counts as
// ended. A join of it that waits fails.
func (s *Server) Expel(incarnation string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.admitted, incarnation)
	delete(s.dismissed, incarnation)
	_ = s.handles.take(incarnation, 0)
	s.stores.expel(incarnation)
	if s.cfg.Tasks != nil {
		s.cfg.Tasks.Expel(incarnation)
	}
	if w, ok := s.waiting[incarnation]; ok {
		delete(s.waiting, incarnation)
		w.answer(nil, errExpelled)
	}
}

var errExpelled = status.Error(codes.PermissionDenied, "this worker does not belong to the job any more")

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

// Publish sets the current world w, with its members by rank, its sync root, and the number of the
// last notification that it takes into account. The slots of w must be as plan.Place sets them. It
// answers the waiting joins of members that have left an older generation. It panics if members and
// w differ in size or root is not a rank of w. A world that is not newer than the current one is
// ignored. A world with a member that Widen has asked to join again is published when all of these
// have. Publish keeps none of its arguments and never blocks.
func (s *Server) Publish(w plan.World, members []Member, root int, seq uint64) {
	if len(members) != w.Size() || root < 0 || root >= w.Size() {
		panic(fmt.Sprintf("rendezvous: a world of %d slots, %d members and root %d", w.Size(), len(members), root))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = &world{w, slices.Clone(members), root, seq}
	s.publishHeld()
}

// Widen tells that workers on other machines take part from now on: workers that listen on loopback
// alone, those that wait included, are asked to listen on other addresses and to join again. It
// never blocks.
func (s *Server) Widen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wide = true
	for inc, w := range s.waiting {
		if w.narrow {
			delete(s.waiting, inc)
			w.answer(s.askToWiden(inc), nil)
		}
	}
}

// askToWiden returns what has a worker join again; the lock is held.
func (s *Server) askToWiden(inc string) *rendezvouspb.JoinReply {
	s.asked[inc] = nil
	return &rendezvouspb.JoinReply{Widen: true}
}

// widened notes with which addresses a worker has joined; the lock is held.
func (s *Server) widened(inc string, addrs []string) {
	if _, asked := s.asked[inc]; asked {
		s.asked[inc] = slices.Clone(addrs)
		s.publishHeld()
	}
}

// publishHeld publishes the world that was held, with the addresses that its members have now,
// unless some have not joined again; the lock is held.
func (s *Server) publishHeld() {
	if s.held == nil {
		return
	}
	for i, m := range s.held.members {
		if addrs, asked := s.asked[m.Incarnation]; asked && addrs == nil {
			return
		} else if asked {
			s.held.members[i].DataAddrs = addrs
		}
	}
	next := *s.held
	s.held = nil
	s.publish(next)
}

// isNarrow returns whether a worker listens on loopback alone, and can do otherwise.
func isNarrow(req *rendezvouspb.JoinRequest) bool {
	return req.GetCanWiden() && !slices.ContainsFunc(req.GetDataAddresses(), func(addr string) bool {
		at, err := netip.ParseAddrPort(addr)
		return err != nil || !at.Addr().IsLoopback()
	})
}

// publish makes a world the current one; the lock is held.
func (s *Server) publish(next world) {
	w, members, root, seq := next.World, next.members, next.root, next.seq
	columns := membersToWire(w, members)
	shared, err := proto.Marshal(columns)
	if err != nil {
		panic(fmt.Sprintf("rendezvous: a world that cannot be sent: %v", err)) // cannot happen: names and addresses are valid UTF-8
	}
	p := &published{
		generation: w.Generation, root: uint32(root), seq: seq,
		ranks:   make(map[string]uint32, len(members)),
		members: shared, columns: columns, key: s.cfg.DataKey(w.Generation), number: 1 + rand.Uint64N(math.MaxUint64),
	}
	p.differ(s.current)
	if s.cfg.Store != nil {
		p.store = s.stores.number
	}
	for r, m := range members {
		p.ranks[m.Incarnation] = uint32(r)
	}
	if s.current != nil && w.Generation <= s.current.generation {
		s.cfg.Log.Errorf("rendezvous: world %d is not newer than world %d: ignored", w.Generation, s.current.generation)
		return
	}
	s.current = p
	if s.cfg.Tasks != nil {
		s.cfg.Tasks.Train(slices.Collect(maps.Keys(p.ranks)))
	}
	for inc := range p.ranks {
		if waiting, ok := s.waiting[inc]; ok {
			if reply := p.reply(inc, waiting.after, waiting.has); reply != nil {
				delete(s.waiting, inc)
				waiting.answer(reply, nil)
			}
		}
	}
}

// differ notes how p differs from the world before, if that is much shorter than p itself.
func (p *published) differ(before *published) {
	if before == nil {
		return
	}
	d, err := proto.Marshal(difference(before.columns, p.columns))
	if err == nil && 4*len(d) < len(p.members) { // the members could be encoded, so there is no error
		p.difference, p.base = d, before.number
	}
}

// reply returns the answer to a join of inc after that generation, by a worker that has the members
// of that number; nil: the world does not answer it.
func (p *published) reply(inc string, after, has uint64) *rendezvouspb.JoinReply {
	if p == nil || p.generation <= after {
		return nil
	}
	rank, ok := p.ranks[inc]
	if !ok {
		return nil
	}
	w := p.world(rank, p.key)
	if p.difference != nil && has == p.base {
		w.Members, w.Difference = nil, p.difference
	}
	return &rendezvouspb.JoinReply{Outcome: &rendezvouspb.JoinReply_World{World: w}}
}

func (p *published) world(rank uint32, key identity.DataKey) *rendezvouspb.World {
	return &rendezvouspb.World{
		Generation: p.generation, Rank: rank, SyncRoot: p.root, Seq: p.seq, Size: uint32(len(p.ranks)), Members: p.members,
		DataKey: key.Bytes(), Store: p.store, MembersNumber: p.number,
	}
}

// Dismiss answers the current join of a worker and all later ones with why: ErrRemoved, ErrLast or
// ErrFinished; it panics for other errors. The last dismissal of a worker counts, and the worker is
// in no later world. Dismiss never blocks.
func (s *Server) Dismiss(incarnation string, why error) {
	var d rendezvouspb.Dismissal
	switch {
	case errors.Is(why, ErrRemoved):
		d = rendezvouspb.Dismissal_DISMISSAL_REMOVED
	case errors.Is(why, ErrFinished):
		d = rendezvouspb.Dismissal_DISMISSAL_FINISHED
	default:
		panic(fmt.Sprintf("rendezvous: %v is not a dismissal", why))
	}
	reply := &rendezvouspb.JoinReply{Outcome: &rendezvouspb.JoinReply_Dismissal{Dismissal: d}, Last: errors.Is(why, ErrLast)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dismissed[incarnation] = reply
	if w, ok := s.waiting[incarnation]; ok {
		delete(s.waiting, incarnation)
		w.answer(reply, nil)
	}
}

// arrive answers a join, or has it wait and returns true.
func (s *Server) arrive(inc string, req *rendezvouspb.JoinRequest, w *waiter) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		w.answer(nil, errStopping)
		return false
	}
	if old, ok := s.waiting[inc]; ok {
		delete(s.waiting, inc)
		old.answer(nil, status.Error(codes.Aborted, "superseded by another join of the same worker"))
	}
	if reply, ok := s.dismissed[inc]; ok {
		w.answer(reply, nil)
		return false
	}
	if s.wide && w.narrow {
		w.answer(s.askToWiden(inc), nil)
		return false
	}
	if err := s.handles.take(inc, len(req.GetHandle())); err != nil {
		w.answer(nil, status.Errorf(codes.ResourceExhausted, "join: %v", err))
		return false
	}
	s.widened(inc, req.GetDataAddresses())
	if reply := s.current.reply(inc, w.after, w.has); reply != nil {
		w.answer(reply, nil)
		return false
	}
	s.waiting[inc] = w
	return true
}

// leave removes the waiter of a call that was given up.
func (s *Server) leave(inc string, w *waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting[inc] == w {
		delete(s.waiting, inc)
	}
}

// join begins the call Join of a worker. It calls answer once, at once or later, unless what it
// returns is called.
func (s *Server) join(from identity.Subject, req *rendezvouspb.JoinRequest, answer func(*rendezvouspb.JoinReply, error)) (leave func()) {
	if err := validate(req); err != nil {
		answer(nil, s.invalid(from, "join", err))
		return nil
	}
	w := &waiter{after: req.GetAfterGeneration(), has: req.GetHasMembers(), narrow: isNarrow(req), answer: answer}
	if !s.arrive(from.Incarnation, req, w) {
		return nil
	}
	if s.cfg.Handler != nil {
		s.cfg.Handler.Joined(from, joiningFromWire(req))
	}
	return func() { s.leave(from.Incarnation, w) }
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
		rendezvouspb.Rendezvous_Join_FullMethodName: carry.Later(func(from identity.Subject, req *rendezvouspb.JoinRequest, answer func(carry.Reply)) func() {
			return s.join(from, req, func(reply *rendezvouspb.JoinReply, err error) { answer(carry.NewReply(reply, err)) })
		}),
		rendezvouspb.Rendezvous_Look_FullMethodName:   carry.AtOnce(s.look),
		rendezvouspb.Rendezvous_Report_FullMethodName: carry.AtOnce(s.report),
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
	from, err := v.s.caller(ctx)
	if err != nil {
		return nil, err
	}
	answered := make(chan answer, 1)
	leave := v.s.join(from, req, func(reply *rendezvouspb.JoinReply, err error) { answered <- answer{reply, err} })
	select {
	case a := <-answered:
		return a.reply, a.err
	case <-ctx.Done():
		if leave != nil {
			leave()
		}
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

func (v service) Look(ctx context.Context, req *rendezvouspb.LookRequest) (*rendezvouspb.World, error) {
	return answerCaller(ctx, v.s, req, v.s.look)
}

func (v service) Report(ctx context.Context, req *rendezvouspb.ReportRequest) (*rendezvouspb.ReportReply, error) {
	return answerCaller(ctx, v.s, req, v.s.report)
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

var reportsFromWire = map[rendezvouspb.Report]Report{
	rendezvouspb.Report_REPORT_DONE: Done, rendezvouspb.Report_REPORT_LEAVING: Leaving, rendezvouspb.Report_REPORT_COMMITTED: Committed,
	rendezvouspb.Report_REPORT_DRAINING: Draining, rendezvouspb.Report_REPORT_FETCHING: Fetching,
	rendezvouspb.Report_REPORT_WRITING: Writing, rendezvouspb.Report_REPORT_WRITTEN: Written, rendezvouspb.Report_REPORT_NOT_WRITTEN: NotWritten,
}

func (s *Server) report(from identity.Subject, req *rendezvouspb.ReportRequest) (*rendezvouspb.ReportReply, error) {
	if req.GetReport() == rendezvouspb.Report_REPORT_BACKEND {
		return s.reportBackend(from, req)
	}
	r, ok := reportsFromWire[req.GetReport()]
	if !ok {
		return nil, s.invalid(from, "report", fmt.Errorf("%d is not a report", req.GetReport()))
	}
	if s.cfg.Handler != nil {
		s.cfg.Handler.Reported(from, r, req.GetGeneration(), req.GetCommits())
	}
	return &rendezvouspb.ReportReply{}, nil
}

func (s *Server) reportBackend(from identity.Subject, req *rendezvouspb.ReportRequest) (*rendezvouspb.ReportReply, error) {
	if err := checkBackend(req.GetBackend()); err != nil {
		return nil, s.invalid(from, "report", err)
	}
	if h, ok := s.cfg.Handler.(BackendHandler); ok {
		h.BackendReported(from, req.GetGeneration(), req.GetBackend())
	}
	return &rendezvouspb.ReportReply{}, nil
}

func (s *Server) invalid(from identity.Subject, what string, err error) error {
	s.cfg.Log.Warnf("rendezvous: refused the %s of %v: %v", what, from, err)
	return status.Errorf(codes.InvalidArgument, "%s: %v", what, err)
}
