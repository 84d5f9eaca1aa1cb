package collective

import (
	"context"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// reducesIfReady reports whether a bucket is reduced where its tensor lies, which stays as it is
// where the guess is wrong.
func (e *engine) reducesIfReady(b *agreement.Bucket) bool {
	return len(b.IDs) == 1 && b.Compression == operation.NotCompressed && e.lane.call.ReducesIfReady(b.Bytes)
}

// tryGuess reduces the bucket that is expected, and reports whether that was right: then the cycle
// is over. Ready says that this rank has nothing to say but what it has submitted.
func (e *engine) tryGuess(ready bool) (right bool, err error) {
	b, just := e.agreed.Expected()
	ready = ready && just
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
	if e.agreed.Guessed(right); right {
		e.copyOut(&b, data)
	}
	return right, nil
}

// guessInPlace reduces the only tensor of a bucket where it lies, if all ranks are ready.
func (e *engine) guessInPlace(b *agreement.Bucket, ready bool) (data []byte, right bool, err error) {
	switch {
	case ready:
		data = e.agreed.At(b.IDs[0]).Mine.data
	case e.lane.inMemory() == nil: // what is sent to others before all is known
		data = e.buffer(b.Bytes)
		clear(data)
	}
	e.mark(1)
	right, err = e.lane.allReduceIfReady(context.Background(), b.Wire, b.Op, b.Bytes, data, ready)
	return data, right, err
}

// guessApart reduces a copy of a bucket, with an element that counts the ranks that are ready.
func (e *engine) guessApart(b *agreement.Bucket, ready bool) (data []byte, right bool, err error) {
	all := e.buffer(b.Bytes + b.Wire.Size())
	data, count := all[:b.Bytes], all[b.Bytes:]
	if ready {
		e.gatherBucket(b, data)
	} else {
		clear(data)
	}
	agreement.SetCount(count, b.Wire, b.Op, 1, ready)
	e.mark(1)
	err = e.lane.allReduceBytes(context.Background(), b.Wire, b.Op, all, nil)
	return data, agreement.Counted(count, b.Wire, b.Op, e.g.size), err
}

// allReduceIfReady is AllReduce of so many bytes on every rank if all ranks are ready for it, with
// the same bits. Otherwise data stays as it is. A rank that is not ready does not need data. All
// ranks find the same.
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
