package collective

import (
	"context"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// reducesIfReady reports whether the tensor of a bucket can be reduced in place by a guess. If the
// guess is wrong, the tensor remains unchanged.
func (e *engine) reducesIfReady(b *agreement.Bucket) bool {
	return len(b.IDs) == 1 && b.Compression == operation.NotCompressed && e.lane.call.ReducesIfReady(b.Bytes)
}

// tryGuess reduces the bucket that this rank expects in the cycle, and reports whether the guess
// was right; the cycle is then over. ready means that this rank has no news besides its
// submissions.
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

// guessInPlace reduces the only tensor of a bucket in place, if all ranks are ready.
func (e *engine) guessInPlace(b *agreement.Bucket, ready bool) (data []byte, right bool, err error) {
	switch {
	case ready:
		data = e.agreed.At(b.IDs[0]).Mine.data
	case e.lane.inMemory() == nil: // a placeholder that is sent before all ranks are known to be ready
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
		e.copyIn(b, data)
	} else {
		clear(data)
	}
	agreement.SetCount(count, b.Wire, b.Op, 1, ready)
	e.mark(1)
	err = e.lane.allReduceBytes(context.Background(), b.Wire, b.Op, all, nil)
	return data, agreement.Counted(count, b.Wire, b.Op, e.g.size), err
}

// allReduceIfReady performs AllReduce with length bytes on every rank, with the same bits, if all
// ranks are ready. Otherwise data remains unchanged. A rank that is not ready needs no data. right
// is the same on all ranks.
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
