package elastic

import (
	"bytes"
	"context"
	"encoding/gob"
	"fmt"
	"slices"
	"strings"

	"github.com/hvdrun/hvdrun/collective"
)

// announcement is what each rank tells the others, at a sync, of the pieces that it has.
type announcement struct {
	Replicas int
	Current  saveID
	Sets     []announcedSet
}

type announcedSet struct {
	ID         saveID
	Size, Mine int
	Strays     []origin
	Holds      []int // numbers of bundles, in order
}

func (l *locals) announce() announcement {
	a := announcement{Replicas: l.replicas, Current: l.current}
	for _, s := range l.sets {
		a.Sets = append(a.Sets, announcedSet{s.id, s.size, s.mine, s.strays, s.held()})
	}
	return a
}

// of returns what is said of a set, or nil.
func (a *announcement) of(id saveID) *announcedSet {
	for i := range a.Sets {
		if a.Sets[i].ID == id {
			return &a.Sets[i]
		}
	}
	return nil
}

// gatherAnnouncements returns what all ranks announce, by rank.
func gatherAnnouncements(ctx context.Context, g *collective.Group, mine announcement) ([]announcement, error) {
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(mine); err != nil {
		return nil, fmt.Errorf("elastic: local parts: %w", err)
	}
	said, err := collective.AllGather(ctx, g, b.Bytes())
	if err != nil {
		return nil, err
	}
	all := make([]announcement, len(said))
	for r := range said {
		if err := gob.NewDecoder(bytes.NewReader(said[r])).Decode(&all[r]); err != nil {
			return nil, fmt.Errorf("elastic: local parts: what rank %d announces: %w", r, err)
		}
	}
	return all, nil
}

// handout is what becomes of the bundles of a set in a new world. It depends on what all ranks have
// announced alone.
type handout struct {
	same    bool  // the new world's ranks are the set's, and each has its own pieces
	takes   []int // by new rank: the number of the bundle that becomes its own; -1: none
	gives   []int // by number: the new rank that gives it to others; -1: it is lost
	strays  []int // the bundles that nobody takes, in their order
	holding []map[int]bool
}

// handOut decides it: who was in the set's world keeps its own; the others take, in their order,
// what is left of those who are gone, and of strays, in that of their numbers.
func handOut(set *announcedSet, all []announcement) handout {
	total := set.Size + len(set.Strays)
	h := handout{same: len(all) == set.Size, takes: make([]int, len(all)), gives: make([]int, total), holding: make([]map[int]bool, len(all))}
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
	h.strays = free
	return h
}

// need is what a rank has to be given of a bundle.
type need struct {
	number int
	plain  bool // the parts without a function: for itself, or to keep them as a stray's
	shared bool // those whose function wants all pieces
}

func (h *handout) needs(r, number, size int, shared bool) need {
	if h.gives[number] < 0 || h.holding[r][number] {
		return need{number: number}
	}
	i := slices.Index(h.strays, number)
	return need{number, h.takes[r] == number || i >= 0 && i%len(h.takes) == r, shared && !h.same && number < size}
}

// shareOut gives every rank's Local parts their values in a new world: of the save that the root
// goes back to, its own pieces or those of one who is gone. It returns what the save of the sync,
// [State.keep], is to begin with. Without Local parts it does nothing.
func (s *State) shareOut(ctx context.Context, g *collective.Group, root int) error {
	l := &s.locals
	l.sync = nil
	if len(l.parts) == 0 {
		return nil
	}
	all, err := gatherAnnouncements(ctx, g, l.announce())
	if err != nil {
		return err
	}
	l.replicas = all[root].Replicas
	// Nobody goes back to a save which is nobody's current one.
	used := make([]saveID, len(all))
	for r := range all {
		used[r] = all[r].Current
	}
	l.keepOnly(used...)
	set := all[root].of(all[root].Current)
	if set == nil || set.ID.Generation == s.worker.Generation() {
		return nil // there is nothing to go back to, or nobody goes back: live values stay
	}
	h := handOut(set, all)
	if set.Mine >= 0 && h.takes[root] != set.Mine {
		return fmt.Errorf("elastic: local parts: the announcements contradict each other")
	}
	s.reportHandout(g, set, &h)
	have, err := s.transfer(ctx, g, set, &h)
	if err != nil {
		return err
	}
	if err := l.assign(g, set, &h, have); err != nil {
		return err
	}
	l.sync = l.continueFrom(g, set, &h, have)
	return nil
}

