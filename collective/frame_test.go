package collective

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

func TestFrames(t *testing.T) {
	h := header{kind: dataFrame, step: 7, length: 3, generation: 1<<63 + 1, seq: 9, ready: true,
		call: descriptor{allReduceAction, kernel.Float64, Max, Ring, -5, 1<<40 + 3}}
	stream := append(h.append(nil), 1, 2, 3)
	if len(stream) != headerSize+3 {
		t.Fatalf("a header of %d bytes", len(stream)-3)
	}
	for _, r := range []io.Reader{bytes.NewReader(stream), iotest.OneByteReader(bytes.NewReader(stream))} {
		f := &frameReader{r: r}
		got, err := f.next()
		payload := make([]byte, 3)
		if err != nil || got != h || f.payload(payload) != nil || payload[2] != 3 {
			t.Fatalf("read %+v, %v", got, err)
		}
		if _, err := f.next(); err != io.EOF {
			t.Fatalf("at the end: %v", err)
		}
	}
	for n := 1; n < headerSize; n++ {
		f := &frameReader{r: bytes.NewReader(stream[:n])}
		if _, err := f.next(); err != io.ErrUnexpectedEOF {
			t.Fatalf("a header cut after %d bytes: %v", n, err)
		}
	}
}

func TestNotices(t *testing.T) {
	aborted := gone(errors.New("broken"), 1, 3)
	call := descriptor{action: barrierAction}
	for _, n := range []notice{aborted, mismatched(3, call, 1, descriptor{action: broadcastAction, dtype: kernel.Int8, count: 4})} {
		f := &frameReader{r: bytes.NewReader(n.frame(5))}
		h, err := f.next()
		p := make([]byte, h.length)
		if err != nil || f.payload(p) != nil {
			t.Fatal(err)
		}
		back, err := parseNotice(h.kind, p, 4)
		if err != nil || back.error(5).Error() != n.error(5).Error() {
			t.Fatalf("%v became %v, %v", n.error(5), back.error(5), err)
		}
		if _, err := parseNotice(h.kind, p, 3); err == nil {
			t.Error("a rank 3 of 3 is named")
		}
	}
	many := notice{cause: fmt.Errorf("%0*d", 5000, 0)}
	for i := range 1000 {
		many.dead = append(many.dead, i)
	}
	if n := len(many.frame(1)); n > headerSize+maxNotice {
		t.Errorf("a notice of %d bytes", n)
	}
}

// FuzzFrames: whatever a peer sends ends the group at worst. It neither panics nor takes memory for
// what has not arrived.
func FuzzFrames(f *testing.F) {
	h := header{kind: dataFrame, length: 5, generation: 1, seq: 1, call: descriptor{action: barrierAction}}
	n := gone(io.EOF, 1)
	f.Add(append(h.append(nil), "hello"...))
	f.Add(n.frame(1))
	f.Add((&header{kind: goodbyeFrame, generation: 1}).append(nil))
	h.call.action, h.length, h.seq = allReduceAction, maxPayload, 2
	f.Add(h.append(nil))
	f.Fuzz(func(t *testing.T, stream []byte) {
		g := newGroup(newFamily(1, 2), 0, 0, 2, nil)
		p := newTCPPath(g)
		g.path = p
		p.stopOnce.Do(func() { close(p.stop) }) // no frame is requested: those that would wait are skipped
		l := p.links[1]
		for _, oneByte := range []bool{false, true} {
			var r io.Reader = bytes.NewReader(stream)
			if oneByte {
				r = iotest.OneByteReader(r)
			}
			l.deliverAll(&frameReader{r: r})
			if held := g.boxes[1].held; held > eagerTotal {
				t.Fatalf("%d bytes are held", held)
			}
		}
		c := &frameReader{r: bytes.NewReader(stream)}
		for {
			h, err := c.next()
			if err != nil || l.heard(c, &h) != nil {
				break
			}
		}
	})
}

// FuzzDriven: the same for a data channel that operations drive.
func FuzzDriven(f *testing.F) {
	h := header{kind: dataFrame, length: 5, generation: 1, seq: 1, call: descriptor{action: barrierAction}}
	n := gone(io.EOF, 1)
	f.Add(append(h.append(nil), "hello"...))
	f.Add(append(h.append(nil), "hell"...))
	f.Add(n.frame(1))
	f.Add((&header{kind: goodbyeFrame, generation: 1}).append(nil))
	f.Fuzz(func(t *testing.T, stream []byte) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		g := newGroup(newFamily(1, 2), 0, 0, 2, nil)
		p := newTCPPath(g)
		l := p.links[1]
		l.wire.fd, l.wire.in = fds[0], new(frameReader)
		defer unix.Close(fds[0])
		r := &incoming{buf: make([]byte, 5)}
		g.boxes[1].enter(1, h.call)
		g.boxes[1].post(r)
		unix.Write(fds[1], stream[:min(len(stream), 64<<10)])
		unix.Close(fds[1])
		for !l.wire.readEnded && l.pull() {
		}
		if !l.wire.readEnded && !l.wire.waiting {
			t.Fatal("the end was not seen")
		}
	})
}
