package agreement

import (
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// A step of training submits the same tensors as the one before. So where the last cycles have
// reduced the same bucket, the next one does not vote on it first: the ranks reduce it at once, and
// learn on the way whether all of them have submitted just that. If not, the result is dropped, and
// the cycle goes on with the vote. What is guessed follows from what all ranks have reduced, so
// that all guess the same.

const (
	largestGuess = 256 << 10 // bytes of a bucket that is reduced in a copy
	Surely       = 2         // cycles in which the bucket has been the only one
)

// Guess is the bucket that the ranks expect.
type Guess struct {
	IDs   []int
	Times int // cycles in a row whose only bucket it was
	Right int // guesses so far that were right
}

// Observe notes the buckets of a cycle. A bucket is lent if it is reduced where its tensor lies,
// which stays as it is where the guess is wrong.
func (a *Table[H]) Observe(buckets []Bucket, lent func(*Bucket) bool) {
	if len(buckets) == 0 {
		return // a cycle without a result tells nothing
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

// guessable reports whether a bucket can be reduced on the chance that all ranks have submitted it:
// its tensors stay as they are until that is known, and an element can count the ranks.
func (a *Table[H]) guessable(b *Bucket, lent func(*Bucket) bool) bool {
	if b.Do != 0 || b.Elsewhere || b.Op == operation.Adasum || !a.Whole() || a.size > mostCounted(b.Wire) ||
		b.Bytes > largestGuess && !lent(b) {
		return false
	}
	return !slices.ContainsFunc(b.IDs, func(id int) bool { return a.table[id].Request.Prescale != 1 })
}

// Expects reports whether the ranks begin this cycle with a guess.
func (a *Table[H]) Expects() bool { return a.Guess.Times >= Surely && a.Whole() }

// Expected is the bucket that is guessed, and whether this rank has submitted just that.
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

// Guessed notes whether the guess of the cycle was right.
func (a *Table[H]) Guessed(right bool) {
	if !right {
		a.Guess.Times = 0
		return
	}
	a.Guess.Right++
	a.Awaited = false
}

// mostCounted is up to how many ranks a sum in an element of a type counts.
func mostCounted(t kernel.Type) int {
	switch t {
	case kernel.Int8, kernel.Uint8, kernel.BFloat16:
		return 127
	case kernel.Float16:
		return 2048
	}
	return 1 << 15
}

// SetCount sets the element that counts the ranks whose guess is right, of some ranks: those of a
// maximum count as nothing.
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

// Counted reports whether the element says, once it is reduced, that the guesses of so many ranks,
// which are all, are right.
func Counted(element []byte, t kernel.Type, op operation.Op, ranks int) bool {
	if op == operation.Average {
		ranks = 1
	}
	want := make([]byte, len(element))
	SetCount(want, t, op, ranks, true)
	return slices.Equal(element, want)
}
