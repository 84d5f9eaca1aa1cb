package cuda

import (
	"context"
	"errors"
	"slices"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
)

// Number of pieces that are under way at a time, and their size. While one is reduced by the group,
// the next comes from the device and the last goes back.
const pieces = 3

// pieceSize is a variable, so that tests can copy less.
var pieceSize = 4 << 20

// staging is what vectors go through between a device and the host: memory that the device
// reads and writes without the processor's help, and a stream for each direction. It is used by one
// operation at a time.
type staging struct {
	device *Device
	memory []byte // of all pieces
	shared bool   // it is collective's memory, which the other ranks of the host can read, registered with the driver

	down, up uintptr         // streams, to the host and to the device
	arrived  [pieces]uintptr // events: a piece is in host memory
	gone     [pieces]uintptr // events: a piece is on the device
	busy     [pieces]bool    // gone was recorded, and not waited for
}

// copyRange is one copy between the device and a piece.
type copyRange struct {
	address uint64
	offset  int // in the piece, in bytes
	n       int // bytes
}

// with gives f a staging that nothing else uses.
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

// staging returns one that is free, or a new one.
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

// make allocates all that a staging consists of. It is called within [Device.do].
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

// free gives back all that the staging holds. The device does not use it any more.
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

// retire has the staging of a failed operation retired in the background; awaitRetiring waits for
// that.
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

// awaitRetiring waits until the device has finished what failed operations have begun: it may write
// to the same memory as the next one.
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

// retire returns the staging of a failed operation to the pool, once the device does not use it any
// more.
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

// settle waits for what is in the stream to the device.
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

// piece is the memory of a piece.
func (s *staging) piece(i int) []byte {
	at := i % pieces * pieceSize
	return s.memory[at : at+pieceSize : at+pieceSize]
}

// transfer describes what is copied, piece by piece.
type transfer struct {
	count int                     // pieces
	down  func(i int) []copyRange // from the device; nil: nothing
	up    func(i int) []copyRange // to the device; nil: nothing
	// before and after put more into a stream, before a piece is copied from the device and after
	// it was copied back. They are called within [Device.do]; nil: nothing.
	before, after func(i int, stream uintptr) error
	// step is called with each piece, in order, when it has come from the device; what it leaves in
	// the piece is copied back.
	step func(i int, piece []byte) error
}

// run makes a transfer, and returns when all of it is done.
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

// fetch begins to copy a piece from the device, once what was in its place was copied back there.
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

// push begins to copy a piece to the device.
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

// cut divides n bytes at an address into pieces, and says where each is.
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
	count, ranges := cut(address, len(src))
	return d.with(ctx, func(s *staging) error {
		return s.run(ctx, transfer{count: count, up: ranges, step: func(i int, piece []byte) error {
			copy(piece, src[i*pieceSize:])
			return nil
		}})
	})
}

// download hands n bytes of the device to a function, piece by piece; it must not keep them.
func (d *Device) download(ctx context.Context, address uint64, n int, take func(at int, b []byte) error) error {
	if n == 0 {
		return nil
	}
	count, ranges := cut(address, n)
	return d.with(ctx, func(s *staging) error {
		return s.run(ctx, transfer{count: count, down: ranges, step: func(i int, piece []byte) error {
			return take(i*pieceSize, piece[:ranges(i)[0].n])
		}})
	})
}
