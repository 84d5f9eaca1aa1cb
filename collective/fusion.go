package collective

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/collective/kernel"
)

// statement is what a rank says about a name.
type statement struct {
	rank    int
	name    string
	request request
}

const (
	saysTensor = 't' // length of the name u8 · name · type u8 · operation u8 · compression u8 · flags u8 · count · scales, 8 bytes each
	saysJoin   = 'j'
	wordsSize  = 4 + 3*8

	elsewhereFlag = 1
	refusedFlag   = 2
)

func (h *Handle) state(b []byte) []byte {
	r := &h.request
	b = append(b, saysTensor, byte(len(h.name)))
	b = append(b, h.name...)
	flags := byte(0)
	if r.elsewhere {
		flags |= elsewhereFlag
	}
	if r.refused {
		flags |= refusedFlag
	}
	b = append(b, byte(r.dtype), byte(r.op), byte(r.compression), flags)
	b = binary.NativeEndian.AppendUint64(b, r.count)
	b = binary.NativeEndian.AppendUint64(b, math.Float64bits(r.prescale))
	return binary.NativeEndian.AppendUint64(b, math.Float64bits(r.postscale))
}

// parseStatements reads what a rank says.
func parseStatements(b []byte, rank int) (all []statement, join bool, err error) {
	for len(b) > 0 {
		if b[0] == saysJoin {
			join, b = true, b[1:]
			continue
		}
		if b[0] != saysTensor || len(b) < 2 || len(b) < 2+int(b[1])+wordsSize {
			return nil, false, errInvalid
		}
		s := statement{rank: rank, name: string(b[2 : 2+int(b[1])])}
		b = b[2+int(b[1]):]
		s.request = request{dtype: kernel.Type(b[0]), op: Op(b[1]), compression: Compression(b[2]),
			elsewhere: b[3]&elsewhereFlag != 0,
			refused:   b[3]&refusedFlag != 0,
			count:     binary.NativeEndian.Uint64(b[4:]),
			prescale:  math.Float64frombits(binary.NativeEndian.Uint64(b[12:])),
			postscale: math.Float64frombits(binary.NativeEndian.Uint64(b[20:]))}
		if s.name == "" || b[3] > elsewhereFlag|refusedFlag || !s.request.sound() {
			return nil, false, errInvalid
		}
		all = append(all, s)
		b = b[wordsSize:]
	}
	return all, join, nil
}

// sound tells whether a request that another rank has sent can be dealt with.
func (r *request) sound() bool {
	switch {
	case r.dtype == 0, r.dtype >= kernel.Types, r.count > uint64(math.MaxInt/r.dtype.Size()),
		r.prescale != r.prescale, r.postscale != r.postscale:
		return false
	case r.refused:
		return true
	case r.elsewhere && (r.op == Adasum || r.compression != CompressNone || r.prescale != 1 || r.postscale != 1):
		return false
	}
	return r.op.check(r.dtype) == nil && r.compression.check(r.dtype, r.op) == nil
}

// exchange tells all ranks what each has to say, and draws the same conclusions from it on all of
// them.
func (e *engine) exchange(join bool) error {
	own := e.statement[:0]
	for _, h := range e.unsaid {
		own = h.state(own)
	}
	if join {
		own = append(own, saysJoin)
		e.said = true
	}
	e.statement = own
	parts, err := AllGather(context.Background(), e.lane, own)
	if err != nil {
		return err
	}
	var said []statement
	last := -1
	for rank, part := range parts {
		from, joins, err := parseStatements(part, rank)
		if err != nil {
			return e.fail(gone(err, rank))
		}
		said = append(said, from...)
		if joins && !e.joined[rank] {
			e.joined[rank], last = true, rank
			e.contribute--
		}
	}
	slices.SortStableFunc(said, func(a, b statement) int { return cmp.Compare(a.name, b.name) }) // then by rank
	for i := range said {
		if err := e.define(&said[i], said[:i]); err != nil {
			return err
		}
	}
	for _, h := range e.unsaid {
		e.hold(e.ids[h.name], h)
	}
	clear(e.unsaid)
	e.unsaid = e.unsaid[:0]
	if e.contribute == 0 {
		e.allJoined(last)
	}
	return nil
}

