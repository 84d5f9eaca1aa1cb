package elastic

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/image"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// Pieces of Local parts cannot be had from the root, so a commit of a state that has any goes like
// this. Each rank
//
//  1. writes its pieces down and gives them to the ranks that keep them,
//  2. meets the others in a barrier,
//  3. saves everything and counts the commit,
//  4. meets the others in the agreement on host updates, and only then gives up the pieces of the
//     commit before.
//
// Who has counted a commit has passed the barrier, so all ranks have made it and all who keep
// pieces have them, whether they have counted it themselves or not; and who has given up the one
// before has passed the agreement, so all have counted this one. Whoever is the root of the next
// sync, all living ranks therefore still have, of the very commit that it goes back to, their own
// pieces and those that they keep for others. A sync ends with the same steps: what it has made is
// a save like a commit.
//
// Saves are not known by the number of their commit, which a sync gives to a save of another world,
// but by the world and a count in it.

// saveID names what all ranks of a world have saved together. The zero value is none.
type saveID struct{ Generation, Save uint64 }

// piece is what a Local part was on one rank, in chunks as an image has them. It does not change.
type piece struct {
	size    int
	chunks  [][]byte
	sums    []uint32
	changed []bool // which chunks differ from those of the piece before it; nil: all
}

// pieceOf cuts b, which nobody writes to any more; before may be nil.
func pieceOf(b []byte, before *piece) *piece {
	n := image.Chunks(len(b))
	p := &piece{size: len(b), chunks: make([][]byte, n), sums: make([]uint32, n), changed: make([]bool, n)}
	for i := range n {
		p.chunks[i] = b[i*image.ChunkSize : min((i+1)*image.ChunkSize, len(b))]
		if before != nil && i < len(before.chunks) && bytes.Equal(before.chunks[i], p.chunks[i]) {
			p.sums[i] = before.sums[i]
			continue
		}
		p.sums[i], p.changed[i] = image.Sum(p.chunks[i]), true
	}
	return p
}

// refers tells whether a message leaves chunk i out, where it refers to the piece before.
func (p *piece) refers(i int, before bool) bool { return before && p.changed != nil && !p.changed[i] }

// bytes is not the caller's to write to.
func (p *piece) bytes() []byte {
	if len(p.chunks) == 1 {
		return p.chunks[0]
	}
	return slices.Concat(p.chunks...)
}

// bundle is one rank's pieces, one for each Local part; nil where a part has none here.
type bundle []*piece

func (b bundle) size() (n int) {
	for _, p := range b {
		if p != nil {
			n += p.size
		}
	}
	return n
}

// settled returns b as the bundle that comes after it where nothing changes.
func (b bundle) settled() bundle {
	next := make(bundle, len(b))
	for i, p := range b {
		if p != nil {
			next[i] = &piece{p.size, p.chunks, p.sums, make([]bool, len(p.chunks))}
		}
	}
	return next
}

// origin is whose pieces a bundle was.
type origin struct {
	Generation uint64
	Rank       int
}

func (o origin) String() string { return fmt.Sprintf("%d of generation %d", o.Rank, o.Generation) }

// pieceSet is what this rank has of a save: bundles by number. Those of the ranks of its world have
// the ranks' numbers; after them come the strays, which ranks of earlier worlds have left and
// nobody has taken.
type pieceSet struct {
	id     saveID
	size   int // of the world
	mine   int // this rank's number in it
	strays []origin
	of     map[int]bundle
}

// keeper returns the rank that is responsible for a bundle: its own, or a stray.
func (s *pieceSet) keeper(number int) int {
	if number < s.size {
		return number
	}
	return (number - s.size) % s.size
}

// own returns the numbers of the bundles that this rank is responsible for.
func (s *pieceSet) own() []int {
	numbers := []int{s.mine}
	for n := s.size + s.mine; n < s.size+len(s.strays); n += s.size {
		numbers = append(numbers, n)
	}
	return numbers
}

