// Package fetch brings a commit from the workers that have it to one that comes late, while they go
// on training.
//
// A source answers over a connection on which both ends have proven that they are of the job. It is
// asked for its newest commit's manifest, the lengths and checksums of all chunks of 1 MiB, and
// keeps that commit until it is asked for another, or the connection ends; then for chunks. Take
// asks all sources for the manifest, has them give different chunks each, and checks every one.
// What has changed when it is through is fetched again, until that is little or does not become
// less.
//
// The package dials nobody and listens nowhere. All numbers on the wire are little-endian.
package fetch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/elastic/image"
)

const (
	askManifest = 'm'
	askChunks   = 'c'

	idle      = 30 * time.Second // longest a source waits for the next question, and keeps a commit for it; longest either waits for bytes
	batch     = 8                // chunks asked for at once
	maxLayout = 1 << 20          // bytes of a layout
	maxPieces = 1 << 20
	maxBatch  = 1024 // chunks that a source gives for one question
)

// Commit is what a source gives.
type Commit struct {
	// Number is the commit's.
	Number uint64
	// Layout says what the pieces are; only who has the same can take them.
	Layout string
	// Pieces are read until Release, by one goroutine.
	Pieces []*image.Piece
	// Release is called once.
	Release func()
}

// Serve answers one late worker's questions, until it closes the connection, is silent for half a
// minute, or asks what makes no sense. newest returns the newest commit, or nil where there is
// none. The caller closes the connection, at any time where it must end.
func Serve(conn net.Conn, newest func() *Commit) error {
	s := &source{conn: conn}
	defer s.release()
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
			s.release()
			s.commit = newest()
			err = s.manifest()
		case askChunks:
			err = s.chunks()
		default:
			err = fmt.Errorf("%#x is no question", question[0])
		}
		if err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
	}
}

// source is one connection's end that gives.
type source struct {
	conn   net.Conn
	commit *Commit
	index  []place // of the commit's chunks
}

// place is a chunk's.
type place struct{ piece, chunk int }

func (s *source) release() {
	if s.commit != nil {
		s.commit.Release()
	}
	s.commit, s.index = nil, nil
}

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
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Pieces)))
	for _, p := range c.Pieces {
		b = binary.LittleEndian.AppendUint64(b, uint64(p.Len()))
	}
	for i, p := range c.Pieces {
		for j := range p.Chunks() {
			b = binary.LittleEndian.AppendUint32(b, p.Sum(j)) // one after the other: the other processors are for training
			s.index = append(s.index, place{i, j})
		}
	}
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
		return fmt.Errorf("%d chunks at once", count)
	}
	b := make([]byte, 4*count)
	if _, err := io.ReadFull(s.conn, b); err != nil {
		return err
	}
	for ; len(b) > 0; b = b[4:] {
		i := binary.LittleEndian.Uint32(b)
		if uint64(i) >= uint64(len(s.index)) {
			return fmt.Errorf("chunk %d of %d", i, len(s.index))
		}
		at := s.index[i]
		if err := s.conn.SetDeadline(time.Now().Add(idle)); err != nil {
			return err
		}
		if _, err := s.conn.Write(s.commit.Pieces[at.piece].Chunk(at.chunk)); err != nil {
			return err
		}
	}
	return nil
}

func readUint32(r io.Reader) (uint32, error) {
	var b [4]byte
	_, err := io.ReadFull(r, b[:])
	return binary.LittleEndian.Uint32(b[:]), err
}

// manifest is what a source says of its newest commit.
type manifest struct {
	number uint64
	sums   []uint32
}

var (
	errNone   = errors.New("it has no commit")
	errLayout = errors.New("its state is another than this one's")
)

// readManifest reads the answer of a source, which must be of this layout and these lengths:
// nothing else is given memory.
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
	b := make([]byte, 4*chunks)
	if _, err := io.ReadFull(r, b); err != nil {
		return m, err
	}
	m.sums = make([]uint32, chunks)
	for i := range m.sums {
		m.sums[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return m, nil
}

// chunked returns the chunks of pieces, in order.
func chunked(pieces [][]byte) (all [][]byte) {
	for _, p := range pieces {
		all = slices.AppendSeq(all, slices.Chunk(p, image.ChunkSize))
	}
	return all
}
