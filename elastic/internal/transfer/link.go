package transfer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// Kinds of frames.
const (
	askManifest = 'm' // asks for the Manifest of the newest commit
	askChunks   = 'q' // asks for some of its chunks, by their numbers
	askToFollow = 'f' // asks for a complete commit, and the steps after it

	frameNone     = 'n' // there is no such commit; the frame's number is 1 if there soon will be
	frameManifest = 'a' // a Manifest
	frameHead     = 'h' // a Head
	frameChunk    = 'c' // a chunk of the commit, with its number
	frameGone     = 'g' // the requested chunk has been overwritten
	frameStep     = 's' // a Step; its averages follow
	framePiece    = 'p' // the next bytes of a step's averages
	frameBeat     = 'b' // the source is alive
	frameLost     = 'l' // the follower needs a step that is no longer kept
)

const (
	frameLength = 13
	mostMessage = 64 << 20         // maximum bytes of a payload that is neither a chunk nor averages
	smallFrame  = 4096             // bytes of a payload that are written with their frame
	idle        = 30 * time.Second // timeout of reads and writes, and of a source's wait for the next request
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

// isBulk reports whether the payload is read by link.fill.
func (f frame) isBulk() bool { return f.kind == frameChunk || f.kind == framePiece }

// link is one end of a connection.
type link struct {
	conn     net.Conn
	received atomic.Int64 // bytes of payloads
	scratch  []byte       // buffer of a chunk's length
}

// buffer returns n bytes, at most ChunkSize. They are valid until the next call.
func (l *link) buffer(n int) []byte {
	if l.scratch == nil {
		l.scratch = make([]byte, snapshot.ChunkSize)
	}
	return l.scratch[:n]
}

func (l *link) write(kind byte, number uint32, payload []byte) error {
	return l.writeSummed(kind, number, payload, snapshot.Sum(payload))
}

func (l *link) writeSummed(kind byte, number uint32, payload []byte, sum uint32) error {
	if err := l.conn.SetWriteDeadline(time.Now().Add(idle)); err != nil {
		return err
	}
	head := frame{kind, number, uint32(len(payload)), sum}.append(nil)
	if len(payload) <= smallFrame {
		head, payload = append(head, payload...), nil
	}
	if _, err := l.conn.Write(head); err != nil || len(payload) == 0 {
		return err
	}
	_, err := l.conn.Write(payload)
	return err
}

// writeChunk sends a chunk of a commit, or reports that it has been overwritten.
func (l *link) writeChunk(c *Commit, number int, at place) error {
	blob := c.Blobs[at.blob]
	if c.Release != nil {
		return l.writeSummed(frameChunk, uint32(number), blob.Chunk(at.chunk), blob.Sum(at.chunk))
	}
	b := l.buffer(min(snapshot.ChunkSize, blob.Len()-at.chunk*snapshot.ChunkSize))
	if sum, ok := blob.TrySum(at.chunk); ok && blob.TryRead(at.chunk, b) {
		return l.writeSummed(frameChunk, uint32(number), b, sum)
	}
	return l.write(frameGone, uint32(number), nil)
}

// read reads a frame, and its payload unless fill reads it.
func (l *link) read(within time.Duration) (frame, []byte, error) {
	if err := l.conn.SetReadDeadline(time.Now().Add(within)); err != nil {
		return frame{}, nil, err
	}
	var head [frameLength]byte
	if _, err := io.ReadFull(l.conn, head[:]); err != nil {
		return frame{}, nil, err
	}
	n := binary.LittleEndian.Uint32
	f := frame{head[0], n(head[1:]), n(head[5:]), n(head[9:])}
	if f.isBulk() {
		return f, nil, nil
	}
	if f.length > mostMessage {
		return f, nil, ErrDamaged
	}
	var b bytes.Buffer // memory is allocated as bytes arrive
	if _, err := io.CopyN(&b, l.conn, int64(f.length)); err != nil {
		return f, nil, noEnd(err)
	}
	if snapshot.Sum(b.Bytes()) != f.sum {
		return f, nil, ErrDamaged
	}
	l.received.Add(int64(f.length))
	return f, b.Bytes(), nil
}

// fill reads the payload of a frame.
func (l *link) fill(to []byte, f frame) error {
	if uint64(f.length) != uint64(len(to)) {
		return ErrDamaged
	}
	if _, err := io.ReadFull(l.conn, to); err != nil {
		return noEnd(err)
	}
	if snapshot.Sum(to) != f.sum {
		return errSum
	}
	l.received.Add(int64(len(to)))
	return nil
}

var errSum = errors.New("the checksum is wrong")

// noEnd converts io.EOF, which within a payload is an unexpected end.
func noEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
