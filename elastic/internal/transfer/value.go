package transfer

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// Value is an immutable sequence of bytes, in chunks as in a snapshot.
type Value struct {
	size    int
	chunks  [][]byte
	sums    []uint32
	changed []bool // chunks that differ from those of the previous value; nil: all
}

// NewValue splits b, which must not change, into chunks. before is the value that the new one
// replaces; nil: none.
func NewValue(b []byte, before *Value) *Value {
	n := snapshot.Chunks(len(b))
	v := &Value{size: len(b), chunks: make([][]byte, n), sums: make([]uint32, n), changed: make([]bool, n)}
	for i := range n {
		v.chunks[i] = b[i*snapshot.ChunkSize : min((i+1)*snapshot.ChunkSize, len(b))]
		if before != nil && i < len(before.chunks) && bytes.Equal(before.chunks[i], v.chunks[i]) {
			v.sums[i] = before.sums[i]
			continue
		}
		v.sums[i], v.changed[i] = snapshot.Sum(v.chunks[i]), true
	}
	return v
}

// Unchanged returns a value with the same bytes as v, which replaces v.
func (v *Value) Unchanged() *Value {
	return &Value{v.size, v.chunks, v.sums, make([]bool, len(v.chunks))}
}

// Len returns the number of bytes.
func (v *Value) Len() int { return v.size }

// Bytes returns the value. The caller must not write to it.
func (v *Value) Bytes() []byte {
	if len(v.chunks) == 1 {
		return v.chunks[0]
	}
	return slices.Concat(v.chunks...)
}

// What a message contains for a chunk of a value.
const (
	follows   = 0 // its bytes follow
	unchanged = 1 // the chunk equals that of the previous value
)

// omits reports whether a message leaves out chunk i.
func (v *Value) omits(i int, differences bool) bool {
	return differences && v.changed != nil && !v.changed[i]
}

// AppendValues appends values, either complete or as differences from the values that they replace.
// Any of them may be nil. A value is encoded as its size plus one, or 0 if it is nil, the checksums
// of its chunks, each with a mark, and the chunks that are sent.
func AppendValues(b []byte, values []*Value, differences bool) []byte {
	room := 0
	for _, v := range values {
		if room += binary.MaxVarintLen64; v == nil {
			continue
		}
		for i, c := range v.chunks {
			if room += 5; !v.omits(i, differences) {
				room += len(c)
			}
		}
	}
	b = slices.Grow(b, room)
	for _, v := range values {
		b = appendValue(b, v, differences)
	}
	return b
}

func appendValue(b []byte, v *Value, differences bool) []byte {
	if v == nil {
		return AppendNumber(b, 0)
	}
	marks := make([]byte, len(v.chunks))
	for i := range marks {
		if v.omits(i, differences) {
			marks[i] = unchanged
		}
	}
	b = appendSums(AppendNumber(b, v.size+1), v.sums, marks)
	for i, c := range v.chunks {
		if marks[i] == follows {
			b = append(b, c...)
		}
	}
	return b
}

// Values returns the next n values, which may alias the message. before are the values that they
// replace, from which unchanged chunks are taken; nil: none.
func (r *Reader) Values(n int, before []*Value) []*Value {
	all := make([]*Value, n)
	for i := range all {
		var old *Value
		if before != nil {
			old = before[i]
		}
		all[i] = r.value(old)
	}
	return all
}

func (r *Reader) value(old *Value) *Value {
	size := r.Number() - 1
	if size < 0 {
		return nil
	}
	sums, marks := r.sums(snapshot.Chunks(size))
	if r.bad {
		return nil
	}
	v := &Value{size: size, chunks: make([][]byte, len(sums)), sums: sums}
	whole := !slices.Contains(marks, unchanged)
	for i, sum := range sums {
		length := min(snapshot.ChunkSize, size-i*snapshot.ChunkSize)
		switch {
		case marks[i] == follows:
			if v.chunks[i] = r.Take(length); !whole {
				v.chunks[i] = bytes.Clone(v.chunks[i]) // a chunk must not keep a message alive that consists mostly of other chunks
			}
			r.bad = r.bad || snapshot.Sum(v.chunks[i]) != sum
		case marks[i] != unchanged || old == nil || i >= len(old.chunks) || len(old.chunks[i]) != length || old.sums[i] != sum:
			r.bad = true
		default:
			v.chunks[i] = old.chunks[i]
		}
		if r.bad {
			return nil
		}
	}
	return v
}
