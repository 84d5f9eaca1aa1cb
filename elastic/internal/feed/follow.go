package feed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/image"
)

// Memory is where a follower has the state.
type Memory struct {
	// Layout describes all of the state.
	Layout string
	// Blobs are set to the commit.
	Blobs [][]byte
	// Buffers receive the averages of steps. They have the same length, and are [Depth] many.
	Buffers [][]byte
}

// Errors by which following ends.
var (
	// ErrLost: the source has gone on too far since.
	ErrLost = errors.New("feed: the source has the next step no longer")
	// ErrNone: the source has nothing to follow.
	ErrNone = errors.New("feed: the source cannot be followed")
	// ErrBusy: another worker takes the source's commit.
	ErrBusy = errors.New("feed: another worker takes the source's commit")
	// ErrOther: the source has another state.
	ErrOther = errors.New("feed: the source has a state of another layout")
)

// Follower receives a commit, and the steps after it. Its methods may be called concurrently.
type Follower struct {
	// Head is that of the commit.
	Head Head

	conn   net.Conn
	memory Memory
	chunks [][]byte

	received atomic.Int64  // bytes
	latest   atomic.Uint64 // as Head.Latest
	ready    chan *Step
	free     chan int
	loaded   chan struct{}
	beats    chan struct{}
	failed   chan struct{}
	err      error // valid when failed is closed
	stop     chan struct{}
	closing  sync.Once
	reading  sync.WaitGroup
	release  func() bool
}

// Follow begins to follow the source at the other end of conn, and blocks until the head of its
// commit is there. Close closes conn, also if ctx ends; if Follow fails, it has.
func Follow(ctx context.Context, conn net.Conn, m Memory) (*Follower, error) {
	f := &Follower{
		conn: conn, memory: m, ready: make(chan *Step, len(m.Buffers)), free: make(chan int, len(m.Buffers)),
		loaded: make(chan struct{}), beats: make(chan struct{}, 1), failed: make(chan struct{}), stop: make(chan struct{}),
	}
	f.release = context.AfterFunc(ctx, f.shut)
	for i := range m.Buffers {
		f.free <- i
	}
	for _, b := range m.Blobs {
		f.chunks = slices.AppendSeq(f.chunks, slices.Chunk(b, image.ChunkSize))
	}
	if err := f.begin(); err != nil {
		f.Close()
		return nil, err
	}
	if len(f.chunks) == 0 {
		close(f.loaded)
	}
	f.reading.Go(func() {
		defer close(f.failed)
		f.err = f.read()
	})
	return f, nil
}

// shut closes the connection, which ends reading.
func (f *Follower) shut() {
	f.closing.Do(func() {
		close(f.stop)
		f.conn.Close()
	})
}

// Close ends following, and waits for that.
func (f *Follower) Close() {
	f.release()
	f.shut()
	f.reading.Wait()
}

// Loaded is closed when the commit is there.
func (f *Follower) Loaded() <-chan struct{} { return f.loaded }

// Ready has the steps after the commit, in order. Done follows for each.
func (f *Follower) Ready() <-chan *Step { return f.ready }

// Done gives the memory of a step back.
func (f *Follower) Done(s *Step) { f.free <- s.Buffer }

// Beats has a value when the source has given a sign of life.
func (f *Follower) Beats() <-chan struct{} { return f.beats }

// Failed is closed when no further steps come. Err then says why.
func (f *Follower) Failed() <-chan struct{} { return f.failed }

// Err returns why no further steps come. It is valid when Failed is closed.
func (f *Follower) Err() error { return f.err }

// Latest returns the number of steps that the source has made, as far as is known.
func (f *Follower) Latest() uint64 { return f.latest.Load() }

// Received returns the number of bytes received so far.
func (f *Follower) Received() int64 { return f.received.Load() }

