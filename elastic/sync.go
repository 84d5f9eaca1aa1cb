package elastic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
)

// trainReturned records that train has returned err. If err is the *HostsUpdatedError of the last
// commit, the state has not changed since that commit.
func (s *State) trainReturned(err error) {
	var updated *HostsUpdatedError
	s.saved.clean = errors.As(err, &updated) && updated == s.saved.promised
	s.saved.promised = nil
}

// isSaved reports whether every part in memory is the same as its blob in the last save.
func (s *State) isSaved(same func(*snapshot.Blob, []byte) bool) bool {
	s.Settle()
	last := s.saved.Last()
	if last == nil {
		return false
	}
	_, live := s.parts.memory()
	for i, p := range s.parts.memoryIn(last.Blobs()) {
		if !same(p, live[i]) {
			return false
		}
	}
	return true
}

// intact returns the ID of the save that the live state equals, or the zero ID. It detects most
// forbidden writes to tensors, because it compares the beginning of each chunk.
func (s *State) intact() snapshotID {
	if s.saved.clean && s.saved.mark != (snapshotID{}) && s.isSaved((*snapshot.Blob).Resembles) {
		return s.saved.mark
	}
	return snapshotID{}
}

// Sync sets the live state of every rank, and the number of its last commit, to those of the
// world's sync root, and saves it. It is collective and blocks until all ranks have the state. Run
// calls it at the beginning and after every reset. If it fails, the live state may be partly
// overwritten; Restore undoes that.
//
// It sends only the parts of tensors that a rank lacks. If the root's live state is its last
// commit, as after a commit in Run, ranks that made the same commit receive nothing, and ranks that
// made another one receive the chunks of 1 MiB whose checksums differ.
func (s *State) Sync(ctx context.Context) error {
	if s.err != nil {
		return s.err
	}
	if s.catchingUp() {
		return s.worker.first.refuses()
	}
	if err := s.settled(); err != nil {
		return err
	}
	defer func() { s.saved.clean, s.saved.synced = false, nil }()
	s.audits.due = nil
	p := s.worker.member.Load()
	g, root := p.group, p.world.SyncRoot
	s.parts.setRank(g.Rank(), g.Size())
	var err error
	if s.steps != nil {
		if root, err = s.steps.settle(ctx, g, root); err != nil {
			return err
		}
	}
	mark := s.saved.nextMark(s.worker.Generation())
	if root, err = s.resume(ctx, g, root); err != nil {
		return err
	}
	roots, err := s.syncOpening(ctx, g, root)
	if err != nil {
		return err
	}
	same := s.catchUp != nil && roots.Mark != (snapshotID{}) && s.steps.caughtUp()
	if same {
		s.worker.log.Debugf("elastic: reached commit %d by applying the steps of others", roots.Commits)
	}
	for i, p := range s.parts.all {
		if c := s.parts.of[i]; c != nil && (c.carried() || roots.Mark != (snapshotID{}) && c.inMemory()) {
			continue
		}
		if c := s.parts.of[i]; c != nil && c.inMemory() && g.Rank() != root {
			if err := s.secure(); err != nil {
				return err
			}
		}
		if err := p.Sync(ctx, g, root); err != nil {
			return fmt.Errorf("elastic: sync part %d: %w", i, err)
		}
	}
	if roots.Mark != (snapshotID{}) {
		if err := s.syncDifference(ctx, g, root, roots.Mark, same); err != nil {
			return fmt.Errorf("elastic: sync: %w", err)
		}
	}
	if err := s.locals.distribute(ctx, g, root); err != nil {
		return err
	}
	if err := s.keep(ctx, g, roots.Commits); err != nil {
		return err
	}
	s.saved.mark = mark
	s.supply()
	return s.beginAudit(ctx, root)
}

// opening is the root's first message of a sync. Small parts are included to save a broadcast for
// each.
type opening struct {
	Commits uint64
	Mark    snapshotID // ID of the root's live state, if that equals its last save
	Layout  []string   // of every part: incompatible states are detected before anything is overwritten
	Carried [][]byte   // encoded carried parts; empty for others
}

func (o *opening) append(b []byte) []byte {
	b = transfer.AppendWord(b, o.Commits, o.Mark.Generation, o.Mark.Count)
	return transfer.Seal(transfer.AppendList(transfer.AppendList(b, o.Layout), o.Carried))
}

// syncOpening broadcasts the root's opening, applies the carried parts and returns it.
func (s *State) syncOpening(ctx context.Context, g *collective.Group, root int) (opening, error) {
	mine := opening{Commits: s.commits, Layout: s.parts.layouts()}
	if g.Rank() == root {
		var err error
		if mine.Carried, err = s.parts.carried(); err != nil {
			return opening{}, err
		}
		mine.Mark = s.intact()
		_, err = collective.BroadcastBytes(ctx, g, mine.append(nil), root)
		return mine, err
	}
	b, err := collective.BroadcastBytes(ctx, g, nil, root)
	if err != nil {
		return opening{}, err
	}
	roots, err := readOpening(b, mine.Layout)
	if err != nil {
		return opening{}, err
	}
	return roots, s.parts.readCarried(roots.Carried)
}