// nextSave is the set of the save at the end of a sync, and what its messages refer to.
type nextSave struct {
	set    *pieceSet
	before bundle
	base   base
}

// transfer moves bundles to those that need them, and returns all that this rank has or was given.
func (s *State) transfer(ctx context.Context, g *collective.Group, set *announcedSet, h *handout) (map[int]bundle, error) {
	l := &s.locals
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
			return nil, fmt.Errorf("elastic: local parts: what rank %d gave: %w", from, err)
		}
		for n, b := range got {
			have[n] = b
		}
	}
	return have, nil
}

// message holds what a rank needs of a set.
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

// assign gives the live values.
func (l *locals) assign(g *collective.Group, set *announcedSet, h *handout, have map[int]bundle) error {
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

// continueFrom returns a save that refers to what ranks hold already, and keeps the strays.
func (l *locals) continueFrom(g *collective.Group, set *announcedSet, h *handout, have map[int]bundle) *nextSave {
	mine, size := g.Rank(), g.Size()
	next := &nextSave{set: &pieceSet{size: size, mine: mine, of: make(map[int]bundle)}}
	for i, n := range h.strays {
		o := origin{set.ID.Generation, n}
		if n >= set.Size {
			o = set.Strays[n-set.Size]
		}
		next.set.strays = append(next.set.strays, o)
		if i%size == mine {
			b := have[n].settled()
			for j, p := range l.parts {
				if p.shared() {
					b[j] = nil // its function has had it
				}
			}
			next.set.of[size+i] = b
		}
	}
	if n := h.takes[mine]; n >= 0 {
		next.before = have[n]
	}
	before := append(slices.Clone(h.takes), h.strays...)
	next.base = base{set.ID, func(n int) int { return before[n] }, func(rank, n int) bool { return h.holding[rank][n] }}
	return next
}

// reportHandout says once in the world which pieces are lost, and which nobody takes.
func (s *State) reportHandout(g *collective.Group, set *announcedSet, h *handout) {
	if g.Rank() != 0 {
		return
	}
	var lost, left []string
	for n, r := range h.gives {
		o := origin{set.ID.Generation, n}
		if n >= set.Size {
			o = set.Strays[n-set.Size]
		}
		switch {
		case r < 0:
			lost = append(lost, o.String())
		case n < set.Size && slices.Contains(h.strays, n):
			left = append(left, o.String())
		}
	}
	names := func(which func(localPart) bool) string {
		var all []string
		for _, p := range s.locals.parts {
			if which(p) {
				all = append(all, fmt.Sprintf("%q", p.name()))
			}
		}
		return strings.Join(all, ", ")
	}
	if len(lost) > 0 {
		s.worker.log.Warnf("lost, with all who kept them: the pieces of local parts %s of rank %s", names(func(localPart) bool { return true }), strings.Join(lost, ", "))
	}
	if plain := names(func(p localPart) bool { return !p.shared() }); len(left) > 0 && plain != "" {
		s.worker.log.Infof("nobody takes the pieces of local parts %s of rank %s: they are kept for workers to come", plain, strings.Join(left, ", "))
	}
}

// replicateSync is replicate for the save at the end of a sync.
func (s *State) replicateSync(ctx context.Context) error {
	l, p := &s.locals, s.worker.place.Load()
	if l.sync == nil {
		return s.replicateAfter(ctx, l.set(l.current))
	}
	l.sync.set.id = l.next(p.world)
	return s.prepare(ctx, p, l.sync.set, l.sync.before, l.sync.base)
}

// keep ends a sync: what is live is saved, on all ranks, as commit number commits.
func (s *State) keep(ctx context.Context, g *collective.Group, commits uint64) error {
	l := &s.locals
	if len(l.parts) > 0 {
		if err := s.replicateSync(ctx); err != nil {
			return err
		}
	}
	if err := s.save(commits); err != nil {
		return err
	}
	s.commits, s.holds, s.agreed = commits, true, true
	if len(l.parts) == 0 {
		return nil
	}
	l.counted()
	if err := collective.Barrier(ctx, g); err != nil {
		return err
	}
	l.settled()
	return nil
}
