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
// Memory that this process has not allocated is not opened to other processes, since it is unknown
// when it is freed. It is copied through a bank instead.
type ipcBackend struct {
	stagingBackend // for types without kernels
	openedMemory
	parts, part int // the number of parts of a vector, one for each device; the index of this rank's part, -1: none
	stream      uintptr
	event       uintptr
	bank        uint64 // 0: not allocated yet

	// Guarded by device.mu.
	exported      map[uint64]ipcHandle // memory that other processes may have open, by address
	deferred      []uint64             // addresses of exported memory that was freed in this process
	deferredBytes uint64               // total size of deferred
}

// newIPCBackend returns the backend of ranks that can open each other's memory, given the records
// of all ranks.
func newIPCBackend(d *Device, g *collective.Group, all []record) (*ipcBackend, error) {
	w := &ipcBackend{stagingBackend: stagingBackend{d, g}, openedMemory: openedMemory{device: d}, part: -1, exported: map[uint64]ipcHandle{}}
	for rank, r := range all {
		if slices.IndexFunc(all, func(of record) bool { return of.Device == r.Device }) != rank {
			continue
		}
		if rank == g.Rank() {
			w.part = w.parts
		}
		w.parts++
	}
	if err := d.do(w.make); err != nil {
		return nil, errors.Join(err, w.shut())
	}
	return w, nil
}

func (*ipcBackend) name() string { return BackendIPC }

// make is called on the device's thread.
func (w *ipcBackend) make() error {
	a := w.stagingBackend.device.api
	return errors.Join(a.check("cuStreamCreate", a.streamCreate(&w.stream, streamNonBlocking)),
		a.check("cuEventCreate", a.eventCreate(&w.event, eventDisableTiming)))
}

// shut implements backend.
func (w *ipcBackend) shut() error {
	var errs []error
	if w.stream != 0 && w.event != 0 {
		errs = append(errs, w.settle(context.Background()))
	}
	errs = append(errs, w.closeAll(), w.stagingBackend.device.do(func() error {
		a := w.stagingBackend.device.api
		var errs []error
		if w.event != 0 {
			errs = append(errs, a.check("cuEventDestroy_v2", a.eventDestroy(w.event)))
		}
		if w.stream != 0 {
			errs = append(errs, a.check("cuStreamDestroy_v2", a.streamDestroy(w.stream)))
		}
		w.event, w.stream = 0, 0
		return errors.Join(errs...)
	}))
	return errors.Join(errs...)
}

// takeDeferred implements backend. The caller holds device.mu.
func (w *ipcBackend) takeDeferred() []uint64 {
	all := w.deferred
	w.deferred = nil
	if w.bank != 0 {
		all = append(all, w.bank)
		w.bank = 0
	}
	return all
}

// deferFree implements backend. The caller holds device.mu.
func (w *ipcBackend) deferFree(address, bytes uint64) bool {
	if _, there := w.exported[address]; !there {
		return false
	}
	delete(w.exported, address)
	w.deferred = append(w.deferred, address)
	w.deferredBytes += bytes
	return true
}

// settle blocks until the work in the stream is done.
func (w *ipcBackend) settle(ctx context.Context) error {
	return w.settleAfter(ctx, func() error { return nil })
}

// settleAfter makes calls of the driver, and blocks until the work in the stream is done.
func (w *ipcBackend) settleAfter(ctx context.Context, calls func() error) error {
	d := w.stagingBackend.device
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

// settleKernel launches a kernel and waits for the stream.
func (w *ipcBackend) settleKernel(ctx context.Context, t kernel.Type, op collective.Op, args *arguments) error {
	return w.settleAfter(ctx, func() error { return w.stagingBackend.device.launch(w.stream, combination(op), t, args) })
}

// after returns when the event has occurred, and at once if it is nil.
func (w *ipcBackend) after(ctx context.Context, e *Event) error {
	if e == nil {
		return nil
	}
	a := w.stagingBackend.device.api
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
			if err := w.copy(mine.address, address+offset, part*t.Size()); err != nil {
				return err
			}
			if err := w.settle(ctx); err != nil {
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

func (w *ipcBackend) copy(to, from uint64, n int) error {
	return w.stagingBackend.device.call("cuMemcpyDtoDAsync_v2", func(a *api) result { return a.memcpyDtoDAsync(to, from, uint64(n), w.stream) })
}

// exchange sends the place of this rank's vector to all ranks, and returns the places of the
// vectors of all ranks.
func (w *ipcBackend) exchange(ctx context.Context, address uint64) ([]place, error) {
	return w.exchangeOf(ctx, address, slices.Repeat([]int{1}, w.group.Size()))
}

// exchangeOf is exchange if only ranks whose size is not 0 have a vector.
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
			return nil, fmt.Errorf("cuda: rank %d has sent a description of its vector of %d bytes", rank, len(p))
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
	d := w.stagingBackend.device
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
	return w.stagingBackend.device.api.check("cuMemAlloc_v2", w.stagingBackend.device.api.memAlloc(&w.bank, uint64(bankSize)))
}
