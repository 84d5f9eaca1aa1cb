package feed

import (
	"encoding/binary"
	"errors"
	"io"
)

// Kinds of frames that a source sends.
const (
	frameNone  = 'n' // there is nothing to follow here; its number is 1 if that will change soon
	frameHead  = 'h' // a Head
	frameChunk = 'c' // a chunk of the commit, with its number
	frameStep  = 's' // a Step; its averages follow
	framePiece = 'p' // the next bytes of a step's averages
	frameBeat  = 'b' // the source is alive
	frameLost  = 'l' // the follower has lost the thread

	frameLength = 13
	mostHead    = 64 << 20 // maximum bytes of a head, and of what precedes a step's averages
	mostValues  = 1 << 16
)

// frame precedes a payload.
type frame struct {
	kind   byte
	number uint32
	length uint32
	sum    uint32 // of the payload
}

func (f frame) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(append(b, f.kind), f.number)
	b = binary.LittleEndian.AppendUint32(b, f.length)
	return binary.LittleEndian.AppendUint32(b, f.sum)
}

func readFrame(r io.Reader) (frame, error) {
	var b [frameLength]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return frame{}, err
	}
	n := binary.LittleEndian.Uint32
	return frame{b[0], n(b[1:]), n(b[5:]), n(b[9:])}, nil
}

// Head describes the commit with which a follower begins.
type Head struct {
	// Feed is the ID of the source's feed.
	Feed uint64
	// Number is the number of the commit, Steps that of the steps that have led to it. Latest is
	// the number of steps that have been applied, or are about to be.
	Number, Steps, Latest uint64
	// Layout describes all of the state.
	Layout string
	// Carried are the values of the parts that are in no blob.
	Carried [][]byte

	lengths []int // of the blobs
	size    int   // bytes of a step's averages
}

func (h *Head) append(b []byte) []byte {
	for _, n := range []uint64{h.Feed, h.Number, h.Steps, h.Latest} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	b = appendBytes(b, []byte(h.Layout))
	b = appendValues(b, h.Carried)
	b = binary.AppendUvarint(b, uint64(len(h.lengths)))
	for _, n := range h.lengths {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return binary.AppendUvarint(b, uint64(h.size))
}

var errMessage = errors.New("feed: an invalid message")

func parseHead(b []byte) (*Head, error) {
	p := reader{b: b}
	h := &Head{Feed: p.word(), Number: p.word(), Steps: p.word(), Latest: p.word(), Layout: string(p.bytes()), Carried: p.values()}
	for range min(p.number(), mostValues, len(p.b)) {
		h.lengths = append(h.lengths, p.number())
	}
	h.size = p.number()
	if p.bad || len(p.b) > 0 {
		return nil, errMessage
	}
	return h, nil
}

// Step is a step for a follower to apply.
type Step struct {
	// Number is the number of the step. It is applied to the state of Commit.
	Number, Commit uint64
	// Carried are the values of the parts in no blob right before it is applied.
	Carried [][]byte
	// Sums are the checksums of some chunks of that commit.
	Sums []Sum
	// Buffer is the index of the buffer that holds its averages.
	Buffer int

	latest uint64 // as Head.Latest
}

func (s *Step) append(b []byte) []byte {
	for _, n := range []uint64{s.Number, s.Commit, s.latest} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return appendValues(b, s.Carried)
}

func appendSums(b []byte, sums []Sum) []byte {
	for _, s := range sums {
		b = binary.LittleEndian.AppendUint32(b, s.Chunk)
		b = binary.LittleEndian.AppendUint32(b, s.Sum)
	}
	return b
}

func parseStep(b []byte) (*Step, error) {
	p := reader{b: b}
	s := &Step{Number: p.word(), Commit: p.word(), latest: p.word(), Carried: p.values()}
	for len(p.b) >= 8 && !p.bad {
		n := p.word()
		s.Sums = append(s.Sums, Sum{uint32(n), uint32(n >> 32)})
	}
	if p.bad || len(p.b) > 0 {
		return nil, errMessage
	}
	return s, nil
}

func appendBytes(b, value []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(value))), value...)
}

func appendValues(b []byte, values [][]byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(values)))
	for _, v := range values {
		b = appendBytes(b, v)
	}
	return b
}

// reader reads a message. What it returns aliases the message.
type reader struct {
	b   []byte
	bad bool
}

func (p *reader) take(n int) []byte {
	if p.bad || n < 0 || n > len(p.b) {
		p.bad = true
		return nil
	}
	b := p.b[:n:n]
	p.b = p.b[n:]
	return b
}

func (p *reader) word() uint64 {
	if b := p.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// number returns a number below 2^48.
func (p *reader) number() int {
	n, k := binary.Uvarint(p.b)
	if p.bad || k <= 0 || n >= 1<<48 {
		p.bad = true
		return 0
	}
	p.b = p.b[k:]
	return int(n)
}

func (p *reader) bytes() []byte { return p.take(p.number()) }

func (p *reader) values() (all [][]byte) {
	n := p.number()
	if n > mostValues {
		p.bad = true
	}
	for range n {
		if p.bad {
			return nil
		}
		all = append(all, p.bytes())
	}
	return all
}
