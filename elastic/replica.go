package elastic

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/line"
)

// The sync root does not have the Local pieces of other ranks, so ranks keep copies for each other.
// In a commit of a state with Local parts, each rank
//
//  1. encodes its pieces and sends them to the ranks that keep copies,
//  2. waits in a barrier,
//  3. saves everything and counts the commit,
//  4. takes part in the agreement on host updates, and only then frees the pieces of the previous
//     commit.
//
// A rank that has counted a commit has passed the barrier, so all ranks have made the commit and
// all copies have arrived. A rank that has freed the previous commit's pieces has passed the
// agreement, so all ranks have counted this commit. Therefore, whichever rank is the next sync
// root, all living ranks still have their own pieces and their copies of the commit that the root
// restores. A sync ends with the same steps, because its result is a save like a commit.
//
// A save is identified by its world and a count in that world, because a sync can assign the same
// commit number to a save of another world.

// saveID identifies a save that all ranks of a world have made together. The zero value stands for
// no save.
type saveID struct{ Generation, Save uint64 }

// piece is the value of a Local part on one rank.
type piece = transfer.Value

// bundle contains one rank's pieces, one for each Local part; nil: no piece of that part.
type bundle []*piece

func (b bundle) size() (n int) {
	for _, p := range b {
		if p != nil {
			n += p.Len()
		}
	}
	return n
}

// settled returns the bundle that follows b if no piece changes, with values that refer to those of
// b.
func (b bundle) settled() bundle {
	next := make(bundle, len(b))
	for i, p := range b {
		if p != nil {
			next[i] = p.Unchanged()
		}
	}
	return next
}

// origin identifies the rank that made a bundle.
type origin struct {
	Generation uint64
	Rank       int
}

func (o origin) String() string { return fmt.Sprintf("%d of generation %d", o.Rank, o.Generation) }

// pieceSet contains this rank's bundles of a save, by number. The bundles of the ranks of the
// save's world have the ranks' numbers. Orphaned bundles have the numbers after these: they are of
// ranks of earlier worlds and no rank has taken them over.
type pieceSet struct {
	id      saveID
	size    int // of the save's world
	mine    int // this rank's number in that world
	orphans []origin
	of      map[int]bundle
}

// keeper returns the rank that is responsible for a bundle, which is its own or an orphaned one.
func (s *pieceSet) keeper(number int) int {
	if number < s.size {
		return number
	}
	return (number - s.size) % s.size
}

// own returns the numbers of the bundles that this rank is responsible for.
func (s *pieceSet) own() []int {
	numbers := []int{s.mine}
	for n := s.size + s.mine; n < s.size+len(s.orphans); n += s.size {
		numbers = append(numbers, n)
	}
	return numbers
}

// locals is the part of a State that handles Local parts.
type locals struct {
	worker   *Worker
	parts    []localPart
	soon     func() bool // whether a checkpoint of the next commit is wanted
	replicas int         // number of ranks that keep copies of each rank's pieces

	to      []int  // ranks that keep copies of this rank's pieces, in the world of last
	last    saveID // the last ID assigned
	current saveID // the save that Restore goes back to
	sets    []*pieceSet
	sync    *nextSave // the save at the end of the current sync

	wanted   bool      // a checkpoint of the prepared commit is wanted
	gathered *pieceSet // on rank 0: all ranks' pieces of a commit for a checkpoint; otherwise nil
}

func (l *locals) set(id saveID) *pieceSet {
	for _, s := range l.sets {
		if s.id == id {
			return s
		}
	}
	return nil
}

// keepOnly frees all sets but those given.
func (l *locals) keepOnly(ids ...saveID) {
	l.sets = slices.DeleteFunc(l.sets, func(s *pieceSet) bool { return !slices.Contains(ids, s.id) })
}

// next returns the ID of the next save in w.
func (l *locals) next(w line.World) saveID {
	if l.last.Generation != w.Generation {
		l.last = saveID{Generation: w.Generation}
		l.to = keepers(hostsOf(w.World), w.Rank, l.replicas)
	}
	l.last.Save++
	return l.last
}

