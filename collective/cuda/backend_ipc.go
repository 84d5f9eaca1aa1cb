package cuda

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Variables for tests.
var (
	// bankSize is the number of bytes that are combined at a time if other processes cannot open a
	// vector.
	bankSize = 64 << 20
	// maxDeferred bounds the freed memory, in bytes, that is kept because other processes have it
	// open. Beyond that, no further memory is opened to them.
	maxDeferred = 64 << 20
)

const placeSize = 8 + len(ipcHandle{}.bytes)

// ipcBackend is the backend of ranks on one host, which open each other's vectors. The first rank
// of each device combines a part of the vectors: it reads that part of all vectors in the order of
// the ranks, and writes the result to all of them. Only one rank reads and writes a given element,
// so the operation is in place, and a device that all ranks share reads and writes each vector
// once. Other ranks of a device launch no kernel: a device runs the kernels of one process at a
// time, and switching between processes takes longer than a small operation.
//
// Memory that this process has not allocated is copied through a bank. It is not opened to other
// processes, since nothing tells when its owner frees it.
type ipcBackend struct {
	stagingBackend // for types without kernels
	openedMemory
	parts, part int // number of parts of a vector, one for each device; index of this rank's part, -1 if it has none
	queue
	bank uint64 // 0 until it is allocated

	// Guarded by device.mu.
	exported      map[uint64]ipcHandle // memory that other processes may have open, by address
	deferred      []uint64             // addresses of exported memory that was freed in this process
	deferredBytes uint64               // total size of deferred
}

// newIPCBackend returns the backend of ranks that can open each other's memory, given the records
// of all ranks.
func newIPCBackend(d *Device, g *collective.Group, all []record) (*ipcBackend, error) {
	w := &ipcBackend{stagingBackend: stagingBackend{d, g}, openedMemory: openedMemory{opener: d}, part: -1, exported: map[uint64]ipcHandle{}}
	for rank, r := range all {
		if slices.IndexFunc(all, func(of record) bool { return of.Device == r.Device }) != rank {
			continue
		}
		if rank == g.Rank() {
			w.part = w.parts
		}
		w.parts++
	}
	if err := d.do(func() error { return w.openQueue(d.api) }); err != nil {
		return nil, errors.Join(err, w.shut())
	}
	return w, nil
}

func (*ipcBackend) name() string { return BackendIPC }

func (w *ipcBackend) shut() error {
	var errs []error
	if w.stream != 0 && w.event != 0 {
		errs = append(errs, w.settle(context.Background()))
	}
	errs = append(errs, w.closeAll(), w.device.do(func() error { return w.closeQueue(w.device.api) }))
	return errors.Join(errs...)
}

func (w *ipcBackend) takeDeferred() []uint64 {
	all := w.deferred
	w.deferred = nil
	if w.bank != 0 {
		all = append(all, w.bank)
		w.bank = 0
	}
	return all
}

func (w *ipcBackend) deferFree(address, bytes uint64) bool {
	if _, there := w.exported[address]; !there {
		return false
	}
	delete(w.exported, address)
	w.deferred = append(w.deferred, address)
	w.deferredBytes += bytes
	return true
}

// settle blocks until the device has done the work in the stream.
func (w *ipcBackend) settle(ctx context.Context) error {
	return w.settleAfter(ctx, func() error { return nil })
}

// settleAfter makes calls, which add work to the stream, and then blocks like settle.
func (w *ipcBackend) settleAfter(ctx context.Context, calls func() error) error {
	d := w.device
	err := d.do(func() error {
		if err := calls(); err != nil {
			return err
		}
		return d.api.check("cuEventRecord", d.api.eventRecord(w.event, w.stream))
	})
	if err != nil {
		return err
	}
	return d.await(ctx, w.event)
}

// settleKernel launches a kernel in the stream, and then blocks like settle.
func (w *ipcBackend) settleKernel(ctx context.Context, t kernel.Type, op collective.Op, args *arguments) error {
	return w.settleAfter(ctx, func() error { return w.device.launch(w.stream, combination(op), t, args) })
}

// after blocks until the event has occurred; it does nothing for a nil event.
func (w *ipcBackend) after(ctx context.Context, e *Event) error {
	if e == nil {
		return nil
	}
	a := w.device.api
	return w.settleAfter(ctx, func() error { return a.check("cuStreamWaitEvent", a.streamWaitEvent(w.stream, e.handle, 0)) })
}

// place is the location of a rank's vector.
type place struct {
	address uint64 // in this process
	banked  bool
}

