package sockets

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// FuzzFrames: whatever a peer sends at most ends the group. The reader neither panics nor allocates
// memory for data that has not arrived.
func FuzzFrames(f *testing.F) {
	h := frame.Header{Kind: frame.Data, Length: 5, Generation: 1, Seq: 1, Call: frame.Call{What: 6}}
	n := frame.Gone(io.EOF, 1)
	f.Add(append(h.Append(nil), "hello"...))
	f.Add(n.Frame(1))
	f.Add((&frame.Header{Kind: frame.Goodbye, Generation: 1}).Append(nil))
	h.Call, h.Length, h.Seq = frame.Call{What: 1}, frame.MaxPayload, 2
	f.Add(h.Append(nil))
	f.Fuzz(func(t *testing.T, stream []byte) {
		p := alone(0)
		p.stopOnce.Do(func() { close(p.stop) }) // no frame is requested: frames that would wait are skipped
		l := p.links[1]
		for _, oneByte := range []bool{false, true} {
			var r io.Reader = bytes.NewReader(stream)
			if oneByte {
				r = iotest.OneByteReader(r)
			}
			l.deliverAll(frame.NewReader(r))
		}
		c := frame.NewReader(bytes.NewReader(stream))
		for {
			h, err := c.Next()
			if err != nil || l.heard(c, &h) != nil {
				break
			}
		}
	})
}

// FuzzDriven does the same for a data channel that operations drive.
func FuzzDriven(f *testing.F) {
	h := frame.Header{Kind: frame.Data, Length: 5, Generation: 1, Seq: 1, Call: frame.Call{What: 6}}
	n := frame.Gone(io.EOF, 1)
	f.Add(append(h.Append(nil), "hello"...))
	f.Add(append(h.Append(nil), "hell"...))
	f.Add(n.Frame(1))
	f.Add((&frame.Header{Kind: frame.Goodbye, Generation: 1}).Append(nil))
	f.Fuzz(func(t *testing.T, stream []byte) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		p := alone(0)
		l := p.links[1]
		l.wire.fd, l.wire.in = fds[0], frame.NewReader(nil)
		defer unix.Close(fds[0])
		r := &frame.Incoming{Buf: make([]byte, 5)}
		p.boxes[1].Enter(1, h.Call, false)
		p.boxes[1].Post(r)
		unix.Write(fds[1], stream[:min(len(stream), 64<<10)])
		unix.Close(fds[1])
		for !l.wire.readEnded && l.pull() {
		}
		if !l.wire.readEnded && !l.wire.waiting {
			t.Fatal("the end was not seen")
		}
	})
}

// group records failures and expects no frames.
type group struct {
	fails  []frame.Notice
	failed chan struct{}
	wake   wake.Flag
	over   bool // Failure reports that it has failed
}

func (g *group) Fail(n frame.Notice)           { g.fails = append(g.fails, n) }
func (g *group) FailAll(frame.Notice)          {}
func (g *group) Poke()                         {}
func (g *group) Departed()                     {}
func (g *group) Knows(frame.Call) bool         { return true }
func (g *group) Enroll() bool                  { return true }
func (g *group) Failure() (frame.Notice, bool) { return frame.Notice{}, g.over }
func (g *group) Failed() <-chan struct{}       { return g.failed }
func (g *group) Wake() wake.Flag               { return g.wake }
func (g *group) Finished() uint64              { return 0 }
func (g *group) Closing() bool                 { return false }
func (g *group) Left(int)                      {}
func (g *group) Nudged(uint64)                 {}

// alone returns the path of a rank in a world of two that has no connections.
func alone(rank int) *Path {
	g := &group{failed: make(chan struct{}), wake: wake.New()}
	gen := &Generation{Peers: Peers{Number: 1, Size: 2}, conns: 1}
	return newPath(gen, Lane{Rank: rank, Size: 2}, g, frame.Inboxes(g, 1, rank, 2), 64<<10)
}
