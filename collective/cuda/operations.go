package cuda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Options are the options of a collective on device memory. The zero value is for a slice that is
// ready, as in [AllReduce].
type Options struct {
	// After is a stream of the device: the operation accesses the slice after the work that is in
	// the stream at the time of the call. If it is nil, the operation waits for no stream.
	After *Stream
}

// event returns a new event at the end of After, or nil if After is nil.
func (o Options) event() (*Event, error) {
	if o.After == nil {
		return nil, nil
	}
	return o.After.Record()
}

// AllReduce combines the slices of all ranks, element by element, and writes the result to the
// slice on every rank. Lengths must be equal. On one host the result has the bits of
// [collective.AllReduce] under [collective.Strict]. With several hosts ([BackendHosts]), the ranks
// of each host are combined in their order, and the results of the hosts in the order of the
// group's algorithm; with staging, all ranks are combined in the order of the algorithm. Under
// Strict, all of these give the same bits. With NCCL the bits are NCCL's: the same on all ranks,
// but possibly different in another world. Min and Max of floating point numbers never use NCCL,
// which drops NaNs. This package has no kernels for int8, int16 and unsigned integers: if NCCL does
// not combine them, the host's processors do, in host memory, whatever the backend.
// [collective.Adasum] is refused. After an error the slice is undefined.
func AllReduce[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op) error {
	return AllReduceWith(ctx, g, s, op, Options{})
}

// AllReduceWith is like AllReduce, with options.
func AllReduceWith[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op, o Options) error {
	return s.device.together(g, func() error {
		ready, err := o.event()
		if err != nil {
			return err
		}
		defer ready.Close()
		c := reduction(typeOf[T](), op, s.n)
		c.invalid = cmp.Or(checkReduced[T](), c.invalid)
		return s.device.allReduceSlice(ctx, g, c, s.address, ready)
	})
}

// reduction is an AllReduce of n elements.
func reduction(t kernel.Type, op collective.Op, n int) call {
	return call{what: allReduceAction, kind: t, op: op, n: n, invalid: refuse(op)}
}

// allReduceSlice combines elements at an address of each rank, once the event ready, if not nil,
// has occurred.
func (d *Device) allReduceSlice(ctx context.Context, g *collective.Group, c call, address uint64, ready *Event) error {
	if err := d.agree(ctx, g, c); err != nil || c.n == 0 {
		return err
	}
	if g.Size() == 1 {
		if ready == nil {
			return nil
		}
		return d.await(ctx, ready.handle)
	}
	b, err := d.backend(ctx, g)
	if err != nil {
		return err
	}
	return b.allReduce(ctx, c.kind, c.op, address, c.n, ready)
}

// Broadcast sets the slice on every rank to that of rank root. Lengths must be equal. After an
// error the slice is undefined. If the ranks open each other's memory, each rank copies root's
// slice from device to device.
func Broadcast[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], root int) error {
	return s.device.together(g, func() error {
		c := call{what: broadcastAction, kind: typeOf[T](), root: root, n: s.n}
		if root < 0 || root >= g.Size() {
			c.invalid = fmt.Errorf("cuda: Broadcast: rank %d is out of range: there are %d ranks", root, g.Size())
		}
		if err := s.device.agree(ctx, g, c); err != nil || s.n == 0 {
			return err
		}
		b, err := s.device.backend(ctx, g)
		if err != nil {
			return err
		}
		return b.broadcast(ctx, s.address, int(s.bytes()), root)
	})
}

// AllGather returns copies of the slices of all ranks, by rank, on this rank's device. The caller
// frees each of them. Lengths may differ.
func AllGather[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T]) ([]*Slice[T], error) {
	var all []*Slice[T]
	d := s.device
	err := d.together(g, func() error {
		own := typeOf[T]()
		calls, err := collective.AllGather(ctx, g, []uint64{uint64(s.n), uint64(own), uint64(d.pending(g))})
		if err != nil {
			return err
		}
		into, sizes, worst := make([]uint64, len(calls)), make([]int, len(calls)), uint64(0)
		for rank, c := range calls {
			if len(c) != 3 || c[0] > math.MaxInt || c[1] >= uint64(kernel.Types) || c[2] > commFailed {
				return fmt.Errorf("cuda: AllGather: the call of rank %d cannot be read", rank)
			}
			if of := kernel.Type(c[1]); of != own {
				return fmt.Errorf("%w: this rank calls AllGather of %v, rank %d of %v", errRefused, own, rank, of)
			}
			worst = max(worst, c[2])
		}
		if err := d.agreeOnNCCL(ctx, g, int64(worst)); err != nil {
			return err
		}
		for rank, c := range calls {
			part, err := Alloc[T](d, int(c[0]))
			if err != nil {
				return err
			}
			all = append(all, part)
			into[rank], sizes[rank] = part.address, int(part.bytes())
		}
		b, err := d.backend(ctx, g)
		if err != nil {
			return err
		}
		return b.allGather(ctx, s.address, into, sizes)
	})
	if err != nil {
		for _, part := range all {
			err = errors.Join(err, part.abandon(err))
		}
		return nil, err
	}
	return all, nil
}