// allReduce combines n elements at an address of each rank.
func (w *ipcBackend) allReduce(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error {
	if !hasKernels(t) {
		return w.stagingBackend.allReduce(ctx, t, op, address, n, ready)
	}
	if err := w.after(ctx, ready); err != nil {
		return err
	}
	all, err := w.exchange(ctx, address)
	if err != nil {
		return err
	}
	step, told := n, true // after the exchange, all vectors are ready
	for _, v := range all {
		if v.banked {
			step, told = bankSize/t.Size(), false
		}
	}
	mine := all[w.group.Rank()]
	for at := 0; at < n; at += step {
		part, offset := min(step, n-at), uint64(at*t.Size())
		addresses := make([]uint64, len(all))
		for i, v := range all {
			addresses[i] = v.address
			if !v.banked {
				addresses[i] += offset
			}
		}
		if mine.banked {
			if err := w.copyAndSettle(ctx, mine.address, address+offset, part*t.Size()); err != nil {
				return err
			}
		}
		if !told {
			if err := collective.Barrier(ctx, w.group); err != nil {
				return err
			}
		}
		if err := w.combine(ctx, t, op, addresses, part); err != nil {
			return err
		}
		if mine.banked {
			if err := w.copy(address+offset, mine.address, part*t.Size()); err != nil {
				return err
			}
		}
	}
	if mine.banked {
		return w.settle(ctx)
	}
	return nil
}

// combine reduces this rank's part of the vectors, if it has one, and returns when all ranks have
// done theirs.
func (w *ipcBackend) combine(ctx context.Context, t kernel.Type, op collective.Op, vectors []uint64, n int) error {
	lo, hi := 0, 0
	if w.part >= 0 {
		lo, hi = kernel.Split(n, w.parts, w.part)
	}
	if lo < hi {
		at := make([]uint64, len(vectors))
		for i, v := range vectors {
			at[i] = v + uint64(lo*t.Size())
		}
		args := over(t, hi-lo, at, at...)
		args.number = divisor(t, w.group.Size())
		if err := w.settleKernel(ctx, t, op, args); err != nil {
			return err
		}
	}
	if err := collective.Barrier(ctx, w.group); err != nil {
		return err
	}
	return w.group.Err() // an aborted rank may have written to its vector while it was read
}

// copy starts to copy n bytes on the device.
func (w *ipcBackend) copy(to, from uint64, n int) error {
	return w.device.call("cuMemcpyDtoDAsync_v2", func(a *api) result { return a.memcpyDtoDAsync(to, from, uint64(n), w.stream) })
}

// copyAndSettle copies n bytes and blocks until the stream has done so.
func (w *ipcBackend) copyAndSettle(ctx context.Context, to, from uint64, n int) error {
	if err := w.copy(to, from, n); err != nil {
		return err
	}
	return w.settle(ctx)
}

// exchange sends the place of this rank's vector to all ranks, and returns the places of the
// vectors of all ranks.
func (w *ipcBackend) exchange(ctx context.Context, address uint64) ([]place, error) {
	return w.exchangeOf(ctx, address, slices.Repeat([]int{1}, w.group.Size()))
}

// exchangeOf is like exchange, but only the ranks whose size is not 0 have a vector.
func (w *ipcBackend) exchangeOf(ctx context.Context, address uint64, sizes []int) ([]place, error) {
	var own place
	var message []byte
	if sizes[w.group.Rank()] > 0 {
		var err error
		if own, message, err = w.tell(address); err != nil {
			return nil, err
		}
	}
	told, err := collective.AllGather(ctx, w.group, message)
	if err != nil {
		return nil, err
	}
	all := make([]place, len(told))
	for rank, p := range told {
		if rank == w.group.Rank() {
			all[rank] = own
			continue
		}
		if sizes[rank] == 0 {
			continue
		}
		if len(p) != placeSize {
			return nil, fmt.Errorf("cuda: the description of rank %d's vector has %d bytes", rank, len(p))
		}
		at := binary.LittleEndian.Uint64(p)
		base, err := w.open(p[8:])
		if err != nil {
			return nil, fmt.Errorf("cuda: the vector of rank %d: %w", rank, err)
		}
		all[rank] = place{address: base + at>>1, banked: at&1 == 1}
	}
	return all, nil
}

// tell returns the place of the memory at an address, and the message that describes the place to
// other ranks.
func (w *ipcBackend) tell(address uint64) (place, []byte, error) {
	base, handle, banked, err := w.export(address)
	if err != nil {
		return place{}, nil, err
	}
	own := place{address: address, banked: banked}
	if banked {
		own.address = base
	}
	at := (own.address - base) << 1
	if banked {
		at |= 1
	}
	return own, append(binary.LittleEndian.AppendUint64(nil, at), handle.bytes[:]...), nil
}

// export returns the memory that other processes open to access an address: the allocation that
// contains it, or the bank.
func (w *ipcBackend) export(address uint64) (base uint64, handle ipcHandle, banked bool, err error) {
	d := w.device
	d.mu.Lock()
	base, own := d.owned.containing(address)
	known, there := w.exported[base]
	full := w.deferredBytes > uint64(maxDeferred)
	d.mu.Unlock()
	if own && there {
		return base, known, false, nil
	}
	err = d.do(func() error {
		if !own || full {
			banked = true
			if err := w.needBank(); err != nil {
				return err
			}
			base = w.bank
		}
		if err := d.api.check("cuIpcGetMemHandle", d.api.ipcGetMemHandle(&handle, base)); err != nil {
			return err
		}
		if !banked {
			d.mu.Lock()
			w.exported[base] = handle
			d.mu.Unlock()
		}
		return nil
	})
	return base, handle, banked, err
}

func (w *ipcBackend) needBank() error {
	if w.bank != 0 {
		return nil
	}
	return w.device.api.check("cuMemAlloc_v2", w.device.api.memAlloc(&w.bank, uint64(bankSize)))
}
