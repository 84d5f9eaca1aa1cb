package transfer

import (
	"encoding/binary"
	"errors"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// Messages between workers consist of words (64-bit, little-endian), numbers (varints below 2^48),
// sequences of bytes, each preceded by its length, lists of such sequences, each preceded by their
// number, and checksums (32-bit, little-endian).

const mostNumber = 1 << 48

// ErrDamaged means that a message is not one that a sender writes.
var ErrDamaged = errors.New("the message is damaged")

// AppendWord appends words.
func AppendWord(b []byte, words ...uint64) []byte {
	for _, w := range words {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

// AppendNumber appends numbers, which must be below 2^48.
func AppendNumber[T int | uint64](b []byte, numbers ...T) []byte {
	for _, n := range numbers {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return b
}

// appendBytes appends a sequence of bytes.
func appendBytes[T ~string | ~[]byte](b []byte, value T) []byte {
	return append(AppendNumber(b, len(value)), value...)
}

// AppendList appends a list of such sequences.
func AppendList[T ~string | ~[]byte](b []byte, values []T) []byte {
	b = AppendNumber(b, len(values))
	for _, v := range values {
		b = appendBytes(b, v)
	}
	return b
}

// Seal appends the checksum of the message to it.
func Seal(b []byte) []byte { return binary.LittleEndian.AppendUint32(b, snapshot.Sum(b)) }

// Unseal verifies and removes the checksum of a message. It returns ErrDamaged if the checksum does
// not match.
func Unseal(b []byte) ([]byte, error) {
	n := len(b) - 4
	if n < 0 || snapshot.Sum(b[:n]) != binary.LittleEndian.Uint32(b[n:]) {
		return nil, ErrDamaged
	}
	return b[:n:n], nil
}

// Reader decodes a message. After an error its methods return zero values. The results alias the
// message. It allocates at most in proportion to the length of the message.
type Reader struct {
	rest []byte
	bad  bool
}

// NewReader returns a reader of a message.
func NewReader(b []byte) Reader { return Reader{rest: b} }

// Err returns ErrDamaged if anything was read that the message does not contain.
func (r *Reader) Err() error {
	if r.bad {
		return ErrDamaged
	}
	return nil
}

// End returns ErrDamaged unless exactly the whole message has been read.
func (r *Reader) End() error {
	r.bad = r.bad || len(r.rest) > 0
	return r.Err()
}

// Take returns the next n bytes.
func (r *Reader) Take(n int) []byte {
	if r.bad || n < 0 || n > len(r.rest) {
		r.bad = true
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

// Word returns the next word.
func (r *Reader) Word() uint64 {
	if b := r.Take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// Number returns the next number.
func (r *Reader) Number() int {
	n, k := binary.Uvarint(r.rest)
	if r.bad || k <= 0 || n >= mostNumber {
		r.bad = true
		return 0
	}
	r.rest = r.rest[k:]
	return int(n)
}

// Count returns the next number, which counts items that follow it, each of at least one byte.
func (r *Reader) Count() int {
	n := r.Number()
	if n > len(r.rest) {
		r.bad = true
		return 0
	}
	return n
}

// Bytes returns the next sequence of bytes.
func (r *Reader) Bytes() []byte { return r.Take(r.Number()) }

// List returns the next list of such sequences.
func (r *Reader) List() [][]byte {
	var all [][]byte
	for range r.Count() {
		all = append(all, r.Bytes())
	}
	if r.bad {
		return nil
	}
	return all
}

// appendSums appends the checksums of chunks, each followed by a mark of one byte.
func appendSums(b []byte, sums []uint32, marks []byte) []byte {
	for _, sum := range sums {
		b = binary.LittleEndian.AppendUint32(b, sum)
	}
	return append(b, marks...)
}

// sums reads the checksums and marks of n chunks.
func (r *Reader) sums(n int) (sums []uint32, marks []byte) {
	if n > len(r.rest)/5 {
		r.bad = true
		return nil, nil
	}
	b := r.Take(4 * n)
	marks = r.Take(n)
	if r.bad {
		return nil, nil
	}
	sums = make([]uint32, n)
	for i := range sums {
		sums[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return sums, marks
}