// readOpening reads the root's opening, which must be of the same parts.
func readOpening(b []byte, layout []string) (opening, error) {
	b, err := transfer.Unseal(b)
	if err != nil {
		return opening{}, errors.New("elastic: sync: the root's opening message has a wrong checksum")
	}
	r := transfer.NewReader(b)
	roots := opening{Commits: r.Word(), Mark: snapshotID{r.Word(), r.Word()}}
	for _, text := range r.List() {
		roots.Layout = append(roots.Layout, string(text))
	}
	roots.Carried = r.List()
	if err := r.End(); err != nil {
		return opening{}, fmt.Errorf("elastic: sync: the root's opening message: %w", err)
	}
	if err := sameLayout(layout, roots.Layout); err != nil {
		return opening{}, err
	}
	if len(roots.Carried) != len(layout) {
		return opening{}, fmt.Errorf("elastic: sync: the root's opening message has %d parts of %d", len(roots.Carried), len(layout))
	}
	return roots, nil
}

// tell exchanges a value of each rank, as JSON. It returns them by rank.
func tell[T any](ctx context.Context, g *collective.Group, mine T) ([]T, error) {
	b, err := json.Marshal(mine)
	if err != nil {
		return nil, fmt.Errorf("elastic: sync: %w", err)
	}
	texts, err := collective.AllGather(ctx, g, transfer.Seal(b))
	if err != nil {
		return nil, err
	}
	all := make([]T, len(texts))
	for r, t := range texts {
		b, err := transfer.Unseal(t)
		if err == nil {
			err = json.Unmarshal(b, &all[r])
		}
		if err != nil {
			return nil, fmt.Errorf("elastic: sync: the report of rank %d: %w", r, err)
		}
	}
	return all, nil
}

// run is a sequence of adjacent chunks of one slice.
type run struct {
	live    []byte
	changed []bool
}

// longestRun limits the chunks of one message, because ranks that do not lack them receive them
// into a scratch buffer of that size.
const longestRun = 8

// syncDifference sets the parts in memory to those of the root, whose live state is the save mark.
// same means that the live state of this rank equals that save too; it need not be in a save of
// this rank.
func (s *State) syncDifference(ctx context.Context, g *collective.Group, root int, mark snapshotID, same bool) error {
	if s.saved.synced = s.parts.noChunks(); s.saved.synced == nil {
		return nil
	}
	if same {
		if !s.saved.clean || !s.isSaved((*snapshot.Blob).Resembles) {
			defer func() { s.saved.synced = nil }() // the following save finds the changes itself
		}
	} else if g.Rank() != root && s.intact() != s.saved.mark {
		last := s.saved.Last()
		changed := s.watch.since(last)
		s.parts.inMemory(func(i, j int, live []byte) {
			s.parts.piece(last, i, j).Restore(live, changed(s.parts.first[i]+j))
		})
	}
	// other: this rank has a different save than the root. none: it has no save to compare.
	other, none := !same && mark != s.saved.mark, !same && s.saved.mark == (snapshotID{})
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
	if other {
		if err := s.secure(); err != nil {
			return err
		}
	}
	var scratch []byte
	for _, r := range s.runs(lacked) {
		to := r.live
		switch {
		case g.Rank() == root:
		case other:
			for i := range r.changed {
				r.changed[i] = true
			}
		default:
			if scratch == nil {
				scratch = make([]byte, longestRun*snapshot.ChunkSize)
			}
			to = scratch[:len(r.live)]
		}
		if err := collective.Broadcast(ctx, g, to, root); err != nil {
			return err
		}
	}
	return nil
}

// noChunks returns false for each chunk of the parts in memory; nil without such parts.
func (ps *parts) noChunks() (all [][][]bool) {
	ps.inMemory(func(i, _ int, live []byte) {
		if all == nil {
			all = make([][][]bool, len(ps.all))
		}
		all[i] = append(all[i], make([]bool, snapshot.Chunks(len(live))))
	})
	return all
}

// lacked returns, for each chunk of the parts in memory, whether any rank lacks it; nil: all chunks
// must be sent.
func (s *State) lacked(ctx context.Context, g *collective.Group, root int, other, all bool) ([]uint8, error) {
	if all {
		return nil, nil
	}
	var mine []uint32
	count, last := 0, s.saved.Last()
	s.parts.inMemory(func(i, j int, live []byte) {
		count += snapshot.Chunks(len(live))
		if other || g.Rank() == root {
			mine = append(mine, s.parts.piece(last, i, j).Sums()...)
		}
	})
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

// runs returns the chunks of the parts in memory that are marked in lacked, or all chunks if it is
// nil.
func (s *State) runs(lacked []uint8) (all []run) {
	at := 0
	s.parts.inMemory(func(i, j int, live []byte) {
		changed := s.saved.synced[i][j]
		for from := 0; from < len(changed); {
			to := from
			for to < len(changed) && to-from < longestRun && (lacked == nil || lacked[at+to] != 0) {
				to++
			}
			if to > from {
				all = append(all, run{live[from*snapshot.ChunkSize : min(to*snapshot.ChunkSize, len(live))], changed[from:to]})
			}
			from = max(to, from+1)
		}
		at += len(changed)
	})
	return all
}

// keep ends a sync: every rank saves its live state as commit number commits.
func (s *State) keep(ctx context.Context, g *collective.Group, commits uint64) error {
	l := &s.locals
	if len(l.parts) > 0 {
		if err := l.replicateSync(ctx); err != nil {
			return err
		}
	}
	if err := s.saveAs(commits, s.savesInPlace() && (s.saved.InPlace() || s.saved.Last() == nil)); err != nil {
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

func sameLayout(mine, roots []string) error {
	if len(mine) != len(roots) {
		return fmt.Errorf("elastic: sync: the state has %d parts on this rank and %d on the root", len(mine), len(roots))
	}
	for i := range mine {
		if mine[i] != roots[i] {
			return fmt.Errorf("elastic: sync: part %d is a %s on this rank and a %s on the root", i, mine[i], roots[i])
		}
	}
	return nil
}