// locals is what a State knows of its Local parts' pieces.
type locals struct {
	parts    []localPart
	replicas int // ranks that keep each rank's pieces

	to      []int  // the ranks that keep this one's, in the world of last
	last    saveID // the number given last
	current saveID // the save that the state goes back to
	sets    []*pieceSet
	sync    *nextSave // of the sync under way

	wanted   bool      // the commit that is prepared is to be written to disk
	gathered *pieceSet // on rank 0: all ranks' pieces of a commit that is to be written; nil otherwise
}

func (l *locals) set(id saveID) *pieceSet {
	for _, s := range l.sets {
		if s.id == id {
			return s
		}
	}
	return nil
}

// keepOnly gives up all sets but some.
func (l *locals) keepOnly(ids ...saveID) {
	l.sets = slices.DeleteFunc(l.sets, func(s *pieceSet) bool { return !slices.Contains(ids, s.id) })
}

// next numbers the next save of a world.
func (l *locals) next(w rendezvous.World) saveID {
	if l.last.Generation != w.Generation {
		l.last = saveID{Generation: w.Generation}
		l.to = keepers(hostsOf(w.World), w.Rank, l.replicas)
	}
	l.last.Save++
	return l.last
}

// keepers returns the other ranks, given all ranks' hosts, in the order in which they keep what one
// rank has: of each other host the rank with the same place there as this one has on its own,
// beginning with the host after its own; then of each the one after that, and so on; and at last
// the others of its own host. It returns as many as it is asked for, or all.
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

// write has every part written down, as the bundle that comes after another, which may be nil.
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
		mine[i] = pieceOf(b, old)
	}
	return mine, nil
}

// base is what the bundles of a set that is given to others may refer to.
type base struct {
	id     saveID
	number func(number int) int            // of the bundle before a bundle; negative: there was none
	holds  func(rank int, number int) bool // whether a rank has a bundle of the base
}

// spread gives the bundles that this rank is responsible for to the ranks that are to keep them,
// takes those that it is to keep itself, and returns when all ranks have done so.
func (l *locals) spread(ctx context.Context, p *place, set *pieceSet, to []int, b base) error {
	parts := make([][]byte, set.size)
	made := make(map[string][]byte) // messages, by what they refer to
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
			return fmt.Errorf("elastic: local parts: what rank %d gave to keep: %w", from, err)
		}
		for n, bundle := range got {
			if n >= set.size+len(set.strays) || set.keeper(n) != from {
				return fmt.Errorf("elastic: local parts: rank %d gave to keep what is not its own", from)
			}
			set.of[n] = bundle
		}
	}
	return nil
}

// replicate does the first two steps of a save in the world that the worker is in. Without Local
// parts it does nothing.
func (s *State) replicate() error {
	if s.err != nil || len(s.locals.parts) == 0 {
		return s.err
	}
	return s.replicateAfter(s.ctx, s.locals.set(s.locals.current))
}

// replicateAfter is replicate where a save of the same world came before, or another, or nil.
func (s *State) replicateAfter(ctx context.Context, before *pieceSet) error {
	l, p := &s.locals, s.worker.place.Load()
	set := &pieceSet{id: l.next(p.world), size: p.group.Size(), mine: p.group.Rank(), of: make(map[int]bundle)}
	b := base{number: func(int) int { return -1 }}
	var mine bundle
	if before != nil && before.id.Generation == set.id.Generation {
		set.strays = before.strays
		for _, n := range before.own()[1:] {
			set.of[n] = before.of[n].settled()
		}
		mine = before.of[set.mine]
		b = base{before.id, func(n int) int { return n }, func(int, int) bool { return true }}
	}
	return s.prepare(ctx, p, set, mine, b)
}

// prepare makes this rank's bundle of a set, the one after another, and spreads it.
func (s *State) prepare(ctx context.Context, p *place, set *pieceSet, before bundle, b base) (err error) {
	l := &s.locals
	if set.of[set.mine], err = l.write(before); err != nil {
		return err
	}
	l.sets = append(l.sets, set)
	if l.replicas > 0 && set.size > 1 {
		if err := l.spread(ctx, p, set, l.to, b); err != nil {
			return err
		}
	}
	// The barrier; rank 0 says in it what it wants.
	wanted := []uint8{0}
	if set.mine == 0 && s.checkpoints.soon() {
		wanted[0] = 1
	}
	if err := collective.AllReduce(ctx, p.group, wanted, collective.Max); err != nil {
		return err
	}
	l.wanted = wanted[0] != 0
	return nil
}

