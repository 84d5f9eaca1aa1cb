package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Handle is an asynchronous operation in progress, or one that has ended.
type Handle struct {
	under  *collective.Handle // nil if the operation was not begun
	vector *submission
	err    error // why the operation was not begun
}

// Wait blocks until the operation has ended and returns its error. Until then the slice belongs to
// the operation; after an error its content is undefined. Once a goroutine waits for an operation,
// the operation is no longer delayed to be fused with later ones.
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

// AllReduceAsync is [AllReduce] in the background, like [collective.AllReduceAsync] for slices in
// host memory: it returns at once, and the operation is done when every rank has called it with the
// same name. Ranks may call it in different orders. Slices that are ready at the same time are
// fused: they are copied, on the device, into one vector, which is reduced. A name that some ranks
// do not submit appears in the group's stall report. The operation begins when the device has done
// the work that is in the stream [Options].After at the time of the call. All slices of one group
// that are in progress at the same time must be on one device of this process. [Device.Close] waits
// for them.
//
// Slices of 1 MiB or more are reduced in place. The fusion of smaller slices uses device memory, up
// to the fusion threshold, which is kept until the next generation; if a rank lacks that memory,
// they are reduced one by one.
func AllReduceAsync[T collective.Element](ctx context.Context, g *collective.Group, name string, s *Slice[T], op collective.Op, o Options) *Handle {
	return submit(ctx, g, []string{name}, []*Slice[T]{s}, op, o)[0]
}

// GroupedAllReduce reduces several slices, fused if they fit the fusion threshold. name is the name
// of the whole group of slices, as in [AllReduceAsync]. It blocks until all slices are reduced.
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

// submit passes slices to the group's engine, all at once.
func submit[T collective.Element](ctx context.Context, g *collective.Group, names []string, tensors []*Slice[T], op collective.Op, o Options) []*Handle {
	handles := make([]*Handle, len(tensors))
	all := make([]collective.Elsewhere, 0, len(tensors))
	var err error
	if alien := checkReduced[T](); alien != nil { // the type is the same on all ranks
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

// submission is a slice in a group's engine.
type submission struct {
	device  *Device
	kind    kernel.Type
	op      collective.Op
	address uint64
	n       int
	ready   *Event // nil if the slice is ready
	refused error  // an error of all ranks that has not ended the group
}

// begin prevents the device from being closed until Ended is called, and records o.After.
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

// Ended releases what the operation has held.
func (v *submission) Ended(error) {
	_ = v.ready.Close() // fails only if the context is broken
	v.device.end()
}

// Reduce combines vectors with those of the other ranks: a single vector in place, several in a
// bucket.
func (v *submission) Reduce(ctx context.Context, lane *collective.Group, bucket []collective.Work) error {
	all := make([]*submission, len(bucket))
	for i, w := range bucket {
		if all[i] = w.(*submission); all[i].device != v.device {
			return errors.New("cuda: slices of two devices are in progress in one group; use one device for each group")
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
