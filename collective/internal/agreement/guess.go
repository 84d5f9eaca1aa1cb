package agreement

import (
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// A step of training submits the same tensors as the step before. So if the last cycles have
// reduced the same bucket, the ranks do not vote first in the next cycle: they reduce that bucket
// at once, and learn from the same reduction whether all ranks have submitted exactly that bucket.
// If not, the result is dropped, and the cycle continues with the vote. The guess depends only on
// what all ranks have reduced, so all ranks guess the same.

const (
	largestGuess = 256 << 10 // largest bucket, in bytes, that is reduced in a copy
	Surely       = 2         // number of consecutive cycles with one and the same bucket before that bucket is guessed
)

// Guess is the bucket that the ranks expect.
type Guess struct {
	IDs   []int
	Times int // number of cycles in a row in which it was the only bucket
	Right int // number of right guesses so far
}

// Observe records the buckets of a cycle. lent reports whether a guess can reduce a bucket in
// place, so that the tensor is unchanged if the guess is wrong.
func (a *Table[H]) Observe(buckets []Bucket, lent func(*Bucket) bool) {
	if len(buckets) == 0 {
		return // a cycle without a result does not count
	}
	if len(buckets) > 1 || !a.guessable(&buckets[0], lent) {
		a.Guess.Times = 0
		return
	}
	if !slices.Equal(a.Guess.IDs, buckets[0].IDs) {
		a.Guess.IDs, a.Guess.Times = append(a.Guess.IDs[:0], buckets[0].IDs...), 0
	}
	a.Guess.Times++
}

// guessable reports whether a bucket can be guessed: its tensors must be unchanged until it is
// known that all ranks have submitted it, and one element must be able to count the ranks.
func (a *Table[H]) guessable(b *Bucket, lent func(*Bucket) bool) bool {
	if b.Do != 0 || b.Elsewhere || b.Op == operation.Adasum || !a.Whole() || a.size > mostCounted(b.Wire) ||
		b.Bytes > largestGuess && !lent(b) {
		return false
	}
	return !slices.ContainsFunc(b.IDs, func(id int) bool { return a.table[id].Request.Prescale != 1 })
}

// Expects reports whether the ranks begin this cycle with a guess.
func (a *Table[H]) Expects() bool { return a.Guess.Times >= Surely && a.Whole() }

// Expected returns the guessed bucket, and whether this rank has submitted exactly its tensors.
func (a *Table[H]) Expected() (b Bucket, ready bool) {
	var none H
	first := &a.table[a.Guess.IDs[0]].Request
	b = Bucket{Wire: first.wire(), Op: first.Op, Compression: first.Compression, IDs: a.Guess.IDs}
	ready = a.Pending == len(b.IDs)
	for _, id := range b.IDs {
		t := &a.table[id]
		b.Bytes += int(t.Request.Count) * b.Wire.Size()
		ready = ready && t.Mine != none
	}
	return b, ready
}

// Guessed records whether the guess of the cycle was right.
func (a *Table[H]) Guessed(right bool) {
	if !right {
		a.Guess.Times = 0
		return
	}
	a.Guess.Right++
	a.Awaited = false
}

// mostCounted returns the largest number of ranks that an element of a type can count by a sum.
func mostCounted(t kernel.Type) int {
	switch t {
	case kernel.Int8, kernel.Uint8, kernel.BFloat16:
		return 127
	case kernel.Float16:
		return 2048
	}
	return 1 << 15
}

// SetCount sets the element that counts the ranks whose guess is right. ranks is the number of all
// ranks. ready means that the guess of this rank is right.
func SetCount(element []byte, t kernel.Type, op operation.Op, ranks int, ready bool) {
	if ready == (op == operation.Max) {
		clear(element)
		return
	}
	one := operation.Neutral[t][operation.Product]
	copy(element, one)
	if ready && (op == operation.Sum || op == operation.Average) {
		combine := kernel.Combine(t, kernel.Sum)
		for range ranks - 1 {
			combine(element, element, one)
		}
	}
}

// Counted reports whether the reduced element shows that the guesses of all ranks are right. ranks
// is the number of all ranks.
func Counted(element []byte, t kernel.Type, op operation.Op, ranks int) bool {
	if op == operation.Average {
		ranks = 1
	}
	want := make([]byte, len(element))
	SetCount(want, t, op, ranks, true)
	return slices.Equal(element, want)
}