// keepers returns up to count other ranks in the order in which they keep copies of a rank's
// pieces, given the host of each rank. Other hosts come first, beginning with the one after the
// rank's own: from each the rank with the same index on its host, then from each the next index,
// and so on. The other ranks of its own host come last.
func keepers(hosts []string, rank, count int) []int {
	var order []string
	on := make(map[string][]int)
	for r, h := range hosts {
		if on[h] == nil {
			order = append(order, h)
		}
		on[h] = append(on[h], r)
	}
	home := slices.Index(order, hosts[rank])
	place := slices.Index(on[hosts[rank]], rank)
	longest := 0
	for _, ranks := range on {
		longest = max(longest, len(ranks))
	}
	var all []int
	for round := 0; round < longest && len(all) < count; round++ {
		for d := 1; d < len(order); d++ {
			if ranks := on[order[(home+d)%len(order)]]; round < len(ranks) {
				all = append(all, ranks[(place+round)%len(ranks)])
			}
		}
	}
	here := on[hosts[rank]]
	for d := 1; d < len(here); d++ {
		all = append(all, here[(place+d)%len(here)])
	}
	return all[:min(max(count, 0), len(all))]
}

// write encodes every part. before is the previous bundle, which may be nil.
func (l *locals) write(before bundle) (bundle, error) {
	mine := make(bundle, len(l.parts))
	for i, p := range l.parts {
		b, err := p.write()
		if err != nil {
			return nil, err
		}
		var old *piece
		if before != nil {
			old = before[i]
		}
		mine[i] = transfer.NewValue(b, old)
	}
	return mine, nil
}

// base is the earlier set to which messages may refer instead of sending unchanged chunks.
type base struct {
	id     saveID
	number func(number int) int            // number of the previous version of a bundle; negative: none
	holds  func(rank int, number int) bool // whether a rank has a bundle of the base
}

// spread sends the bundles that this rank is responsible for to the ranks in to, receives the
// copies that this rank keeps, and returns when all ranks have done so.
func (l *locals) spread(ctx context.Context, p *membership, set *pieceSet, to []int, b base) error {
	parts := make([][]byte, set.size)
	made := make(map[string][]byte) // messages by the bundles to which they refer
	for _, r := range to {
		refer := make([]int, 0, 4)
		for _, n := range set.own() {
			if before := b.number(n); before >= 0 && b.holds(r, before) {
				refer = append(refer, before)
			} else {
				refer = append(refer, -1)
			}
		}
		key := fmt.Sprint(refer)
		if made[key] == nil {
			m := appendHead(nil, set.id, b.id, len(refer))
			for i, n := range set.own() {
				m = appendBundle(m, n, refer[i], set.of[n])
			}
			made[key] = m
		}
		parts[r] = made[key]
	}
	all, err := collective.AllToAll(ctx, p.group, parts)
	if err != nil {
		return err
	}
	bases := l.set(b.id)
	for from, m := range all {
		if from == set.mine || len(m) == 0 {
			continue
		}
		got, err := l.parse(m, set.id, bases)
		if err != nil {
			return fmt.Errorf("elastic: local parts: pieces to keep from rank %d: %w", from, err)
		}
		for n, bundle := range got {
			if n >= set.size+len(set.orphans) || set.keeper(n) != from {
				return fmt.Errorf("elastic: local parts: rank %d sent pieces that are not its own", from)
			}
			set.of[n] = bundle
		}
	}
	return nil
}

// replicateAfter is like replicate; before is the set of the previous save, of the same or another
// world, or nil.
func (l *locals) replicateAfter(ctx context.Context, before *pieceSet) error {
	p := l.worker.member.Load()
	set := &pieceSet{id: l.next(p.world), size: p.group.Size(), mine: p.group.Rank(), of: make(map[int]bundle)}
	b := base{number: func(int) int { return -1 }}
	var mine bundle
	if before != nil && before.id.Generation == set.id.Generation {
		set.orphans = before.orphans
		for _, n := range before.own()[1:] {
			set.of[n] = before.of[n].settled()
		}
		mine = before.of[set.mine]
		b = base{before.id, func(n int) int { return n }, func(int, int) bool { return true }}
	}
	return l.prepare(ctx, p, set, mine, b)
}

