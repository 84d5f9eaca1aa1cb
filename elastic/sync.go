package elastic

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// imageID names what all ranks of a world have saved together, in one commit or sync. The zero
// value is none: what one rank has saved by itself. Ranks whose saved states have the same name
// hold the same, as far as their training gives the same on all ranks; that it did is what
// comparisons are for.
type imageID struct{ Generation, Count uint64 }

// nextMark names the next save of this world. It counts those that fail, too: all ranks call Commit
// and Sync equally often.
func (s *State) nextMark() imageID {
	if g := s.worker.Generation(); s.given.Generation != g {
		s.given = imageID{Generation: g}
	}
	s.given.Count++
	return s.given
}

// parted says that train has returned err: nothing has changed since the last commit where that
// said that the hosts have.
func (s *State) parted(err error) {
	var updated *HostsUpdatedError
	s.clean = errors.As(err, &updated) && updated == s.promised
	s.promised = nil
}

// isSaved tells whether the parts in memory hold what is saved, as far as same tells of a piece.
func (s *State) isSaved(same func(*image.Piece, []byte) bool) bool {
	s.Settle()
	last := s.saved.Last()
	if last == nil {
		return false
	}
	_, live := s.inMemory()
	for i, p := range s.inMemoryOf(last) {
		if !same(p, live[i]) {
			return false
		}
	}
	return true
}

// intact returns the name of the live state, if it is a saved one. A program that writes to tensors
// when it must not is mostly found out: the beginnings of all chunks are compared.
func (s *State) intact() imageID {
	if s.clean && s.mark != (imageID{}) && s.isSaved((*image.Piece).Resembles) {
		return s.mark
	}
	return imageID{}
}

// Sync makes the live state of every rank that of the world's sync root, the number of its last
// commit included, and saves it. It is collective; Run does it at the beginning and after every
// reset. Where it fails the live state may be half the root's: Restore takes it back.
//
// Of tensors it sends what a rank does not have. In Run, where the root's are what it committed
// last, that is nothing to those that have made the commit as well, and to those that have made
// another the chunks of 1 MiB whose checksums differ.
func (s *State) Sync(ctx context.Context) error {
	if s.err != nil {
		return s.err
	}
	if err := s.settled(); err != nil {
		return err
	}
	defer func() { s.clean, s.synced = false, nil }()
	s.audit = nil
	p := s.worker.place.Load()
	g, root := p.group, p.world.SyncRoot
	s.placeParts(g.Rank(), g.Size())
	mark := s.nextMark()
	root, err := s.resume(ctx, g, root)
	if err != nil {
		return err
	}
	roots, err := s.syncOpening(ctx, g, root)
	if err != nil {
		return err
	}
	for i, p := range s.parts {
		if asCarried(s.own[i]) != nil || roots.Mark != (imageID{}) && asInMemory(s.own[i]) != nil {
			continue
		}
		if err := p.Sync(ctx, g, root); err != nil {
			return fmt.Errorf("elastic: sync part %d: %w", i, err)
		}
	}
	if roots.Mark != (imageID{}) {
		if err := s.syncDifference(ctx, g, root, roots.Mark); err != nil {
			return fmt.Errorf("elastic: sync: %w", err)
		}
	}
	if err := s.shareOut(ctx, g, root); err != nil {
		return err
	}
	if err := s.keep(ctx, g, roots.Commits); err != nil {
		return err
	}
	s.mark = mark
	s.supply()
	return s.beginAudit(ctx, root)
}

// opening is the root's first message of a sync. What is small travels in it, which saves a
// broadcast for each.
type opening struct {
	Commits uint64
	Mark    imageID  // of the root's live state, where that is what it has saved
	Layout  []string // of every part: states that do not fit are told apart before anything is overwritten
	Carried [][]byte // of every carried part, encoded; of others empty
}

// syncOpening broadcasts the opening, puts the carried parts in their places and returns the
// root's.
func (s *State) syncOpening(ctx context.Context, g *collective.Group, root int) (opening, error) {
	mine := opening{Commits: s.commits, Layout: make([]string, len(s.parts)), Carried: make([][]byte, len(s.parts))}
	for i, p := range s.parts {
		mine.Layout[i] = fmt.Sprintf("%T", p)
		if s.own[i] != nil {
			mine.Layout[i] = s.own[i].layout()
		}
		if c := asCarried(s.own[i]); c != nil && g.Rank() == root {
			b, err := c.encode()
			if err != nil {
				return opening{}, err
			}
			mine.Carried[i] = b
		}
	}
	if g.Rank() == root {
		mine.Mark = s.intact()
		var b bytes.Buffer
		if err := gob.NewEncoder(&b).Encode(mine); err != nil {
			return opening{}, fmt.Errorf("elastic: sync: %w", err)
		}
		_, err := collective.BroadcastBytes(ctx, g, binary.LittleEndian.AppendUint32(b.Bytes(), image.Sum(b.Bytes())), root)
		return mine, err
	}
	b, err := collective.BroadcastBytes(ctx, g, nil, root)
	if err != nil {
		return opening{}, err
	}
	n := len(b) - 4
	if n < 0 || image.Sum(b[:n]) != binary.LittleEndian.Uint32(b[n:]) {
		return opening{}, errors.New("elastic: sync: the root's opening came damaged")
	}
	b = b[:n]
	var roots opening
	if err := gob.NewDecoder(bytes.NewReader(b)).Decode(&roots); err != nil {
		return opening{}, fmt.Errorf("elastic: sync: the root's opening: %w", err)
	}
	if err := sameLayout(mine.Layout, roots.Layout); err != nil {
		return opening{}, err
	}
	for i, o := range s.own {
		if c := asCarried(o); c != nil {
			if err := c.decode(roots.Carried[i]); err != nil {
				return opening{}, err
			}
		}
	}
	return roots, nil
}

