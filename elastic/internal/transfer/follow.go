package transfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/internal/wake"
)

// Memory is the memory of a follower's state.
type Memory struct {
	// Layout describes the whole state.
	Layout string
	// Blobs receive the commit.
	Blobs [][]byte
	// Buffers receive the averages of steps. There are [Depth] buffers, all of the same length.
	Buffers [][]byte
}

// Follower receives a commit, and then the steps after it. Its methods are safe for concurrent use.
type Follower struct {
	// Head describes the commit.
	Head Head

	link
	memory  Memory
	chunks  [][]byte
	lengths []int // of the blobs

	latest  atomic.Uint64 // as Head.Latest
	ready   chan *Step
	free    chan int
	loaded  chan struct{}
	beats   wake.Flag
	failed  chan struct{}
	err     error // valid when failed is closed
	stop    chan struct{}
	closing sync.Once
	reading sync.WaitGroup
	release func() bool
}

// Follow starts to follow the source at the other end of conn, and blocks until it has received the
// head of the source's commit. Follow owns conn: it closes conn if it fails; otherwise conn is
// closed by Close, or when ctx ends.
func Follow(ctx context.Context, conn net.Conn, m Memory) (*Follower, error) {
	f := &Follower{
		link: link{conn: conn}, memory: m, ready: make(chan *Step, len(m.Buffers)), free: make(chan int, len(m.Buffers)),
		loaded: make(chan struct{}), beats: wake.New(), failed: make(chan struct{}), stop: make(chan struct{}),
	}
	f.release = context.AfterFunc(ctx, f.shut)
	for i := range m.Buffers {
		f.free <- i
	}
	f.chunks, f.lengths = chunked(m.Blobs)
	if err := f.begin(); err != nil {
		f.Close()
		return nil, err
	}
	if len(f.chunks) == 0 {
		close(f.loaded)
	}
	f.reading.Go(func() {
		defer close(f.failed)
		f.err = f.receive()
	})
	return f, nil
}

// shut closes the connection, which makes receive return.
func (f *Follower) shut() {
	f.closing.Do(func() {
		close(f.stop)
		f.conn.Close()
	})
}

// Close stops following, and waits for the follower's goroutine.
func (f *Follower) Close() {
	f.release()
	f.shut()
	f.reading.Wait()
}

// Loaded returns a channel that is closed when the commit has been received.
func (f *Follower) Loaded() <-chan struct{} { return f.loaded }

// Ready returns a channel of the steps after the commit, in order. The receiver must call Done for
// each.
func (f *Follower) Ready() <-chan *Step { return f.ready }

// Done gives the buffer of a step back.
func (f *Follower) Done(s *Step) { f.free <- s.Buffer }

// Beats returns a channel that has a value when the source has given a sign of life.
func (f *Follower) Beats() <-chan struct{} { return f.beats }

// Failed returns a channel that is closed when no further steps come. Err then returns the reason.
func (f *Follower) Failed() <-chan struct{} { return f.failed }

// Err returns why no further steps come. It is valid once the channel of Failed is closed.
func (f *Follower) Err() error { return f.err }

// Latest returns the number of steps that the source has made, as far as this follower knows.
func (f *Follower) Latest() uint64 { return f.latest.Load() }

// Received returns the number of bytes received so far.
func (f *Follower) Received() int64 { return f.received.Load() }

// begin sends the request to follow, and reads everything up to the head.
func (f *Follower) begin() error {
	if err := f.write(askToFollow, 0, nil); err != nil {
		return err
	}
	for {
		fr, b, err := f.read(idle)
		if err != nil {
			return err
		}
		switch fr.kind {
		case frameBeat: // the source waits for a commit after which it has all steps
		case frameNone:
			if fr.number != 0 {
				return ErrBusy
			}
			return errNone
		case frameHead:
			h, err := parseHead(b)
			if err != nil {
				return err
			}
			f.Head = *h
			f.know(h.Latest)
			return f.fits(h)
		default:
			return ErrDamaged
		}
	}
}

// fits returns an error if the commit or the averages do not fit the memory.
func (f *Follower) fits(h *Head) error {
	for _, b := range f.memory.Buffers {
		if len(b) != h.size {
			return ErrOther
		}
	}
	return h.Manifest.fits(f.memory.Layout, f.lengths)
}

// know records how many steps the source has made.
func (f *Follower) know(latest uint64) { f.latest.Store(max(f.latest.Load(), latest)) }

// receive receives chunks and steps until it fails, and returns the error.
func (f *Follower) receive() error {
	missing := len(f.chunks)
	next := f.Head.Steps
	for {
		fr, b, err := f.read(idle)
		if err != nil {
			return fmt.Errorf("transfer: %w", err)
		}
		switch fr.kind {
		case frameChunk:
			if missing == 0 || int(fr.number) != len(f.chunks)-missing {
				return ErrDamaged
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
				return errors.Join(ErrDamaged, err)
			}
			if err := f.step(s); err != nil {
				return err
			}
			next++
		case frameBeat:
			r := NewReader(b)
			f.know(r.Word())
			f.beats.Set()
		case frameLost:
			return ErrLost
		default:
			return ErrDamaged
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
		fr, _, err := f.read(idle)
		switch {
		case err != nil:
			return fmt.Errorf("transfer: %w", err)
		case fr.kind == frameLost:
			return ErrLost
		case fr.kind != framePiece || uint64(fr.length) > uint64(len(rest)) || fr.length == 0:
			return ErrDamaged
		}
		if err := f.fill(rest[:fr.length], fr); err != nil {
			return err
		}
		rest = rest[fr.length:]
	}
	f.ready <- s
	return nil
}
