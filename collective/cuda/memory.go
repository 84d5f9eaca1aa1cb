package cuda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Slice is a vector in a device's memory. The zero value is empty and belongs to no device.
type Slice[T collective.Element] struct {
	device  *Device
	address uint64
	n       int
	owned   bool // by Alloc
}

// Alloc returns n zeros in the device's memory, aligned to 256 bytes. The memory is not garbage
// collected: the caller releases it by [Slice.Free]. If n is 0, Alloc allocates nothing.
func Alloc[T collective.Element](d *Device, n int) (*Slice[T], error) {
	s := &Slice[T]{device: d, n: n, owned: true}
	if n < 0 || n > math.MaxInt/s.size() {
		return nil, fmt.Errorf("cuda: a slice cannot have %d elements", n)
	}
	if n == 0 {
		return s, nil
	}
	err := d.call("cuMemAlloc_v2", func(a *api) result { return a.memAlloc(&s.address, s.bytes()) })
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	d.owned.add(s.address, s.bytes())
	d.mu.Unlock()
	if err := s.Zero(context.Background()); err != nil {
		return nil, errors.Join(err, s.Free())
	}
	return s, nil
}

// Wrap returns a Slice of n elements of memory that belongs to other code, such as another library.
// address is on the device, in its primary context, and a multiple of an element's size. The owner
// must not free the memory while the Slice is used.
func Wrap[T collective.Element](d *Device, address uint64, n int) (*Slice[T], error) {
	s := &Slice[T]{device: d, address: address, n: n}
	if n < 0 || uint64(n) > (math.MaxUint64-address)/uint64(s.size()) || n > 0 && address == 0 {
		return nil, fmt.Errorf("cuda: %d elements cannot be at address %#x", n, address)
	}
	if address%uint64(s.size()) != 0 {
		return nil, fmt.Errorf("cuda: address %#x is not aligned for elements of %d bytes", address, s.size())
	}
	return s, nil
}

// Free releases a slice that [Alloc] returned; it must not be used afterwards. Free has no effect
// on other slices. It blocks until the device is idle. If other processes have opened the memory
// for a group's operations, Free returns at once, and the memory is kept until the next generation
// or until the device is closed.
func (s *Slice[T]) Free() error {
	if !s.owned || s.address == 0 {
		return nil
	}
	return s.device.free(s.address)
}

// abandon frees the slice that a failed operation would have returned. The device may still use the
// slice if the group has failed; then the next generation, or Close, frees it.
func (s *Slice[T]) abandon(err error) error {
	var refused *BackendError
	if s.address == 0 || errors.As(err, &refused) {
		return s.Free()
	}
	d := s.device
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, there := d.owned.remove(s.address); there {
		d.deferredFrees = append(d.deferredFrees, s.address)
	}
	return nil
}

func (d *Device) free(address uint64) error {
	d.mu.Lock()
	bytes, there := d.owned.remove(address)
	for _, b := range d.backends {
		if b.deferFree(address, bytes) {
			d.mu.Unlock()
			return nil
		}
	}
	d.mu.Unlock()
	if !there {
		return errors.New("cuda: Free of memory that has been freed already")
	}
	return d.call("cuMemFree_v2", func(a *api) result { return a.memFree(address) })
}

// ranges is a list of allocations, in the order of their addresses.
type ranges []allocated

type allocated struct{ address, bytes uint64 }

func byAddress(a allocated, address uint64) int { return cmp.Compare(a.address, address) }

func (r *ranges) add(address, bytes uint64) {
	i, _ := slices.BinarySearchFunc(*r, address, byAddress)
	*r = slices.Insert(*r, i, allocated{address, bytes})
}

// remove removes the allocation that begins at an address, and returns its size.
func (r *ranges) remove(address uint64) (bytes uint64, there bool) {
	i, there := slices.BinarySearchFunc(*r, address, byAddress)
	if there {
		bytes = (*r)[i].bytes
		*r = slices.Delete(*r, i, i+1)
	}
	return bytes, there
}

// containing returns the beginning of the allocation that contains an address.
func (r ranges) containing(address uint64) (base uint64, there bool) {
	i, exact := slices.BinarySearchFunc(r, address, byAddress)
	if !exact {
		i--
	}
	if i < 0 || address-r[i].address >= r[i].bytes {
		return 0, false
	}
	return r[i].address, true
}

// Len returns the number of elements.
func (s *Slice[T]) Len() int { return s.n }

// Address returns the address of the first element on the device.
func (s *Slice[T]) Address() uint64 { return s.address }

// Device returns the device of the memory, or nil for the zero value.
func (s *Slice[T]) Device() *Device { return s.device }

// Slice returns a view of the elements [from, to). It panics if the bounds are out of range.
func (s *Slice[T]) Slice(from, to int) *Slice[T] {
	if from < 0 || to < from || to > s.n {
		panic(fmt.Sprintf("cuda: slice bounds %d:%d of %d", from, to, s.n))
	}
	return &Slice[T]{device: s.device, address: s.address + uint64(from*s.size()), n: to - from}
}

func (s *Slice[T]) size() int     { return int(unsafe.Sizeof(*new(T))) }
func (s *Slice[T]) bytes() uint64 { return uint64(s.n) * uint64(s.size()) }

// Zero sets all elements to zero, and blocks until that is done.
func (s *Slice[T]) Zero(ctx context.Context) error {
	if s.n == 0 {
		return nil
	}
	return s.device.with(ctx, func(g *staging) error {
		if err := s.device.call("cuMemsetD8Async", func(a *api) result {
			return a.memsetD8Async(s.address, 0, s.bytes(), g.up)
		}); err != nil {
			return err
		}
		return g.settle(ctx)
	})
}

// CopyFrom sets the elements to those of src, which must have the same length, and blocks until
// that is done; src may then be changed. It copies in pieces through pinned memory.
func (s *Slice[T]) CopyFrom(ctx context.Context, src []T) error {
	if len(src) != s.n {
		return fmt.Errorf("cuda: %d elements cannot be copied to a slice of %d: give the same length", len(src), s.n)
	}
	return s.device.upload(ctx, s.address, kernel.Bytes(src))
}

// CopyTo sets dst, which must have the same length, to the elements, and blocks until that is done.
func (s *Slice[T]) CopyTo(ctx context.Context, dst []T) error {
	if len(dst) != s.n {
		return fmt.Errorf("cuda: %d elements cannot be copied to a slice of %d: give the same length", s.n, len(dst))
	}
	return s.device.download(ctx, s.address, kernel.Bytes(dst))
}

// CopySlice sets the elements to those of src, which must have the same length and device, and
// blocks until that is done. The two must not overlap.
func (s *Slice[T]) CopySlice(ctx context.Context, src *Slice[T]) error {
	if src.n != s.n || src.device != s.device {
		return fmt.Errorf("cuda: %d elements cannot be copied to a slice of %d: give the same length, on the same device", src.n, s.n)
	}
	if s.n == 0 {
		return nil
	}
	return s.device.with(ctx, func(g *staging) error {
		if err := s.device.call("cuMemcpyDtoDAsync_v2", func(a *api) result {
			return a.memcpyDtoDAsync(s.address, src.address, s.bytes(), g.up)
		}); err != nil {
			return err
		}
		return g.settle(ctx)
	})
}