// run is some chunks in a row of a piece in memory.
type run struct {
	live    []byte
	changed []bool
}

// longestRun is how many chunks are sent in one message: who has them already takes them into
// memory of that size.
const longestRun = 8

// syncDifference makes the parts in memory those of the root, whose live state is the save of that
// name.
func (s *State) syncDifference(ctx context.Context, g *collective.Group, root int, mark imageID) error {
	if s.synced = s.noChunks(); s.synced == nil {
		return nil
	}
	if g.Rank() != root && s.intact() != s.mark {
		if err := s.restoreMemory(); err != nil {
			return err
		}
	}
	// Whether somebody has another save, and whether somebody has none to compare.
	other, none := mark != s.mark, s.mark == (imageID{})
	word := []uint8{0, 0}
	if other {
		word[0] = 1
	}
	if none {
		word[1] = 1
	}
	if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil {
		return err
	}
	if word[0] == 0 {
		return nil
	}
	lacked, err := s.lacked(ctx, g, root, other, word[1] != 0)
	if err != nil {
		return err
	}
	var aside []byte
	for _, r := range s.runs(lacked) {
		to := r.live
		switch {
		case g.Rank() == root:
		case other:
			for i := range r.changed {
				r.changed[i] = true
			}
		default:
			if aside == nil {
				aside = make([]byte, longestRun*image.ChunkSize)
			}
			to = aside[:len(r.live)]
		}
		if err := collective.Broadcast(ctx, g, to, root); err != nil {
			return err
		}
	}
	return nil
}

// restoreMemory makes the parts in memory what is saved.
func (s *State) restoreMemory() error {
	pieces := s.saved.Last().Pieces()
	for i, o := range s.own {
		if asInMemory(o) == nil {
			continue
		}
		if err := o.restore(pieces[s.first[i]:]); err != nil {
			return err
		}
	}
	return nil
}

// noChunks returns a false for each chunk of the parts in memory; nil where there are none.
func (s *State) noChunks() (all [][][]bool) {
	for i, o := range s.own {
		if m := asInMemory(o); m != nil {
			if all == nil {
				all = make([][][]bool, len(s.parts))
			}
			for _, b := range m.memory() {
				all[i] = append(all[i], make([]bool, image.Chunks(len(b))))
			}
		}
	}
	return all
}

// lacked returns which chunks of the parts in memory, in their order, some rank lacks; nil where it
// is all of them.
func (s *State) lacked(ctx context.Context, g *collective.Group, root int, other, all bool) ([]uint8, error) {
	if all {
		return nil, nil
	}
	var mine []uint32
	count := 0
	for i, pieces := range s.synced {
		for j := range pieces {
			count += len(pieces[j])
			if other || g.Rank() == root {
				mine = append(mine, s.saved.Last().Pieces()[s.first[i]+j].Sums()...)
			}
		}
	}
	sums := make([]uint32, count)
	if g.Rank() == root {
		sums = mine
	}
	if err := collective.Broadcast(ctx, g, sums, root); err != nil {
		return nil, err
	}
	lacked := make([]uint8, count)
	for i := range mine {
		if mine[i] != sums[i] {
			lacked[i] = 1
		}
	}
	return lacked, collective.AllReduce(ctx, g, lacked, collective.Max)
}

// runs returns the chunks of the parts in memory that lacked marks, or all where it is nil.
func (s *State) runs(lacked []uint8) (all []run) {
	at := 0
	for i, o := range s.own {
		m := asInMemory(o)
		if m == nil {
			continue
		}
		for j, b := range m.memory() {
			changed := s.synced[i][j]
			for from := 0; from < len(changed); {
				to := from
				for to < len(changed) && to-from < longestRun && (lacked == nil || lacked[at+to] != 0) {
					to++
				}
				if to > from {
					all = append(all, run{b[from*image.ChunkSize : min(to*image.ChunkSize, len(b))], changed[from:to]})
				}
				from = max(to, from+1)
			}
			at += len(changed)
		}
	}
	return all
}

func sameLayout(mine, roots []string) error {
	if len(mine) != len(roots) {
		return fmt.Errorf("elastic: sync: the state has %d parts here and %d at the root", len(mine), len(roots))
	}
	for i := range mine {
		if mine[i] != roots[i] {
			return fmt.Errorf("elastic: sync: part %d is a %s here and a %s at the root", i, mine[i], roots[i])
		}
	}
	return nil
}
