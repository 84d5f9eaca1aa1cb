package cuda

import (
	"context"
	"errors"
	"slices"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
)

// pieces is the number of pieces in flight. While the group reduces one piece, the next is copied
// from the device and the previous one back to it.
const pieces = 3

// pieceSize is the size of a piece, in bytes. It is a variable so that tests can copy less.
var pieceSize = 4 << 20

// staging is the means to copy vectors between a device and the host: pinned memory, which the
// device reads and writes without the processor's help, and a stream for each direction. One
// operation at a time uses it.
type staging struct {
	device *Device
	memory []byte // of all pieces
	shared bool   // memory is from collective.Alloc, which other ranks of the host can read, and is registered with the driver

	down, up uintptr         // streams, to the host and to the device
	arrived  [pieces]uintptr // events: a piece is in host memory
	gone     [pieces]uintptr // events: a piece is on the device
	busy     [pieces]bool    // gone was recorded but not waited for
}

// copyRange is one copy between the device and a piece.
type copyRange struct {
	address uint64
	offset  int // in the piece, in bytes
	n       int // bytes
}

// with calls f with an unused staging, once the device has finished the work of failed operations.
// If f fails, the staging is retired.
func (d *Device) with(ctx context.Context, f func(*staging) error) error {
	if err := d.begin(); err != nil {
		return err
	}
	defer d.end()
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := d.awaitRetiring(ctx); err != nil {
		return err
	}
	s, err := d.staging()
	if err != nil {
		return err
	}
	if err = f(s); err != nil {
		d.retire(s)
		return err
	}
	d.keep(s)
	return nil
}

// staging returns an unused staging, or a new one.
func (d *Device) staging() (*staging, error) {
	d.mu.Lock()
	if n := len(d.spare); n > 0 {
		s := d.spare[n-1]
		d.spare = d.spare[:n-1]
		d.mu.Unlock()
		return s, nil
	}
	d.mu.Unlock()
	s := &staging{device: d}
	if err := d.do(s.make); err != nil {
		return nil, errors.Join(err, s.free())
	}
	return s, nil
}

func (d *Device) keep(s *staging) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.spare = append(d.spare, s)
}

// make allocates the memory, streams and events of a staging. It is called within [Device.do].
func (s *staging) make() error {
	a := s.device.api
	for _, stream := range []*uintptr{&s.down, &s.up} {
		if err := a.check("cuStreamCreate", a.streamCreate(stream, streamNonBlocking)); err != nil {
			return err
		}
	}
	for i := range pieces {
		for _, event := range []*uintptr{&s.arrived[i], &s.gone[i]} {
			if err := a.check("cuEventCreate", a.eventCreate(event, eventDisableTiming)); err != nil {
				return err
			}
		}
	}
	n := pieces * pieceSize
	if shared, err := collective.Alloc[byte](n); err == nil {
		if a.memHostRegister(unsafe.Pointer(&shared[0]), uint64(n), hostPortable) == success {
			s.memory, s.shared = shared, true
			return nil
		}
		collective.Free(shared)
	}
	var p unsafe.Pointer
	if err := a.check("cuMemHostAlloc", a.memHostAlloc(&p, uint64(n), hostPortable)); err != nil {
		return err
	}
	s.memory = unsafe.Slice((*byte)(p), n)
	return nil
}

// free releases everything that the staging holds. The device must not use it any more.
func (s *staging) free() error {
	return s.device.do(func() error {
		a := s.device.api
		var errs []error
		if s.memory != nil && s.shared {
			errs = append(errs, a.check("cuMemHostUnregister", a.memHostUnregister(unsafe.Pointer(&s.memory[0]))))
			collective.Free(s.memory)
		} else if s.memory != nil {
			errs = append(errs, a.check("cuMemFreeHost", a.memFreeHost(unsafe.Pointer(&s.memory[0]))))
		}
		for _, event := range append(s.arrived[:], s.gone[:]...) {
			if event != 0 {
				errs = append(errs, a.check("cuEventDestroy_v2", a.eventDestroy(event)))
			}
		}
		for _, stream := range []uintptr{s.down, s.up} {
			if stream != 0 {
				errs = append(errs, a.check("cuStreamDestroy_v2", a.streamDestroy(stream)))
			}
		}
		return errors.Join(errs...)
	})
}

// retire retires the staging of a failed operation in the background; awaitRetiring waits for that.
func (d *Device) retire(s *staging) {
	done := make(chan struct{})
	d.mu.Lock()
	d.retiring = append(d.retiring, done)
	d.mu.Unlock()
	d.spawn(func() {
		s.retire()
		d.mu.Lock()
		d.retiring = slices.DeleteFunc(d.retiring, func(c chan struct{}) bool { return c == done })
		d.mu.Unlock()
		close(done)
	})
}

