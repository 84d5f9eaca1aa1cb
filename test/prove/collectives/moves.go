package main

import (
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// counted is a ReduceScatter of parts whose lengths depend on the step and on the turn.
func (t *turnOf[T]) counted() error {
	data := t.filled(0)
	counts, at := make([]int, t.g.Size()), 0
	left := len(data)
	for rank := range counts {
		if counts[rank] = left; rank < len(counts)-1 {
			counts[rank] = int(t.place(0, rank, 0).bits(0)%4) * left / 4 // none, some or all of the rest
		}
		left -= counts[rank]
		if rank < t.g.Rank() {
			at += counts[rank]
		}
	}
	part, err := room[T](counts[t.g.Rank()], t.step.Alloc)
	if err != nil {
		return err
	}
	defer collective.Free(part)
	if err := collective.ReduceScatterCounts(t.ctx, t.g, data, counts, part, t.op); err != nil {
		return err
	}
	return errors.Join(t.same(data, t.input(0, 0, t.g.Rank()), 0, "the input"), t.right(part, at, 0, "", everybody(t.g.Size())))
}

// moves runs BroadcastAsync, AllGatherIntoAsync and ReduceScatterIntoAsync on the tensors in turn,
// each rank in its own order. The tensors of AllGatherIntoAsync hold the parts of all ranks.
func (t *turnOf[T]) moves() error {
	g, n := t.g, t.g.Size()
	handles, parts := make([]*collective.Handle, len(t.room)), make([][]T, len(t.room))
	for _, i := range t.order() {
		data := t.room[i]
		lo, hi := kernel.Split(len(data), n, g.Rank())
		switch i % 3 {
		case 0:
			t.filled(i)
			handles[i] = collective.BroadcastAsync(t.ctx, g, t.name(i), data, t.root(i))
		case 1:
			each := len(data) / n
			all := data[:each*n]
			own := all[each*g.Rank():][:each]
			if t.turn%2 == 1 {
				own = make([]T, each)
			}
			fill(own, t.input(i, 0, g.Rank()))
			handles[i] = collective.AllGatherIntoAsync(t.ctx, g, t.name(i), own, all)
		case 2:
			parts[i] = make([]T, hi-lo)
			handles[i] = collective.ReduceScatterIntoAsync(t.ctx, g, t.name(i), t.filled(i), parts[i], t.op)
		}
	}
	errs := make([]error, len(handles))
	for i, h := range handles {
		if errs[i] = h.Wait(); errs[i] != nil {
			spoil(t.room[i], parts[i])
		}
	}
	var first error
	for i, err := range errs {
		if err == nil {
			err = t.moved(i, parts[i])
		}
		if err != nil && (first == nil || classOf(err) == classWrong && classOf(first) != classWrong) {
			first = fmt.Errorf("tensor %d: %w", i, err)
		}
	}
	return first
}

// root returns the root of a tensor's broadcast.
func (t *turnOf[T]) root(tensor int) int { return (t.step.Root + tensor) % t.g.Size() }

// moved checks a result.
func (t *turnOf[T]) moved(i int, part []T) error {
	n := t.g.Size()
	switch i % 3 {
	case 0:
		return t.same(t.room[i], t.input(i, 0, t.root(i)), 0, "")
	case 1:
		each := len(t.room[i]) / n
		for rank := range n {
			if err := t.same(t.room[i][each*rank:][:each], t.input(i, 0, rank), 0, fmt.Sprintf("of rank %d", rank)); err != nil {
				return err
			}
		}
		return nil
	}
	lo, _ := kernel.Split(len(t.room[i]), n, t.g.Rank())
	return errors.Join(t.same(t.room[i], t.input(i, 0, t.g.Rank()), 0, "the input"), t.right(part, lo, i, "", everybody(n)))
}
