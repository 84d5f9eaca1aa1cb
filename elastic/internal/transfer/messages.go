package transfer

import (
	"encoding/binary"
	"slices"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// What a manifest reports about a chunk.
const (
	gone    = 0
	present = 1
)

// Manifest describes a commit.
type Manifest struct {
	// Number is the number of the commit.
	Number uint64
	// Layout is the Layout of the Commit.
	Layout string

	lengths []int    // of the blobs
	sums    []uint32 // checksums of all chunks; nil: not included
	there   []byte   // for each of these, whether the source still has the chunk
}

func (m *Manifest) append(b []byte) []byte {
	b = appendBytes(AppendWord(b, m.Number), m.Layout)
	b = AppendNumber(AppendNumber(b, len(m.lengths)), m.lengths...)
	return appendSums(AppendNumber(b, len(m.sums)), m.sums, m.there)
}

func (r *Reader) manifest() (m Manifest) {
	m.Number, m.Layout = r.Word(), string(r.Bytes())
	chunks := 0
	for range r.Count() {
		m.lengths = append(m.lengths, r.Number())
		chunks += snapshot.Chunks(m.lengths[len(m.lengths)-1])
	}
	n := r.Count()
	r.bad = r.bad || n != 0 && n != chunks
	m.sums, m.there = r.sums(n)
	return m
}

// fits returns ErrOther unless the manifest describes a commit of the given layout whose blobs have
// the given lengths.
func (m *Manifest) fits(layout string, lengths []int) error {
	if m.Layout != layout || !slices.Equal(m.lengths, lengths) {
		return ErrOther
	}
	return nil
}

// has reports whether the source still has chunk i with the checksum sum.
func (m *Manifest) has(i int, sum uint32) bool { return m.there[i] == present && m.sums[i] == sum }

// Head describes the commit with which a follower starts. Its manifest has no checksums.
type Head struct {
	Manifest
	// Feed is the ID of the source's feed.
	Feed uint64
	// Steps is the number of steps that have led to the commit. Latest is the number of steps that
	// the source has applied or is about to apply.
	Steps, Latest uint64
	// Carried are the values of the parts that are in no blob.
	Carried [][]byte

	size int // number of bytes of a step's averages
}

func (h *Head) append(b []byte) []byte {
	b = AppendWord(h.Manifest.append(b), h.Feed, h.Steps, h.Latest)
	return AppendNumber(AppendList(b, h.Carried), h.size)
}

func parseHead(b []byte) (*Head, error) {
	r := NewReader(b)
	h := &Head{Manifest: r.manifest(), Feed: r.Word(), Steps: r.Word(), Latest: r.Word(), Carried: r.List(), size: r.Number()}
	return h, r.End()
}

// Step is a step for a follower to apply.
type Step struct {
	// Number is the number of the step. It is applied to the state of Commit.
	Number, Commit uint64
	// Carried are the values of the parts that are in no blob, right before the step is applied.
	Carried [][]byte
	// Sums are the checksums of some chunks of that commit.
	Sums []Sum
	// Buffer is the index of the buffer that holds its averages.
	Buffer int

	latest uint64 // as Head.Latest
}

// Sum is the checksum of a chunk. Chunk counts the chunks of all blobs.
type Sum struct{ Chunk, Sum uint32 }

func (s *Step) append(b []byte) []byte {
	b = AppendList(AppendWord(b, s.Number, s.Commit, s.latest), s.Carried)
	for _, sum := range s.Sums {
		b = binary.LittleEndian.AppendUint32(b, sum.Chunk)
		b = binary.LittleEndian.AppendUint32(b, sum.Sum)
	}
	return b
}

func parseStep(b []byte) (*Step, error) {
	r := NewReader(b)
	s := &Step{Number: r.Word(), Commit: r.Word(), latest: r.Word(), Carried: r.List()}
	for len(r.rest) >= 8 && !r.bad {
		n := r.Word()
		s.Sums = append(s.Sums, Sum{uint32(n), uint32(n >> 32)})
	}
	return s, r.End()
}
