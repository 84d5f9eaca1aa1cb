package frame

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"testing"
	"testing/iotest"
)

func TestFrames(t *testing.T) {
	h := Header{Kind: Data, Step: 7, Length: 3, Generation: 1<<63 + 1, Seq: 9, Ready: true, Call: Call{1<<63 + 5, 1<<40 + 3}}
	stream := append(h.Append(nil), 1, 2, 3)
	if len(stream) != HeaderSize+3 {
		t.Fatalf("a header of %d bytes", len(stream)-3)
	}
	for _, r := range []io.Reader{bytes.NewReader(stream), iotest.OneByteReader(bytes.NewReader(stream))} {
		f := NewReader(r)
		got, err := f.Next()
		payload := make([]byte, 3)
		if err != nil || got != h || f.Payload(payload) != nil || payload[2] != 3 {
			t.Fatalf("read %+v, %v", got, err)
		}
		if _, err := f.Next(); err != io.EOF {
			t.Fatalf("at the end: %v", err)
		}
	}
	for n := 1; n < HeaderSize; n++ {
		f := NewReader(bytes.NewReader(stream[:n]))
		if _, err := f.Next(); err != io.ErrUnexpectedEOF {
			t.Fatalf("a header cut after %d bytes: %v", n, err)
		}
	}
}

func TestNotices(t *testing.T) {
	aborted := Gone(errors.New("broken"), 1, 3)
	named := Mismatched(3, Call{What: 6}, 1, Call{2, 4})
	named.Tensor = "bias"
	for _, n := range []Notice{aborted, named} {
		f := NewReader(bytes.NewReader(n.Frame(5)))
		h, err := f.Next()
		p := make([]byte, h.Length)
		if err != nil || f.Payload(p) != nil {
			t.Fatal(err)
		}
		back, err := ParseNotice(h.Kind, p, 4)
		if err != nil || !reflect.DeepEqual(back, n) {
			t.Fatalf("%v became %v, %v", n, back, err)
		}
		if _, err := ParseNotice(h.Kind, p, 3); err == nil {
			t.Error("a rank 3 of 3 is named")
		}
	}
	many := Notice{Cause: fmt.Errorf("%0*d", 5000, 0)}
	for i := range 1000 {
		many.Dead = append(many.Dead, i)
	}
	if n := len(many.Frame(1)); n > HeaderSize+MaxNotice {
		t.Errorf("a notice of %d bytes", n)
	}
}

// group records the notices of an inbox.
type group struct{ failed []Notice }

func (g *group) Fail(n Notice)   { g.failed = append(g.failed, n) }
func (g *group) Poke()           {}
func (g *group) Departed()       {}
func (g *group) Knows(Call) bool { return true }

// TestKeepsLittle: an inbox keeps unrequested frames only up to its bound.
func TestKeepsLittle(t *testing.T) {
	g, over := &group{}, make(chan struct{})
	close(over)
	b := &Inboxes(g, 1, 0, 2)[1]
	b.Enter(1, Call{What: 1}, false)
	h := Header{Kind: Data, Call: Call{What: 1}, Length: eagerFrame, Generation: 1, Seq: 1}
	kept := 0
	for ; kept < 100; kept++ {
		if _, err := b.Place(&h, over); err != nil {
			break
		}
		b.Placed()
	}
	if kept != eagerTotal/eagerFrame || b.held > eagerTotal || len(g.failed) > 0 {
		t.Fatalf("%d frames and %d bytes are kept, %v", kept, b.held, g.failed)
	}
}

// TestUnknownCall: an invalid call is not reported as a call that differs from this rank's.
func TestUnknownCall(t *testing.T) {
	for knows, dead := range map[bool]int{true: 0, false: 1} {
		g := &choosy{knows: knows}
		b := &Inboxes(g, 1, 0, 2)[1]
		b.Enter(1, Call{What: 1}, false)
		b.Deliver(&Outgoing{From: g, Header: Header{Kind: Data, Call: Call{What: 2}, Generation: 1, Seq: 1}})
		if len(g.failed) != 1 || len(g.failed[0].Dead) != dead || g.failed[0].Mismatch != knows {
			t.Errorf("known %v: %+v", knows, g.failed)
		}
	}
}

type choosy struct {
	group
	knows bool
}

func (g *choosy) Knows(Call) bool { return g.knows }
