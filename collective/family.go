package collective

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
)

// lane describes a group to be made of ranks of a generation.
type lane struct {
	sockets.Lane
	strict  bool // every AllReduce is Strict
	oneWay  bool // as in membership
	carries bool // it performs operations of another group, which counts them
}

// laneID returns the id of child k of a group, by the kind of the child. Since it is derived from
// the id of the parent, the ranks need not agree on one. Ids are hashes: two equal ids in one
// generation are improbable, and are refused.
func laneID(parent uint64, kind byte, k uint64) uint64 {
	b := binary.BigEndian.AppendUint64(nil, parent)
	b = binary.BigEndian.AppendUint64(append(b, kind), k)
	sum := sha256.Sum256(b)
	return max(1, binary.BigEndian.Uint64(sum[:]))
}

// original returns the number of a rank of the group in the group of all ranks.
func (g *Group) original(rank int) int {
	if g.members == nil {
		return rank
	}
	return g.members[rank]
}

// family is the set of groups of one generation in this process. They fail together.
type family struct {
	*sockets.Generation // for ranks in one process: only its number and size are set
	settings
	connect    func(context.Context, lane) (*Group, error)         // connects the ranks of a lane
	startPeers func(g, lane *Group, start func(peer *Group) error) // makes the other ranks start their side of a lane of g; nil if a connection does that

	mu      sync.Mutex
	lanes   map[uint64]*Group
	failure *frame.Notice // the first failure
	told    []string      // what TellBackend has logged

	waits waits
}

// settings is the part of [Config] about the groups of a generation, without their connections.
type settings struct {
	onlySockets bool // this rank shares no memory
	log         logrus.FieldLogger
	timeline    Timeline                             // may be nil
	tally       *tally                               // nil for ranks in one process
	backend     func(generation uint64, name string) // as Config.Backend
	forced      exchange.Forced
	tuning      tuning
}

func newFamily(of *sockets.Generation) *family {
	return &family{Generation: of, lanes: map[uint64]*Group{}}
}

// group returns the group of a lane, or nil.
func (f *family) group(lane uint64) *Group {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lanes[lane]
}

// add adds a group. It returns false if the lane is taken. The caller then calls catchUp.
func (f *family) add(g *Group) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lanes[g.lane] != nil {
		return false
	}
	f.lanes[g.lane] = g
	return true
}

// catchUp fails a new group if its family has already failed.
func (f *family) catchUp(g *Group) {
	f.mu.Lock()
	n := f.failure
	f.mu.Unlock()
	if n != nil {
		g.failAs(*n)
	}
}

// remove removes a closed group. The group of all ranks remains, so that connections to it are
// refused as long as its generation lasts.
func (f *family) remove(g *Group) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if g.lane != 0 && f.lanes[g.lane] == g {
		delete(f.lanes, g.lane)
	}
}

// failOthers fails the other groups of the family.
func (f *family) failOthers(from *Group, n frame.Notice) {
	f.mu.Lock()
	if f.failure == nil {
		f.failure = &n
	}
	others := make([]*Group, 0, len(f.lanes))
	for _, g := range f.lanes {
		if g != from {
			others = append(others, g)
		}
	}
	f.mu.Unlock()
	for _, g := range others {
		g.failAs(n)
	}
}

// demand handles a lane that another rank wants to connect: it starts the engine of the lane, or
// connects a lane of messages. It returns frame.ErrLeft if the group is closed on this rank.
func (f *family) demand(lane uint64) error {
	f.mu.Lock()
	var of *Group
	start := func() error { _, err := of.engine(); return err }
	for _, g := range f.lanes {
		if laneID(g.lane, asyncLane, 0) == lane {
			of = g
		} else if key, ok := g.pointFor(lane); ok {
			of, start = g, func() error { return of.meet(key) }
		}
	}
	f.mu.Unlock()
	if of == nil || of.err() != nil { // if it has failed, the dialer is notified elsewhere
		return nil
	}
	if start() == ErrClosed {
		return frame.ErrLeft
	}
	return nil
}

// kin implements sockets.Groups for a family.
type kin family

func (f *kin) Path(lane uint64) (path *sockets.Path, there bool) {
	g := (*family)(f).group(lane)
	if g == nil {
		return nil, false
	}
	return g.call.TCP, true
}

func (f *kin) Paths() (all []*sockets.Path) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, g := range f.lanes {
		if g.call.TCP != nil {
			all = append(all, g.call.TCP)
		}
	}
	return all
}

func (f *kin) Demand(lane uint64) error { return (*family)(f).demand(lane) }
func (f *kin) FailAll(n frame.Notice)   { (*family)(f).failOthers(nil, n) }

func (f *kin) Failure() *frame.Notice {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failure
}

// outward returns a notice with the ranks as numbered in the group of all ranks.
func (g *Group) outward(n frame.Notice) frame.Notice {
	if g.members == nil {
		return n
	}
	if n.Mismatch {
		a, b := g.members[n.Ranks[0]], g.members[n.Ranks[1]]
		if g.oneWay { // both ranks have reported the sender's action
			n.Calls[1-exchange.Sender].What += uint64(operation.Recv - operation.Send)
		}
		m := frame.Mismatched(a, n.Calls[0], b, n.Calls[1])
		m.Tensor = n.Tensor
		return m
	}
	dead := make([]int, len(n.Dead))
	for i, r := range n.Dead {
		dead[i] = g.members[r]
	}
	slices.Sort(dead)
	return frame.Gone(n.Cause, dead...)
}

// inward is the inverse of outward. It drops ranks outside this group, which have no number in it.
func (g *Group) inward(n frame.Notice) frame.Notice {
	if g.members == nil {
		return n
	}
	if n.Mismatch {
		a, b := slices.Index(g.members, n.Ranks[0]), slices.Index(g.members, n.Ranks[1])
		if a >= 0 && b >= 0 {
			m := frame.Mismatched(a, n.Calls[0], b, n.Calls[1])
			m.Tensor = n.Tensor
			return m
		}
		return frame.Gone(fmt.Errorf("a rank outside this group: %w", errorOf(&n, g.generation)))
	}
	var dead []int
	for _, r := range n.Dead {
		if i := slices.Index(g.members, r); i >= 0 {
			dead = append(dead, i)
		}
	}
	slices.Sort(dead)
	if len(dead) == 0 {
		if n.Cause == nil {
			return frame.Gone(errOutside)
		}
		return frame.Gone(fmt.Errorf("%w: %w", errOutside, n.Cause))
	}
	return frame.Gone(n.Cause, dead...)
}

var errOutside = errors.New("a rank outside this group is gone")