// counted says that the save whose pieces have been given away is the one to go back to.
func (l *locals) counted() { l.current = l.last }

// settled says that all ranks have counted it.
func (l *locals) settled() { l.keepOnly(l.current) }

// astray says that this rank has saved by itself: then its save has no pieces elsewhere.
func (l *locals) astray() {
	l.current = saveID{}
	for _, p := range l.parts {
		p.forget()
	}
}

// handOverLimit bounds what a rank takes from ranks that may leave, in bytes.
const handOverLimit = 1 << 30

// leave returns what a commit, or a check, has to say about a change of the hosts. Before the ranks
// part, they give the pieces that the last save has to those who have none yet, as nobody knows who
// will be in the next world.
func (s *State) leave(change plan.Change, live bool) error {
	l := &s.locals
	if change == 0 || len(l.parts) == 0 {
		return updated(change)
	}
	if live {
		if err := s.replicate(); err != nil {
			return err
		}
		if err := s.save(s.commits); err != nil {
			return err
		}
		l.counted()
	}
	p, set := s.worker.place.Load(), l.set(l.current)
	if set == nil {
		return updated(change)
	}
	sum := []uint64{0}
	for _, n := range set.own() {
		sum[0] += uint64(set.of[n].size())
	}
	mine := sum[0]
	if err := collective.AllReduce(s.ctx, p.group, sum, collective.Sum); err != nil {
		return err
	}
	l.settled()
	most := []uint64{mine}
	if sum[0] > handOverLimit {
		if err := collective.AllReduce(s.ctx, p.group, most, collective.Max); err != nil {
			return err
		}
	}
	count := holders(set.size, l.replicas, sum[0], most[0])
	if count < set.size-1 && set.mine == 0 {
		s.worker.log.Warnf("the local parts have %d MB on all ranks, so each rank's are given to %d others only before the hosts change", sum[0]>>20, count)
	}
	to := keepers(hostsOf(p.world.World), set.mine, count)
	if count > l.replicas {
		// Who keeps the pieces already is given nothing.
		to = to[min(l.replicas, len(to)):]
		if err := l.spread(s.ctx, p, set, to, base{number: func(int) int { return -1 }}); err != nil {
			return err
		}
		// Who goes may take the group with it, so nobody goes before all have everything.
		if err := collective.Barrier(s.ctx, p.group); err != nil {
			return err
		}
	}
	if s.checkpoints != nil && count < set.size-1 && change&plan.Removed != 0 {
		// Nobody may be left to go on, and then one rank writes all pieces.
		if err := s.gather(s.ctx, true); err != nil {
			return err
		}
	}
	return updated(change)
}

// holders returns to how many others each rank's pieces go before the ranks part.
func holders(size, replicas int, sum, most uint64) int {
	if sum <= handOverLimit {
		return size - 1
	}
	return min(max(replicas, 1, int(handOverLimit/max(most, 1))), size-1)
}

// A message holds bundles: the id of their save and that of the save whose bundles they refer to,
// four numbers of 64 bits, little-endian; how many there are; and of each its number, and one more
// than the number of the bundle that it refers to, or 0. Of each part follow one more than the
// size, or 0 where it is absent; the chunks' checksums, of 32 bits; a byte for each chunk, 1 where
// it is that of the bundle referred to; and the other chunks. Numbers are varints.

func appendHead(m []byte, id, base saveID, bundles int) []byte {
	for _, n := range []uint64{id.Generation, id.Save, base.Generation, base.Save} {
		m = binary.LittleEndian.AppendUint64(m, n)
	}
	return binary.AppendUvarint(m, uint64(bundles))
}

// appendBundle appends a bundle; before is the number of the one to which its changes are, negative
// where all of it is to be sent.
func appendBundle(m []byte, number, before int, b bundle) []byte {
	room := 2 * binary.MaxVarintLen64
	for _, p := range b {
		room += binary.MaxVarintLen64
		if p == nil {
			continue
		}
		for i, c := range p.chunks {
			if room += 5; !p.refers(i, before >= 0) {
				room += len(c)
			}
		}
	}
	m = slices.Grow(m, room)
	m = binary.AppendUvarint(m, uint64(number))
	m = binary.AppendUvarint(m, uint64(before+1))
	for _, p := range b {
		m = appendPiece(m, p, before >= 0)
	}
	return m
}

