package elastic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// Divergence is a chunk of a part whose bits differ between ranks.
type Divergence struct {
	// Part is the name of the part.
	Part string
	// Chunk is the index of the chunk, of 1 MiB in tensors. -1 stands for the whole part, if its
	// length differs between ranks.
	Chunk int
	// Ranks are the ranks that differ from the most common value; if several values are equally
	// common, from that of the lowest rank.
	Ranks []int
}

// DivergedError means that states of ranks that must be equal differ. All ranks get the same error.
type DivergedError struct{ Where []Divergence }

// Error returns a message with the first few chunks.
func (e *DivergedError) Error() string {
	var b strings.Builder
	b.WriteString("elastic: the ranks' states differ: ")
	for i, d := range e.Where {
		if i == 3 {
			fmt.Fprintf(&b, "; and %d more", len(e.Where)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(d.Part)
		if d.Chunk >= 0 {
			fmt.Fprintf(&b, ", chunk %d", d.Chunk)
		}
		fmt.Fprintf(&b, ", ranks %v", d.Ranks)
	}
	return b.String()
}

// verification describes when states are compared and what happens if they differ.
type verification struct {
	every int  // commits between comparisons; 0: only after syncs, negative: never
	heal  bool // replace the state of the minority; otherwise return an error
}

func (v verification) due(commits uint64) bool { return v.every > 0 && commits%uint64(v.every) == 0 }

// Digest returns a hash of the last Save, Commit or Sync: of all parts of this package except
// [Local] ones, and of [Imaged] parts. Equal states have equal digests on all ranks; different
// states have equal digests with a probability of 2^-32 per differing chunk of 1 MiB. It reads all
// parts of the state that have changed. It is not collective.
func (s *State) Digest() (uint64, error) {
	if s.err != nil {
		return 0, s.err
	}
	if err := s.settled(); err != nil {
		return 0, err
	}
	if err := s.watch.prove(s.saved.Last()); err != nil {
		return 0, err
	}
	s.logLeftOut()
	sums, err := s.parts.sums(s.saved.Last(), false)
	return digestOf(sums), err
}

// logLeftOut logs, once, the parts that comparisons do not include.
func (s *State) logLeftOut() {
	if s.loggedLeftOut || s.worker.Rank() != 0 {
		return
	}
	s.loggedLeftOut = true
	if names := s.parts.withoutImage(); len(names) > 0 {
		s.worker.log.Warnf("digests and comparisons of the ranks' states leave out %s: not elastic.Imaged", strings.Join(names, ", "))
	}
}

func digestOf(sums ...[][]uint32) uint64 {
	h := fnv.New64a()
	for _, parts := range sums {
		for _, part := range parts {
			b := binary.LittleEndian.AppendUint64(nil, uint64(len(part)))
			for _, sum := range part {
				b = binary.LittleEndian.AppendUint32(b, sum)
			}
			_, _ = h.Write(b)
		}
	}
	return h.Sum64()
}

// sumsOf returns the checksums of the chunks of b.
func sumsOf(b []byte) []uint32 {
	sums := make([]uint32, 0, snapshot.Chunks(len(b)))
	for c := range slices.Chunk(b, snapshot.ChunkSize) {
		sums = append(sums, snapshot.Sum(c))
	}
	return sums
}

// Verify compares the last saves of all ranks. If they differ it returns a *DivergedError and
// changes nothing. It is collective and blocks for [State.Digest] and one reduction of 16 bytes.
// Parts without an image are not compared. --verify-state N makes the state do the same after every
// N commits, and --heal-state makes it repair differences.
func (s *State) Verify(ctx context.Context) error {
	if s.err != nil {
		return s.err
	}
	if s.catchingUp() {
		return s.worker.first.refuses()
	}
	if err := s.settled(); err != nil {
		return err
	}
	if err := s.watch.prove(s.saved.Last()); err != nil {
		return err
	}
	s.logLeftOut()
	diverged, _, err := s.compare(ctx, s.worker.group(), false)
	if err == nil && diverged != nil {
		return diverged
	}
	return err
}

// verify compares the ranks' saves. If they differ it heals them, or returns a *DivergedError.
// After a sync, root is the sync root, whose state counts as correct. If root is negative, the
// state of the majority does.
func (s *State) verify(ctx context.Context, root int) error {
	g, synced := s.worker.group(), root >= 0
	diverged, digests, err := s.compare(ctx, g, synced)
	if err != nil || diverged == nil {
		return err
	}
	if !synced {
		root = majority(digests)
	}
	if root < 0 || !s.worker.verification.heal {
		return diverged
	}
	return s.heal(ctx, g, root, diverged, "", synced)
}

// heal copies the differing parts of root to all ranks and compares again. since is a part of the
// log line.
func (s *State) heal(ctx context.Context, g *collective.Group, root int, diverged *DivergedError, since string, synced bool) error {
	if g.Rank() == 0 {
		s.worker.log.Warnf("%v%s; the state of rank %d replaces theirs", diverged, since, root)
	}
	if err := s.healFrom(ctx, g, root, diverged); err != nil {
		return err
	}
	diverged, _, err := s.compare(ctx, g, synced)
	if err == nil && diverged != nil {
		return fmt.Errorf("elastic: still different after healing: %w", diverged)
	}
	return err
}

// compare returns where the ranks' saves differ, and the digests of all ranks; nil if they are
// equal.
func (s *State) compare(ctx context.Context, g *collective.Group, synced bool) (*DivergedError, []uint64, error) {
	sums, err := s.parts.sums(s.saved.Last(), synced)
	if err != nil {
		return nil, nil, err
	}
	mine := digestOf(sums)
	word := []uint64{mine, ^mine}
	if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil || word[0] == ^word[1] {
		return nil, nil, err
	}
	return s.parts.locate(ctx, g, sums)
}

// locate finds the differences, first by part and then by chunk.
func (ps *parts) locate(ctx context.Context, g *collective.Group, sums [][]uint32) (*DivergedError, []uint64, error) {
	mine := digestOf(sums)
	parts := []uint64{mine}
	for i := range sums {
		parts = append(parts, digestOf(sums[i:i+1]))
	}
	all, err := collective.AllGather(ctx, g, parts)
	if err != nil {
		return nil, nil, err
	}
	diverged := &DivergedError{}
	digests := make([]uint64, len(all))
	for r := range all {
		if digests[r] = all[r][0]; len(all[r]) != len(parts) {
			return nil, nil, errors.New("elastic: verify: the ranks' states have different numbers of parts")
		}
	}
	for i := range sums {
		if !slices.ContainsFunc(all, func(of []uint64) bool { return of[i+1] != all[0][i+1] }) {
			continue
		}
		chunks, err := collective.AllGather(ctx, g, sums[i])
		if err != nil {
			return nil, nil, err
		}
		diverged.Where = append(diverged.Where, differing(ps.name(i), chunks)...)
	}
	return diverged, digests, nil
}

// differing returns the differing chunks of a part, given all ranks' checksums.
func differing(part string, of [][]uint32) (where []Divergence) {
	for _, sums := range of {
		if len(sums) != len(of[0]) {
			lengths := make([]uint64, len(of))
			for r := range of {
				lengths[r] = uint64(len(of[r]))
			}
			return []Divergence{{part, -1, minority(lengths)}}
		}
	}
	column := make([]uint64, len(of))
	for c := range of[0] {
		for r := range of {
			column[r] = uint64(of[r][c])
		}
		if ranks := minority(column); len(ranks) > 0 {
			where = append(where, Divergence{part, c, ranks})
		}
	}
	return where
}

// common returns the lowest rank with the most common value, and how many ranks have that value.
func common(values []uint64) (rank, count int) {
	for r, v := range values {
		n := 0
		for _, other := range values {
			if other == v {
				n++
			}
		}
		if n > count {
			rank, count = r, n
		}
	}
	return rank, count
}

func minority(values []uint64) (ranks []int) {
	most, _ := common(values)
	for r, v := range values {
		if v != values[most] {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// majority returns the lowest rank with the value that more than half of all ranks have, or -1.
func majority(digests []uint64) int {
	if rank, n := common(digests); 2*n > len(digests) {
		return rank
	}
	return -1
}

// healFrom sets the differing parts on every rank to those of root, and saves.
func (s *State) healFrom(ctx context.Context, g *collective.Group, root int, diverged *DivergedError) error {
	if err := s.secure(); err != nil {
		return err
	}
	for i, p := range s.parts.all {
		name := s.parts.name(i)
		if !slices.ContainsFunc(diverged.Where, func(d Divergence) bool { return d.Part == name }) {
			continue
		}
		if err := p.Sync(ctx, g, root); err != nil {
			return fmt.Errorf("elastic: heal %s: %w", name, err)
		}
	}
	return s.save(s.commits)
}

// backgroundAudit is the smallest size of the tensors, in bytes, for which their checksums are
// computed in the background of training.
const backgroundAudit = 4 << 20

// audits are the comparisons of the states after syncs.
type audits struct {
	due     *audit         // audit of the last sync, until the ranks have compared the checksums; nil: none
	running sync.WaitGroup // computes checksums
}

// audit is the comparison of the ranks' states after a sync. The checksums are computed in the
// background and compared at the first commit for which all ranks have finished. The audit of a
// later sync replaces it.
type audit struct {
	root int // the sync root
	done chan struct{}
	sums [][]uint32 // valid when done is closed
	err  error

	word []uint64 // the reduced words

	spread *spread // for a state with Steps; nil: the checksums are of the sync's save
}

// spread is what an audit of a state with Steps still has to read. Its checksums are of the commits
// after the sync, because a state that differs continues to differ. Each rank reads the same chunks
// before the same step, and none before the first step of a world, which must not be delayed.
type spread struct {
	begun  bool // a step has been made
	chunks []spreadChunk
}

type spreadChunk struct{ part, at, piece, chunk int }

// spreadShare is the number of chunks that are read before a step.
const spreadShare = 8

// beginSpread starts an audit that is spread over the following steps.
func (s *State) beginSpread(root int) error {
	a := &audit{root: root, done: make(chan struct{}), sums: make([][]uint32, len(s.parts.all)), spread: &spread{}}
	blobs := s.saved.Last().Blobs()
	for i, c := range s.parts.of {
		switch {
		case c.opaque:
			continue
		case !c.inMemory():
			var err error
			if a.sums[i], err = c.sums(blobs[s.parts.first[i]:]); err != nil {
				return err
			}
			continue
		}
		for j, live := range c.memory() {
			for k := range snapshot.Chunks(len(live)) {
				a.spread.chunks = append(a.spread.chunks, spreadChunk{i, len(a.sums[i]), j, k})
				a.sums[i] = append(a.sums[i], 0)
			}
		}
	}
	s.audits.due = a
	return nil
}

// auditSome continues a spread audit, before a step is applied.
func (s *State) auditSome() {
	a := s.audits.due
	if a == nil || a.spread == nil || len(a.spread.chunks) == 0 {
		return
	}
	if !a.spread.begun {
		a.spread.begun = true
		return
	}
	n := min(spreadShare, len(a.spread.chunks))
	for _, c := range a.spread.chunks[:n] {
		live := s.parts.of[c.part].memory()[c.piece][c.chunk*snapshot.ChunkSize:]
		a.sums[c.part][c.at] = snapshot.Sum(live[:min(snapshot.ChunkSize, len(live))])
	}
	if a.spread.chunks = a.spread.chunks[n:]; len(a.spread.chunks) == 0 {
		close(a.done)
	}
}

// beginAudit compares the states after a sync, or starts to compare them in the background.
func (s *State) beginAudit(ctx context.Context, root int) error {
	if s.worker.verification.every < 0 {
		return nil
	}
	size := 0
	s.parts.inMemory(func(_, _ int, live []byte) { size += len(live) })
	if size < backgroundAudit {
		return s.verify(ctx, root)
	}
	if s.steps != nil && s.checkpoints == nil && s.replayable() {
		return s.beginSpread(root)
	}
	a := &audit{root: root, done: make(chan struct{})}
	s.audits.due = a
	blobs, done := s.saved.Audit()
	s.audits.running.Go(func() {
		defer close(a.done)
		defer done()
		a.sums, a.err = s.parts.sumsOf(blobs, true)
	})
	return nil
}

// fill sets this rank's three words for the reduction: whether its checksums are not ready yet, and
// its digest.
func (a *audit) fill(word []uint64) {
	a.word = word
	select {
	case <-a.done:
		sum := digestOf(a.sums)
		word[0], word[1], word[2] = 0, sum, ^sum
	default:
		word[0], word[1], word[2] = 1, 0, 0
	}
}

// compareAudited evaluates the reduced words of the preceding agreement.
func (s *State) compareAudited() error {
	a := s.audits.due
	if a == nil || a.word[0] != 0 {
		return nil
	}
	s.audits.due = nil
	if a.err != nil {
		return a.err
	}
	if a.word[1] == ^a.word[2] {
		return nil
	}
	if err := s.settled(); err != nil {
		return err
	}
	g := s.worker.group()
	diverged, _, err := s.parts.locate(s.ctx, g, a.sums)
	if err != nil {
		return err
	}
	if !s.worker.verification.heal {
		return diverged
	}
	return s.heal(s.ctx, g, a.root, diverged, " since the last sync", false)
}