// begin reads up to the head.
func (f *Follower) begin() error {
	for {
		fr, b, err := f.message()
		if err != nil {
			return err
		}
		switch fr.kind {
		case frameBeat: // it waits for a commit from which on it has all steps
		case frameNone:
			if fr.number != 0 {
				return ErrBusy
			}
			return ErrNone
		case frameHead:
			h, err := parseHead(b)
			if err != nil {
				return err
			}
			f.Head = *h
			f.know(h.Latest)
			return f.fits(h)
		default:
			return errMessage
		}
	}
}

// fits compares the head with the memory.
func (f *Follower) fits(h *Head) error {
	ok := h.Layout == f.memory.Layout && len(h.lengths) == len(f.memory.Blobs)
	for i := range h.lengths {
		ok = ok && h.lengths[i] == len(f.memory.Blobs[i])
	}
	for _, b := range f.memory.Buffers {
		ok = ok && len(b) == h.size
	}
	if !ok {
		return ErrOther
	}
	return nil
}

// message reads a frame, and its payload unless that is a chunk or a piece.
func (f *Follower) message() (frame, []byte, error) {
	if err := f.conn.SetReadDeadline(time.Now().Add(idle)); err != nil {
		return frame{}, nil, err
	}
	fr, err := readFrame(f.conn)
	if err != nil || fr.kind == frameChunk || fr.kind == framePiece {
		return fr, nil, err
	}
	if fr.length > mostHead {
		return fr, nil, errMessage
	}
	var b bytes.Buffer // memory is taken as bytes arrive
	if _, err := io.CopyN(&b, f.conn, int64(fr.length)); err != nil {
		return fr, nil, err
	}
	if image.Sum(b.Bytes()) != fr.sum {
		return fr, nil, errMessage
	}
	f.received.Add(int64(fr.length))
	return fr, b.Bytes(), nil
}

// fill reads the payload of a frame.
func (f *Follower) fill(to []byte, fr frame) error {
	if uint64(fr.length) != uint64(len(to)) {
		return errMessage
	}
	if _, err := io.ReadFull(f.conn, to); err != nil {
		return err
	}
	if image.Sum(to) != fr.sum {
		return errors.New("feed: a wrong checksum")
	}
	f.received.Add(int64(len(to)))
	return nil
}

// know notes how far the source is.
func (f *Follower) know(latest uint64) { f.latest.Store(max(f.latest.Load(), latest)) }

// read receives until that fails.
func (f *Follower) read() error {
	missing := len(f.chunks)
	next := f.Head.Steps
	for {
		fr, b, err := f.message()
		if err != nil {
			return fmt.Errorf("feed: %w", err)
		}
		switch fr.kind {
		case frameChunk:
			if missing == 0 || int(fr.number) != len(f.chunks)-missing {
				return errMessage
			}
			if err := f.fill(f.chunks[fr.number], fr); err != nil {
				return err
			}
			if missing--; missing == 0 {
				close(f.loaded)
			}
		case frameStep:
			s, err := parseStep(b)
			if err != nil || s.Number != next {
				return errors.Join(errMessage, err)
			}
			if err := f.step(s); err != nil {
				return err
			}
			next++
		case frameBeat:
			p := reader{b: b}
			f.know(p.word())
			select {
			case f.beats <- struct{}{}:
			default:
			}
		case frameLost:
			return ErrLost
		default:
			return errMessage
		}
	}
}

// step receives the averages of a step.
func (f *Follower) step(s *Step) error {
	f.know(s.latest)
	select {
	case s.Buffer = <-f.free:
	case <-f.stop:
		return net.ErrClosed
	}
	for rest := f.memory.Buffers[s.Buffer]; len(rest) > 0; {
		fr, _, err := f.message()
		switch {
		case err != nil:
			return fmt.Errorf("feed: %w", err)
		case fr.kind == frameLost:
			return ErrLost
		case fr.kind != framePiece || uint64(fr.length) > uint64(len(rest)) || fr.length == 0:
			return errMessage
		}
		if err := f.fill(rest[:fr.length], fr); err != nil {
			return err
		}
		rest = rest[fr.length:]
	}
	f.ready <- s
	return nil
}
