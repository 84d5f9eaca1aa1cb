package elastic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// Divergence is one chunk of a part of which not all ranks hold the same bits.
type Divergence struct {
	// Part names the part.
	Part string
	// Chunk numbers the chunk: of tensors those of 1 MiB. -1 stands for the whole part, where it is
	// not equally long on all ranks.
	Chunk int
	// Ranks are those that differ from most; of equally many, from the lowest rank.
	Ranks []int
}

// DivergedError says that ranks which must hold the same state do not, and where. All ranks get the
// same.
type DivergedError struct{ Where []Divergence }

// Error names the first few chunks.
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

// verification says when states are compared, and what follows where they differ.
type verification struct {
	every int  // commits; 0: only what syncs have left, negative: never
	heal  bool // by majority; otherwise it is an error
}

func (v verification) due(commits uint64) bool { return v.every > 0 && commits%uint64(v.every) == 0 }

// Digest returns a number for the bits that the last Save, Commit or Sync has kept, of all parts of
// this package and of parts that are [Imaged], but not of [Local] ones. Ranks that hold the same
// have the same digest; those that do not have another, but for one chance in 2^32 for each chunk
// of 1 MiB. It reads the whole state where it has changed, and is not collective.
func (s *State) Digest() (uint64, error) {
	if s.err != nil {
		return 0, s.err
	}
	if err := s.settled(); err != nil {
		return 0, err
	}
	if err := s.proveWatch(); err != nil {
		return 0, err
	}
	s.sayLeftOut()
	sums, err := s.sums(false)
	return digestOf(sums), err
}

// sayLeftOut names, once, the parts that no comparison sees.
func (s *State) sayLeftOut() {
	if s.saidLeftOut || s.worker.Rank() != 0 {
		return
	}
	s.saidLeftOut = true
	var names []string
	for i := range s.parts {
		if s.kept[i] == nil {
			names = append(names, s.partName(i))
		}
	}
	if len(names) > 0 {
		s.worker.log.Warnf("digests and comparisons of the ranks' states leave out %s: not elastic.Imaged", strings.Join(names, ", "))
	}
}

// travelled is a part of which a sync carries bytes that say the same in every process, but that
// need not be the same there.
type travelled interface{ onlyCarried() bool }

// sums returns the checksums of the chunks of each part that is in images; none of others. Right
// after a sync there is no need to ask for those of parts that have travelled in its opening, which
// has a checksum of its own.
func (s *State) sums(synced bool) ([][]uint32, error) {
	last := s.saved.Last()
	if last == nil {
		return nil, errNothingSaved
	}
	return s.sumsIn(last, synced)
}

// sumsIn is sums of an image. It looks at nothing that changes.
func (s *State) sumsIn(last *image.Image, synced bool) ([][]uint32, error) {
	sums := make([][]uint32, len(s.parts))
	for i, k := range s.kept {
		if t, ok := k.(travelled); k == nil || synced && ok && t.onlyCarried() {
			continue
		}
		var err error
		if sums[i], err = k.sums(last.Pieces()[s.first[i]:]); err != nil {
			return nil, err
		}
	}
	return sums, nil
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

// sumsOf returns the checksums of b as a piece would have them.
func sumsOf(b []byte) []uint32 {
	sums := make([]uint32, 0, image.Chunks(len(b)))
	for c := range slices.Chunk(b, image.ChunkSize) {
		sums = append(sums, image.Sum(c))
	}
	return sums
}

// Verify compares what all ranks have saved last. Where they differ it returns a *DivergedError,
// and nothing has changed; the cost is that of [State.Digest] and of one reduction of 16 bytes. It
// is collective. Parts that have no image are not compared. With --verify-state N the state does
// the same after each N commits, and heals where it was asked to.
func (s *State) Verify(ctx context.Context) error {
	if s.err != nil {
		return s.err
	}
	if err := s.settled(); err != nil {
		return err
	}
	if err := s.proveWatch(); err != nil {
		return err
	}
	s.sayLeftOut()
	diverged, _, err := s.compare(ctx, s.worker.Group(), false)
	if err == nil && diverged != nil {
		return diverged
	}
	return err
}

// verify compares the ranks' saved states, and where they differ heals them or returns a
// *DivergedError. After a sync the truth is the root's; root is negative otherwise, and the truth
// is that of most ranks.
func (s *State) verify(ctx context.Context, root int) error {
	g, synced := s.worker.Group(), root >= 0
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

// heal gives all ranks what root has of what differs, since when the log says, and compares again.
func (s *State) heal(ctx context.Context, g *collective.Group, root int, diverged *DivergedError, since string, synced bool) error {
	if g.Rank() == 0 {
		s.worker.log.Warnf("%v%s; they are given what rank %d has", diverged, since, root)
	}
	if err := s.healFrom(ctx, g, root, diverged); err != nil {
		return err
	}
	diverged, _, err := s.compare(ctx, g, synced)
	if err == nil && diverged != nil {
		return fmt.Errorf("elastic: not healed: %w", diverged)
	}
	return err
}

// compare returns where the ranks' saved states differ, and their digests; nil where they do not.
func (s *State) compare(ctx context.Context, g *collective.Group, synced bool) (*DivergedError, []uint64, error) {
	sums, err := s.sums(synced)
	if err != nil {
		return nil, nil, err
	}
	mine := digestOf(sums)
	word := []uint64{mine, ^mine}
	if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil || word[0] == ^word[1] {
		return nil, nil, err
	}
	return s.locate(ctx, g, sums)
}

// locate is the rest of compare, where the ranks' checksums are known to differ: by part first, and
// by chunk then.
func (s *State) locate(ctx context.Context, g *collective.Group, sums [][]uint32) (*DivergedError, []uint64, error) {
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
			return nil, nil, errors.New("elastic: verify: the states have not the same parts")
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
		diverged.Where = append(diverged.Where, differing(s.partName(i), chunks)...)
	}
	return diverged, digests, nil
}

// differing returns which chunks of a part differ, given all ranks' checksums.
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

// common returns a rank whose value is that of the most ranks, of equals the lowest, and how many
// have it.
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

// majority returns the lowest rank that holds what more than half of all hold, or -1.
func majority(digests []uint64) int {
	if rank, n := common(digests); 2*n > len(digests) {
		return rank
	}
	return -1
}

// healFrom makes what differs that of root on every rank, and saves it.
func (s *State) healFrom(ctx context.Context, g *collective.Group, root int, diverged *DivergedError) error {
	for i, p := range s.parts {
		name := s.partName(i)
		if !slices.ContainsFunc(diverged.Where, func(d Divergence) bool { return d.Part == name }) {
			continue
		}
		if err := p.Sync(ctx, g, root); err != nil {
			return fmt.Errorf("elastic: heal %s: %w", name, err)
		}
	}
	return s.save(s.commits)
}
