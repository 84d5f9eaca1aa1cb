// Package fetch copies a commit from training workers to one that joins late, without interrupting
// them.
//
// A source serves an authenticated connection. On request it sends the manifest of its newest
// commit, the lengths and checksums of all chunks of 1 MiB, and then chunks. It keeps nothing for
// that: chunks that later commits overwrite are gone, and it says so. Take asks all sources for
// their manifests, requests different chunks from each, and verifies every chunk. It repeats this
// for the chunks that have changed meanwhile, until these are few or no longer become fewer. Chunks
// that are gone change all the time, and are left out.
//
// The package neither dials nor listens. All numbers on the wire are little-endian.
package fetch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/image"
)

const (
	askManifest = 'm'
	askChunks   = 'c'
	askToFollow = 'f'

	// What a source says of a chunk.
	gone    = 0
	present = 1

	idle      = 30 * time.Second // how long a source waits for the next request, and timeout of reads and writes
	batch     = 8                // chunks per request
	maxLayout = 1 << 20          // maximum bytes of a layout
	maxPieces = 1 << 20
	maxBatch  = 1024 // maximum chunks per request that a source accepts
)

// Commit is a commit to serve.
type Commit struct {
	// Number is the number of the commit.
	Number uint64
	// Layout describes the blobs; only workers with the same layout can use them.
	Layout string
	// Blobs are read by one goroutine. They may be lent.
	Blobs []*image.Blob
}

// Serve answers the requests of one worker until that closes the connection, is silent for 30
// seconds or sends an invalid request. newest returns the newest commit, or nil. The caller closes
// the connection, which also ends a blocked Serve. A worker that asks to follow instead gets the
// connection for itself: follow serves it then. AskToFollow is the other side of that.
func Serve(conn net.Conn, newest func() *Commit, follow func(net.Conn) error) error {
	s := &source{conn: conn}
	for {
		if err := conn.SetDeadline(time.Now().Add(idle)); err != nil {
			return err
		}
		var question [1]byte
		if _, err := io.ReadFull(conn, question[:]); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("fetch: %w", err)
		}
		var err error
		switch question[0] {
		case askManifest:
			s.commit, s.index = newest(), s.index[:0]
			err = s.manifest()
		case askChunks:
			err = s.chunks()
		case askToFollow:
			if err := conn.SetDeadline(time.Time{}); err != nil {
				return err
			}
			return follow(conn)
		default:
			err = fmt.Errorf("unknown request %#x", question[0])
		}
		if err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
	}
}

// AskToFollow asks the source at the other end of conn to serve conn by the follow function of its
// Serve.
func AskToFollow(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(idle)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte{askToFollow}); err != nil {
		return err
	}
	return conn.SetDeadline(time.Time{})
}

// source serves one connection.
type source struct {
	conn   net.Conn
	commit *Commit
	index  []place // positions of the commit's chunks
	buffer []byte  // of a chunk, and the byte before it
}

// place is the position of a chunk.
type place struct{ blob, chunk int }

func (s *source) manifest() error {
	c := s.commit
	if c == nil {
		_, err := s.conn.Write([]byte{0})
		return err
	}
	b := []byte{1}
	b = binary.LittleEndian.AppendUint64(b, c.Number)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Layout)))
	b = append(b, c.Layout...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Blobs)))
	for _, p := range c.Blobs {
		b = binary.LittleEndian.AppendUint64(b, uint64(p.Len()))
	}
	var there []byte
	for i, p := range c.Blobs {
		for j := range p.Chunks() {
			sum, ok := p.TrySum(j) // sequentially: training uses the other processors
			b = binary.LittleEndian.AppendUint32(b, sum)
			there = append(there, gone)
			if ok {
				there[len(there)-1] = present
			}
			s.index = append(s.index, place{i, j})
		}
	}
	b = append(b, there...)
	if err := s.conn.SetDeadline(time.Now().Add(idle)); err != nil {
		return err
	}
	_, err := s.conn.Write(b)
	return err
}

