// Package frame defines what two ranks of a group exchange: frames with their headers, and notices
// of why the group ends. Its Inbox matches the frames of a peer with the requests for them.
package frame

import (
	"encoding/binary"
	"errors"
	"io"
)

// Every frame begins with a header of fixed size, in the byte order of the machine: ranks with
// different byte orders could not use each other's elements anyway, and the magic number reveals
// them.
//
//	0 magic u32 · 4 kind u8 · 5 call: what u64, count u64 · 21 ready u8 · 22 zero ·
//	24 step u32 · 28 length u32 · 32 generation u64 · 40 sequence u64
const (
	HeaderSize = 48
	magic      = 0x68766403 // "hvd", version 3

	MaxPayload = 1 << 20 // bytes of the payload of a frame; algorithms cut data into smaller segments
	MaxNotice  = 1 << 10 // bytes of the payload of a notice
	MaxName    = 255     // bytes of the name of a tensor
	maxCause   = 512     // bytes of the text of a cause
	maxNamed   = 64      // number of dead ranks in a notice
)

// Kind is the purpose of a frame.
type Kind uint8

// The kinds of frames.
const (
	Data     Kind = iota + 1 // bytes of an operation
	Abort                    // notice: ranks are gone
	Mismatch                 // notice: calls do not match
	Goodbye                  // the sender leaves the group and sends no more operations
	Ack                      // everything that the leaving peer has sent is read
	Nudge                    // the sender's engine begins the cycle in the sequence number
	Cut                      // a connection of the data channel has ended; the sequence number is its index
)

// IsNotice reports whether a frame of the kind contains the reason why the group ends.
func (k Kind) IsNotice() bool { return k == Abort || k == Mismatch }

// Steps of a Cut frame.
const (
	// NoticeFollows means that the sender has ended the group and sends the notice next.
	NoticeFollows = 1
	// AsIfClosed means that the connection has ended as if the receiver of the frame had closed it,
	// which it may have done.
	AsIfClosed = 2
)

// Call identifies what a rank has called, so that ranks notice different calls.
type Call struct {
	What  uint64 // the operation and its arguments, as packed by the group
	Count uint64 // elements
}

// Header is the beginning of a frame.
type Header struct {
	Kind       Kind
	Call       Call
	Step       uint32 // position of the frame among those of the operation between these two ranks
	Length     uint32 // bytes of payload
	Generation uint64
	Seq        uint64 // number of the operation in its group, from 1
	Ready      bool   // the sender is ready with data, and has not only called the operation
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

// Err reports that a peer has sent bytes that are not a frame.
var Err = errors.New("it has sent bytes that are not a frame of this program")

// ParseHeader parses a header and checks everything that can be checked without the group. b has at
// least HeaderSize bytes.
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
// payload is read directly into its destination. A caller that reads from the stream itself writes
// the bytes to Room.
type Reader struct {
	r      io.Reader
	buf    [8 << 10]byte
	lo, hi int // buf[lo:hi] is read but not consumed
}

// NewReader returns a Reader of r, which may be nil if Next and Payload are not called.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next reads a header. It returns io.EOF only if the stream ends between two frames.
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

// Missing returns the number of bytes of the next header, and of the payload of a notice, that are
// not read yet.
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

// Room returns the buffer for the next bytes of the stream. The caller then passes their number to
// Filled.
func (f *Reader) Room() []byte {
	f.hi = copy(f.buf[:], f.buf[f.lo:f.hi])
	f.lo = 0
	return f.buf[f.hi:]
}

// Filled records that n bytes have been written to Room.
func (f *Reader) Filled(n int) { f.hi += n }

// Held returns the bytes that are read but not consumed. It is valid until the next call of another
// method.
func (f *Reader) Held() []byte { return f.buf[f.lo:f.hi] }

// Header consumes and returns the next header. At least HeaderSize bytes must be held.
func (f *Reader) Header() (Header, error) {
	h, err := ParseHeader(f.buf[f.lo:])
	f.lo += HeaderSize
	return h, err
}

// Peek is like Header, but does not consume the header.
func (f *Reader) Peek() (Header, error) { return ParseHeader(f.buf[f.lo:]) }

// Take moves held bytes to dst and returns their number.
func (f *Reader) Take(dst []byte) int {
	n := copy(dst, f.buf[f.lo:f.hi])
	f.lo += n
	return n
}

// NoEOF returns err, or io.ErrUnexpectedEOF if err is io.EOF, for a stream that must not end there.
func NoEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
