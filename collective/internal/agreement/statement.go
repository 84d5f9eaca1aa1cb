package agreement

import (
	"encoding/binary"
	"math"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// statement is what a rank announces about a name.
type statement struct {
	rank    int
	name    string
	request Request
}

const (
	tensorStatement = 't' // length of the name u8 · name · type u8 · operation u8 · compression u8 · flags u8 · count · scales, 8 bytes each
	moveStatement   = 'm' // the same, for operations other than AllReduce · action u8 · root u32
	joinStatement   = 'j'
	requestSize     = 4 + 3*8
	moveSize        = requestSize + 5

	elsewhereFlag = 1
	refusedFlag   = 2
)

// state appends a rank's statement about a name.
func (r *Request) state(b []byte, name string) []byte {
	kind := byte(tensorStatement)
	if r.Do != 0 {
		kind = moveStatement
	}
	b = append(b, kind, byte(len(name)))
	b = append(b, name...)
	flags := byte(0)
	if r.Elsewhere {
		flags |= elsewhereFlag
	}
	if r.Refused {
		flags |= refusedFlag
	}
	b = append(b, byte(r.Type), byte(r.Op), byte(r.Compression), flags)
	b = binary.NativeEndian.AppendUint64(b, r.Count)
	b = binary.NativeEndian.AppendUint64(b, math.Float64bits(r.Prescale))
	b = binary.NativeEndian.AppendUint64(b, math.Float64bits(r.Postscale))
	if r.Do != 0 {
		b = binary.NativeEndian.AppendUint32(append(b, byte(r.Do)), uint32(r.Root))
	}
	return b
}

// parseStatements parses the statements of a rank.
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
		s.request = Request{Type: kernel.Type(b[0]), Op: operation.Op(b[1]), Compression: operation.Compression(b[2]),
			Elsewhere: b[3]&elsewhereFlag != 0,
			Refused:   b[3]&refusedFlag != 0,
			Count:     binary.NativeEndian.Uint64(b[4:]),
			Prescale:  math.Float64frombits(binary.NativeEndian.Uint64(b[12:])),
			Postscale: math.Float64frombits(binary.NativeEndian.Uint64(b[20:]))}
		if size == moveSize {
			s.request.Do, s.request.Root = operation.Action(b[requestSize]), int32(binary.NativeEndian.Uint32(b[requestSize+1:]))
		}
		if s.name == "" || (size == moveSize) != s.request.moves() || b[3] > elsewhereFlag|refusedFlag || !s.request.sound() {
			return nil, false, frame.ErrInvalid
		}
		all = append(all, s)
		b = b[size:]
	}
	return all, join, nil
}
