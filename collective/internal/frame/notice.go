package frame

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
)

// Notice is the reason why a group ends: ranks are gone, or two calls do not match.
type Notice struct {
	Dead  []int // ascending
	Cause error // may be nil

	Mismatch bool
	Ranks    [2]int // ascending
	Calls    [2]Call
	Tensor   string // name of the asynchronous operation; empty for others
}

// Gone returns the notice that ranks are gone.
func Gone(cause error, ranks ...int) Notice { return Notice{Dead: ranks, Cause: cause} }

// Mismatched returns the notice that the calls of two ranks do not match.
func Mismatched(rank int, call Call, other int, calls Call) Notice {
	n := Notice{Mismatch: true, Ranks: [2]int{rank, other}, Calls: [2]Call{call, calls}}
	if rank > other {
		n.Ranks, n.Calls = [2]int{other, rank}, [2]Call{calls, call}
	}
	return n
}

// Frame returns the notice as a frame, including the header.
func (n *Notice) Frame(generation uint64) []byte {
	h := Header{Kind: Abort, Generation: generation}
	var p []byte
	if n.Mismatch {
		h.Kind = Mismatch
		for i := range n.Ranks {
			p = binary.NativeEndian.AppendUint32(p, uint32(n.Ranks[i]))
			p = binary.NativeEndian.AppendUint64(p, n.Calls[i].What)
			p = binary.NativeEndian.AppendUint64(p, n.Calls[i].Count)
		}
		p = append(p, n.Tensor[:min(len(n.Tensor), MaxName)]...)
	} else {
		dead := n.Dead[:min(len(n.Dead), maxNamed)]
		p = binary.NativeEndian.AppendUint32(p, uint32(len(dead)))
		for _, r := range dead {
			p = binary.NativeEndian.AppendUint32(p, uint32(r))
		}
		if n.Cause != nil {
			text := n.Cause.Error()
			p = append(p, text[:min(len(text), maxCause)]...)
		}
	}
	h.Length = uint32(len(p))
	return append(h.Append(make([]byte, 0, HeaderSize+len(p))), p...)
}

// ParseNotice parses the payload of a notice; size is the number of ranks of the generation.
func ParseNotice(k Kind, p []byte, size int) (Notice, error) {
	rank := func(b []byte) (int, bool) {
		r := binary.NativeEndian.Uint32(b)
		return int(min(r, math.MaxInt32)), r < uint32(size)
	}
	if k == Mismatch {
		const each = 4 + 16
		if len(p) < 2*each || len(p) > 2*each+MaxName {
			return Notice{}, Err
		}
		call := func(b []byte) Call {
			return Call{binary.NativeEndian.Uint64(b), binary.NativeEndian.Uint64(b[8:])}
		}
		a, ok1 := rank(p)
		b, ok2 := rank(p[each:])
		if !ok1 || !ok2 {
			return Notice{}, Err
		}
		n := Mismatched(a, call(p[4:]), b, call(p[each+4:]))
		n.Tensor = string(p[2*each:])
		return n, nil
	}
	if len(p) < 4 {
		return Notice{}, Err
	}
	count := int(min(binary.NativeEndian.Uint32(p), maxNamed+1))
	p = p[4:]
	if count > maxNamed || len(p) < 4*count {
		return Notice{}, Err
	}
	var n Notice
	for ; count > 0; count-- {
		r, ok := rank(p)
		if !ok {
			return Notice{}, Err
		}
		n.Dead = append(n.Dead, r)
		p = p[4:]
	}
	slices.Sort(n.Dead)
	if len(p) > 0 {
		n.Cause = errors.New(string(p[:min(len(p), maxCause)]))
	}
	return n, nil
}
