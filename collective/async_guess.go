package collective

import (
	"context"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// A step of training submits the same tensors as the one before. So where the last cycles have
// reduced the same bucket, the next one does not vote on it first: the ranks reduce it at once, and
// learn on the way whether all of them have submitted just that. If not, the result is dropped, and
// the cycle goes on with the vote. What is guessed follows from what all ranks have reduced, so
// that all guess the same.

const (
	largestGuess = 256 << 10 // bytes of a bucket that is reduced in a copy
	surely       = 2         // cycles in which the bucket has been the only one
)

// guess is the bucket that the ranks expect.
type guess struct {
	ids   []int
	times int // cycles in a row whose only bucket it was
	right int // guesses so far that were right
}

// observe notes the buckets of a cycle.
func (e *engine) observe(buckets []bucket) {
	if len(buckets) == 0 {
		return // a cycle without a result tells nothing
	}
	if len(buckets) > 1 || !e.guessable(&buckets[0]) {
		e.guess.times = 0
		return
	}
	if !slices.Equal(e.guess.ids, buckets[0].ids) {
		e.guess.ids, e.guess.times = append(e.guess.ids[:0], buckets[0].ids...), 0
	}
	e.guess.times++
}

// guessable reports whether a bucket can be reduced on the chance that all ranks have submitted it:
// its tensors stay as they are until that is known, and an element can count the ranks.
func (e *engine) guessable(b *bucket) bool {
	if b.do != 0 || b.elsewhere || b.op == operation.Adasum || e.contribute < e.g.size || e.g.size > mostCounted(b.wire) ||
		b.bytes > largestGuess && !e.reducesIfReady(b) {
		return false
	}
	return !slices.ContainsFunc(b.ids, func(id int) bool { return e.table[id].request.prescale != 1 })
}

// reducesIfReady reports whether a bucket is reduced where its tensor lies, which stays as it is
// where the guess is wrong.
func (e *engine) reducesIfReady(b *bucket) bool {
	return len(b.ids) == 1 && b.compression == operation.NotCompressed && e.lane.call.ReducesIfReady(b.bytes)
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

// expects reports whether the ranks begin this cycle with a guess.
func (e *engine) expects() bool { return e.guess.times >= surely && e.contribute == e.g.size }

// tryGuess reduces the bucket that is expected, and reports whether that was right: then the cycle
// is over. Ready says that this rank has nothing to say but what it has submitted.
func (e *engine) tryGuess(ready bool) (right bool, err error) {
	first := &e.table[e.guess.ids[0]].request
	b := bucket{wire: first.wire(), op: first.op, compression: first.compression, ids: e.guess.ids}
	ready = ready && e.pending == len(b.ids)
	for _, id := range b.ids {
		t := &e.table[id]
		b.bytes += int(t.request.count) * b.wire.Size()
		ready = ready && t.mine != nil
	}
	e.mark(0)
	data, right, err := []byte(nil), false, error(nil)
	if e.reducesIfReady(&b) {
		data, right, err = e.guessInPlace(&b, ready)
	} else {
		data, right, err = e.guessApart(&b, ready)
	}
	if err != nil {
		return false, err
	}
	e.mark(2)
	if !right {
		e.guess.times = 0
		return false, nil
	}
	e.guess.right++
	e.awaited = false
	e.copyOut(&b, data)
	return true, nil
}

// guessInPlace reduces the only tensor of a bucket where it lies, if all ranks are ready.
func (e *engine) guessInPlace(b *bucket, ready bool) (data []byte, right bool, err error) {
	switch {
	case ready:
		data = e.table[b.ids[0]].mine.data
	case e.lane.call.TwoLevels(): // what is sent to other hosts before all is known
		data = e.buffer(b.bytes)
		clear(data)
	}
	e.mark(1)
	right, err = e.lane.allReduceIfReady(context.Background(), b.wire, b.op, b.bytes, data, ready)
	return data, right, err
}

// guessApart reduces a copy of a bucket, with an element that counts the ranks that are ready.
func (e *engine) guessApart(b *bucket, ready bool) (data []byte, right bool, err error) {
	all := e.buffer(b.bytes + b.wire.Size())
	data, count := all[:b.bytes], all[b.bytes:]
	if ready {
		e.gatherBucket(b, data)
	} else {
		clear(data)
	}
	setCount(count, b.wire, b.op, 1, ready)
	e.mark(1)
	err = e.lane.allReduceBytes(context.Background(), b.wire, b.op, all, nil)
	return data, counted(count, b.wire, b.op, e.g.size), err
}

// setCount sets the element that counts the ranks whose guess is right, of some ranks: those of a
// maximum count as nothing.
func setCount(element []byte, t kernel.Type, op operation.Op, ranks int, ready bool) {
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

// counted reports whether the element says, once it is reduced, that the guesses of so many ranks,
// which are all, are right.
func counted(element []byte, t kernel.Type, op operation.Op, ranks int) bool {
	if op == operation.Average {
		ranks = 1
	}
	want := make([]byte, len(element))
	setCount(want, t, op, ranks, true)
	return slices.Equal(element, want)
}

// allReduceIfReady is AllReduce of so many bytes on every rank if all ranks are ready for it, with
// the same bits. Otherwise data stays as it is; that of a rank that is not ready is not looked at.
// All ranks find the same.
func (g *Group) allReduceIfReady(ctx context.Context, t kernel.Type, op operation.Op, length int, data []byte, ready bool) (right bool, err error) {
	d := operation.Descriptor{Action: operation.AllReduce, Type: t, Op: op, Count: uint64(length / t.Size()), Algorithm: g.call.Algorithm()}
	if h := g.inMemory(); h != nil {
		err = g.do(ctx, d, nil, func(m *shm.Member, call shm.Desc) (err error) {
			right, err = m.AllReduceSaying(ctx, call, length, data, ready, h.Reduction(t, op))
			return err
		})
		return right && err == nil, err
	}
	err = g.run(ctx, d, nil, func(c *levels.Call) (err error) {
		right, err = c.AllReduceIfReady(data, ready)
		return err
	})
	return right && err == nil, err
}
