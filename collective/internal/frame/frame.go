// Package frame defines what goes between two ranks of a group: frames and their headers, notices
// of why the group ends, and the inbox in which the frames of a peer meet the requests for them.
package frame

import (
	"encoding/binary"
	"errors"
	"io"
)

// Every frame begins with a header of fixed size, in the byte order of the machine: ranks of
// different orders could not understand each other's elements anyway, and the magic number tells.
//
//	0 magic u32 · 4 kind u8 · 5 call: what u64, count u64 · 21 ready u8 · 22 zero ·
//	24 step u32 · 28 length u32 · 32 generation u64 · 40 sequence u64
const (
	HeaderSize = 48
	magic      = 0x68766403 // "hvd", version 3

	MaxPayload = 1 << 20 // of any frame; algorithms cut data into segments below it
	MaxNotice  = 1 << 10 // of the payload of a notice
	maxName    = 255     // bytes of the name of a tensor
	maxCause   = 512
	maxNamed   = 64 // ranks that a notice names as dead
)

// Kind is what a frame is for.
type Kind uint8

// The kinds of frames.
const (
	Data     Kind = iota + 1 // bytes of an operation
	Abort                    // notice: ranks are gone
	Mismatch                 // notice: calls do not match
	Goodbye                  // the sender leaves the group and sends no more operations
	Ack                      // all that the leaving peer has sent is read
	Nudge                    // the sender's engine begins the cycle that the sequence number tells
	Cut                      // the connection of the data channel that the sequence number tells has ended
)

// IsNotice reports whether a frame of the kind says why the group ends.
func (k Kind) IsNotice() bool { return k == Abort || k == Mismatch }

// Steps of a Cut frame.
const (
	// NoticeFollows is of a sender that has ended the group, and says why next.
	NoticeFollows = 1
	// AsIfClosed is of a connection that has ended as the peer ends it, who may have done so.
	AsIfClosed = 2
)

// Call says what a rank has called, so that ranks that call different things notice.
type Call struct {
	What  uint64 // the operation and its arguments, as the group packs them
	Count uint64 // elements
}

// Header is the beginning of a frame.
type Header struct {
	Kind       Kind
	Call       Call
	Step       uint32 // place of the frame among those of the operation between these two ranks
	Length     uint32 // bytes of payload
	Generation uint64
	Seq        uint64 // number of the operation in its group, from 1
	Ready      bool   // the sender sends data at once, not only that it has called the operation
}

// Append appends the encoded header to b.
func (h *Header) Append(b []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, magic)
	b = append(b, byte(h.Kind))
	b = binary.NativeEndian.AppendUint64(b, h.Call.What)
	b = binary.NativeEndian.AppendUint64(b, h.Call.Count)
	b = append(b, 0, 0, 0)
	if h.Ready {
		b[len(b)-3] = 1
	}
	b = binary.NativeEndian.AppendUint32(b, h.Step)
	b = binary.NativeEndian.AppendUint32(b, h.Length)
	b = binary.NativeEndian.AppendUint64(b, h.Generation)
	return binary.NativeEndian.AppendUint64(b, h.Seq)
}

// Err says that a peer has sent bytes that are not a frame.
var Err = errors.New("sent bytes that are not a frame of this program")

// ParseHeader checks all that can be checked without knowing the group; b holds HeaderSize bytes at
// least.
func ParseHeader(b []byte) (Header, error) {
	h := Header{
		Kind: Kind(b[4]), Call: Call{binary.NativeEndian.Uint64(b[5:]), binary.NativeEndian.Uint64(b[13:])},
		Step: binary.NativeEndian.Uint32(b[24:]), Length: binary.NativeEndian.Uint32(b[28:]),
		Generation: binary.NativeEndian.Uint64(b[32:]), Seq: binary.NativeEndian.Uint64(b[40:]),
		Ready: b[21] == 1,
	}
	if binary.NativeEndian.Uint32(b) != magic {
		return Header{}, Err
	}
	limit := uint32(0)
	switch h.Kind {
	case Data:
		limit = MaxPayload
	case Abort, Mismatch:
		limit = MaxNotice
	case Goodbye, Ack, Nudge, Cut:
	default:
		return Header{}, Err
	}
	if h.Length > limit {
		return Header{}, Err
	}
	return h, nil
}

// Reader reads frames from a stream. Headers and small payloads share reads; the rest of a large
// payload goes directly to where it belongs. A caller that moves the bytes itself puts them into
// Room.
type Reader struct {
	r      io.Reader
	buf    [8 << 10]byte
	lo, hi int // buf[lo:hi] is read and not used
}

// NewReader reads from r, which is nil where Next and Payload are not called.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next reads a header; io.EOF only where the stream ends between two frames.
func (f *Reader) Next() (Header, error) {
	if f.hi-f.lo < HeaderSize {
		room := f.Room()
		n, err := io.ReadAtLeast(f.r, room, HeaderSize-f.hi)
		had := f.hi
		f.hi += n
		if f.hi < HeaderSize {
			if err == nil || had > 0 && err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return Header{}, err
		}
	}
	return f.Header()
}

// Payload reads len(dst) bytes of the payload of the frame that Next returned.
func (f *Reader) Payload(dst []byte) error {
	n := f.Take(dst)
	if n == len(dst) {
		return nil
	}
	_, err := io.ReadFull(f.r, dst[n:])
	return NoEOF(err)
}

// Missing is how many bytes of the next header, and of the payload of a notice, are not read yet.
func (f *Reader) Missing() int {
	have := f.hi - f.lo
	if have < HeaderSize {
		return HeaderSize - have
	}
	if h, err := ParseHeader(f.buf[f.lo:]); err == nil && h.Kind != Data {
		return max(0, HeaderSize+int(h.Length)-have)
	}
	return 0
}

// Room is where the next bytes of the stream go; Filled says how many have come.
func (f *Reader) Room() []byte {
	f.hi = copy(f.buf[:], f.buf[f.lo:f.hi])
	f.lo = 0
	return f.buf[f.hi:]
}

// Filled says that so many bytes are in Room.
func (f *Reader) Filled(n int) { f.hi += n }

// Held is what has been read and not used. It is valid until the next call of another method.
func (f *Reader) Held() []byte { return f.buf[f.lo:f.hi] }

// Header uses the header that is held; HeaderSize bytes are.
func (f *Reader) Header() (Header, error) {
	h, err := ParseHeader(f.buf[f.lo:])
	f.lo += HeaderSize
	return h, err
}

// Peek is Header without using it.
func (f *Reader) Peek() (Header, error) { return ParseHeader(f.buf[f.lo:]) }

// Take uses what is held for dst and returns how many bytes that was.
func (f *Reader) Take(dst []byte) int {
	n := copy(dst, f.buf[f.lo:f.hi])
	f.lo += n
	return n
}

// NoEOF is an error of a stream that must not end there: io.ErrUnexpectedEOF for io.EOF.
func NoEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
