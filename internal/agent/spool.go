package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

const (
	// spoolSize bounds the output of a worker that is kept while no driver is attached, in bytes.
	spoolSize = 64 << 20
	// segmentSize is the size of each file of a spool, which is dropped as a whole, in bytes.
	segmentSize = 4 << 20
	// spoolFrame is the size of the header before each text: its stream and length.
	spoolFrame = 5
)

// spool keeps the output of a worker in files that have been unlinked: nothing of it is left once
// the agent has ended, however it ended, and no other user can read it. Beyond its bound it drops
// the oldest segment. The zero spool is empty, and its bound is 0.
type spool struct {
	dir      string // "": the system's for temporary files
	most     int64
	segments []*segment
	held     int64 // unread bytes of the segments
	missing  int64 // bytes of text that were lost before the first segment
}

// segment is one file of a spool.
type segment struct {
	file    *os.File
	end, at int64 // offsets up to which it is written and read
	text    int64 // unread bytes of text
	lost    int64 // bytes of text that were lost after it
}

func (s *spool) empty() bool { return len(s.segments) == 0 && s.missing == 0 }

// put appends a text of a stream. If that fails, the text counts as missing.
func (s *spool) put(stream uint32, text []byte) error {
	g, err := s.last()
	if err != nil {
		s.lose(text)
		return err
	}
	b := binary.LittleEndian.AppendUint32([]byte{byte(stream)}, uint32(len(text)))
	if _, err := g.file.WriteAt(append(b, text...), g.end); err != nil {
		if g.end == 0 {
			s.segments = s.segments[:len(s.segments)-1]
			g.file.Close()
		}
		s.lose(text)
		return fmt.Errorf("agent: keeping output: %w", err)
	}
	n := int64(len(b) + len(text))
	g.end += n
	g.text += int64(len(text))
	s.held += n
	for s.held > s.most && len(s.segments) > 1 {
		s.missing += s.segments[0].text
		s.drop()
	}
	return nil
}

// last returns the segment to write to, and creates one if the last segment is full or has a gap
// after it.
func (s *spool) last() (*segment, error) {
	if n := len(s.segments); n > 0 && s.segments[n-1].end < segmentSize && s.segments[n-1].lost == 0 {
		return s.segments[n-1], nil
	}
	f, err := unnamed(s.dir)
	if err != nil {
		return nil, err
	}
	g := &segment{file: f}
	s.segments = append(s.segments, g)
	return g, nil
}

// lose records that a text is missing after the last segment.
func (s *spool) lose(text []byte) {
	missing := &s.missing
	if n := len(s.segments); n > 0 {
		missing = &s.segments[n-1].lost
	}
	*missing += int64(len(text))
}

// drop drops the oldest segment.
func (s *spool) drop() {
	g := s.segments[0]
	s.held -= g.end - g.at
	s.missing += g.lost
	g.file.Close()
	s.segments = s.segments[1:]
}

// take removes and returns the oldest text and its stream, or the number of bytes missing before
// it. If the spool is empty, it returns no text and 0.
func (s *spool) take() (stream uint32, text []byte, missing int64, err error) {
	if missing, s.missing = s.missing, 0; missing > 0 {
		return 0, nil, missing, nil
	}
	if len(s.segments) == 0 {
		return 0, nil, 0, nil
	}
	g := s.segments[0]
	var head [spoolFrame]byte
	if _, err = g.file.ReadAt(head[:], g.at); err == nil {
		text = make([]byte, binary.LittleEndian.Uint32(head[1:]))
		_, err = g.file.ReadAt(text, g.at+spoolFrame)
	}
	if err != nil {
		missing = g.text
		s.drop()
		return 0, nil, missing, fmt.Errorf("agent: reading kept output: %w", err)
	}
	n := int64(spoolFrame + len(text))
	g.at += n
	g.text -= int64(len(text))
	s.held -= n
	if g.at == g.end {
		s.drop()
	}
	return uint32(head[0]), text, 0, nil
}

// close drops everything.
func (s *spool) close() {
	for len(s.segments) > 0 {
		s.drop()
	}
	s.missing = 0
}

// unnamed creates a file and unlinks it; its mode keeps other users from opening it before.
func unnamed(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "hvdrun-output-") // of mode 0600
	if err != nil {
		return nil, fmt.Errorf("agent: keeping output: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, fmt.Errorf("agent: keeping output: %w", errors.Join(err, f.Close()))
	}
	return f, nil
}
