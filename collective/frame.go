package collective

import (
	"encoding/binary"
	"errors"
	"io"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// The frames between two ranks. Every frame begins with a header of fixed size, in the byte order
// of the machine: ranks of different orders could not understand each other's elements anyway, and
// the magic number tells.
//
//	0 magic u32 · 4 kind u8 · 5 descriptor: op u8, type u8, reduction u8, algorithm u8, root i32, count u64 ·
//	21 ready u8 · 22 zero · 24 step u32 · 28 length u32 · 32 generation u64 · 40 sequence u64
const (
	headerSize = 48
	frameMagic = 0x68766403 // "hvd", version 3

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
	cutFrame                      // the connection of the data channel that the sequence number tells has ended
)

// noticeFollows is the step of a cutFrame whose sender has ended the group, and says why next.
const noticeFollows = 1

type header struct {
	kind       kind
	call       descriptor
	step       uint32 // place of the frame among those of the operation between these two ranks
	length     uint32 // bytes of payload
	generation uint64
	seq        uint64 // number of the operation in its group, from 1
	ready      bool   // see allReduceIfReady
}

func (h *header) append(b []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, frameMagic)
	b = append(b, byte(h.kind))
	b = append(h.call.append(b), 0, 0, 0)
	if h.ready {
		b[len(b)-3] = 1
	}
	b = binary.NativeEndian.AppendUint32(b, h.step)
	b = binary.NativeEndian.AppendUint32(b, h.length)
	b = binary.NativeEndian.AppendUint64(b, h.generation)
	return binary.NativeEndian.AppendUint64(b, h.seq)
}

var errFrame = errors.New("sent bytes that are not a frame of this program")

// parseHeader checks all that can be checked without knowing the group; b holds headerSize bytes.
func parseHeader(b []byte) (header, error) {
	h := header{
		kind: kind(b[4]), call: parseDescriptor(b[5:]),
		step: binary.NativeEndian.Uint32(b[24:]), length: binary.NativeEndian.Uint32(b[28:]),
		generation: binary.NativeEndian.Uint64(b[32:]), seq: binary.NativeEndian.Uint64(b[40:]),
		ready: b[21] == 1,
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
	case goodbyeFrame, ackFrame, nudgeFrame, cutFrame:
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
