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
// be equal. On one host it has the bits of [collective.AllReduce] under [collective.Strict]; where it is staged between hosts those of the group's
// algorithm. [collective.Adasum] is refused. After an error the slice is undefined.
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
		return allReduce(ctx, g, s, op, ready)
	})
}

// allReduce is AllReduce once the event has come to pass, if there is one.
func allReduce[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op, ready *Event) error {
	d, t := s.device, typeOf[T]()
	if err := sameLength(ctx, g, s.n); err != nil || s.n == 0 {
		return err
	}
	if g.Size() == 1 {
		if ready == nil {
			return nil
		}
		return d.await(ctx, ready.handle)
	}
	w, err := d.way(ctx, g)
	if err != nil {
		return err
	}
	if w != nil && hasKernels(t) {
		return w.allReduce(ctx, t, op, s.address, s.n, ready)
	}
	count, legs := cut(s.address, int(s.bytes()))
	return d.staged(ctx, ready, journey{count: count, down: legs, up: legs, step: func(i int, piece []byte) error {
		return collective.AllReduce(ctx, g, elements[T](piece[:legs(i)[0].n]), op)
	}})
}

// Broadcast sets the slice on every rank to that of rank root. Lengths must be equal. After an error the slice is undefined.
func Broadcast[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], root int) error {
	if g == nil || root < 0 || root >= g.Size() {
		return fmt.Errorf("cuda: Broadcast: there is no rank %d among %d", root, g.Size())
	}
	return s.device.together(g, func() error {
		if err := sameLength(ctx, g, s.n); err != nil || s.n == 0 {
			return err
		}
		return s.device.broadcast(ctx, g, s.address, int(s.bytes()), root)
	})
}

// broadcast is Broadcast of bytes.
func (d *Device) broadcast(ctx context.Context, g *collective.Group, address uint64, n, root int) error {
	count, legs := cut(address, n)
	j := journey{count: count, step: func(i int, piece []byte) error {
		return collective.Broadcast(ctx, g, piece[:legs(i)[0].n], root)
	}}
	if g.Rank() == root {
		j.down = legs
	} else {
		j.up = legs
	}
	return d.staged(ctx, nil, j)
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
		for root, n := range lengths {
			if n[0] > uint64(math.MaxInt) {
				return fmt.Errorf("cuda: AllGather: rank %d has %d elements", root, n[0])
			}
			part, err := Alloc[T](d, int(n[0]))
			if err != nil {
				return err
			}
			all = append(all, part)
		}
		for root, part := range all {
			if root == g.Rank() {
				if err := part.CopySlice(ctx, s); err != nil {
					return err
				}
			}
			if part.n == 0 {
				continue
			}
			if err := d.broadcast(ctx, g, part.address, int(part.bytes()), root); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		for _, part := range all {
			err = errors.Join(err, part.Free())
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
		if err := sameLength(ctx, g, s.n); err != nil {
			return err
		}
		lo, hi := kernel.Split(s.n, g.Size(), g.Rank())
		var err error
		if part, err = Alloc[T](d, hi-lo); err != nil || s.n == 0 {
			return err
		}
		return d.staged(ctx, nil, scatter(ctx, g, s, part, op))
	})
	if err != nil {
		if part != nil {
			err = errors.Join(err, part.Free())
		}
		return nil, err
	}
	return part, nil
}

// scatter is the journey of a ReduceScatter: a piece has as many elements of each rank's part.
func scatter[T collective.Element](ctx context.Context, g *collective.Group, s, part *Slice[T], op collective.Op) journey {
	n, size := g.Size(), s.size()
	each := max(1, pieceSize/size/n) // elements
	_, longest := kernel.Split(s.n, n, 0)
	// of returns the elements of rank's part that are in piece i.
	of := func(rank, i int) (lo, hi int) {
		lo, hi = kernel.Split(s.n, n, rank)
		return min(lo+i*each, hi), min(lo+(i+1)*each, hi)
	}
	down := func(i int) []leg {
		var legs []leg
		offset := 0
		for rank := range n {
			lo, hi := of(rank, i)
			legs = append(legs, leg{address: s.address + uint64(lo*size), offset: offset, n: (hi - lo) * size})
			offset += (hi - lo) * size
		}
		return legs
	}
	begin, _ := kernel.Split(s.n, n, g.Rank())
	return journey{count: (longest + each - 1) / each, down: down,
		up: func(i int) []leg {
			lo, hi := of(g.Rank(), i)
			return []leg{{address: part.address + uint64((lo-begin)*size), n: (hi - lo) * size}}
		},
		step: func(i int, piece []byte) error {
			last := down(i)[n-1]
			mine, err := collective.ReduceScatter(ctx, g, elements[T](piece[:last.offset+last.n]), op)
			copy(piece, bytesOf(mine))
			return err
		}}
}

// staged makes a journey with a staging of its own.
func (d *Device) staged(ctx context.Context, ready *Event, j journey) error {
	return d.with(ctx, func(s *staging) error {
		if err := s.after(ready); err != nil {
			return err
		}
		return s.travel(ctx, j)
	})
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
	return errors.As(err, &mismatch) || errors.Is(err, collective.ErrAborted) || errors.Is(err, errUnequal) ||
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

// sameLength makes sure that all ranks are about to do equally many pieces.
func sameLength(ctx context.Context, g *collective.Group, n int) error {
	bounds := [2]int64{int64(n), -int64(n)}
	if err := collective.AllReduce(ctx, g, bounds[:], collective.Max); err != nil {
		return err
	}
	if bounds[0] != -bounds[1] {
		return fmt.Errorf("%w: from %d to %d elements", errUnequal, -bounds[1], bounds[0])
	}
	return nil
}
