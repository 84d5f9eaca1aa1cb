package elastic

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/hvdrun/hvdrun/collective"
)

// announcement describes the pieces that a rank holds. All ranks exchange announcements in a sync.
type announcement struct {
	Replicas int
	Current  saveID
	Sets     []announcedSet
}

type announcedSet struct {
	ID         saveID
	Size, Mine int
	Orphans    []origin
	Holds      []int // sorted numbers of bundles
}

func (l *locals) announce() announcement {
	a := announcement{Replicas: l.replicas, Current: l.current}
	for _, s := range l.sets {
		a.Sets = append(a.Sets, announcedSet{s.id, s.size, s.mine, s.orphans, s.held()})
	}
	return a
}

// of returns the set with the ID in the announcement, or nil.
func (a *announcement) of(id saveID) *announcedSet {
	for i := range a.Sets {
		if a.Sets[i].ID == id {
			return &a.Sets[i]
		}
	}
	return nil
}

// assignment maps the bundles of a set to the ranks of a new world. It depends only on the
// announcements, so all ranks compute the same assignment.
type assignment struct {
	same    bool  // the new world has the ranks of the set, and each has its own pieces
	takes   []int // by new rank: number of the bundle that becomes its own; -1: none
	gives   []int // by number: the new rank that sends it to others; -1: lost
	orphans []int // bundles that no rank takes over, in order
	holding []map[int]bool
}

// assignPieces assigns to each rank of the set's world its own bundle. The other ranks, in their
// order, get the bundles of ranks that have left, and after these the orphaned bundles.
func assignPieces(set *announcedSet, all []announcement) assignment {
	total := set.Size + len(set.Orphans)
	h := assignment{same: len(all) == set.Size, takes: make([]int, len(all)), gives: make([]int, total), holding: make([]map[int]bool, len(all))}
	holders := make([][]int, total)
	owned := make([]bool, total)
	for r := range all {
		h.takes[r], h.holding[r] = -1, make(map[int]bool)
		s := all[r].of(set.ID)
		if s == nil {
			continue
		}
		h.takes[r] = s.Mine
		for _, n := range s.Holds {
			if n < 0 || n >= total {
				continue
			}
			holders[n] = append(holders[n], r)
			h.holding[r][n] = true
		}
		if s.Mine >= 0 && s.Mine < set.Size {
			owned[s.Mine], h.gives[s.Mine] = true, r
		}
	}
	for r, n := range h.takes {
		h.same = h.same && n == r
	}
	var free []int
	for n := range total {
		switch {
		case owned[n]:
		case len(holders[n]) == 0:
			h.gives[n] = -1
		default:
			h.gives[n] = holders[n][n%len(holders[n])]
			free = append(free, n)
		}
	}
	for r := range h.takes {
		if h.takes[r] < 0 && len(free) > 0 {
			h.takes[r], free = free[0], free[1:]
		}
	}
	h.orphans = free
	return h
}

// need describes which parts of a bundle a rank must receive.
type need struct {
	number int
	plain  bool // parts without a Redistribute function: it uses them, or keeps an orphaned bundle
	shared bool // parts whose Redistribute function needs all pieces
}

func (h *assignment) needs(r, number, size int, shared bool) need {
	if h.gives[number] < 0 || h.holding[r][number] {
		return need{number: number}
	}
	i := slices.Index(h.orphans, number)
	return need{number, h.takes[r] == number || i >= 0 && i%len(h.takes) == r, shared && !h.same && number < size}
}

// distribute sets every rank's Local parts in a new world, from the save that the root restores, to
// the rank's own pieces or those of a rank that has left. It also prepares the save at the end of
// the sync; see [State.keep]. Without Local parts it does nothing.
func (l *locals) distribute(ctx context.Context, g *collective.Group, root int) error {
	l.sync = nil
	if len(l.parts) == 0 {
		return nil
	}
	all, err := tell(ctx, g, l.announce())
	if err != nil {
		return err
	}
	l.replicas = all[root].Replicas
	// Only saves that are some rank's current one can be restored.
	used := make([]saveID, len(all))
	for r := range all {
		used[r] = all[r].Current
	}
	l.keepOnly(used...)
	set := all[root].of(all[root].Current)
	if set == nil || set.ID.Generation == l.worker.Generation() {
		return nil // no save, or one of this world: keep the live values
	}
	h := assignPieces(set, all)
	if set.Mine >= 0 && h.takes[root] != set.Mine {
		return fmt.Errorf("elastic: local parts: the ranks' announcements are inconsistent")
	}
	l.reportAssignment(g, set, &h)
	have, err := l.transfer(ctx, g, set, &h)
	if err != nil {
		return err
	}
	if err := l.apply(g, set, &h, have); err != nil {
		return err
	}
	l.sync = l.continueFrom(g, set, &h, have)
	return nil
}

// nextSave describes the save at the end of a sync: its set, and the base of its messages.
type nextSave struct {
	set    *pieceSet
	before bundle
	base   base
}