// define makes what a rank has said the meaning of a name. It must not contradict what another rank
// has said before, or what this rank has submitted.
func (e *engine) define(s *statement, before []statement) error {
	if len(before) > 0 && before[len(before)-1].name == s.name {
		if other := before[len(before)-1]; other.request != s.request {
			return e.mismatch(other, *s)
		}
		return nil
	}
	id, known := e.ids[s.name]
	if !known {
		e.ids[s.name] = len(e.table)
		e.table = append(e.table, entry{name: s.name, request: s.request})
		return nil
	}
	t := &e.table[id]
	if t.mine != nil && t.request != s.request {
		return e.mismatch(statement{rank: e.g.rank, name: s.name, request: t.request}, *s)
	}
	t.request = s.request
	return nil
}

func (e *engine) mismatch(a, b statement) error {
	n := mismatched(a.rank, a.request.call(), b.rank, b.request.call())
	n.tensor = a.name
	return e.fail(n)
}

func (e *engine) fail(n notice) error {
	e.lane.fail(n)
	<-e.lane.failed
	return e.lane.err()
}

// report logs, on the first rank, which operations wait for whom for too long.
func (e *engine) report() error {
	now := time.Now()
	if e.warn = now.Add(e.tuning.stall); e.tuning.stall < 0 {
		e.warn = time.Time{}
	}
	state := make([]uint8, len(e.table)) // 0 missing, 1 here, 2 here for too long
	for i := range e.table {
		switch h := e.table[i].mine; {
		case h != nil && e.tuning.stall >= 0 && now.Sub(h.since) >= e.tuning.stall:
			state[i] = 2
		case h != nil || e.joined[e.g.rank]:
			state[i] = 1
		}
	}
	all, err := AllGather(context.Background(), e.lane, state)
	if err != nil || e.g.rank != 0 || e.tuning.log == nil {
		return err
	}
	for i := range e.table {
		var missing []int
		late := false
		for rank, s := range all {
			if len(s) != len(state) {
				return e.fail(gone(errInvalid, rank))
			}
			late = late || s[i] == 2
			if s[i] == 0 {
				missing = append(missing, rank)
			}
		}
		if late && len(missing) > 0 {
			e.tuning.log(e.table[i].name, missing, e.tuning.stall)
		}
	}
	return nil
}

// bucket is tensors that are reduced as one.
type bucket struct {
	wire        kernel.Type // as ranks send it
	op          Op
	compression Compression
	elsewhere   bool
	ids         []int
	bytes       int // on the wire
	full        bool
}

// large is the size in bytes from which on a tensor is reduced where it lies: to copy it to others
// and back costs more than they save.
const large = 1 << 20

// lone tells whether a tensor, of so many bytes on the wire, has a bucket of its own.
func (r *request) lone(bytes int) bool { return bytes >= large && r.compression == CompressNone }

// fits tells whether the tensors of a request may be in the bucket.
func (b *bucket) fits(r *request, bytes, most int) bool {
	return !b.full && !r.lone(bytes) && b.op != Adasum && b.alike(r) && b.bytes+bytes <= most
}

// alike tells whether the tensors of a request are done as those of the bucket.
func (b *bucket) alike(r *request) bool {
	return b.wire == r.wire() && b.op == r.op && b.compression == r.compression && b.elsewhere == r.elsewhere
}

// wire is the type of a tensor as ranks send it.
func (r *request) wire() kernel.Type {
	if t := r.compression.wire(); t != 0 {
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
	for id, vote := range e.votes[2:] {
		if vote == 0 {
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
				b.full = true // later ones go into a later one, in their order
			}
		}
		if at < 0 {
			at = used
			if used++; used > len(e.buckets) {
				e.buckets = append(e.buckets, bucket{})
			}
			e.buckets[at] = bucket{wire: r.wire(), op: r.op, compression: r.compression, elsewhere: r.elsewhere, ids: e.buckets[at].ids[:0], full: r.lone(bytes)}
		}
		b := &e.buckets[at]
		b.ids, b.bytes = append(b.ids, id), b.bytes+bytes
	}
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
	e.complete(h, fmt.Errorf("collective: AllReduceAsync: %w", h.refusal))
}

