// Package rendezvous is the driver's part of its workers' lines: it holds the current world, and
// the joins that wait for the next one.
//
// It is level-triggered: a join names the generation that its worker has left, and is answered with
// the current world if that is newer and includes the worker. A worker whose answer was lost
// repeats the join. The launcher that passes a line on vouches for the worker that it names.
package rendezvous

import (
	"context"
	"encoding/hex"
	"encoding/json"
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

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/plan"
)

// maxHandles bounds the total size of the handles of all workers, in bytes: each member of a world
// receives all of them.
const maxHandles = 8 << 20

// Handler receives the messages of workers. Its methods are called concurrently from the goroutines
// that receive lines, and must not block for long, since one such goroutine may receive the lines
// of many workers. They may call the Server's methods.
type Handler interface {
	// Joined is called for a join that must wait because no published world and no dismissal
	// answers it. A repeated join calls it again. A world published concurrently may answer the
	// join before the call; in that case j.After is below that world's generation, and Joined need
	// do nothing.
	Joined(from identity.Subject, j line.Joining)
	// Reported is called for a report, and again if the report is repeated. It, or a later
	// goroutine, calls noted once the report need not be repeated to another driver.
	Reported(from identity.Subject, r line.Report, generation, commits uint64, noted func())
	// BackendReported is called, as Reported is, with the backend of the device collectives of a
	// generation, a name that package line permits.
	BackendReported(from identity.Subject, generation uint64, backend string, noted func())
	// FailureReported is called, as Reported is, with the error of the worker's program, a text
	// that package line permits.
	FailureReported(from identity.Subject, text string, noted func())
	// Beaten is called for a heartbeat: about once a second from each worker.
	Beaten(from identity.Subject, b line.Beat)
	// Heard is called with what a worker has received.
	Heard(from identity.Subject, h line.Heard)
	// Located is called with the answer to a request for stacks.
	Located(from identity.Subject, s line.StacksLine)
}