func (s *source) chunks() error {
	count, err := readUint32(s.conn)
	if err != nil {
		return err
	}
	if count > maxBatch {
		return fmt.Errorf("request for %d chunks, more than the limit", count)
	}
	b := make([]byte, 4*count)
	if _, err := io.ReadFull(s.conn, b); err != nil {
		return err
	}
	for ; len(b) > 0; b = b[4:] {
		i := binary.LittleEndian.Uint32(b)
		if uint64(i) >= uint64(len(s.index)) {
			return fmt.Errorf("request for chunk %d of %d", i, len(s.index))
		}
		at := s.index[i]
		if err := s.conn.SetDeadline(time.Now().Add(idle)); err != nil {
			return err
		}
		if _, err := s.conn.Write(s.read(s.commit.Blobs[at.blob], at.chunk)); err != nil {
			return err
		}
	}
	return nil
}

// read returns the reply for a chunk: present and its bytes, or gone. It is valid until the next
// call.
func (s *source) read(p *image.Blob, chunk int) []byte {
	n := min(image.ChunkSize, p.Len()-chunk*image.ChunkSize)
	if s.buffer == nil {
		s.buffer = make([]byte, 1+image.ChunkSize)
	}
	s.buffer[0] = present
	if !p.TryRead(chunk, s.buffer[1:1+n]) {
		s.buffer[0] = gone
		return s.buffer[:1]
	}
	return s.buffer[:1+n]
}

func readUint32(r io.Reader) (uint32, error) {
	var b [4]byte
	_, err := io.ReadFull(r, b[:])
	return binary.LittleEndian.Uint32(b[:]), err
}

// manifest describes a source's newest commit.
type manifest struct {
	number uint64
	sums   []uint32
	there  []byte // of each chunk, whether the source still has it
}

// has reports whether the source has chunk i with a checksum.
func (m *manifest) has(i int, sum uint32) bool { return m.there[i] == present && m.sums[i] == sum }

var (
	errNone   = errors.New("the source has no commit")
	errLayout = errors.New("the source has a state of another layout")
)

// readManifest reads the response of a source. It fails unless layout and lengths match, before it
// allocates memory for the checksums.
func readManifest(r io.Reader, layout string, lengths []int) (manifest, error) {
	var m manifest
	var head [13]byte
	if _, err := io.ReadFull(r, head[:1]); err != nil {
		return m, err
	}
	if head[0] == 0 {
		return m, errNone
	}
	if _, err := io.ReadFull(r, head[1:]); err != nil {
		return m, err
	}
	m.number = binary.LittleEndian.Uint64(head[1:])
	if n := binary.LittleEndian.Uint32(head[9:]); uint64(n) != uint64(len(layout)) || n > maxLayout {
		return m, errLayout
	}
	theirs := make([]byte, len(layout)+4+8*len(lengths))
	if _, err := io.ReadFull(r, theirs[:len(layout)+4]); err != nil {
		return m, err
	}
	if string(theirs[:len(layout)]) != layout || uint64(binary.LittleEndian.Uint32(theirs[len(layout):])) != uint64(len(lengths)) {
		return m, errLayout
	}
	theirs = theirs[len(layout)+4:]
	if _, err := io.ReadFull(r, theirs); err != nil {
		return m, err
	}
	chunks := 0
	for i, n := range lengths {
		if binary.LittleEndian.Uint64(theirs[8*i:]) != uint64(n) {
			return m, errLayout
		}
		chunks += image.Chunks(n)
	}
	b := make([]byte, 5*chunks)
	if _, err := io.ReadFull(r, b); err != nil {
		return m, err
	}
	m.sums = make([]uint32, chunks)
	for i := range m.sums {
		m.sums[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	m.there = b[4*chunks:]
	return m, nil
}

// chunked returns the chunks of blobs, in order.
func chunked(blobs [][]byte) (all [][]byte) {
	for _, p := range blobs {
		all = slices.AppendSeq(all, slices.Chunk(p, image.ChunkSize))
	}
	return all
}
