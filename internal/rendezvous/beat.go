package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

// MaxLanes is the largest number of lanes in a Beat, MaxWaits that of waits, and MaxEntered that of
// phases.
const (
	MaxLanes   = 16
	MaxWaits   = 64
	MaxEntered = 16
)

const (
	maxWhat   = 256         // bytes of an operation's name
	beatBound = time.Second // timeout of the reply to a heartbeat or a check of health
)

// Phase is a worker's current activity.
type Phase uint8

// The phases of a worker.
const (
	// Joins: it waits in a join.
	Joins Phase = iota + 1
	// Connecting: it connects to the other ranks of its world.
	Connecting
	// Outside: it is in its world, but its program is not in elastic.Run.
	Outside
	// Syncing: it receives or gives the state.
	Syncing
	// Training: it is in the program's training function.
	Training
	// Saving: it saves its state, in a commit.
	Saving
	// Resetting: it calls the program's OnReset functions.
	Resetting
	// Fetches: it fetches the state from other workers before it joins.
	Fetches
)

// String describes the phase: "joining", "connecting", "outside of elastic.Run", "synchronising its
// state", "training", "saving its state", "in an OnReset function" or "fetching the state".
func (p Phase) String() string {
	switch p {
	case Joins:
		return "joining"
	case Connecting:
		return "connecting"
	case Outside:
		return "outside of elastic.Run"
	case Syncing:
		return "synchronising its state"
	case Training:
		return "training"
	case Saving:
		return "saving its state"
	case Resetting:
		return "in an OnReset function"
	case Fetches:
		return "fetching the state"
	}
	return fmt.Sprintf("in phase %d", uint8(p))
}

// Lane is a worker's progress in one of the groups of its world, from collective.Progress.
type Lane struct {
	// ID identifies the group; 0 is the group of all ranks. While the ranks connect, a worker waits
	// in operation 0 of that lane.
	ID uint64
	// Operation is the number of the last operation that the worker has entered. Operations have
	// the same numbers on all ranks.
	Operation uint64
	Waiting   bool
	// For is how long the worker has been in that operation, or has not entered another one, at
	// least.
	For time.Duration
	// What is the operation's name. Client.Beat truncates it to 256 bytes.
	What string
}

// BeatSpacing is the number of seconds between two beats of a worker in a world of this size, so
// that the driver gets about a hundred of them a second at most: 1 for up to a hundred workers.
func BeatSpacing(size int) int { return max(1, (size+99)/100) }

// Beat is a worker's heartbeat, sent about once a second, or less often in a world of more than a
// hundred workers: see [BeatSpacing].
type Beat struct {
	// Generation is the generation of the worker's current or last world.
	Generation uint64
	Phase      Phase
	// Quiet is how long neither the phase nor any lane has changed, at least.
	Quiet time.Duration
	// Lanes has at most MaxLanes elements.
	Lanes []Lane
	// Commits is the number of the worker's last commit in the generation; 0: none.
	Commits uint64
	// Written is the number of bytes on disk of a last checkpoint that the worker is writing.
	Written uint64
	// Trained is whether the worker's training function has returned in the generation; nil:
	// unknown.
	Trained *bool
	// Counters are what the worker has done since it began; nil: unknown.
	Counters *Counters
	// Usage is what the worker's process uses; nil: unknown.
	Usage *proc.Usage
	// Figures are the newest numbers that the worker's program has reported, by distinct names. It
	// has at most MaxFigures elements.
	Figures []Figure
	// Waits are how long the worker was in operations that have ended lately. It has at most
	// MaxWaits elements.
	Waits []Wait
	// Entered are the phases that the worker has entered on its way into the world of the
	// generation, in order. Nil: they were sent before. It has at most MaxEntered elements.
	Entered []Entered
}

// Figure is a number that a program reports, such as its loss.
type Figure struct {
	Name  string // of 1 to 32 of the characters a-z, A-Z, 0-9, +, -, . and _
	Value float64
}

// MaxFigures is the largest number of elements of Beat.Figures.
const MaxFigures = 16

