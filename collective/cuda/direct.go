package cuda

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/kernel"
)

// Variables for tests.
var (
	// bankSize is how much of a vector that other processes cannot open is combined at a time.
	bankSize = 64 << 20
	// maxDoomed is how much memory that was freed is kept for those that have it open. Beyond that nothing more is opened to them.
	maxDoomed = 64 << 20
)

const (
	nonceSize = 32
	helloSize = 1 + nonceSize + len(ipcHandle{}.bytes)
	placeSize = 8 + len(ipcHandle{}.bytes)
)

// direct is a group whose ranks, processes of one host, have each other's vectors open. Every rank combines its part of the vector, reading
// those of all in the order of the ranks, and writes the result to all. An element is read and written by one rank alone, so it is
// done in place, and a device that all share reads and writes each vector once.
//
// Of memory that this process has not allocated nobody can tell when it is freed, so it is not opened to others: it goes through a bank.
type direct struct {
	device *Device
	group  *collective.Group
	stream uintptr
	event  uintptr
	bank   uint64 // 0: not needed yet

	opened map[string]uint64 // what others have allocated, by their handles

	// Guarded by device.mu.
	exported map[uint64]ipcHandle // what others may have open, by address
	doomed   []uint64             // of these, what has been freed here
	kept     uint64               // bytes of doomed
}

// way returns how the ranks of a group reach each other's memory, nil if they do not. They find out at the first call. What
// was open in generations before is closed then; when all ranks have come that far, what they had open is freed.
func (d *Device) way(ctx context.Context, g *collective.Group) (*direct, error) {
	d.mu.Lock()
	w, known := d.ways[g]
	var past []*direct
	for other, of := range d.ways {
		if of != nil && other.Generation() < g.Generation() {
			past = append(past, of)
		}
	}
	d.mu.Unlock()
	if known {
		return w, nil
	}
	for _, of := range past {
		if err := of.shut(); err != nil {
			return nil, err
		}
	}
	w, err := d.meet(ctx, g)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	maps.DeleteFunc(d.ways, func(other *collective.Group, _ *direct) bool { return other.Generation() < g.Generation() })
	maps.DeleteFunc(d.queues, func(other *collective.Group, _ *queue) bool { return other.Generation() < g.Generation() })
	d.ways[g] = w
	graves := d.graves
	d.graves = nil
	for _, of := range past {
		graves = append(graves, of.remains()...)
	}
	d.mu.Unlock()
	return w, d.bury(graves)
}

// bury frees memory that nobody has open any more.
func (d *Device) bury(graves []uint64) error {
	if len(graves) == 0 {
		return nil
	}
	return d.do(func() error {
		var errs []error
		for _, address := range graves {
			errs = append(errs, d.api.check("cuMemFree_v2", d.api.memFree(address)))
		}
		return errors.Join(errs...)
	})
}

// meet tries whether all ranks can open each other's memory: each writes a random text into some of its own, and the
// others look for it there.
func (d *Device) meet(ctx context.Context, g *collective.Group) (*direct, error) {
	w := &direct{device: d, group: g, opened: map[string]uint64{}, exported: map[uint64]ipcHandle{}}
	if err := d.do(w.make); err != nil {
		return nil, errors.Join(err, w.shut())
	}
	probe, err := Alloc[byte](d, nonceSize)
	if err != nil {
		return nil, errors.Join(err, w.shut())
	}
	ok, err := w.introduce(ctx, probe)
	all := []uint8{0}
	if ok {
		all[0] = 1
	}
	if err == nil {
		err = collective.AllReduce(ctx, g, all, collective.Min)
	}
	if err == nil {
		err = w.forget()
	}
	if err == nil {
		err = collective.Barrier(ctx, g)
	}
	if err != nil { // others may be looking at it
		d.mu.Lock()
		delete(d.owned, probe.address)
		d.graves = append(d.graves, probe.address)
		d.mu.Unlock()
		return nil, errors.Join(err, w.shut())
	}
	if all[0] == 0 {
		return nil, errors.Join(w.shut(), probe.Free())
	}
	return w, probe.Free()
}

// introduce tells whether this rank can open the memory of all others.
func (w *direct) introduce(ctx context.Context, probe *Slice[byte]) (bool, error) {
	d, hello := w.device, make([]byte, helloSize)
	rand.Read(hello[1 : 1+nonceSize])
	if err := probe.CopyFrom(ctx, hello[1:1+nonceSize]); err != nil {
		return false, err
	}
	var handle ipcHandle
	able := !d.config.Staging && w.group.Size() <= places
	if able {
		able = d.call("cuIpcGetMemHandle", func(a *api) result { return a.ipcGetMemHandle(&handle, probe.address) }) == nil
	}
	if able {
		hello[0] = 1
	}
	copy(hello[1+nonceSize:], handle.bytes[:])
	hellos, err := collective.AllGather(ctx, w.group, hello)
	if err != nil {
		return false, err
	}
	for rank, h := range hellos {
		if len(h) != helloSize || h[0] != 1 {
			return false, nil
		}
		if rank == w.group.Rank() {
			continue
		}
		address, err := w.open(h[1+nonceSize:])
		if err != nil {
			if errors.Is(err, ErrSticky) {
				return false, err
			}
			return false, nil
		}
		seen := make([]byte, nonceSize)
		if err := (&Slice[byte]{device: d, address: address, n: nonceSize}).CopyTo(ctx, seen); err != nil {
			return false, err
		}
		if !bytes.Equal(seen, h[1:1+nonceSize]) {
			return false, nil
		}
	}
	return true, nil
}

