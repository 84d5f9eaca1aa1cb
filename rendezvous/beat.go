package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/connectivity"

	"github.com/hvdrun/hvdrun/internal/wire"
)

// MaxLanes is how many lanes a Beat may have.
const MaxLanes = 16

const (
	maxWhat   = 256         // bytes of the name of an operation
	beatBound = time.Second // longest that a beat waits for its answer
)

// Phase is what a worker does.
type Phase uint8

// The phases of a worker.
const (
	// Joins: it has asked for a world.
	Joins Phase = iota + 1
	// Connecting: it connects to the others of its world.
	Connecting
	// Outside: it is in its world, and its program not in elastic.Run.
	Outside
	// Syncing: it makes its state that of the others.
	Syncing
	// Training: it is in the program's training function.
	Training
	// Saving: it saves its state, in a commit.
	Saving
	// Resetting: it calls the program's OnReset functions.
	Resetting
	// Fetches: it has not joined yet, and brings the state from others before it does.
	Fetches
)

// String says what the worker is doing: "joining", "connecting", "outside of elastic.Run",
// "synchronising its state", "training", "saving its state", "in an OnReset function" or "fetching
// the state".
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

// Lane is how far a worker has come in one of the groups of its world: collective.Progress, and
// since when.
type Lane struct {
	// ID tells the group; 0 is that of all ranks. While these connect, a worker waits there in
	// operation 0.
	ID uint64
	// Operation is the number of the last operation that it has entered, the same for the same
	// operation on all ranks.
	Operation uint64
	Waiting   bool
	// For is how long it has been at that operation, or after it, at least.
	For time.Duration
	// What is the operation's name. Client.Beat cuts it to 256 bytes.
	What string
}

// BeatSpacing is by how much rarer the workers of a world of this size beat than once a second, so
// that the driver hears about a hundred of them a second at most: 1 for up to a hundred workers.
func BeatSpacing(size int) int { return max(1, (size+99)/100) }

// Beat is what a worker says of itself about once a second, in a world of more than a hundred
// workers more rarely: see [BeatSpacing].
type Beat struct {
	// Generation is that of the world that it is in, or has left last.
	Generation uint64
	Phase      Phase
	// Quiet is how long neither the phase nor any lane has changed, at least.
	Quiet time.Duration
	// Lanes are at most MaxLanes.
	Lanes []Lane
	// Commits is the number of its last commit in the generation; 0 for none.
	Commits uint64
	// Written is how many bytes of the job's last checkpoint are on the disk, while it writes that.
	Written uint64
}

// ErrNotConnected is returned by Client.Beat where there is no connection now.
var ErrNotConnected = errors.New("rendezvous: the driver is not connected")

// Connected tells whether there is a connection to the driver now. It does not block.
func (c *Client) Connected() bool { return c.conn.GetState() == connectivity.Ready }

// Beat tells the driver what the worker does, once: unlike the other calls it is not repeated, and
// lasts a second at most. Where there is no connection it begins to make one, and returns
// ErrNotConnected at once.
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

func (b Beat) toWire() *wire.BeatRequest {
	req := &wire.BeatRequest{
		Generation: b.Generation, Phase: wire.Phase(b.Phase), QuietNanoseconds: uint64(max(0, b.Quiet)),
		Lanes: make([]*wire.Lane, min(len(b.Lanes), MaxLanes)), Commits: b.Commits, Written: b.Written,
	}
	for i := range req.Lanes {
		l := &b.Lanes[i]
		req.Lanes[i] = &wire.Lane{
			Id: l.ID, Operation: l.Operation, Waiting: l.Waiting, Nanoseconds: uint64(max(0, l.For)), What: clip(l.What, maxWhat),
		}
	}
	return req
}

// beatFromWire checks what the wire's format does not bound.
func beatFromWire(req *wire.BeatRequest) (Beat, error) {
	b := Beat{
		Generation: req.GetGeneration(), Phase: Phase(req.GetPhase()), Quiet: time.Duration(req.GetQuietNanoseconds()),
		Commits: req.GetCommits(), Written: req.GetWritten(),
	}
	switch n := len(req.GetLanes()); {
	case req.GetPhase() < wire.Phase_PHASE_JOINING || req.GetPhase() > wire.Phase_PHASE_FETCHING:
		return b, fmt.Errorf("%d is no phase", req.GetPhase())
	case req.GetQuietNanoseconds() > math.MaxInt64:
		return b, errors.New("a duration out of range")
	case n > MaxLanes:
		return b, fmt.Errorf("%d lanes; at most %d", n, MaxLanes)
	case n > 0:
		b.Lanes = make([]Lane, n)
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
	return b, nil
}

func (v service) Beat(ctx context.Context, req *wire.BeatRequest) (*wire.BeatReply, error) {
	from, err := v.s.caller(ctx)
	if err != nil {
		return nil, err
	}
	b, err := beatFromWire(req)
	if err != nil {
		return nil, v.s.invalid(from, "beat", err)
	}
	if h, ok := v.s.cfg.Handler.(BeatHandler); ok {
		h.Beaten(from, b)
	}
	return &wire.BeatReply{}, nil
}
