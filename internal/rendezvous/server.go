package rendezvous

import (
	"context"
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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/plan"
)

// Handler receives the workers' calls. Its methods are called concurrently from the goroutines of
// connections and must not block for long, since one of those may have the calls of many workers;
// they may call the Server's methods.
type Handler interface {
	// Joined is called for a join that has to wait because no published world and no dismissal
	// answers it. A repeated join calls it again. A world that is published concurrently may answer
	// the join before the call; j.After is below its generation then, and there is nothing to do.
	Joined(from identity.Subject, j Joining)
	// Reported is called for a report, twice if the report was repeated. It has noted called once
	// the worker need not repeat the report to another driver.
	Reported(from identity.Subject, r Report, generation, commits uint64, noted func())
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
	// of 1 to 32 of the characters a-z, 0-9, '+', '-', '.' and '_'. It is called as Reported is.
	BackendReported(from identity.Subject, generation uint64, backend string, noted func())
}

// FailureHandler is a Handler that also receives what programs say of the errors that end them.
type FailureHandler interface {
	Handler
	// FailureReported is called with the error of the worker's program: a text that CleanError
	// returns. It is called as Reported is.
	FailureReported(from identity.Subject, text string, noted func())
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

// expel forgets a worker. A held world keeps what it has of its members: it must not be published
// with the loopback address of one that has not joined again.
func (w *widening) expel(inc string) {
	if w.held == nil || !slices.ContainsFunc(w.held.members, func(m Member) bool { return m.Incarnation == inc }) {
		delete(w.asked, inc)
	}
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
	s.widening.expel(incarnation)
	if s.cfg.Tasks != nil {
		s.cfg.Tasks.Expel(incarnation)
	}
	if w, ok := s.waiting[incarnation]; ok {
		delete(s.waiting, incarnation)
		w.answer(nil, errExpelled)
	}
}

var errExpelled = status.Error(codes.PermissionDenied, "this worker does not belong to the job any more")

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