// transfer sends bundles to the ranks that need them, and returns all bundles that this rank had or
// has received.
func (l *locals) transfer(ctx context.Context, g *collective.Group, set *announcedSet, h *assignment) (map[int]bundle, error) {
	shared := slices.ContainsFunc(l.parts, localPart.shared)
	have := make(map[int]bundle)
	held := l.set(set.ID)
	if held != nil {
		for n, b := range held.of {
			have[n] = b
		}
	}
	moved := false
	parts := make([][]byte, g.Size())
	made := make(map[string][]byte)
	for r := range parts {
		var list []need
		for n := range h.gives {
			want := h.needs(r, n, set.Size, shared)
			moved = moved || want.plain || want.shared
			if (want.plain || want.shared) && h.gives[n] == g.Rank() {
				list = append(list, want)
			}
		}
		if len(list) == 0 {
			continue
		}
		key := fmt.Sprint(list)
		if made[key] == nil {
			made[key] = l.message(set.ID, list, have)
		}
		parts[r] = made[key]
	}
	if !moved {
		return have, nil
	}
	all, err := collective.AllToAll(ctx, g, parts)
	if err != nil {
		return nil, err
	}
	for from, m := range all {
		if from == g.Rank() || len(m) == 0 {
			continue
		}
		got, err := l.parse(m, set.ID, nil)
		if err != nil {
			return nil, fmt.Errorf("elastic: local parts: pieces from rank %d: %w", from, err)
		}
		for n, b := range got {
			have[n] = b
		}
	}
	return have, nil
}

// message encodes the bundles of a set that a rank needs.
func (l *locals) message(id saveID, list []need, have map[int]bundle) []byte {
	m := appendHead(nil, id, saveID{}, len(list))
	for _, want := range list {
		b := make(bundle, len(l.parts))
		for i, p := range l.parts {
			if p.shared() && want.shared || !p.shared() && want.plain {
				b[i] = have[want.number][i]
			}
		}
		m = appendBundle(m, want.number, -1, b)
	}
	return m
}

// apply sets the live values of the Local parts.
func (l *locals) apply(g *collective.Group, set *announcedSet, h *assignment, have map[int]bundle) error {
	for i, p := range l.parts {
		if p.shared() && !h.same {
			pieces := make([]*piece, set.Size)
			for n := range pieces {
				if b := have[n]; b != nil {
					pieces[n] = b[i]
				}
			}
			if err := p.deal(pieces, g.Rank(), g.Size()); err != nil {
				return err
			}
			continue
		}
		n := h.takes[g.Rank()]
		if n < 0 || have[n] == nil || have[n][i] == nil {
			continue
		}
		if err := p.read(have[n][i]); err != nil {
			return err
		}
	}
	return nil
}

// continueFrom returns the next save: it refers to bundles that ranks already hold, and keeps the
// orphaned ones.
func (l *locals) continueFrom(g *collective.Group, set *announcedSet, h *assignment, have map[int]bundle) *nextSave {
	mine, size := g.Rank(), g.Size()
	next := &nextSave{set: &pieceSet{size: size, mine: mine, of: make(map[int]bundle)}}
	for i, n := range h.orphans {
		o := origin{set.ID.Generation, n}
		if n >= set.Size {
			o = set.Orphans[n-set.Size]
		}
		next.set.orphans = append(next.set.orphans, o)
		if i%size == mine {
			b := have[n].settled()
			for j, p := range l.parts {
				if p.shared() {
					b[j] = nil // its Redistribute function has received it
				}
			}
			next.set.of[size+i] = b
		}
	}
	if n := h.takes[mine]; n >= 0 {
		next.before = have[n]
	}
	before := append(slices.Clone(h.takes), h.orphans...)
	next.base = base{set.ID, func(n int) int { return before[n] }, func(rank, n int) bool { return h.holding[rank][n] }}
	return next
}

// reportAssignment logs, on rank 0, which pieces are lost and which are taken over by no rank.
func (l *locals) reportAssignment(g *collective.Group, set *announcedSet, h *assignment) {
	if g.Rank() != 0 {
		return
	}
	var lost, left []string
	for n, r := range h.gives {
		o := origin{set.ID.Generation, n}
		if n >= set.Size {
			o = set.Orphans[n-set.Size]
		}
		switch {
		case r < 0:
			lost = append(lost, o.String())
		case n < set.Size && slices.Contains(h.orphans, n):
			left = append(left, o.String())
		}
	}
	names := func(which func(localPart) bool) string {
		var all []string
		for _, p := range l.parts {
			if which(p) {
				all = append(all, fmt.Sprintf("%q", p.label()))
			}
		}
		return strings.Join(all, ", ")
	}
	if len(lost) > 0 {
		l.worker.log.Warnf("lost with all their copies: the pieces of local parts %s of rank %s", names(func(localPart) bool { return true }), strings.Join(lost, ", "))
	}
	if plain := names(func(p localPart) bool { return !p.shared() }); len(left) > 0 && plain != "" {
		l.worker.log.Infof("no rank takes over the pieces of local parts %s of rank %s: they are kept for new workers", plain, strings.Join(left, ", "))
	}
}