// ServerConfig configures a Server.
type ServerConfig struct {
	// Handler receives the messages of workers.
	Handler Handler
	// Tell passes a line, and the bytes after it, on to workers, by incarnation. For a world, ranks
	// are the ranks of these workers; nil: the line is the same for all. A line may be lost. Tell
	// must not block.
	Tell func(workers []string, ranks []uint32, text, tail []byte)
	// DataKey returns the key of data connections of a generation. Nil: a random one for each.
	DataKey func(generation uint64) identity.DataKey
	// Tasks takes the connections of workers that run or submit tasks. Nil: they are refused.
	Tasks Tasks
	// Store serves a connection of a worker to a store for programs in other languages until the
	// worker closes it. Nil: such connections are refused.
	Store func(conn net.Conn) error
	// Log receives refused requests. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Tasks is a scheduler of tasks.
type Tasks interface {
	// Handle serves a connection of a worker until it or ctx ends, and closes it.
	Handle(ctx context.Context, conn net.Conn, from identity.Subject) error
	// Expel reports that the process of a worker has ended. It must not block.
	Expel(incarnation string)
	// Ended does what Expel does, and also returns the functions of at most 8 tasks that the
	// process ran when it ended. It returns none if stopped is set: the process was asked to end.
	// It blocks for at most 2 s while the last messages of the process are read.
	Ended(incarnation string, stopped bool) []string
	// Train sets the workers with a place in the current world. It must not block.
	Train(incarnations []string)
}

// Server holds the current world and the waiting joins. It answers only workers that were passed to
// Admit. Its methods are safe for concurrent use.
type Server struct {
	cfg ServerConfig

	mu        sync.Mutex
	current   *published
	waiting   map[string]*waiter          // by incarnation
	dismissed map[string]error            // the reasons, by incarnation
	admitted  map[string]identity.Subject // by incarnation
	handles   handles
	stores    stores
	widening
}

// handles counts the bytes of the handles of all workers.
type handles struct {
	of    map[string]int // by incarnation
	total int
}

// take records the length of a worker's handle, unless the total would be too large; 0 removes it.
func (h *handles) take(inc string, length int) error {
	total := h.total - h.of[inc] + length
	if length > 0 && total > maxHandles {
		return fmt.Errorf("the handles of all workers have %d bytes; at most %d are allowed", total, maxHandles)
	}
	h.total = total
	if length == 0 {
		delete(h.of, inc)
	} else {
		h.of[inc] = length
	}
	return nil
}

// widening is what a Server knows about workers that listen only on loopback addresses. It is empty
// while all workers are on one machine.
type widening struct {
	wide bool // workers on other machines take part
	// asked has the workers that were asked to listen on other addresses, with the addresses of
	// their later joins; nil: the worker has not joined again.
	asked map[string][]string
	held  *world // a world that was passed to Publish and waits until its members have joined again; nil: none
}

// expel forgets a worker, unless it is a member of the held world, which must not be published with
// the loopback address of a member that has not joined again.
func (w *widening) expel(inc string) {
	if w.held == nil || !slices.ContainsFunc(w.held.members, func(m line.Member) bool { return m.Incarnation == inc }) {
		delete(w.asked, inc)
	}
}

// world holds the arguments of Publish.
type world struct {
	plan.World
	members []line.Member
	root    int
	seq     uint64
}

// published is the current world in encoded form. It is immutable.
type published struct {
	generation uint64
	ranks      map[string]uint32 // by incarnation
	head       line.Message      // without the rank and the size of the tail
	members    []byte            // encoded columns
	columns    *line.Members
	key        identity.DataKey
	// difference is the encoded difference from the members with the number base; nil: it would not
	// be much shorter.
	difference []byte
	base       uint64
}

// waiter is a waiting join.
type waiter struct {
	after  uint64
	has    uint64 // number of the members that the worker has; 0: none
	narrow bool   // its worker listens only on loopback addresses, and can widen
}

// NewServer returns a Server without a world. It starts nothing.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.DataKey == nil {
		cfg.DataKey = func(uint64) identity.DataKey { return identity.NewDataKey() }
	}
	return &Server{
		cfg: cfg, waiting: make(map[string]*waiter), dismissed: make(map[string]error), admitted: make(map[string]identity.Subject),
		stores: newStores(), widening: widening{asked: make(map[string][]string)}, handles: handles{of: make(map[string]int)},
	}
}

// Admit accepts lines of a worker until Expel. The subject must have an incarnation and a host.
func (s *Server) Admit(worker identity.Subject) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.admitted[worker.Incarnation] = worker
}

// Expel ignores lines of a worker from now on: its process has ended, or counts as ended.
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
	delete(s.waiting, incarnation)
}

// Publish makes w the current world, with its members by rank, its sync root, and the number of the
// last notification that it takes into account. The slots of w must be as plan.Place sets them.
// Publish answers the waiting joins of members that have left an older generation. It panics if
// members and w differ in size or root is not a rank of w. It ignores a world that is not newer
// than the current one. If Widen has asked members of w to join again, w becomes current once all
// of them have. Publish keeps none of its arguments and never blocks.
func (s *Server) Publish(w plan.World, members []line.Member, root int, seq uint64) {
	if len(members) != w.Size() || root < 0 || root >= w.Size() {
		panic(fmt.Sprintf("rendezvous: a world of %d slots, %d members and root %d", w.Size(), len(members), root))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = &world{w, slices.Clone(members), root, seq}
	s.publishHeld()
}

// Widen records that workers on other machines take part from now on: workers that listen only on
// loopback addresses, including waiting ones, are asked to listen on other addresses and to join
// again. It never blocks.
func (s *Server) Widen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wide = true
	for inc, w := range s.waiting {
		if w.narrow {
			delete(s.waiting, inc)
			s.askToWiden(inc)
		}
	}
}

