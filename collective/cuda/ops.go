package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/kernel"
)

// Options say how a collective on device memory is done. The zero value changes nothing.
type Options struct {
	// After is a stream of the device: what has been put into it before the call is done before the operation touches the
	// slice. Nil: the slice is ready.
	After *Stream
}

// event is the end of what After holds now; nil if there is no stream.
func (o Options) event() (*Event, error) {
	if o.After == nil {
		return nil, nil
	}
	return o.After.Record()
}

// Each operation is called by every rank of the group with the same arguments, except for the data, as those of package collective,
// and in the same order with those. It blocks until the result is complete on this rank's device; what is put into any stream
// afterwards finds it. What goes wrong on one rank's device ends the group for all: that rank returns the error, the others an
// error that is [collective.ErrAborted].

// AllReduce combines the slices of all ranks, element by element, and puts the result into the slice on every rank. Lengths must
// be equal. On one host it has the bits of [collective.AllReduce] under [collective.Strict]. With several hosts ([BackendHosts]) the ranks of each host are
// combined in their order, and the results of the hosts in that of the group's algorithm; staged, all are in that. Under Strict the bits
// are the same by all of these. By NCCL they are NCCL's, the same on all ranks but perhaps others in another world, and where operands are NaN its own. [collective.Adasum] is
// refused. After an error the slice is undefined.
func AllReduce[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op) error {
	return AllReduceWith(ctx, g, s, op, Options{})
}

// AllReduceWith is AllReduce with options.
func AllReduceWith[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op, o Options) error {
	if err := refuse(g, op); err != nil {
		return err
	}
	return s.device.together(g, func() error {
		ready, err := o.event()
		if err != nil {
			return err
		}
		defer ready.Close()
		return s.device.allReduce(ctx, g, typeOf[T](), op, s.address, s.n, ready)
	})
}

// allReduce combines n elements at an address of each rank once the event has come to pass, if there is one.
func (d *Device) allReduce(ctx context.Context, g *collective.Group, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error {
	if err := sameLength(ctx, d, g, n); err != nil || n == 0 {
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
	return b.allReduce(ctx, t, op, address, n, ready)
}

// Broadcast sets the slice on every rank to that of rank root. Lengths must be equal. After an error the slice is undefined. Where memory is opened
// to others each rank copies root's, device to device.
func Broadcast[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], root int) error {
	if g == nil || root < 0 || root >= g.Size() {
		return fmt.Errorf("cuda: Broadcast: there is no rank %d among %d", root, g.Size())
	}
	return s.device.together(g, func() error {
		if err := sameLength(ctx, s.device, g, s.n); err != nil || s.n == 0 {
			return err
		}
		b, err := s.device.backend(ctx, g)
		if err != nil {
			return err
		}
		return b.broadcast(ctx, s.address, int(s.bytes()), root)
	})
}

// AllGather returns the slices of every rank, by rank, as copies on this rank's device, which the caller frees one by one. Lengths may
// differ.
func AllGather[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T]) ([]*Slice[T], error) {
	var all []*Slice[T]
	d := s.device
	err := d.together(g, func() error {
		lengths, err := collective.AllGather(ctx, g, []uint64{uint64(s.n)})
		if err != nil {
			return err
		}
		into, sizes := make([]uint64, len(lengths)), make([]int, len(lengths))
		for rank, n := range lengths {
			if len(n) != 1 || n[0] > uint64(math.MaxInt) {
				return fmt.Errorf("cuda: AllGather: rank %d has %d elements", rank, n)
			}
			part, err := Alloc[T](d, int(n[0]))
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

// ReduceScatter combines the slices of all ranks, element by element, and returns this rank's part of the result on its device, which the
// caller frees; the slice stays as it is. Lengths must be equal; the parts are those of [collective.ReduceScatter].
func ReduceScatter[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op) (*Slice[T], error) {
	if err := refuse(g, op); err != nil {
		return nil, err
	}
	var part *Slice[T]
	d := s.device
	err := d.together(g, func() error {
		if err := sameLength(ctx, s.device, g, s.n); err != nil {
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

var errNoDevice = errors.New("cuda: a slice of no device")

// together does one rank's part of an operation. If it fails here the others must not wait.
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

// common tells whether the other ranks have the same error, or none because nothing has begun.
func common(err error) bool {
	var mismatch *collective.MismatchError
	var backend *BackendError
	return errors.As(err, &mismatch) || errors.As(err, &backend) || errors.Is(err, collective.ErrAborted) || errors.Is(err, errUnequal) ||
		errors.Is(err, collective.ErrBusy) || errors.Is(err, collective.ErrClosed)
}

// refuse is the error of what no rank can have meant; all ranks find it by themselves.
func refuse(g *collective.Group, op collective.Op) error {
	switch {
	case g == nil:
		return errors.New("cuda: no group")
	case combination(op) == "":
		return fmt.Errorf("cuda: %v is no operation on device memory", op)
	}
	return nil
}

var errUnequal = errors.New("cuda: the ranks' slices have different lengths")

// sameLength makes sure that all ranks are about to do equally many pieces, in the same way.
func sameLength(ctx context.Context, d *Device, g *collective.Group, n int) error {
	bounds := [3]int64{int64(n), -int64(n), d.pending(g)}
	if err := collective.AllReduce(ctx, g, bounds[:], collective.Max); err != nil {
		return err
	}
	if w := d.viaNCCL(g); w != nil {
		if err := w.agree(ctx, bounds[2]); err != nil {
			return err
		}
	}
	if bounds[0] != -bounds[1] {
		return fmt.Errorf("%w: from %d to %d elements", errUnequal, -bounds[1], bounds[0])
	}
	return nil
}
