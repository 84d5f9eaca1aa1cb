package collective

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"

	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// subsetLane is the kind of the lanes of subsets.
const subsetLane = 's'

// Subset returns a new group of some of the ranks of g. The new group has its own connections, so
// operations on the two groups never wait for each other. Subset is an operation of g: every rank
// calls it with the same list, and gets the new group if it is in the list, and nil otherwise. The
// ranks of the new group are the positions in the list. An empty list, a repeated rank or an
// unknown rank is an error on every rank and leaves g usable; lists that differ cause a
// [*MismatchError].
//
// The groups of a generation fail together: an error that ends one of them ends them all. In each
// group the error names the ranks as numbered in that group. Closing a subset does not affect g;
// closing g closes its subsets. Subset blocks until the new group is connected, with the bounds of
// [Endpoint.Connect].
func (g *Group) Subset(ctx context.Context, ranks []int) (*Group, error) {
	return g.Partition(ctx, [][]int{ranks})
}

// Partition makes several subsets at once that have no rank in common. It returns the one with this
// rank, or nil. The rules of [Group.Subset] apply to all the lists.
func (g *Group) Partition(ctx context.Context, lists [][]int) (*Group, error) {
	all := slices.Concat(lists...)
	lengths := make([]int, len(lists))
	for i, ranks := range lists {
		lengths[i] = len(ranks)
	}
	d := operation.Descriptor{Action: operation.Subset, Type: kernel.Uint8, Root: clampRoot(len(all)), Count: digest(slices.Concat(lengths, all))}
	var invalid error
	if slices.Contains(lengths, 0) {
		invalid = errNoRanks
	} else {
		invalid = checkRanks(g, all)
	}
	var k uint64
	err := g.run(ctx, d, invalid, func(c *levels.Call) error {
		if err := c.Agree(); err != nil {
			return err
		}
		k = g.subsets
		g.subsets += uint64(len(lists))
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
	l := lane{Lane: sockets.Lane{ID: laneID(g.lane, subsetLane, k), Rank: me, Size: len(ranks)}, strict: g.call.Strict}
	for _, r := range ranks {
		l.Members = append(l.Members, g.original(r))
	}
	child, err := g.family.connect(ctx, l)
	if !g.call.Strict {
		g.exitIfKilled()
	}
	if err != nil {
		return nil, fmt.Errorf("collective: Subset: %w", err)
	}
	g.adopt(child)
	return child, nil
}

// adopt makes child be closed when g is closed.
func (g *Group) adopt(child *Group) {
	g.mu.Lock()
	g.children = append(slices.DeleteFunc(g.children, func(c *Group) bool { return c.closing.Load() }), child)
	g.mu.Unlock()
	if g.closing.Load() {
		child.Close()
	}
}

// eachChild calls end for all children concurrently, and waits for the calls.
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

// digest returns a hash of numbers.
func digest(ranks []int) uint64 {
	h := fnv.New64a()
	for _, r := range ranks {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(r)))
	}
	return h.Sum64()
}

var errNoRanks = errors.New("the list of ranks is empty")

// checkRanks returns an error for a list that is empty, or has a repeated or unknown rank.
func checkRanks(g *Group, ranks []int) error {
	if g == nil {
		return nil
	}
	seen := make(map[int]bool, len(ranks))
	for _, r := range ranks {
		switch {
		case r < 0 || r >= g.size:
			return fmt.Errorf("rank %d is out of range: there are %d ranks", r, g.size)
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
