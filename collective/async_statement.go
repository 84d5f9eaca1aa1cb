package collective

import (
	"cmp"
	"context"
	"encoding/binary"
	"math"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// statement is what a rank announces about a name.
type statement struct {
	rank    int
	name    string
	request request
}

const (
	tensorStatement = 't' // length of the name u8 · name · type u8 · operation u8 · compression u8 · flags u8 · count · scales, 8 bytes each
	moveStatement   = 'm' // the same, of what is no AllReduce · action u8 · root u32
	joinStatement   = 'j'
	requestSize     = 4 + 3*8
	moveSize        = requestSize + 5

	elsewhereFlag = 1
	refusedFlag   = 2
)

func (h *Handle) state(b []byte) []byte {
	r := &h.request
	kind := byte(tensorStatement)
	if r.do != 0 {
		kind = moveStatement
	}
	b = append(b, kind, byte(len(h.name)))
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
	b = binary.NativeEndian.AppendUint64(b, math.Float64bits(r.postscale))
	if r.do != 0 {
		b = binary.NativeEndian.AppendUint32(append(b, byte(r.do)), uint32(r.root))
	}
	return b
}

// parseStatements reads what a rank says.
func parseStatements(b []byte, rank int) (all []statement, join bool, err error) {
	for len(b) > 0 {
		if b[0] == joinStatement {
			join, b = true, b[1:]
			continue
		}
		size := requestSize
		if b[0] == moveStatement {
			size = moveSize
		} else if b[0] != tensorStatement {
			return nil, false, frame.ErrInvalid
		}
		if len(b) < 2 || len(b) < 2+int(b[1])+size {
			return nil, false, frame.ErrInvalid
		}
		s := statement{rank: rank, name: string(b[2 : 2+int(b[1])])}
		b = b[2+int(b[1]):]
		s.request = request{dtype: kernel.Type(b[0]), op: operation.Op(b[1]), compression: operation.Compression(b[2]),
			elsewhere: b[3]&elsewhereFlag != 0,
			refused:   b[3]&refusedFlag != 0,
			count:     binary.NativeEndian.Uint64(b[4:]),
			prescale:  math.Float64frombits(binary.NativeEndian.Uint64(b[12:])),
			postscale: math.Float64frombits(binary.NativeEndian.Uint64(b[20:]))}
		if size == moveSize {
			s.request.do, s.request.root = operation.Action(b[requestSize]), int32(binary.NativeEndian.Uint32(b[requestSize+1:]))
		}
		if s.name == "" || (size == moveSize) != s.request.moves() || b[3] > elsewhereFlag|refusedFlag || !s.request.sound() {
			return nil, false, frame.ErrInvalid
		}
		all = append(all, s)
		b = b[size:]
	}
	return all, join, nil
}

// sound reports whether a request that another rank has sent is valid.
func (r *request) sound() bool {
	switch {
	case r.dtype == 0, r.dtype >= kernel.Types, r.count > uint64(math.MaxInt/r.dtype.Size()),
		r.prescale != r.prescale, r.postscale != r.postscale:
		return false
	case r.refused:
		return true
	case r.moves():
		return r.movable()
	case r.elsewhere && (r.op == operation.Adasum || r.compression != operation.NotCompressed || r.prescale != 1 || r.postscale != 1):
		return false
	}
	return r.op.Check(r.dtype) == nil && r.compression.Check(r.dtype) == nil
}

// exchange tells all ranks what each has to say, and derives the same state from it on all of them.
func (e *engine) exchange(join bool) error {
	own := e.statement[:0]
	for _, h := range e.unannounced {
		own = h.state(own)
	}
	if join {
		own = append(own, joinStatement)
		e.joinAnnounced = true
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
			return e.fail(frame.Gone(err, rank))
		}
		for i := range from {
			if r := &from[i].request; r.moves() && !r.refused && int(r.root) >= e.g.size {
				return e.fail(frame.Gone(frame.ErrInvalid, rank))
			}
		}
		said = append(said, from...)
		if joins && !e.joined[rank] {
			e.joined[rank], last = true, rank
			e.contribute--
		}
	}
	e.lane.call.Contributors = e.contribute
	slices.SortStableFunc(said, func(a, b statement) int { return cmp.Compare(a.name, b.name) }) // then by rank
	for i := range said {
		if err := e.define(&said[i], said[:i]); err != nil {
			return err
		}
	}
	for _, h := range e.unannounced {
		e.hold(e.ids[h.name], h)
	}
	clear(e.unannounced)
	e.unannounced = e.unannounced[:0]
	if e.contribute == 0 {
		e.allJoined(last)
	}
	return nil
}

// define stores what a rank has said of a name. It must not contradict what another rank has said
// before, or what this rank has submitted.
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
	n := frame.Mismatched(a.rank, a.request.call().Call(), b.rank, b.request.call().Call())
	n.Tensor = a.name
	return e.fail(n)
}

// report logs, on the first rank, which operations have waited for too long, and for which ranks.
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
				return e.fail(frame.Gone(frame.ErrInvalid, rank))
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

// allJoined ends the joining of all ranks.
func (e *engine) allJoined(last int) {
	clear(e.joined)
	e.contribute, e.joinAnnounced = e.g.size, false
	e.lane.call.Contributors = e.contribute
	e.mu.Lock()
	h := e.joining
	e.submitted = 0 // those that joined early have submitted fewer
	e.mu.Unlock()
	if h != nil {
		h.request.count = uint64(last)
		e.complete(h, nil)
	}
}