// awaitRetiring blocks until the device has finished the work of failed operations, which may write
// to the memory of the next operation.
func (d *Device) awaitRetiring(ctx context.Context) error {
	d.mu.Lock()
	all := slices.Clone(d.retiring)
	d.mu.Unlock()
	for _, done := range all {
		select {
		case <-done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// retire returns the staging of a failed operation to the pool, once the device no longer uses it.
func (s *staging) retire() {
	ctx := context.Background()
	err := s.settle(ctx)
	if err == nil {
		if err = s.device.do(func() error { return s.record(s.arrived[0], s.down) }); err == nil {
			err = s.device.await(ctx, s.arrived[0])
		}
	}
	if err != nil {
		s.free() // fails like all other calls now: the context is broken
		return
	}
	s.busy = [pieces]bool{}
	s.device.keep(s)
}

func (s *staging) record(event, stream uintptr) error {
	return s.device.api.check("cuEventRecord", s.device.api.eventRecord(event, stream))
}

// settle blocks until the work in the stream to the device is done.
func (s *staging) settle(ctx context.Context) error {
	if err := s.device.do(func() error { return s.record(s.gone[0], s.up) }); err != nil {
		return err
	}
	err := s.device.await(ctx, s.gone[0])
	if err == nil {
		s.busy = [pieces]bool{}
	}
	return err
}

// after makes both streams wait for an event, unless it is nil.
func (s *staging) after(e *Event) error {
	if e == nil {
		return nil
	}
	return s.device.do(func() error {
		a := s.device.api
		return errors.Join(a.check("cuStreamWaitEvent", a.streamWaitEvent(s.down, e.handle, 0)),
			a.check("cuStreamWaitEvent", a.streamWaitEvent(s.up, e.handle, 0)))
	})
}

// piece returns the memory of piece i.
func (s *staging) piece(i int) []byte {
	at := i % pieces * pieceSize
	return s.memory[at : at+pieceSize : at+pieceSize]
}

// transfer describes a copy in pieces between a device and the host.
type transfer struct {
	count int                     // pieces
	down  func(i int) []copyRange // what is copied from the device; may be nil
	up    func(i int) []copyRange // what is copied to the device; may be nil
	// before and after add work to a stream, before a piece is copied from the device and after it
	// is copied back. They are called within [Device.do], and may be nil.
	before, after func(i int, stream uintptr) error
	// step is called with each piece, in order, when it has been copied from the device. The
	// content that step leaves in the piece is copied back.
	step func(i int, piece []byte) error
}

// run runs a transfer, and blocks until all of it is done.
func (s *staging) run(ctx context.Context, j transfer) error {
	const ahead = pieces - 1
	fetched := 0
	for i := range j.count {
		for ; fetched < min(i+ahead, j.count); fetched++ {
			if err := s.fetch(ctx, j, fetched); err != nil {
				return err
			}
		}
		if j.down != nil {
			if err := s.device.await(ctx, s.arrived[i%pieces]); err != nil {
				return err
			}
		}
		if err := j.step(i, s.piece(i)); err != nil {
			return err
		}
		if j.up != nil {
			if err := s.push(i, j); err != nil {
				return err
			}
		}
	}
	if j.up == nil {
		return nil
	}
	return s.settle(ctx)
}

// fetch starts to copy a piece from the device, once the previous content of its memory has been
// copied back.
func (s *staging) fetch(ctx context.Context, j transfer, i int) error {
	place := i % pieces
	if s.busy[place] {
		if err := s.device.await(ctx, s.gone[place]); err != nil {
			return err
		}
		s.busy[place] = false
	}
	if j.down == nil {
		return nil
	}
	ranges, piece := j.down(i), s.piece(i)
	return s.device.do(func() error {
		a := s.device.api
		if j.before != nil {
			if err := j.before(i, s.down); err != nil {
				return err
			}
		}
		for _, l := range ranges {
			if l.n == 0 {
				continue
			}
			to := unsafe.Pointer(&piece[l.offset : l.offset+l.n][0])
			if err := a.check("cuMemcpyDtoHAsync_v2", a.memcpyDtoHAsync(to, l.address, uint64(l.n), s.down)); err != nil {
				return err
			}
		}
		return s.record(s.arrived[place], s.down)
	})
}

// push starts to copy a piece to the device.
func (s *staging) push(i int, j transfer) error {
	ranges, piece := j.up(i), s.piece(i)
	return s.device.do(func() error {
		a := s.device.api
		for _, l := range ranges {
			if l.n == 0 {
				continue
			}
			from := unsafe.Pointer(&piece[l.offset : l.offset+l.n][0])
			if err := a.check("cuMemcpyHtoDAsync_v2", a.memcpyHtoDAsync(l.address, from, uint64(l.n), s.up)); err != nil {
				return err
			}
		}
		s.busy[i%pieces] = true
		if j.after != nil {
			if err := j.after(i, s.up); err != nil {
				return err
			}
		}
		return s.record(s.gone[i%pieces], s.up)
	})
}

// cut divides n bytes at an address into pieces, and returns a function that returns the range of
// each.
func cut(address uint64, n int) (count int, ranges func(i int) []copyRange) {
	return (n + pieceSize - 1) / pieceSize, func(i int) []copyRange {
		return []copyRange{{address: address + uint64(i*pieceSize), n: min(pieceSize, n-i*pieceSize)}}
	}
}

// upload copies src to the device.
func (d *Device) upload(ctx context.Context, address uint64, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	return d.with(ctx, func(s *staging) error { return s.upload(ctx, address, src) })
}

func (s *staging) upload(ctx context.Context, address uint64, src []byte) error {
	count, ranges := cut(address, len(src))
	return s.run(ctx, transfer{count: count, up: ranges, step: func(i int, piece []byte) error {
		copy(piece, src[i*pieceSize:])
		return nil
	}})
}

// download copies memory of the device to dst.
func (d *Device) download(ctx context.Context, address uint64, dst []byte) error {
	if len(dst) == 0 {
		return nil
	}
	count, ranges := cut(address, len(dst))
	return d.with(ctx, func(s *staging) error {
		return s.run(ctx, transfer{count: count, down: ranges, step: func(i int, piece []byte) error {
			copy(dst[i*pieceSize:], piece)
			return nil
		}})
	})
}