// SetFigure returns figures with f, in place of an older one of that name. It returns an error if
// the name is not allowed or there are more than MaxFigures names.
func SetFigure(all []Figure, f Figure) ([]Figure, error) {
	if err := checkWord(f.Name); err != nil {
		return all, err
	}
	if i := slices.IndexFunc(all, func(has Figure) bool { return has.Name == f.Name }); i >= 0 {
		all[i] = f
		return all, nil
	}
	if len(all) >= MaxFigures {
		return all, fmt.Errorf("%q is one name too many; at most %d are allowed", f.Name, MaxFigures)
	}
	return append(all, f), nil
}

// usageFromWire converts what a process uses, and checks its bounds.
func usageFromWire(w *rendezvouspb.Usage) (*proc.Usage, error) {
	if w == nil {
		return nil, nil
	}
	if w.GetProcessorNanoseconds() > math.MaxInt64 {
		return nil, errors.New("a duration out of range")
	}
	return &proc.Usage{
		Processor: time.Duration(w.GetProcessorNanoseconds()), Resident: w.GetResidentBytes(), Used: w.GetUsedBytes(), Limit: w.GetLimitBytes(),
	}, nil
}

// figuresFromWire converts the numbers of a program, and checks them.
func figuresFromWire(w []*rendezvouspb.Figure) (all []Figure, err error) {
	for _, f := range w {
		if all, err = SetFigure(all, Figure{f.GetName(), f.GetValue()}); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Counters are what a worker has done since it began. They only grow.
type Counters struct {
	// Commits is the number of its commits, CommitTime how long they took, and CommitBytes how many
	// bytes of tensors they looked at, to copy those that had changed.
	Commits     uint64
	CommitTime  time.Duration
	CommitBytes uint64
	// Operations are its collective operations, at most MaxOperations elements.
	Operations []Operations
}

// MaxOperations is the largest number of elements of Counters.Operations.
const MaxOperations = 128

// maxSizeClass is the largest Operations.SizeClass.
const maxSizeClass = 15

// Operations are collective operations of a kind, a backend and a class of sizes, from
// collective.Operations.
type Operations struct {
	Kind, Backend string // of 1 to 32 of the characters a-z, A-Z, 0-9, +, -, . and _
	SizeClass     int
	Count         uint64
	Duration      time.Duration
	Bytes         uint64
}

func (c *Counters) toWire() *rendezvouspb.Counters {
	if c == nil {
		return nil
	}
	w := &rendezvouspb.Counters{
		Commits: c.Commits, CommitNanoseconds: uint64(max(0, c.CommitTime)), CommitBytes: c.CommitBytes,
		Operations: make([]*rendezvouspb.Operations, min(len(c.Operations), MaxOperations)),
	}
	for i := range w.Operations {
		o := &c.Operations[i]
		w.Operations[i] = &rendezvouspb.Operations{
			Kind: o.Kind, Backend: o.Backend, SizeClass: uint32(o.SizeClass), Count: o.Count,
			Nanoseconds: uint64(max(0, o.Duration)), Bytes: o.Bytes,
		}
	}
	return w
}

// countersFromWire converts counters and checks their bounds.
func countersFromWire(w *rendezvouspb.Counters) (*Counters, error) {
	if w == nil {
		return nil, nil
	}
	if n := len(w.GetOperations()); n > MaxOperations {
		return nil, fmt.Errorf("%d kinds of operations; at most %d", n, MaxOperations)
	}
	if w.GetCommitNanoseconds() > math.MaxInt64 {
		return nil, errors.New("a duration out of range")
	}
	c := &Counters{
		Commits: w.GetCommits(), CommitTime: time.Duration(w.GetCommitNanoseconds()), CommitBytes: w.GetCommitBytes(),
	}
	if len(w.GetOperations()) > 0 {
		c.Operations = make([]Operations, len(w.GetOperations()))
	}
	for i, o := range w.GetOperations() {
		if err := errors.Join(checkWord(o.GetKind()), checkWord(o.GetBackend())); err != nil {
			return nil, err
		}
		if o.GetNanoseconds() > math.MaxInt64 || o.GetSizeClass() > maxSizeClass {
			return nil, errors.New("a duration or a size out of range")
		}
		c.Operations[i] = Operations{
			Kind: o.GetKind(), Backend: o.GetBackend(), SizeClass: int(o.GetSizeClass()), Count: o.GetCount(),
			Duration: time.Duration(o.GetNanoseconds()), Bytes: o.GetBytes(),
		}
	}
	return c, nil
}

// checkWord validates the name of a kind of operations or of a backend.
func checkWord(name string) error {
	if name == "" || len(name) > maxBackend {
		return fmt.Errorf("a name of %d bytes; 1 to %d are allowed", len(name), maxBackend)
	}
	for _, c := range []byte(name) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '+', c == '-', c == '.', c == '_':
		default:
			return fmt.Errorf("name %q; only letters, digits, +, -, . and _ are allowed", name)
		}
	}
	return nil
}

