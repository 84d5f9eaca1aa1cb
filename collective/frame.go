package collective

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/hvdrun/hvdrun/collective/kernel"
)

// The frames between two ranks. Every frame begins with a header of fixed size, in the byte order
// of the machine: ranks of different orders could not understand each other's elements anyway, and
// the magic number tells.
//
//	0 magic u32 · 4 kind u8 · 5 descriptor: op u8, type u8, reduction u8, algorithm u8, root i32, count u64 ·
//	21 zero · 24 step u32 · 28 length u32 · 32 generation u64 · 40 sequence u64
const (
	headerSize = 48
	frameMagic = 0x68766402 // "hvd", version 2

	maxPayload = 1 << 20 // of any frame; algorithms cut data into segments below it
	maxNotice  = 1 << 10 // of the payload of a notice
	maxCause   = 512
	maxNamed   = 64 // ranks that a notice names as dead
)

type kind uint8

const (
	dataFrame     kind = iota + 1 // bytes of an operation
	abortFrame                    // notice: ranks are gone
	mismatchFrame                 // notice: calls do not match
	goodbyeFrame                  // the sender leaves the group and sends no more operations
	ackFrame                      // all that the leaving peer has sent is read
	nudgeFrame                    // the sender's engine begins the cycle that the sequence number tells
)

// action is the operation of the API that a rank has called.
type action uint8

const (
	allReduce action = iota + 1
	broadcast
	allGather
	reduceScatter
	allToAll
	barrier
	broadcastBytes
	subset
	share // of memory, while a group is made
	allReduceAsync
	actions
)

var actionNames = [actions]string{"", "AllReduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll", "Barrier",
	"BroadcastBytes", "Subset", "Connect", "AllReduceAsync"}

// descriptor says what a rank has called, so that ranks that call different things notice.
type descriptor struct {
	action    action
	dtype     kernel.Type
	reduce    Op
	algorithm Algorithm // of an AllReduce, where one is forced; with refusedCall, of any operation, where its arguments are refused
	root      int32     // of broadcasts; the number of parts of an AllToAll, of ranks of a Subset; options of an AllReduceAsync
	count     uint64    // elements; where lengths may differ, those of this sender to this receiver; digest of a Subset's list
}

// refusedCall is set in the algorithm of a call whose arguments a rank refuses.
const refusedCall = 1 << 7

// matches reports whether two ranks may call a and b together.
func (a descriptor) matches(b descriptor) bool {
	switch a.action {
	case allGather, allToAll, broadcastBytes:
		b.count = a.count
	}
	return a == b
}

// String is the call as errors tell it.
func (a descriptor) String() string {
	if a.algorithm&refusedCall != 0 {
		a.algorithm &^= refusedCall
		return a.String() + ", refused there"
	}
	name := fmt.Sprintf("operation %d", a.action)
	if a.action < actions {
		name = actionNames[a.action]
	}
	switch a.action {
	case allReduce:
		text := fmt.Sprintf("%s of %d %v (%v)", name, a.count, a.dtype, a.reduce)
		if a.algorithm != Auto {
			text += fmt.Sprintf(" by %v", a.algorithm)
		}
		return text
	case reduceScatter:
		return fmt.Sprintf("%s of %d %v (%v)", name, a.count, a.dtype, a.reduce)
	case broadcast:
		return fmt.Sprintf("%s of %d %v from rank %d", name, a.count, a.dtype, a.root)
	case allGather:
		return fmt.Sprintf("%s of %v", name, a.dtype)
	case allToAll:
		return fmt.Sprintf("%s of %d parts of %v", name, a.root, a.dtype)
	case broadcastBytes:
		return fmt.Sprintf("%s from rank %d", name, a.root)
	case allReduceAsync:
		text := fmt.Sprintf("%s of %d %v (%v", name, a.count, a.dtype, a.reduce)
		if c := Compression(a.root & 0xff); c != CompressNone {
			text += fmt.Sprintf(", %v on the wire", c)
		}
		if scales := a.root >> 8 & 0xffff; scales != 0 {
			text += fmt.Sprintf(", scales %x", scales)
		}
		if a.root&elsewhereBit != 0 {
			text += ", not in memory"
		}
		return text + ")"
	case subset:
		return fmt.Sprintf("%s of %d ranks (list %016x)", name, a.root, a.count)
	}
	return name
}