// make is called on the device's thread.
func (w *direct) make() error {
	a := w.device.api
	return errors.Join(a.check("cuStreamCreate", a.streamCreate(&w.stream, streamNonBlocking)),
		a.check("cuEventCreate", a.eventCreate(&w.event, eventDisableTiming)))
}

// open returns where memory of another process is in this one.
func (w *direct) open(handle []byte) (uint64, error) {
	if address, there := w.opened[string(handle)]; there {
		return address, nil
	}
	var h ipcHandle
	copy(h.bytes[:], handle)
	var address uint64
	err := w.device.call("cuIpcOpenMemHandle_v2", func(a *api) result { return a.ipcOpenMemHandle(&address, h, ipcLazyPeerAccess) })
	if err == nil {
		w.opened[string(handle)] = address
	}
	return address, err
}

// forget closes all that others have allocated.
func (w *direct) forget() error {
	return w.device.do(func() error {
		var errs []error
		for handle, address := range w.opened {
			errs = append(errs, w.device.api.check("cuIpcCloseMemHandle", w.device.api.ipcCloseMemHandle(address)))
			delete(w.opened, handle)
		}
		return errors.Join(errs...)
	})
}

// shut waits for what is under way and closes what others have allocated. A second call does nothing.
func (w *direct) shut() error {
	var errs []error
	if w.stream != 0 && w.event != 0 {
		errs = append(errs, w.settle(context.Background()))
	}
	errs = append(errs, w.forget(), w.device.do(func() error {
		a := w.device.api
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

// remains is the memory that others may have open and that nobody uses here. The caller holds device.mu.
func (w *direct) remains() []uint64 {
	all := w.doomed
	w.doomed = nil
	if w.bank != 0 {
		all = append(all, w.bank)
		w.bank = 0
	}
	return all
}

// keep tells whether others may have open what is to be freed. Then it is freed when the direct is closed. The caller holds device.mu.
func (w *direct) keep(address, bytes uint64) bool {
	if _, there := w.exported[address]; !there {
		return false
	}
	delete(w.exported, address)
	w.doomed = append(w.doomed, address)
	w.kept += bytes
	return true
}

// settle waits for the stream.
func (w *direct) settle(ctx context.Context) error {
	a := w.device.api
	if err := w.device.do(func() error { return a.check("cuEventRecord", a.eventRecord(w.event, w.stream)) }); err != nil {
		return err
	}
	return w.device.await(ctx, w.event)
}

// place is where a rank has its vector for the others.
type place struct {
	address uint64 // in this process
	banked  bool
}

// allReduce combines n elements at an address of each rank.
func (w *direct) allReduce(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error {
	if ready != nil {
		err := w.device.call("cuStreamWaitEvent", func(a *api) result { return a.streamWaitEvent(w.stream, ready.handle, 0) })
		if err != nil {
			return err
		}
		if err := w.settle(ctx); err != nil {
			return err
		}
	}
	all, err := w.exchange(ctx, address)
	if err != nil {
		return err
	}
	step, told := n, true // all know by the exchange that all vectors are ready
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

// combine has this rank's part of the vectors combined, and returns when all ranks have done theirs.
func (w *direct) combine(ctx context.Context, t kernel.Type, op collective.Op, vectors []uint64, n int) error {
	lo, hi := kernel.Split(n, w.group.Size(), w.group.Rank())
	if lo < hi {
		at := make([]uint64, len(vectors))
		for i, v := range vectors {
			at[i] = v + uint64(lo*t.Size())
		}
		args := over(t, hi-lo, at, at...)
		args.number = divisor(t, w.group.Size())
		if err := w.device.do(func() error { return w.device.launch(w.stream, combination(op), t, args) }); err != nil {
			return err
		}
		if err := w.settle(ctx); err != nil {
			return err
		}
	}
	return collective.Barrier(ctx, w.group)
}

func (w *direct) copy(to, from uint64, n int) error {
	return w.device.call("cuMemcpyDtoDAsync_v2", func(a *api) result { return a.memcpyDtoDAsync(to, from, uint64(n), w.stream) })
}

// exchange tells all ranks where this one's vector is, and returns where everybody's is.
func (w *direct) exchange(ctx context.Context, address uint64) ([]place, error) {
	base, handle, banked, err := w.export(address)
	if err != nil {
		return nil, err
	}
	own := place{address: address, banked: banked}
	if banked {
		own.address = base
	}
	message := make([]byte, placeSize)
	at := (own.address - base) << 1
	if banked {
		at |= 1
	}
	binary.LittleEndian.PutUint64(message, at)
	copy(message[8:], handle.bytes[:])
	told, err := collective.AllGather(ctx, w.group, message)
	if err != nil {
		return nil, err
	}
	all := make([]place, len(told))
	for rank, p := range told {
		if len(p) != placeSize {
			return nil, fmt.Errorf("cuda: rank %d tells %d bytes of where its vector is", rank, len(p))
		}
		if rank == w.group.Rank() {
			all[rank] = own
			continue
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

// export returns what others open in order to reach an address: the allocation that it lies in, or the bank.
func (w *direct) export(address uint64) (base uint64, handle ipcHandle, banked bool, err error) {
	d := w.device
	err = d.do(func() error {
		var size uint64
		if r := d.api.memGetAddressRange(&base, &size, address); r != success {
			base = 0 // memory of a kind that has no range, such as a pool's
		}
		d.mu.Lock()
		_, own := d.owned[base]
		known, there := w.exported[base]
		full := w.kept > uint64(maxDoomed)
		d.mu.Unlock()
		switch {
		case own && there:
			handle = known
			return nil
		case !own || full:
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

func (w *direct) needBank() error {
	if w.bank != 0 {
		return nil
	}
	return w.device.api.check("cuMemAlloc_v2", w.device.api.memAlloc(&w.bank, uint64(bankSize)))
}
