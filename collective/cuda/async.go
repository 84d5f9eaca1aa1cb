package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Handle is an asynchronous operation under way.
type Handle struct {
	under  *collective.Handle // nil: it was not begun
	vector *submission
	err    error // why it was not begun
}

// Wait blocks until the operation has ended and returns its error. Until then the slice belongs to
// the operation; after an error it is undefined. What waits is not held back to be fused with what
// comes later.
func (h *Handle) Wait() error {
	if h.under == nil {
		return h.err
	}
	if err := h.under.Wait(); err != nil {
		return err
	}
	return h.vector.refused
}

// Done reports whether Wait would return at once.
func (h *Handle) Done() bool { return h.under == nil || h.under.Done() }

// AllReduceAsync is [AllReduce] in the background, as [collective.AllReduceAsync] is of slices in
// memory: it returns at once, and the operation is done when every rank has called it with the same
// name, ranks may do so in different orders, and slices that are due at the same time are fused:
// copied, on the device, into one vector that is reduced. A name that some ranks do not submit is
// told by the group's stall report. The operation begins when what is in the stream After at the
// time of the call has been done. The slices of one group that are under way at a time are on one
// device of this process. Close of the device waits for them.
//
// Slices of 1 MiB or more are reduced where they lie. Others take memory of the device, up to the
// fusion threshold, until the next generation; where a rank has none left, they are reduced one by
// one.
func AllReduceAsync[T collective.Element](ctx context.Context, g *collective.Group, name string, s *Slice[T], op collective.Op, o Options) *Handle {
	return submit(ctx, g, []string{name}, []*Slice[T]{s}, op, o)[0]
}

// GroupedAllReduce is AllReduce of several slices at once, which are fused where they fit the
// fusion threshold. The name stands for all of them, as in [AllReduceAsync]. It blocks until all
// are done.
func GroupedAllReduce[T collective.Element](ctx context.Context, g *collective.Group, name string, tensors []*Slice[T], op collective.Op, o Options) error {
	names := make([]string, len(tensors))
	for i := range names {
		names[i] = fmt.Sprintf("%s.%d", name, i)
	}
	var first error
	for _, h := range submit(ctx, g, names, tensors, op, o) {
		if err := h.Wait(); first == nil {
			first = err
		}
	}
	return first
}

// submit hands slices to the group's engine, all at once.
func submit[T collective.Element](ctx context.Context, g *collective.Group, names []string, tensors []*Slice[T], op collective.Op, o Options) []*Handle {
	handles := make([]*Handle, len(tensors))
	all := make([]collective.Elsewhere, 0, len(tensors))
	var err error
	if g == nil {
		err = errNoGroup
	} else if alien := checkReduced[T](); alien != nil { // as it is on all ranks
		err = fmt.Errorf("cuda: %w", alien)
	} else { // the group's engine refuses invalid operations, on all ranks
		for i, s := range tensors {
			v := &submission{device: s.device, kind: typeOf[T](), op: op, address: s.address, n: s.n}
			if err = v.begin(o); err != nil {
				g.Abort(err) // the others must not wait
				break
			}
			handles[i] = &Handle{vector: v}
			all = append(all, collective.Elsewhere{Name: names[i], Type: v.kind, Count: v.n, Work: v})
		}
	}
	if err != nil {
		for _, v := range all {
			v.Work.Ended(err)
		}
		for i := range handles {
			handles[i] = &Handle{err: err}
		}
		return handles
	}
	for i, under := range collective.AllReduceElsewhere(ctx, g, op, all...) {
		handles[i].under = under
	}
	return handles
}

// submission is a slice under way in a group's engine.
type submission struct {
	device  *Device
	kind    kernel.Type
	op      collective.Op
	address uint64
	n       int
	ready   *Event // nil: it is
	refused error  // what all ranks have found alike, and that has not ended the group
}

// begin keeps the device from being closed until Ended is called.
func (v *submission) begin(o Options) (err error) {
	if v.device == nil {
		return errNoDevice
	}
	if err := v.device.beginAsync(); err != nil {
		return err
	}
	if v.ready, err = o.event(); err != nil {
		v.device.end()
	}
	return err
}

// Ended gives back what the operation has held.
func (v *submission) Ended(error) {
	_ = v.ready.Close() // fails where everything does: the context is broken
	v.device.end()
}

// Reduce combines vectors with those of the other ranks: one where it lies, several in a bucket.
func (v *submission) Reduce(ctx context.Context, lane *collective.Group, bucket []collective.Work) error {
	all := make([]*submission, len(bucket))
	for i, w := range bucket {
		if all[i] = w.(*submission); all[i].device != v.device {
			return errors.New("cuda: slices of two devices are under way in one group")
		}
	}
	err := v.device.reduceAll(ctx, lane, all)
	var refused *BackendError
	if !errors.As(err, &refused) {
		return err
	}
	for _, v := range all {
		v.refused = err
	}
	return nil
}