func (a descriptor) append(b []byte) []byte {
	b = append(b, byte(a.action), byte(a.dtype), byte(a.reduce), byte(a.algorithm))
	b = binary.NativeEndian.AppendUint32(b, uint32(a.root))
	return binary.NativeEndian.AppendUint64(b, a.count)
}

const descriptorSize = 16

func parseDescriptor(b []byte) descriptor {
	return descriptor{action(b[0]), kernel.Type(b[1]), Op(b[2]), Algorithm(b[3]),
		int32(binary.NativeEndian.Uint32(b[4:])), binary.NativeEndian.Uint64(b[8:])}
}

type header struct {
	kind       kind
	call       descriptor
	step       uint32 // place of the frame among those of the operation between these two ranks
	length     uint32 // bytes of payload
	generation uint64
	seq        uint64 // number of the operation in its group, from 1
}

func (h *header) append(b []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, frameMagic)
	b = append(b, byte(h.kind))
	b = append(h.call.append(b), 0, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, h.step)
	b = binary.NativeEndian.AppendUint32(b, h.length)
	b = binary.NativeEndian.AppendUint64(b, h.generation)
	return binary.NativeEndian.AppendUint64(b, h.seq)
}

var errFrame = errors.New("sent what is no frame of this program")

// parseHeader checks all that can be checked without knowing the group; b holds headerSize bytes.
func parseHeader(b []byte) (header, error) {
	h := header{
		kind: kind(b[4]), call: parseDescriptor(b[5:]),
		step: binary.NativeEndian.Uint32(b[24:]), length: binary.NativeEndian.Uint32(b[28:]),
		generation: binary.NativeEndian.Uint64(b[32:]), seq: binary.NativeEndian.Uint64(b[40:]),
	}
	if binary.NativeEndian.Uint32(b) != frameMagic {
		return header{}, errFrame
	}
	limit := uint32(0)
	switch h.kind {
	case dataFrame:
		limit = maxPayload
	case abortFrame, mismatchFrame:
		limit = maxNotice
	case goodbyeFrame, ackFrame, nudgeFrame:
	default:
		return header{}, errFrame
	}
	if h.length > limit || h.kind == dataFrame && (h.call.action == 0 || h.call.action >= actions || h.call.dtype >= kernel.Types) {
		return header{}, errFrame
	}
	return h, nil
}

// frameReader reads frames from a stream. Headers and small payloads share reads; the rest of a
// large payload goes directly to where it belongs.
type frameReader struct {
	r      io.Reader
	buf    [8 << 10]byte
	lo, hi int // buf[lo:hi] is read and not used
}

// next reads a header; io.EOF only where the stream ends between two frames.
func (f *frameReader) next() (header, error) {
	if f.hi-f.lo < headerSize {
		f.hi = copy(f.buf[:], f.buf[f.lo:f.hi])
		f.lo = 0
		n, err := io.ReadAtLeast(f.r, f.buf[f.hi:], headerSize-f.hi)
		had := f.hi
		f.hi += n
		if f.hi < headerSize {
			if err == nil || had > 0 && err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return header{}, err
		}
	}
	h, err := parseHeader(f.buf[f.lo:])
	f.lo += headerSize
	return h, err
}

// payload reads len(dst) bytes of the payload of the frame that next returned.
func (f *frameReader) payload(dst []byte) error {
	n := copy(dst, f.buf[f.lo:f.hi])
	f.lo += n
	if n == len(dst) {
		return nil
	}
	_, err := io.ReadFull(f.r, dst[n:])
	return noEOF(err)
}

// noEOF: a stream that ends inside a frame has not ended well.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

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
