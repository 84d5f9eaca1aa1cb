// Package transfer copies the state of workers that train to a worker that arrives late, without
// interrupting training. Take copies their newest commit from several of them. Follow receives a
// complete commit from one of them, and then the averages of each later step, which the follower
// applies itself. Serve is the source's side of both. The package also contains the codec of all
// messages in which workers exchange state.
//
// A source serves an authenticated connection. On request it sends the manifest of its newest
// commit, which has the lengths and checksums of all chunks of 1 MiB, and then chunks. It keeps
// nothing for that: if a later commit has overwritten a chunk, it reports that the chunk is gone.
// Take asks all sources for their manifests, requests different chunks from each, and verifies
// every chunk. It repeats this for the chunks that have changed meanwhile, until these are few or
// their number no longer decreases. Chunks that are gone change all the time, and Take leaves them
// out.
//
// For a follower, the source holds its newest commit until it has sent it, so that its next commits
// use other memory meanwhile. While it has followers, it keeps the averages of the last steps: of
// two, or of more if they are small. It never waits for a follower: if a follower needs a step that
// is no longer kept, the source reports that, and the follower starts again with a newer commit.
//
// The package neither dials nor listens.
package transfer

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

const (
	batch    = 8    // chunks per request
	maxBatch = 1024 // maximum chunks per request that a source accepts
)

// Commit is a commit of a source.
type Commit struct {
	// Number is the number of the commit.
	Number uint64
	// Layout describes the commit's content. Only workers with the same layout can use it.
	Layout string
	// Blobs are read by one goroutine at a time. They may be lent.
	Blobs []*snapshot.Blob

	// Steps is the number of steps that have led to the commit. This and the following fields are
	// for followers.
	Steps uint64
	// Carried are the values of the parts that are in no blob.
	Carried [][]byte
	// Release ends the hold of the blobs; nil: the blobs are lent.
	Release func()
}

// place is the position of a chunk.
type place struct{ blob, chunk int }

// places returns the positions of all chunks.
func (c *Commit) places() (all []place) {
	for i, b := range c.Blobs {
		for j := range b.Chunks() {
			all = append(all, place{i, j})
		}
	}
	return all
}

// manifest returns the manifest without checksums.
func (c *Commit) manifest() Manifest {
	m := Manifest{Number: c.Number, Layout: c.Layout}
	for _, b := range c.Blobs {
		m.lengths = append(m.lengths, b.Len())
	}
	return m
}

// Errors of a source.
var (
	// errNone: the source has no commit, or nobody can follow it.
	errNone = errors.New("transfer: the source has no commit to give")
	// ErrOther: the source has a state of another layout.
	ErrOther = errors.New("transfer: the source has a state of another layout")
	// ErrBusy: another follower is taking the source's commit.
	ErrBusy = errors.New("transfer: another worker takes the source's commit")
	// ErrLost: the source no longer has the next step.
	ErrLost = errors.New("transfer: the source no longer has the next step")
)

// Supply is what a worker provides for others.
type Supply struct {
	// Newest returns the newest commit; nil before the first commit. It may be called by any
	// goroutine.
	Newest func() *Commit
	// Feed serves followers; nil: nobody can follow this worker.
	Feed *Feed
}

// Serve answers the requests of one worker until that worker closes the connection, is silent for
// 30 seconds or sends an invalid request. supply returns what this worker currently provides; nil:
// nothing. A follower is served until it closes the connection or needs a step that is no longer
// kept. The caller closes the connection, which also ends a blocked Serve.
func Serve(conn net.Conn, supply func() *Supply) error {
	s := &source{link: link{conn: conn}}
	for {
		f, b, err := s.read(idle)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			switch f.kind {
			case askManifest:
				err = s.manifest(supply())
			case askChunks:
				err = s.chunks(b)
			case askToFollow:
				return s.follow(supply())
			default:
				err = fmt.Errorf("the request %#x is not known", f.kind)
			}
		}
		if err != nil {
			return fmt.Errorf("transfer: %w", err)
		}
	}
}

// source serves one connection.
type source struct {
	link
	commit *Commit
	places []place // positions of the chunks of commit
}

func (s *source) manifest(from *Supply) error {
	s.commit, s.places = nil, nil
	if from != nil {
		s.commit = from.Newest()
	}
	if s.commit == nil {
		return s.write(frameNone, 0, nil)
	}
	s.places = s.commit.places()
	m := s.commit.manifest()
	for _, at := range s.places {
		sum, ok := s.commit.Blobs[at.blob].TrySum(at.chunk) // sequential, because training uses the other processors
		m.sums, m.there = append(m.sums, sum), append(m.there, gone)
		if ok {
			m.there[len(m.there)-1] = present
		}
	}
	return s.write(frameManifest, 0, m.append(nil))
}

func (s *source) chunks(b []byte) error {
	r := NewReader(b)
	numbers := make([]int, min(r.Count(), maxBatch+1))
	for i := range numbers {
		numbers[i] = r.Number()
	}
	if len(numbers) > maxBatch {
		return fmt.Errorf("more than %d chunks are requested at once", maxBatch)
	}
	if err := r.End(); err != nil {
		return err
	}
	for _, n := range numbers {
		if n >= len(s.places) {
			return fmt.Errorf("chunk %d is requested, and the commit has %d", n, len(s.places))
		}
		if err := s.writeChunk(s.commit, n, s.places[n]); err != nil {
			return err
		}
	}
	return nil
}

func (s *source) follow(from *Supply) error {
	if from == nil || from.Feed == nil {
		return s.write(frameNone, 0, nil)
	}
	return from.Feed.serve(&s.link)
}

// chunked returns the chunks of blobs, in order, and the lengths of the blobs.
func chunked(blobs [][]byte) (all [][]byte, lengths []int) {
	for _, b := range blobs {
		all = slices.AppendSeq(all, slices.Chunk(b, snapshot.ChunkSize))
		lengths = append(lengths, len(b))
	}
	return all, lengths
}
