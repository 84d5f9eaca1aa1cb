package collective

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
)

// notice is why a group ends: ranks are gone, or two calls do not match.
type notice struct {
	dead  []int
	cause error

	mismatch bool
	ranks    [2]int // ascending
	calls    [2]descriptor
	tensor   string // of which asynchronous operation; empty for others
}

func gone(cause error, ranks ...int) notice { return notice{dead: ranks, cause: cause} }

func mismatched(rank int, call descriptor, other int, calls descriptor) notice {
	n := notice{mismatch: true, ranks: [2]int{rank, other}, calls: [2]descriptor{call, calls}}
	if rank > other {
		n.ranks, n.calls = [2]int{other, rank}, [2]descriptor{calls, call}
	}
	return n
}

func (n *notice) error(generation uint64) error {
	if n.mismatch {
		return &MismatchError{Generation: generation, Tensor: n.tensor, Ranks: n.ranks,
			Calls: [2]string{n.calls[0].String(), n.calls[1].String()}}
	}
	return &AbortedError{Generation: generation, Dead: n.dead, Cause: n.cause}
}

// frame is the notice as it goes to a peer, header and all.
func (n *notice) frame(generation uint64) []byte {
	h := header{kind: abortFrame, generation: generation}
	var p []byte
	if n.mismatch {
		h.kind = mismatchFrame
		for i := range n.ranks {
			p = binary.NativeEndian.AppendUint32(p, uint32(n.ranks[i]))
			p = n.calls[i].append(p)
		}
		p = append(p, n.tensor[:min(len(n.tensor), maxName)]...)
	} else {
		dead := n.dead[:min(len(n.dead), maxNamed)]
		p = binary.NativeEndian.AppendUint32(p, uint32(len(dead)))
		for _, r := range dead {
			p = binary.NativeEndian.AppendUint32(p, uint32(r))
		}
		if n.cause != nil {
			text := n.cause.Error()
			p = append(p, text[:min(len(text), maxCause)]...)
		}
	}
	h.length = uint32(len(p))
	return append(h.append(make([]byte, 0, headerSize+len(p))), p...)
}

// parseNotice reads the payload of a notice; size is the number of ranks of the generation.
func parseNotice(k kind, p []byte, size int) (notice, error) {
	rank := func(b []byte) (int, bool) {
		r := binary.NativeEndian.Uint32(b)
		return int(min(r, math.MaxInt32)), r < uint32(size)
	}
	if k == mismatchFrame {
		const each = 4 + descriptorSize
		if len(p) < 2*each || len(p) > 2*each+maxName {
			return notice{}, errFrame
		}
		a, ok1 := rank(p)
		b, ok2 := rank(p[each:])
		if !ok1 || !ok2 {
			return notice{}, errFrame
		}
		n := mismatched(a, parseDescriptor(p[4:]), b, parseDescriptor(p[each+4:]))
		n.tensor = string(p[2*each:])
		return n, nil
	}
	if len(p) < 4 {
		return notice{}, errFrame
	}
	count := int(min(binary.NativeEndian.Uint32(p), maxNamed+1))
	p = p[4:]
	if count > maxNamed || len(p) < 4*count {
		return notice{}, errFrame
	}
	var n notice
	for ; count > 0; count-- {
		r, ok := rank(p)
		if !ok {
			return notice{}, errFrame
		}
		n.dead = append(n.dead, r)
		p = p[4:]
	}
	slices.Sort(n.dead)
	if len(p) > 0 {
		n.cause = errors.New(string(p[:min(len(p), maxCause)]))
	}
	return n, nil
}
