package collective

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/agreement"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// fail ends the lane, and with it the generation, and returns the error.
func (e *engine) fail(n frame.Notice) error {
	e.lane.fail(n)
	<-e.lane.call.Failed
	return e.lane.err()
}

// execute performs the operations that the last vote found ready.
func (e *engine) execute() error {
	buckets := e.agreed.Elect(e.refuse)
	e.agreed.Observe(buckets, e.reducesIfReady)
	for i := range buckets {
		if err := e.reduce(&buckets[i]); err != nil {
			return err
		}
	}
	return nil
}

// refuse ends an operation that all ranks refuse in the same way.
func (e *engine) refuse(id int) {
	if h := e.agreed.Take(id); h != nil {
		e.complete(h, h.request.Action().Wrap(h.refusal))
	}
}

// reduce performs the operations of one bucket.
func (e *engine) reduce(b *agreement.Bucket) error {
	switch {
	case b.Do != 0:
		return e.move(b)
	case b.Elsewhere:
		return e.reduceElsewhere(b)
	}
	e.mark(0)
	data := e.inPlace(b)
	if data == nil {
		data = e.buffer(b.Bytes)
		e.copyIn(b, data)
	}
	e.mark(1)
	if len(data) > 0 {
		if err := e.lane.allReduceBytes(context.Background(), b.Wire, b.Op, data, nil); err != nil {
			return err
		}
	}
	e.mark(2)
	e.copyOut(b, data)
	return nil
}

// mark records when a phase of the current bucket begins, for the timeline.
func (e *engine) mark(phase int) {
	if e.g.family.timeline != nil {
		e.marks[phase] = time.Now()
	}
}

// record adds an operation that ends now to the timeline, phase by phase.
func (e *engine) record(h *Handle) {
	if t := e.g.tally; t != nil {
		t.note(h.request.Action(), h.request.Bytes(), h.since.Sub(t.origin), e.lane.ran())
	}
	if e.g.family.timeline == nil {
		return
	}
	from, ends := h.since, [...]time.Time{e.marks[0], e.marks[1], e.marks[2], time.Now()}
	for i, phase := range [...]string{"queue", "copy-in", "reduce", "copy-out"} {
		e.g.family.timeline.Span(Span{Name: h.request.Action().String(), Phase: phase, Tensor: h.name, Lane: e.g.lane,
			Generation: e.g.generation, Start: from, Duration: ends[i].Sub(from), Bytes: h.request.Bytes()})
		from = ends[i]
	}
}

// inPlace returns the memory of the only tensor of a bucket if it is reduced in place, or nil if
// the bucket needs a copy.
func (e *engine) inPlace(b *agreement.Bucket) []byte {
	t := e.agreed.At(b.IDs[0])
	if len(b.IDs) > 1 || t.Mine == nil || b.Compression != operation.NotCompressed {
		return nil
	}
	if f := t.Request.Prescale; f != 1 {
		kernel.Scale(t.Request.Type)(t.Mine.data, f)
	}
	return t.Mine.data
}

// copyIn copies the tensors of a bucket to all, in the format in which they are sent. Elements to
// which this rank contributes nothing are neutral.
func (e *engine) copyIn(b *agreement.Bucket, all []byte) {
	for _, id := range b.IDs {
		t := e.agreed.At(id)
		part := all[:int(t.Request.Count)*b.Wire.Size()]
		all = all[len(part):]
		if t.Mine == nil {
			operation.FillNeutral(part, b.Wire, b.Op)
			continue
		}
		if f := t.Request.Prescale; f != 1 {
			kernel.Scale(t.Request.Type)(t.Mine.data, f)
		}
		if b.Compression == operation.NotCompressed {
			kernel.Copy(part, t.Mine.data)
		} else {
			kernel.Narrow(b.Wire)(part, t.Mine.data)
		}
	}
}

// buffer returns n bytes for a bucket. They contain data of earlier buckets. If ranks of this host
// share memory, the bytes are in memory that the other ranks can read, so that the reduction copies
// nothing.
func (e *engine) buffer(n int) []byte {
	if n > cap(e.fused) {
		size := max(n, min(2*cap(e.fused), e.agreed.Fusion))
		Free(e.fused[:cap(e.fused)])
		e.fused = nil
		if e.lane.call.Here() != nil {
			e.fused, _ = Alloc[byte](size) // on failure, ordinary memory is used
		}
		if e.fused == nil {
			e.fused = make([]byte, size)
		}
	}
	return e.fused[:n]
}

// copyOut copies the results into their tensors and ends the operations.
func (e *engine) copyOut(b *agreement.Bucket, all []byte) {
	for _, id := range b.IDs {
		t := e.agreed.At(id)
		part := all[:int(t.Request.Count)*b.Wire.Size()]
		all = all[len(part):]
		h := e.agreed.Take(id)
		e.watchTensor(id, h)
		if h == nil {
			continue
		}
		switch {
		case b.Compression != operation.NotCompressed:
			kernel.Widen(b.Wire)(h.data, part)
		case len(part) > 0 && &part[0] != &h.data[0]:
			kernel.Copy(h.data, part)
		}
		if f := t.Request.Postscale; f != 1 {
			kernel.Scale(t.Request.Type)(h.data, f)
		}
		e.record(h)
		e.complete(h, nil)
	}
}