// Wait is how long one operation took on a worker, from collective.Wait.
type Wait struct {
	// Operation identifies it on all ranks.
	Operation uint64
	// For has the resolution of a microsecond on the wire, and a maximum of 71 minutes.
	For time.Duration
}

// Entered is that a worker has entered a phase, and how long before the heartbeat.
type Entered struct {
	Phase Phase
	Ago   time.Duration
}

// ErrNotConnected is returned by Client.Beat if there is no connection.
var ErrNotConnected = errors.New("rendezvous: the driver is not connected")

// Connected reports whether there is a connection to the driver now: the worker's, or that of the
// agent which carries its calls. It blocks until the agent answers, a second at most; an agent that
// does not is taken to be connected.
func (c *Client) Connected(ctx context.Context) bool {
	if c.conn.GetState() != connectivity.Ready {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, beatBound)
	defer cancel()
	r, err := grpc_health_v1.NewHealthClient(c.conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	switch status.Code(err) {
	case codes.OK:
		return r.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING
	case codes.Unavailable:
		return false
	default: // Unimplemented: a driver has answered
		return true
	}
}

// Beat sends a heartbeat. Unlike other calls it is not repeated and takes at most a second. Without
// a connection it starts connecting and returns ErrNotConnected at once.
func (c *Client) Beat(ctx context.Context, b Beat) error {
	switch c.conn.GetState() {
	case connectivity.Ready:
	case connectivity.Idle:
		c.conn.Connect()
		return ErrNotConnected
	default:
		return ErrNotConnected
	}
	ctx, cancel := context.WithTimeout(ctx, beatBound)
	defer cancel()
	if _, err := c.rpc.Beat(ctx, b.toWire()); err != nil {
		return fmt.Errorf("rendezvous: beat: %w", plain(err))
	}
	return nil
}

func (b Beat) toWire() *rendezvouspb.BeatRequest {
	req := &rendezvouspb.BeatRequest{
		Generation: b.Generation, Phase: rendezvouspb.Phase(b.Phase), QuietNanoseconds: uint64(max(0, b.Quiet)),
		Lanes: make([]*rendezvouspb.Lane, min(len(b.Lanes), MaxLanes)), Commits: b.Commits, Written: b.Written,
		Trained: b.Trained, Counters: b.Counters.toWire(),
	}
	if u := b.Usage; u != nil {
		req.Usage = &rendezvouspb.Usage{
			ProcessorNanoseconds: uint64(max(0, u.Processor)), ResidentBytes: u.Resident, UsedBytes: u.Used, LimitBytes: u.Limit,
		}
	}
	for _, f := range b.Figures[:min(len(b.Figures), MaxFigures)] {
		req.Figures = append(req.Figures, &rendezvouspb.Figure{Name: f.Name, Value: f.Value})
	}
	for _, w := range b.Waits[:min(len(b.Waits), MaxWaits)] {
		req.WaitOperations = append(req.WaitOperations, w.Operation)
		req.WaitMicroseconds = append(req.WaitMicroseconds, uint32(min(max(0, w.For.Microseconds()), math.MaxUint32)))
	}
	for _, e := range b.Entered[:min(len(b.Entered), MaxEntered)] {
		req.Entered = append(req.Entered, rendezvouspb.Phase(e.Phase))
		req.EnteredNanoseconds = append(req.EnteredNanoseconds, uint64(max(0, e.Ago)))
	}
	for i := range req.Lanes {
		l := &b.Lanes[i]
		req.Lanes[i] = &rendezvouspb.Lane{
			Id: l.ID, Operation: l.Operation, Waiting: l.Waiting, Nanoseconds: uint64(max(0, l.For)), What: clip(l.What, maxWhat),
		}
	}
	return req
}

// beatFromWire converts a heartbeat and checks the bounds that the wire format does not.
func beatFromWire(req *rendezvouspb.BeatRequest) (Beat, error) {
	b := Beat{
		Generation: req.GetGeneration(), Phase: Phase(req.GetPhase()), Quiet: time.Duration(req.GetQuietNanoseconds()),
		Commits: req.GetCommits(), Written: req.GetWritten(), Trained: req.Trained,
	}
	switch n := len(req.GetLanes()); {
	case !validPhase(req.GetPhase()):
		return b, fmt.Errorf("%d is not a phase", req.GetPhase())
	case req.GetQuietNanoseconds() > math.MaxInt64:
		return b, errors.New("a duration out of range")
	case n > MaxLanes:
		return b, fmt.Errorf("%d lanes; at most %d", n, MaxLanes)
	case n > 0:
		b.Lanes = make([]Lane, n)
	}
	if err := b.columnsFromWire(req); err != nil {
		return b, err
	}
	for i, l := range req.GetLanes() {
		switch {
		case len(l.GetWhat()) > maxWhat || !utf8.ValidString(l.GetWhat()):
			return b, fmt.Errorf("an operation's name of %d bytes; at most %d", len(l.GetWhat()), maxWhat)
		case l.GetNanoseconds() > math.MaxInt64:
			return b, errors.New("a duration out of range")
		}
		b.Lanes[i] = Lane{
			ID: l.GetId(), Operation: l.GetOperation(), Waiting: l.GetWaiting(), For: time.Duration(l.GetNanoseconds()), What: l.GetWhat(),
		}
	}
	var err error
	if b.Usage, err = usageFromWire(req.GetUsage()); err != nil {
		return b, err
	}
	if b.Figures, err = figuresFromWire(req.GetFigures()); err != nil {
		return b, err
	}
	b.Counters, err = countersFromWire(req.GetCounters())
	return b, err
}

// columnsFromWire takes what is sent in columns, which must be of one length.
func (b *Beat) columnsFromWire(req *rendezvouspb.BeatRequest) error {
	operations, waits := req.GetWaitOperations(), req.GetWaitMicroseconds()
	phases, ago := req.GetEntered(), req.GetEnteredNanoseconds()
	switch {
	case len(operations) != len(waits) || len(waits) > MaxWaits:
		return fmt.Errorf("%d waits of %d operations; at most %d", len(waits), len(operations), MaxWaits)
	case len(phases) != len(ago) || len(phases) > MaxEntered:
		return fmt.Errorf("%d times of %d phases; at most %d", len(ago), len(phases), MaxEntered)
	}
	for i, us := range waits {
		b.Waits = append(b.Waits, Wait{operations[i], time.Duration(us) * time.Microsecond})
	}
	for i, p := range phases {
		if !validPhase(p) || ago[i] > math.MaxInt64 {
			return fmt.Errorf("phase %d, entered %d ns ago", p, ago[i])
		}
		b.Entered = append(b.Entered, Entered{Phase(p), time.Duration(ago[i])})
	}
	return nil
}

func validPhase(p rendezvouspb.Phase) bool {
	return p >= rendezvouspb.Phase_PHASE_JOINING && p <= rendezvouspb.Phase_PHASE_FETCHING
}

func (s *Server) beat(from identity.Subject, req *rendezvouspb.BeatRequest) (*rendezvouspb.BeatReply, error) {
	b, err := beatFromWire(req)
	if err != nil {
		return nil, s.invalid(from, "beat", err)
	}
	if h, ok := s.cfg.Handler.(BeatHandler); ok {
		h.Beaten(from, b)
	}
	return &rendezvouspb.BeatReply{}, nil
}