// reduce does the operations of one bucket.
func (e *engine) reduce(b *bucket) error {
	if b.elsewhere {
		return e.reduceElsewhere(b)
	}
	e.mark(0)
	data := e.alone(b)
	if data == nil {
		data = e.copyIn(b)
	}
	e.mark(1)
	op := b.op
	if op == Average && e.contribute < e.g.size {
		op = Sum
	}
	if len(data) > 0 {
		if err := e.lane.allReduce(context.Background(), b.wire, op, data); err != nil {
			return err
		}
	}
	if op != b.op {
		kernel.Divide(b.wire)(data, e.contribute)
	}
	e.mark(2)
	e.copyOut(b, data)
	return nil
}

// mark notes when a phase of the bucket under way begins, where somebody listens.
func (e *engine) mark(phase int) {
	if e.g.family.timeline != nil {
		e.marks[phase] = time.Now()
	}
}

// record tells the timeline of an operation that ends now, phase by phase.
func (e *engine) record(h *Handle) {
	if e.g.family.timeline == nil {
		return
	}
	from, ends := h.since, [...]time.Time{e.marks[0], e.marks[1], e.marks[2], time.Now()}
	for i, phase := range [...]string{"queue", "copy-in", "reduce", "copy-out"} {
		e.g.family.timeline.Span(Span{Name: actionNames[allReduceAsync], Phase: phase, Tensor: h.name, Lane: e.g.lane,
			Generation: e.g.generation, Start: from, Duration: ends[i].Sub(from), Bytes: h.request.bytes()})
		from = ends[i]
	}
}

// alone is the memory of the one tensor of a bucket that is reduced where it lies; nil where it is
// not so.
func (e *engine) alone(b *bucket) []byte {
	t := &e.table[b.ids[0]]
	if len(b.ids) > 1 || t.mine == nil || b.compression != CompressNone {
		return nil
	}
	if f := t.request.prescale; f != 1 {
		kernel.Scale(t.request.dtype)(t.mine.data, f)
	}
	return t.mine.data
}

// copyIn gathers the tensors of a bucket as they go to the others. For what this rank does not
// contribute there are elements that change nothing.
func (e *engine) copyIn(b *bucket) []byte {
	all := e.buffer(b.bytes)
	rest := all
	for _, id := range b.ids {
		t := &e.table[id]
		part := rest[:int(t.request.count)*b.wire.Size()]
		rest = rest[len(part):]
		if t.mine == nil {
			fillNeutral(part, b.wire, b.op)
			continue
		}
		if f := t.request.prescale; f != 1 {
			kernel.Scale(t.request.dtype)(t.mine.data, f)
		}
		if b.compression == CompressNone {
			kernel.Copy(part, t.mine.data)
		} else {
			kernel.Narrow(b.wire)(part, t.mine.data)
		}
	}
	return all
}

// buffer returns n bytes for a bucket, whose contents are those of an earlier one. Where all ranks
// share memory they lie in what others can read, so that the reduction copies nothing.
func (e *engine) buffer(n int) []byte {
	if n > cap(e.fused) {
		size := max(n, min(2*cap(e.fused), e.fusion))
		Free(e.fused[:cap(e.fused)])
		e.fused = nil
		if e.lane.inMemory() != nil {
			e.fused, _ = Alloc[byte](size) // where there is no room an ordinary one does
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
		if h == nil {
			continue
		}
		switch {
		case b.compression != CompressNone:
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

// allJoined ends the joining of all ranks.
func (e *engine) allJoined(last int) {
	clear(e.joined)
	e.contribute, e.said = e.g.size, false
	e.mu.Lock()
	h := e.joining
	e.submitted = 0 // those that joined early have submitted fewer
	e.mu.Unlock()
	if h != nil {
		h.request.count = uint64(last)
		e.complete(h, nil)
	}
}

// logStall is the stall report of an endpoint.
func (e *Endpoint) logStall(tensor string, missing []int, waited time.Duration) {
	e.log.WithField("tensor", tensor).WithField("ranks", fmt.Sprint(missing)).
		Warnf("collective: %q waits for ranks %v for more than %v", tensor, missing, waited)
}