// askToWiden asks a worker to widen and join again; the lock is held.
func (s *Server) askToWiden(inc string) {
	s.asked[inc] = nil
	s.cfg.Tell([]string{inc}, nil, line.Down("widen", nil), nil)
}

// widened records the addresses with which a worker has joined again; the lock is held.
func (s *Server) widened(inc string, addrs []string) {
	if _, asked := s.asked[inc]; asked {
		s.asked[inc] = slices.Clone(addrs)
		s.publishHeld()
	}
}

// publishHeld publishes the held world with the new addresses of its members, unless some members
// have not joined again; the lock is held.
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

// isNarrow returns whether a worker listens only on loopback addresses but can listen on others.
func isNarrow(j *line.Joining) bool {
	return j.CanWiden && !slices.ContainsFunc(j.DataAddrs, func(addr string) bool {
		at, err := netip.ParseAddrPort(addr)
		return err != nil || !at.Addr().IsLoopback()
	})
}

// publish makes a world the current one; the lock is held.
func (s *Server) publish(next world) {
	w, members, root, seq := next.World, next.members, next.root, next.seq
	columns := line.NewMembers(w, members)
	key := s.cfg.DataKey(w.Generation)
	p := &published{
		generation: w.Generation, ranks: make(map[string]uint32, len(members)),
		members: columns.Append(nil), columns: columns, key: key,
		head: line.Message{
			Generation: w.Generation, Size: len(members), Root: root, Seq: seq,
			DataKey: hex.EncodeToString(key.Bytes()), Number: 1 + rand.Uint64N(math.MaxUint64),
		},
	}
	p.differ(s.current)
	if s.cfg.Store != nil {
		p.head.StoreNumber = s.stores.number
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
	var answered []string
	for inc := range p.ranks {
		if w := s.waiting[inc]; w != nil && p.answers(inc, w) {
			answered = append(answered, inc)
		}
	}
	s.answer(answered)
}

// answer answers waiting joins with the current world, with one line for all workers that have the
// same members; the lock is held.
func (s *Server) answer(workers []string) {
	var whole, differs []string
	for _, inc := range workers {
		if has := s.waiting[inc].has; s.current.difference != nil && has == s.current.base {
			differs = append(differs, inc)
		} else {
			whole = append(whole, inc)
		}
		delete(s.waiting, inc)
	}
	s.tellWorld(whole, s.current.head, s.current.members)
	head := s.current.head
	head.Base = s.current.base
	s.tellWorld(differs, head, s.current.difference)
}

func (s *Server) tellWorld(workers []string, head line.Message, tail []byte) {
	if len(workers) == 0 {
		return
	}
	ranks := make([]uint32, len(workers))
	for i, inc := range workers {
		ranks[i] = s.current.ranks[inc]
	}
	head.Is, head.Tail = "world", len(tail)
	s.cfg.Tell(workers, ranks, line.Text(head), tail)
}

// differ sets the difference of p from the world before, if that is much shorter than p itself.
func (p *published) differ(before *published) {
	if before == nil {
		return
	}
	if d := line.Difference(before.columns, p.columns).Append(nil); 4*len(d) < len(p.members) {
		p.difference, p.base = d, before.head.Number
	}
}

// answers reports whether the world answers a join of a worker.
func (p *published) answers(inc string, w *waiter) bool {
	if p == nil || p.generation <= w.after {
		return false
	}
	_, member := p.ranks[inc]
	return member
}

// Dismiss answers the current join of a worker and all later ones with why: line.ErrRemoved,
// ErrLast or ErrFinished; it panics for other errors. The last dismissal of a worker counts, and no
// later world includes the worker. Dismiss never blocks.
func (s *Server) Dismiss(incarnation string, why error) {
	text := line.Dismissed(why)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dismissed[incarnation] = why
	if s.waiting[incarnation] != nil {
		delete(s.waiting, incarnation)
		s.cfg.Tell([]string{incarnation}, nil, text, nil)
	}
}

// arrive answers a join, or makes it wait and returns true.
func (s *Server) arrive(inc string, j *line.Joining) (waits bool, err error) {
	w := &waiter{after: j.After, has: j.Has, narrow: isNarrow(j)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if why, ok := s.dismissed[inc]; ok {
		s.cfg.Tell([]string{inc}, nil, line.Dismissed(why), nil)
		return false, nil
	}
	if s.wide && w.narrow {
		s.askToWiden(inc)
		return false, nil
	}
	if err := s.handles.take(inc, len(j.Handle)); err != nil {
		return false, err
	}
	s.widened(inc, j.DataAddrs)
	s.waiting[inc] = w
	if s.current.answers(inc, w) {
		s.answer([]string{inc})
		return false, nil
	}
	return true, nil
}

// Hear handles a line that the launcher of a worker passes on. noted is called once the line need
// not be repeated to another driver. Hear does not keep text.
func (s *Server) Hear(incarnation string, text []byte, noted func()) {
	s.mu.Lock()
	from, belongs := s.admitted[incarnation]
	s.mu.Unlock()
	if !belongs {
		noted()
		return
	}
	what, err := line.Kind(text)
	switch {
	case err != nil:
		noted()
	case what == "report":
		err = s.report(from, text, noted)
	default:
		err = s.hear(from, what, text)
		noted()
	}
	if err != nil {
		s.cfg.Log.Warnf("rendezvous: refused a line (%.32q) of %v: %v", what, from, err)
		s.cfg.Tell([]string{from.Incarnation}, nil, line.Error(what+": "+err.Error(), what == "join"), nil)
	}
}

// hear handles a line that is not a report.
func (s *Server) hear(from identity.Subject, what string, text []byte) error {
	h := s.cfg.Handler
	switch what {
	case "join":
		j, err := read[line.Joining](text)
		if err != nil {
			return err
		}
		waits, err := s.arrive(from.Incarnation, &j)
		if waits {
			h.Joined(from, j)
		}
		return err
	case "pulse":
		b, err := read[line.Beat](text)
		if err == nil {
			h.Beaten(from, b)
		}
		return err
	case "look":
		s.look(from.Incarnation)
		return nil
	case "heard":
		l, err := read[line.Heard](text)
		if err == nil {
			h.Heard(from, l)
		}
		return err
	case "stacks":
		l, err := read[line.StacksLine](text)
		if err == nil {
			h.Located(from, l)
		}
		return err
	}
	return errors.New("this hvdrun does not know the line")
}

// read decodes and checks a line.
func read[T any](text []byte) (v T, err error) {
	err = json.Unmarshal(text, &v)
	if bounded, is := any(&v).(interface{ Check() error }); is && err == nil {
		err = bounded.Check()
	}
	return v, err
}

// report handles a report. noted is called even after an error.
func (s *Server) report(from identity.Subject, text []byte, noted func()) error {
	r, err := read[line.ReportLine](text)
	switch {
	case err != nil:
		noted()
	case r.What == "backend":
		s.cfg.Handler.BackendReported(from, r.Generation, r.Backend, noted)
	case r.What == "failed":
		s.cfg.Handler.FailureReported(from, r.Error, noted)
	default:
		s.cfg.Handler.Reported(from, r.Report(), r.Generation, r.Commits, noted)
	}
	return err
}

// look sends a worker the newest world, with a key for visits to its members.
func (s *Server) look(inc string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	head, tail := line.Message{}, []byte(nil)
	if s.current != nil && s.dismissed[inc] == nil {
		head, tail = s.current.head, s.current.members
		head.DataKey = hex.EncodeToString(s.current.key.ForVisits().Bytes())
	}
	head.Is, head.Tail = "looked", len(tail)
	s.cfg.Tell([]string{inc}, nil, line.Text(head), tail)
}
