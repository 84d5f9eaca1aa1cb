package collective

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective/kernel"
)

// lane is a group that is to be made among ranks of a generation. Its id is derived from that of
// its parent, so that its ranks need not agree on one; 0 is the group of all ranks.
type lane struct {
	id         uint64
	rank, size int
	members    []int // as in Group
	strict     bool  // every AllReduce is Strict
}

// laneID names child k of a group. Ids come from a hash: that two in one generation are equal will
// not happen, and is refused.
func laneID(parent uint64, kind byte, k uint64) uint64 {
	b := binary.BigEndian.AppendUint64(nil, parent)
	b = binary.BigEndian.AppendUint64(append(b, kind), k)
	sum := sha256.Sum256(b)
	return max(1, binary.BigEndian.Uint64(sum[:]))
}

// kinds of children
const subsetLane = 's'

// original is a rank of the lane as the group of all ranks numbers it.
func (l *lane) original(rank int) int {
	if l.members == nil {
		return rank
	}
	return l.members[rank]
}

func (g *Group) original(rank int) int {
	if g.members == nil {
		return rank
	}
	return g.members[rank]
}

// algorithm is that of every AllReduce of the group.
func (g *Group) algorithm() Algorithm {
	if g.strict {
		return Strict
	}
	return g.family.algorithm
}

// family is the groups of one generation in this process. They fail together.
type family struct {
	generation uint64
	size       int                                         // of the group of all ranks
	connect    func(context.Context, lane) (*Group, error) // connects the ranks of a lane; nothing else
	hosts      []string                                    // of all ranks; nil: not known
	apart      bool                                        // this rank shares no memory
	log        logrus.FieldLogger
	timeline   Timeline                             // nil: nobody listens
	backend    func(generation uint64, name string) // as Config.Backend
	algorithm  Algorithm                            // of AllReduce
	segment    int                                  // most bytes of a frame, for tests; 0: as is best

	connections int                           // of the data channel of ranks of different hosts
	mesh        func(distance, size int) bool // what near tells, in tests; nil: as ever
	rouse       func(g, lane *Group)          // starts the engines of the other ranks of g; nil: they start as they are reached
	tuning      tuning

	mu      sync.Mutex
	lanes   map[uint64]*Group
	failure *notice  // the first one
	told    []string // backends

	dead atomic.Bool // the worker, a goroutine, has been killed: it says nothing any more
}

func newFamily(generation uint64, size int) *family {
	return &family{generation: generation, size: size, connections: 1, lanes: map[uint64]*Group{}}
}

func (f *family) group(lane uint64) *Group {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lanes[lane]
}

// add reports false where the lane is taken. The caller calls catchUp next.
func (f *family) add(g *Group) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lanes[g.lane] != nil {
		return false
	}
	f.lanes[g.lane] = g
	return true
}

// catchUp fails a new group whose family has failed already.
func (f *family) catchUp(g *Group) {
	f.mu.Lock()
	n := f.failure
	f.mu.Unlock()
	if n != nil {
		g.failAs(*n)
	}
}

// remove forgets a group that is closed. The one of all ranks stays: connections to it are refused
// for as long as its generation lasts.
func (f *family) remove(g *Group) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if g.lane != 0 && f.lanes[g.lane] == g {
		delete(f.lanes, g.lane)
	}
}

