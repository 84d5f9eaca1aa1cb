package collective

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

func (e *engine) fail(n frame.Notice) error {
	e.lane.fail(n)
	<-e.lane.call.Failed
	return e.lane.err()
}

// bucket is tensors that are reduced as one.
type bucket struct {
	do          operation.Action // 0: AllReduce
	wire        kernel.Type      // as ranks send it
	op          operation.Op
	compression operation.Compression
	elsewhere   bool
	ids         []int
	bytes       int // on the wire
	full        bool
}

// large is the size in bytes from which on a tensor is reduced where it lies: copying it into a
// bucket and back costs more than the bucket saves.
const large = 1 << 20

// ownBucket reports whether a tensor, of so many bytes on the wire, has a bucket of its own.
func (r *request) ownBucket(bytes int) bool {
	return r.do != 0 || bytes >= large && r.compression == operation.NotCompressed
}

// fits reports whether the tensors of a request may be in the bucket.
func (b *bucket) fits(r *request, bytes, most int) bool {
	return !b.full && !r.ownBucket(bytes) && b.op != operation.Adasum && b.alike(r) && b.bytes+bytes <= most
}

// alike reports whether the tensors of a request are reduced as those of the bucket.
func (b *bucket) alike(r *request) bool {
	return b.do == r.do && b.wire == r.wire() && b.op == r.op && b.compression == r.compression && b.elsewhere == r.elsewhere
}

// wire is the type of a tensor as ranks send it.
func (r *request) wire() kernel.Type {
	if t := r.compression.Wire(); t != 0 {
		return t
	}
	return r.dtype
}

// execute reduces what the last vote has found ready. Buckets follow from the vote and the table
// alone.
func (e *engine) execute() error {
	if e.contribute == 0 {
		return nil
	}
	used := 0
	for id := range e.table {
		if !e.elected(id) {
			continue
		}
		r := &e.table[id].request
		if r.refused {
			e.refuse(&e.table[id])
			continue
		}
		bytes := int(r.count) * r.wire().Size()
		at := -1
		for i := used - 1; i >= 0 && at < 0; i-- {
			if b := &e.buckets[i]; b.fits(r, bytes, e.fusion) {
				at = i
			} else if b.alike(r) {
				b.full = true // later tensors go into a later bucket, in their order
			}
		}
		if at < 0 {
			at = used
			if used++; used > len(e.buckets) {
				e.buckets = append(e.buckets, bucket{})
			}
			e.buckets[at] = bucket{do: r.do, wire: r.wire(), op: r.op, compression: r.compression, elsewhere: r.elsewhere,
				ids: e.buckets[at].ids[:0], full: r.ownBucket(bytes)}
		}
		b := &e.buckets[at]
		b.ids, b.bytes = append(b.ids, id), b.bytes+bytes
	}
	e.observe(e.buckets[:used])
	for i := range e.buckets[:used] {
		if err := e.reduce(&e.buckets[i]); err != nil {
			return err
		}
	}
	return nil
}

// refuse ends an operation that all ranks refuse in the same way.
func (e *engine) refuse(t *entry) {
	h := t.mine
	if h == nil {
		return // this rank has joined
	}
	t.mine = nil
	e.pending--
	e.complete(h, h.request.wrong(h.refusal))
}

// reduce does the operations of one bucket.
func (e *engine) reduce(b *bucket) error {
	switch {
	case b.do != 0:
		return e.move(b)
	case b.elsewhere:
		return e.reduceElsewhere(b)
	}
	e.mark(0)
	data := e.inPlace(b)
	if data == nil {
		data = e.copyIn(b)
	}
	e.mark(1)
	if len(data) > 0 {
		if err := e.lane.allReduceBytes(context.Background(), b.wire, b.op, data, nil); err != nil {
			return err
		}
	}
	e.mark(2)
	e.copyOut(b, data)
	return nil
}

// mark notes when a phase of the bucket under way begins, for the timeline.
func (e *engine) mark(phase int) {
	if e.g.family.timeline != nil {
		e.marks[phase] = time.Now()
	}
}

// record tells the timeline of an operation that ends now, phase by phase.
func (e *engine) record(h *Handle) {
	if t := e.g.family.tally; t != nil {
		t.note(h.request.action(), h.request.bytes(), h.since.Sub(t.origin), e.g.backend())
	}
	if e.g.family.timeline == nil {
		return
	}
	from, ends := h.since, [...]time.Time{e.marks[0], e.marks[1], e.marks[2], time.Now()}
	for i, phase := range [...]string{"queue", "copy-in", "reduce", "copy-out"} {
		e.g.family.timeline.Span(Span{Name: h.request.action().String(), Phase: phase, Tensor: h.name, Lane: e.g.lane,
			Generation: e.g.generation, Start: from, Duration: ends[i].Sub(from), Bytes: h.request.bytes()})
		from = ends[i]
	}
}

// inPlace is the memory of the one tensor of a bucket that is reduced where it lies; nil where it
// is not so.
func (e *engine) inPlace(b *bucket) []byte {
	t := &e.table[b.ids[0]]
	if len(b.ids) > 1 || t.mine == nil || b.compression != operation.NotCompressed {
		return nil
	}
	if f := t.request.prescale; f != 1 {
		kernel.Scale(t.request.dtype)(t.mine.data, f)
	}
	return t.mine.data
}

// copyIn gathers the tensors of a bucket as they go to the others. Where this rank contributes
// nothing, the elements are neutral.
func (e *engine) copyIn(b *bucket) []byte {
	all := e.buffer(b.bytes)
	e.gatherBucket(b, all)
	return all
}

func (e *engine) gatherBucket(b *bucket, rest []byte) {
	for _, id := range b.ids {
		t := &e.table[id]
		part := rest[:int(t.request.count)*b.wire.Size()]
		rest = rest[len(part):]
		if t.mine == nil {
			operation.FillNeutral(part, b.wire, b.op)
			continue
		}
		if f := t.request.prescale; f != 1 {
			kernel.Scale(t.request.dtype)(t.mine.data, f)
		}
		if b.compression == operation.NotCompressed {
			kernel.Copy(part, t.mine.data)
		} else {
			kernel.Narrow(b.wire)(part, t.mine.data)
		}
	}
}

// buffer returns n bytes for a bucket, whose contents are those of an earlier one. Where ranks of
// this host share memory they lie in what those can read, so that the reduction copies nothing.
func (e *engine) buffer(n int) []byte {
	if n > cap(e.fused) {
		size := max(n, min(2*cap(e.fused), e.fusion))
		Free(e.fused[:cap(e.fused)])
		e.fused = nil
		if e.lane.call.Here() != nil {
			e.fused, _ = Alloc[byte](size) // without room, an ordinary one is used
		}
		if e.fused == nil {
			e.fused = make([]byte, size)
		}
	}
	return e.fused[:n]
}

// copyOut hands results to their tensors and ends their operations.
func (e *engine) copyOut(b *bucket, all []byte) {
	for _, id := range b.ids {
		t := &e.table[id]
		part := all[:int(t.request.count)*b.wire.Size()]
		all = all[len(part):]
		h := t.mine
		e.watchTensor(id, h)
		if h == nil {
			continue
		}
		switch {
		case b.compression != operation.NotCompressed:
			kernel.Widen(b.wire)(h.data, part)
		case len(part) > 0 && &part[0] != &h.data[0]:
			kernel.Copy(h.data, part)
		}
		if f := t.request.postscale; f != 1 {
			kernel.Scale(t.request.dtype)(h.data, f)
		}
		e.record(h)
		t.mine = nil
		e.pending--
		e.complete(h, nil)
	}
}