func appendPiece(m []byte, p *piece, refers bool) []byte {
	if p == nil {
		return append(m, 0)
	}
	m = binary.AppendUvarint(m, uint64(p.size)+1)
	for _, sum := range p.sums {
		m = binary.LittleEndian.AppendUint32(m, sum)
	}
	for i := range p.chunks {
		if p.refers(i, refers) {
			m = append(m, 1)
		} else {
			m = append(m, 0)
		}
	}
	for i, c := range p.chunks {
		if !p.refers(i, refers) {
			m = append(m, c...)
		}
	}
	return m
}

var errMessage = errors.New("it is damaged")

// parser reads a message. After an error it reads zeros.
type parser struct {
	b   []byte
	bad bool
}

func (p *parser) take(n int) []byte {
	if p.bad || n < 0 || n > len(p.b) {
		p.bad = true
		return nil
	}
	b := p.b[:n:n]
	p.b = p.b[n:]
	return b
}

func (p *parser) word() uint64 {
	if b := p.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// number returns a number below 2^48.
func (p *parser) number() int {
	n, k := binary.Uvarint(p.b)
	if p.bad || k <= 0 || n >= 1<<48 {
		p.bad = true
		return 0
	}
	p.b = p.b[k:]
	return int(n)
}

func (p *parser) id() saveID { return saveID{p.word(), p.word()} }

// parse returns the bundles of a message, which must be of a save; bases may be nil. All of it is
// checked. The bundles may use the message's memory.
func (l *locals) parse(m []byte, id saveID, bases *pieceSet) (map[int]bundle, error) {
	p := &parser{b: m}
	if of := p.id(); of != id && !p.bad {
		return nil, fmt.Errorf("it is of save %v, not of %v: the ranks do not call Commit equally often", of, id)
	}
	if of := p.id(); bases != nil && bases.id != of || of == (saveID{}) {
		bases = nil
	}
	all := make(map[int]bundle)
	for range min(p.number(), len(p.b)) {
		number := p.number()
		var before bundle
		if refers := p.number() - 1; refers >= 0 {
			if bases == nil || bases.of[refers] == nil {
				return nil, fmt.Errorf("%w: it refers to what is not here", errMessage)
			}
			before = bases.of[refers]
		}
		b := make(bundle, len(l.parts))
		for i := range b {
			var old *piece
			if before != nil {
				old = before[i]
			}
			b[i] = p.piece(old)
		}
		all[number] = b
	}
	if p.bad || len(p.b) > 0 {
		return nil, errMessage
	}
	return all, nil
}

// piece reads one, whose unchanged chunks are those of another, which may be nil.
func (p *parser) piece(old *piece) *piece {
	size := p.number() - 1
	if size < 0 {
		return nil
	}
	n := image.Chunks(size)
	sums, as := p.take(4*n), p.take(n)
	if p.bad {
		return nil
	}
	q := &piece{size: size, chunks: make([][]byte, n), sums: make([]uint32, n)}
	whole := !slices.Contains(as, 1)
	for i := range n {
		length := min(image.ChunkSize, size-i*image.ChunkSize)
		q.sums[i] = binary.LittleEndian.Uint32(sums[4*i:])
		switch {
		case as[i] == 0:
			if q.chunks[i] = p.take(length); !whole {
				q.chunks[i] = bytes.Clone(q.chunks[i]) // a chunk must not keep a message that is mostly of others
			}
			p.bad = p.bad || image.Sum(q.chunks[i]) != q.sums[i]
		case old == nil || i >= len(old.chunks) || len(old.chunks[i]) != length || old.sums[i] != q.sums[i]:
			p.bad = true
		default:
			q.chunks[i] = old.chunks[i]
		}
		if p.bad {
			return nil
		}
	}
	return q
}

// held returns the numbers of the bundles of a set, in order.
func (s *pieceSet) held() []int { return slices.Sorted(maps.Keys(s.of)) }