// replicateSync is like replicate, for the save at the end of a sync.
func (l *locals) replicateSync(ctx context.Context) error {
	p := l.worker.member.Load()
	if l.sync == nil {
		return l.replicateAfter(ctx, l.set(l.current))
	}
	l.sync.set.id = l.next(p.world)
	return l.prepare(ctx, p, l.sync.set, l.sync.before, l.sync.base)
}

// prepare adds this rank's bundle to set, following before, and spreads it.
func (l *locals) prepare(ctx context.Context, p *membership, set *pieceSet, before bundle, b base) (err error) {
	if set.of[set.mine], err = l.write(before); err != nil {
		return err
	}
	l.sets = append(l.sets, set)
	if l.replicas > 0 && set.size > 1 {
		if err := l.spread(ctx, p, set, l.to, b); err != nil {
			return err
		}
	}
	// This reduction is the barrier. It also informs all ranks whether rank 0 wants a checkpoint.
	wanted := []uint8{0}
	if set.mine == 0 && l.soon() {
		wanted[0] = 1
	}
	if err := collective.AllReduce(ctx, p.group, wanted, collective.Max); err != nil {
		return err
	}
	l.wanted = wanted[0] != 0
	return nil
}

// counted makes the replicated save the one that Restore goes back to.
func (l *locals) counted() { l.current = l.last }

// settled frees the previous saves after all ranks have counted the current one.
func (l *locals) settled() { l.keepOnly(l.current) }

// unreplicated records that this rank has saved alone, so no other rank has copies.
func (l *locals) unreplicated() {
	l.current = saveID{}
	for _, p := range l.parts {
		p.forget()
	}
}

// handOverLimit limits the bytes that a rank receives from ranks that may leave.
const handOverLimit = 1 << 30

// holders returns the number of other ranks to which each rank's pieces are sent before the ranks
// separate.
func holders(size, replicas int, sum, most uint64) int {
	if sum <= handOverLimit {
		return size - 1
	}
	return min(max(replicas, 1, int(handOverLimit/max(most, 1))), size-1)
}

// A message contains bundles. It begins with the IDs of their save and of the save to which they
// refer, in four words, and the number of bundles. Each bundle consists of its number, the number
// of the bundle to which it refers plus one (0: none), and the values of its parts.

func appendHead(m []byte, id, base saveID, bundles int) []byte {
	m = transfer.AppendWord(m, id.Generation, id.Save, base.Generation, base.Save)
	return transfer.AppendNumber(m, bundles)
}

// appendBundle appends a bundle. before is the number of the bundle to which its unchanged chunks
// refer; negative: all chunks are sent.
func appendBundle(m []byte, number, before int, b bundle) []byte {
	return transfer.AppendValues(transfer.AppendNumber(m, number, before+1), b, before >= 0)
}

// parse checks and returns the bundles of a message, which must belong to the save id. bases are
// the bundles to which they may refer; nil: none. The bundles may alias m.
func (l *locals) parse(m []byte, id saveID, bases *pieceSet) (map[int]bundle, error) {
	r := transfer.NewReader(m)
	if of := (saveID{r.Word(), r.Word()}); of != id && r.Err() == nil {
		return nil, fmt.Errorf("message of save %v instead of %v: the ranks do not call Commit equally often", of, id)
	}
	if of := (saveID{r.Word(), r.Word()}); bases != nil && bases.id != of || of == (saveID{}) {
		bases = nil
	}
	all := make(map[int]bundle)
	for range r.Count() {
		number := r.Number()
		var before bundle
		if refers := r.Number() - 1; refers >= 0 {
			if bases == nil || bases.of[refers] == nil {
				return nil, fmt.Errorf("%w: it refers to a bundle that this rank does not have", transfer.ErrDamaged)
			}
			before = bases.of[refers]
		}
		all[number] = r.Values(len(l.parts), before)
	}
	if err := r.End(); err != nil {
		return nil, err
	}
	return all, nil
}

// held returns the sorted numbers of the bundles in a set.
func (s *pieceSet) held() []int { return slices.Sorted(maps.Keys(s.of)) }