// ReduceScatter combines the slices of all ranks, element by element, and returns this rank's part
// of the result on its device, which the caller frees; s is unchanged. Lengths must be equal; the
// parts are those of [collective.ReduceScatter].
func ReduceScatter[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op) (*Slice[T], error) {
	var part *Slice[T]
	d := s.device
	err := d.together(g, func() error {
		c := call{what: reduceScatterAction, kind: typeOf[T](), op: op, n: s.n, invalid: cmp.Or(checkReduced[T](), refuse(op))}
		if err := d.agree(ctx, g, c); err != nil {
			return err
		}
		lo, hi := kernel.Split(s.n, g.Size(), g.Rank())
		var err error
		if part, err = Alloc[T](d, hi-lo); err != nil || s.n == 0 {
			return err
		}
		b, err := d.backend(ctx, g)
		if err != nil {
			return err
		}
		return b.reduceScatter(ctx, typeOf[T](), op, s.address, s.n, part.address)
	})
	if err != nil {
		if part != nil {
			err = errors.Join(err, part.abandon(err))
		}
		return nil, err
	}
	return part, nil
}

var errNoDevice = errors.New("cuda: the slice belongs to no device: it is the zero value")

// together performs this rank's part f of an operation. If that fails on this rank only, it aborts
// the group, so that the others do not wait.
func (d *Device) together(g *collective.Group, f func() error) error {
	err := errNoDevice
	if d != nil {
		err = f()
	}
	if err != nil && !common(err) {
		g.Abort(err)
	}
	return err
}

// common reports whether the other ranks get the error too, or nothing has begun.
func common(err error) bool {
	var mismatch *collective.MismatchError
	var backend *BackendError
	return errors.As(err, &mismatch) || errors.As(err, &backend) || errors.Is(err, collective.ErrAborted) || errors.Is(err, errUnequal) || errors.Is(err, errRefused) ||
		errors.Is(err, collective.ErrBusy) || errors.Is(err, collective.ErrClosed)
}

// refuse returns the error for an operation that is not supported, or nil.
func refuse(op collective.Op) error {
	if combination(op) == "" {
		return fmt.Errorf("cuda: %v is not supported on device memory", op)
	}
	return nil
}

// call describes the operation that a rank is about to perform. All ranks must be about to perform
// the same one.
type call struct {
	what    action
	kind    kernel.Type
	op      collective.Op
	root    int
	n       int   // elements
	invalid error // why this rank refuses it, or nil
}

type action uint8

const (
	allReduceAction action = iota + 1
	broadcastAction
	reduceScatterAction
)

// word returns the call without its length, in 57 bits. The word of a refused call differs from
// that of every valid one.
func (c call) word() int64 {
	w := int64(uint32(c.root))<<24 | int64(c.op)<<16 | int64(c.kind)<<8 | int64(c.what)
	if c.invalid != nil {
		w |= 1 << 56
	}
	return w
}

var (
	errUnequal = errors.New("cuda: the ranks' slices have different lengths")
	errRefused = errors.New("cuda: the ranks' calls differ, or are refused")
)

// agree verifies that all ranks are about to perform the same operation, with the same length and
// the same backend.
func (d *Device) agree(ctx context.Context, g *collective.Group, c call) error {
	w := c.word()
	bounds := [5]int64{int64(c.n), -int64(c.n), d.pending(g), w, -w}
	if err := collective.AllReduce(ctx, g, bounds[:], collective.Max); err != nil {
		return err
	}
	if err := d.agreeOnNCCL(ctx, g, bounds[2]); err != nil {
		return err
	}
	switch {
	case c.invalid != nil:
		return fmt.Errorf("%w: %w", errRefused, c.invalid)
	case bounds[3] != -bounds[4]:
		return fmt.Errorf("%w: this rank calls %v, another rank does not", errRefused, c)
	case bounds[0] != -bounds[1]:
		return fmt.Errorf("%w: from %d to %d elements", errUnequal, -bounds[1], bounds[0])
	}
	return nil
}

// String returns the call as described in errors.
func (c call) String() string {
	switch c.what {
	case allReduceAction:
		return fmt.Sprintf("AllReduce of %d %v (%v)", c.n, c.kind, c.op)
	case broadcastAction:
		return fmt.Sprintf("Broadcast of %d %v from rank %d", c.n, c.kind, c.root)
	}
	return fmt.Sprintf("ReduceScatter of %d %v (%v)", c.n, c.kind, c.op)
}
