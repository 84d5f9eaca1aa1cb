package cuda

import (
	"context"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// broadcast makes every rank copy root's bytes from root's memory. A device that all ranks share
// reads and writes n bytes for each rank but root.
func (w *ipcBackend) broadcast(ctx context.Context, address uint64, n, root int) error {
	into, sizes := make([]uint64, w.group.Size()), make([]int, w.group.Size())
	into[root], sizes[root] = address, n
	return w.copyParts(ctx, address, into, sizes)
}

// allGather makes every rank copy the bytes of all others from their memory.
func (w *ipcBackend) allGather(ctx context.Context, own uint64, into []uint64, sizes []int) error {
	if rank := w.group.Rank(); sizes[rank] > 0 {
		if err := w.copy(into[rank], own, sizes[rank]); err != nil {
			return err
		}
	}
	return w.copyParts(ctx, own, into, sizes)
}

// copyParts copies the sizes[r] bytes of each other rank r to into[r]. The bytes of this rank are
// at own. It blocks until all ranks have their copies, so that no rank reads this rank's memory any
// more.
func (w *ipcBackend) copyParts(ctx context.Context, own uint64, into []uint64, sizes []int) error {
	me := w.group.Rank()
	all, err := w.exchangeOf(ctx, own, sizes)
	if err != nil {
		return err
	}
	steps, banked := 1, false
	for rank, p := range all {
		if p.banked {
			steps, banked = max(steps, (sizes[rank]+bankSize-1)/bankSize), true
		}
	}
	for i := range steps {
		if at := i * bankSize; all[me].banked && at < sizes[me] {
			if err := w.copyAndSettle(ctx, all[me].address, own+uint64(at), min(bankSize, sizes[me]-at)); err != nil {
				return err
			}
		}
		if banked {
			if err := collective.Barrier(ctx, w.group); err != nil {
				return err
			}
		}
		for rank, p := range all {
			at, n := 0, sizes[rank]
			if p.banked {
				at = i * bankSize
				n = min(bankSize, n-at)
			} else if i > 0 {
				continue
			}
			if rank == me || n <= 0 {
				continue
			}
			if err := w.copy(into[rank]+uint64(at), p.address, n); err != nil {
				return err
			}
		}
		if err := w.settle(ctx); err != nil {
			return err
		}
		if err := collective.Barrier(ctx, w.group); err != nil {
			return err
		}
	}
	return nil
}

// reduceScatter makes every rank combine its part of all vectors, in the order of the ranks. A
// device that all ranks share reads each vector once and writes as many bytes as one vector has.
func (w *ipcBackend) reduceScatter(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, into uint64) error {
	if !hasKernels(t) {
		return w.stagingBackend.reduceScatter(ctx, t, op, address, n, into)
	}
	all, err := w.exchange(ctx, address)
	if err != nil {
		return err
	}
	ranks, me, size := w.group.Size(), w.group.Rank(), t.Size()
	_, each := kernel.Split(n, ranks, 0) // elements of a part in a step; the first part is the longest
	longest, banked := each, false
	for _, p := range all {
		if p.banked {
			each, banked = max(1, min(longest, bankSize/size/ranks)), true
		}
	}
	begin, _ := kernel.Split(n, ranks, me)
	for from := 0; from < longest; from += each {
		if all[me].banked {
			if err := w.fillBank(ctx, all[me].address, address, n, size, from, each); err != nil {
				return err
			}
		}
		if banked {
			if err := collective.Barrier(ctx, w.group); err != nil {
				return err
			}
		}
		lo, hi := within(n, ranks, me, from, each)
		sources := make([]uint64, ranks)
		for rank, p := range all {
			if sources[rank] = p.address + uint64(lo*size); p.banked {
				sources[rank] = p.address + uint64(me*each*size)
			}
		}
		if lo < hi {
			args := over(t, hi-lo, []uint64{into + uint64((lo-begin)*size)}, sources...)
			args.number = divisor(t, ranks)
			if err := w.settleKernel(ctx, t, op, args); err != nil {
				return err
			}
		}
		if err := collective.Barrier(ctx, w.group); err != nil {
			return err
		}
	}
	return nil
}

// within returns the range of the elements that a step takes from a rank's part of n elements: each
// elements, or as many as are left, beginning at element from of the part.
func within(n, ranks, rank, from, each int) (lo, hi int) {
	lo, hi = kernel.Split(n, ranks, rank)
	return min(lo+from, hi), min(lo+from+each, hi)
}

// fillBank copies the elements of a step from this rank's vector to the bank. In the bank, the data
// of rank r begins at element r·each.
func (w *ipcBackend) fillBank(ctx context.Context, bank, address uint64, n, size, from, each int) error {
	ranks := w.group.Size()
	for rank := range ranks {
		lo, hi := within(n, ranks, rank, from, each)
		if lo == hi {
			continue
		}
		if err := w.copy(bank+uint64(rank*each*size), address+uint64(lo*size), (hi-lo)*size); err != nil {
			return err
		}
	}
	return w.settle(ctx)
}