// spread fails the other groups of the family.
func (f *family) spread(from *Group, n notice) {
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

// demand starts the engine whose lane another rank wants to connect. Where that rank's group is
// closed here, it is told so.
func (f *family) demand(lane uint64) error {
	f.mu.Lock()
	var of *Group
	for _, g := range f.lanes {
		if laneID(g.lane, asyncLane, 0) == lane {
			of = g
		}
	}
	f.mu.Unlock()
	if of == nil || of.err() != nil { // where it has failed, the dialer will be told
		return nil
	}
	if _, err := of.engine(); err == ErrClosed {
		return errLeft
	}
	return nil
}

// outward is a notice with ranks as the group of all ranks numbers them.
func (g *Group) outward(n notice) notice {
	if g.members == nil {
		return n
	}
	if n.mismatch {
		a, b := g.members[n.ranks[0]], g.members[n.ranks[1]]
		m := mismatched(a, n.calls[0], b, n.calls[1])
		m.tensor = n.tensor
		return m
	}
	dead := make([]int, len(n.dead))
	for i, r := range n.dead {
		dead[i] = g.members[r]
	}
	slices.Sort(dead)
	return gone(n.cause, dead...)
}

// inward is the inverse of outward. Of ranks that are not in this group it cannot tell the numbers.
func (g *Group) inward(n notice) notice {
	if g.members == nil {
		return n
	}
	if n.mismatch {
		a, b := slices.Index(g.members, n.ranks[0]), slices.Index(g.members, n.ranks[1])
		if a >= 0 && b >= 0 {
			m := mismatched(a, n.calls[0], b, n.calls[1])
			m.tensor = n.tensor
			return m
		}
		return gone(fmt.Errorf("outside this group: %w", n.error(g.generation)))
	}
	var dead []int
	for _, r := range n.dead {
		if i := slices.Index(g.members, r); i >= 0 {
			dead = append(dead, i)
		}
	}
	slices.Sort(dead)
	if len(dead) == 0 {
		if n.cause == nil {
			return gone(errOutside)
		}
		return gone(fmt.Errorf("%w: %w", errOutside, n.cause))
	}
	return gone(n.cause, dead...)
}

var errOutside = errors.New("a rank outside this group is gone")

// Subset makes a group of some of the ranks of g, with connections of its own, so that operations
// on the two never wait for each other. It is an operation of g: every rank calls it, with the same
// list, and gets the new group if it is in the list, nil otherwise. Ranks of the new group are
// places in the list. A list that is empty, names a rank twice or one that there is not is an error
// on every rank and leaves g usable; lists that differ are a [*MismatchError].
//
// The groups of a generation fail together: what ends one of them with an error ends them all, in
// each of them with the ranks as it numbers them. To close a subset leaves g as it is; to close g
// closes its subsets. Subset blocks until the new group is connected, and bounds that as
// [Endpoint.Connect] does.
func (g *Group) Subset(ctx context.Context, ranks []int) (*Group, error) {
	return g.Partition(ctx, [][]int{ranks})
}

// Partition makes several subsets at a time, of which no two have a rank in common, and returns the
// one that this rank is in; nil if it is in none. What is said of [Group.Subset] holds for it, with
// all the lists in the place of one.
func (g *Group) Partition(ctx context.Context, lists [][]int) (*Group, error) {
	all := slices.Concat(lists...)
	lengths := make([]int, len(lists))
	for i, ranks := range lists {
		lengths[i] = len(ranks)
	}
	d := descriptor{action: subset, dtype: kernel.Uint8, root: clampRoot(len(all)), count: digest(slices.Concat(lengths, all))}
	var invalid error
	if slices.Contains(lengths, 0) {
		invalid = errNoRanks
	} else {
		invalid = checkRanks(g, all)
	}
	var k uint64
	err := g.run(ctx, d, invalid, func(c *call) error {
		if err := c.agree(); err != nil {
			return err
		}
		k = c.g.subsets
		c.g.subsets += uint64(len(lists))
		return nil
	})
	if err != nil {
		return nil, err
	}
	which := slices.IndexFunc(lists, func(ranks []int) bool { return slices.Contains(ranks, g.rank) })
	if which < 0 {
		return nil, nil
	}
	ranks := lists[which]
	k += uint64(which)
	me := slices.Index(ranks, g.rank)
	l := lane{id: laneID(g.lane, subsetLane, k), rank: me, size: len(ranks), members: make([]int, len(ranks)), strict: g.strict}
	for i, r := range ranks {
		l.members[i] = g.original(r)
	}
	child, err := g.family.connect(ctx, l)
	if !g.strict {
		g.survive()
	}
	if err != nil {
		return nil, fmt.Errorf("collective: Subset: %w", err)
	}
	g.adopt(child)
	return child, nil
}

// adopt has child end with g.
func (g *Group) adopt(child *Group) {
	g.mu.Lock()
	g.children = append(slices.DeleteFunc(g.children, func(c *Group) bool { return c.closing.Load() }), child)
	g.mu.Unlock()
	if g.closing.Load() {
		child.Close()
	}
}

// eachChild ends all children at the same time and waits.
func (g *Group) eachChild(end func(*Group)) {
	g.mu.Lock()
	children := g.children
	g.children = nil
	g.mu.Unlock()
	var ending sync.WaitGroup
	for _, c := range children {
		ending.Go(func() { end(c) })
	}
	ending.Wait()
}

func digest(ranks []int) uint64 {
	h := fnv.New64a()
	for _, r := range ranks {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(r)))
	}
	return h.Sum64()
}

var errNoRanks = errors.New("no ranks")

func checkRanks(g *Group, ranks []int) error {
	if g == nil {
		return nil
	}
	seen := make(map[int]bool, len(ranks))
	for _, r := range ranks {
		switch {
		case r < 0 || r >= g.size:
			return fmt.Errorf("there is no rank %d among %d", r, g.size)
		case seen[r]:
			return fmt.Errorf("rank %d is named twice", r)
		}
		seen[r] = true
	}
	if len(ranks) == 0 {
		return errNoRanks
	}
	return nil
}
