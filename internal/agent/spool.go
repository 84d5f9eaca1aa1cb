package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

const (
	// spoolSize bounds the output of a worker that is kept for a driver that is not there, in
	// bytes.
	spoolSize = 64 << 20
	// segmentSize is how much of that is in one file, and thrown away at a time.
	segmentSize = 4 << 20
	// spoolFrame is what stands before each text: its stream and its length.
	spoolFrame = 5
)

// spool keeps the output of a worker in files that have no name any more: nothing of it is left
// when the agent is gone, however it ended, and no other user can read it. Where there is more than
// its bound, the oldest goes. The zero spool is empty, and has the bound 0.
type spool struct {
	dir      string // "": the system's for temporary files
	most     int64
	segments []*segment
	held     int64 // bytes of the segments that are unread
	missing  int64 // bytes of text that are missing before the first segment
}

// segment is one of its files.
type segment struct {
	file    *os.File
	end, at int64 // of what is written, and of what is read
	text    int64 // unread bytes of text
	lost    int64 // bytes of text that are missing after it
}

func (s *spool) empty() bool { return len(s.segments) == 0 && s.missing == 0 }

// put adds a text of a stream. Where that fails the text is missing.
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

// last returns the segment to write to, which it makes where the newest takes no more.
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

// lose notes that a text is missing after what is held.
func (s *spool) lose(text []byte) {
	missing := &s.missing
	if n := len(s.segments); n > 0 {
		missing = &s.segments[n-1].lost
	}
	*missing += int64(len(text))
}

// drop throws the oldest segment away.
func (s *spool) drop() {
	g := s.segments[0]
	s.held -= g.end - g.at
	s.missing += g.lost
	g.file.Close()
	s.segments = s.segments[1:]
}

// take returns the oldest text and its stream, or how many bytes are missing before it; no text and
// 0 where it is empty.
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

// close throws everything away.
func (s *spool) close() {
	for len(s.segments) > 0 {
		s.drop()
	}
	s.missing = 0
}

// unnamed makes a file that has no name, and that no other user could have opened before it lost
// it.
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
