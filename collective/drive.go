package collective

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// The data channels of a group that is not encrypted belong to the operation under way: its own goroutine writes and reads
// them, without blocking, whenever it has to wait. No other goroutine stands between the kernel and the buffers of
// an operation, and once it has returned nobody touches them. Between operations nobody reads: the control channels tell
// what happens to the group.

const (
	spinBound      = 100 * time.Microsecond // how long a wait looks again and again before it sleeps
	spinCrowded    = 20 * time.Microsecond  // the same where ranks of one host outnumber its cores
	lookAround     = 16                     // passes from one look at all links to the next
	sleepBound     = time.Second            // of one sleep
	sleepContext   = 10 * time.Millisecond  // the same where a context may end meanwhile
	sameHostPacing = "cubic"                // congestion control between ranks of one host: others pace what needs no pace
)

// wire is one data channel as operations drive it. It belongs to the operation under way.
type wire struct {
	fd int // −1 while there is none: under TLS, before the group is complete and after its end

	queue fifo[*outgoing]
	head  [headerSize]byte // of the first in the queue
	sent  int              // bytes of it, with its header, that the kernel has taken
	both  [2][]byte
	mute  bool // frames are dropped: the group ends, or the peer needs them no more

	in      frameReader
	pending early  // a frame that nobody has asked for yet
	waiting bool   // there is one
	into    []byte // where the rest of the frame under way goes
	filling bool   // there is one
	deaf    bool   // nothing more comes
}

// takeOver hands the data channels to the operations, once the group is complete: no connection can fail to come any more,
// so nothing but notices has to be read while no operation is under way, and those come over the control channels.
func (p *tcpPath) takeOver() {
	here := 1
	for _, l := range p.links {
		if l == nil {
			continue
		}
		if l.data.sealed() {
			return // then all are
		}
		l.data.SetReadDeadline(time.Unix(1, 0))
		<-l.heardOut
		if sameHost(l.data) {
			here++
		}
	}
	p.crowded = here > runtime.GOMAXPROCS(0)
	p.mu.Lock()
	err := p.takeOverLocked()
	p.mu.Unlock()
	if err != nil {
		p.g.fail(gone(fmt.Errorf("collective: %w", err), p.g.rank))
	}
}

func (p *tcpPath) takeOverLocked() (err error) {
	if p.released {
		return nil
	}
	if p.alarm, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		p.alarm = -1
		return err
	}
	for _, l := range p.links {
		if l == nil {
			continue
		}
		if l.wire.fd, err = l.data.duplicate(); err != nil {
			l.wire.fd = -1
			return err
		}
		if sameHost(l.data) {
			unix.SetsockoptString(l.wire.fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, sameHostPacing) // as well as can be
		}
		l.data.raw.Close() // the runtime's poller has no more to do with it
	}
	p.driven = true
	return nil
}

// start lets an operation drive; false where the group has ended.
func (p *tcpPath) start() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.released {
		return false
	}
	p.driving = true
	return true
}

// finish is the end of an operation.
func (p *tcpPath) finish() {
	p.mu.Lock()
	p.driving = false
	if p.released {
		p.closeWires()
	}
	p.mu.Unlock()
}

// shutWires ends all movement on the wires, so that an operation that sleeps wakes up. The caller holds p.mu.
func (p *tcpPath) shutWires() {
	for _, l := range p.links {
		if l != nil && l.wire.fd >= 0 {
			unix.Shutdown(l.wire.fd, unix.SHUT_RDWR) // an error means that it has ended by itself
		}
	}
	p.ring()
	if !p.driving {
		p.closeWires()
	}
}

// closeWires closes the wires of a group that has ended. The caller holds p.mu; no operation is under way.
func (p *tcpPath) closeWires() {
	for _, l := range p.links {
		if l != nil && l.wire.fd >= 0 {
			unix.Close(l.wire.fd)
			l.wire.fd = -1
		}
	}
	if p.alarm >= 0 {
		unix.Close(p.alarm)
		p.alarm = -1
	}
}

// poke wakes an operation that sleeps.
func (p *tcpPath) poke() {
	if p.sleeping.Load() {
		p.mu.Lock()
		p.ring()
		p.mu.Unlock()
	}
}

// ring raises the alarm. The caller holds p.mu.
func (p *tcpPath) ring() {
	if p.alarm >= 0 {
		one := [8]byte{1}
		unix.Write(p.alarm, one[:]) // fails only where it rings already
	}
}

// pause moves frames until there is something for the operation to look at.
func (p *tcpPath) pause(c *call) error {
	var until time.Time
	for pass := 1; ; pass++ {
		if p.advance(pass%lookAround == 0) {
			return nil
		}
		select {
		case <-p.g.wake:
			return nil
		case <-p.g.failed:
			return c.lost()
		default:
		}
		if pass%lookAround == 0 {
			if c.ctx.Err() != nil {
				return c.cancelled()
			}
			now := time.Now()
			if until.IsZero() {
				until = now.Add(p.patience())
			}
			if now.After(until) {
				p.sleep(c)
				continue
			}
		}
		unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // whoever shares the core may be who is waited for
	}
}

func (p *tcpPath) patience() time.Duration {
	if p.crowded {
		return spinCrowded
	}
	return spinBound
}

// advance moves what can be moved on the links where the operation needs it, or on all of them.
func (p *tcpPath) advance(all bool) bool {
	moved := false
	for _, l := range p.links {
		if l == nil || l.wire.fd < 0 {
			continue
		}
		if l.wire.queue.len() > 0 && l.push() {
			moved = true
		}
		if !l.wire.deaf && (all || l.wire.filling || p.g.boxes[l.rank].hungry()) && l.pull() {
			moved = true
		}
	}
	return moved
}

// sleep waits for the kernel, for an alarm, or for a bound.
func (p *tcpPath) sleep(c *call) {
	p.polls = append(p.polls[:0], unix.PollFd{Fd: int32(p.alarm), Events: unix.POLLIN})
	for _, l := range p.links {
		if l == nil || l.wire.fd < 0 {
			continue
		}
		w, events := &l.wire, int16(0)
		if w.queue.len() > 0 {
			events = unix.POLLOUT
		}
		if !w.deaf && !w.waiting {
			events |= unix.POLLIN
		}
		if events != 0 {
			p.polls = append(p.polls, unix.PollFd{Fd: int32(w.fd), Events: events})
		}
	}
	bound := sleepBound
	if c.ctx.Done() != nil {
		bound = sleepContext
	}
	p.sleeping.Store(true)
	select {
	case <-p.g.failed: // the next look finds it
	case <-p.g.wake:
		p.g.poke()
	default:
		unix.Poll(p.polls, int(bound.Milliseconds())) // whatever it returns, the next thing is to look
	}
	p.sleeping.Store(false)
	if p.polls[0].Revents != 0 {
		var count [8]byte
		unix.Read(p.alarm, count[:])
	}
}

// carry takes a frame of the operation under way and writes at once what the kernel takes of it.
func (l *link) carry(o *outgoing) {
	if l.wire.mute || l.wire.fd < 0 {
		o.done.Store(true) // the end of the group is told otherwise
		return
	}
	l.wire.queue.push(o)
	if l.wire.queue.len() == 1 {
		l.push()
	}
}

// push writes what the kernel takes and reports whether that was anything.
func (l *link) push() bool {
	w, moved := &l.wire, false
	for w.queue.len() > 0 {
		o := w.queue.at(0)
		n, err := w.write(o)
		if n > 0 {
			moved = true
			w.sent += n
		}
		switch {
		case w.sent == headerSize+len(o.data):
			w.queue.pop()
			w.sent = 0
			o.done.Store(true)
		case err == nil || errors.Is(err, unix.EAGAIN):
			return moved
		case !errors.Is(err, unix.EINTR):
			w.mute = true
			for w.queue.len() > 0 {
				w.queue.pop().done.Store(true)
			}
			l.unwritable(fmt.Errorf("write: %w", err))
			return true
		}
	}
	return moved
}

func (w *wire) write(o *outgoing) (int, error) {
	if w.sent >= headerSize {
		return unix.Write(w.fd, o.data[w.sent-headerSize:])
	}
	o.header.append(w.head[:0])
	if len(o.data) == 0 {
		return unix.Write(w.fd, w.head[w.sent:])
	}
	w.both = [2][]byte{w.head[w.sent:], o.data}
	n, err := unix.Writev(w.fd, w.both[:])
	w.both = [2][]byte{}
	return n, err
}

// pull reads at most one frame and reports whether anything has come.
func (l *link) pull() bool {
	w, moved := &l.wire, false
	for {
		switch {
		case w.filling:
			if len(w.into) > 0 {
				n, err := w.fill()
				moved = moved || n > 0
				if err != nil {
					return l.broken(err) || moved
				}
				if w.into = w.into[n:]; len(w.into) > 0 {
					return moved
				}
			}
			w.filling = false
			l.path.g.boxes[l.rank].filled()
			return true
		case w.waiting:
			buf, asked := l.path.g.boxes[l.rank].wanted(&w.pending)
			if !asked {
				return moved
			}
			w.into, w.waiting, w.filling = buf, false, true
		default:
			n, ok, err := l.head()
			moved = moved || n > 0
			if err != nil {
				return l.broken(err) || moved
			}
			if !ok {
				return moved
			}
			moved = true // it may have been there since the last read
		}
	}
}

// broken is the end of what comes; errors that only mean that nothing is there are none.
func (l *link) broken(err error) bool {
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return false
	}
	l.wire.deaf = true
	switch {
	case errors.Is(err, errShut): // the group has ended
	case errors.Is(err, errFrame):
		l.lost(err)
	default:
		l.ended(err)
	}
	return true
}

// fill reads some of the payload of the frame under way.
func (w *wire) fill() (int, error) {
	if f := &w.in; f.lo < f.hi {
		n := copy(w.into, f.buf[f.lo:f.hi])
		f.lo += n
		return n, nil
	}
	n, err := unix.Read(w.fd, w.into)
	if n == 0 && err == nil {
		err = io.ErrUnexpectedEOF
	}
	return max(n, 0), err
}

// head reads the header of the next frame; ok where it is there, and the frame is dealt with or under way.
func (l *link) head() (n int, ok bool, err error) {
	f := &l.wire.in
	if need := f.missing(); need > 0 {
		f.hi = copy(f.buf[:], f.buf[f.lo:f.hi])
		f.lo = 0
		if n, err = unix.Read(l.wire.fd, f.buf[f.hi:]); n <= 0 {
			if err == nil {
				if err = io.ErrUnexpectedEOF; f.hi == 0 {
					err = io.EOF
				}
			}
			return 0, false, err
		}
		f.hi += n
		if n < need || f.missing() > 0 {
			return n, false, nil
		}
	}
	h, err := parseHeader(f.buf[f.lo:])
	f.lo += headerSize
	if err != nil {
		return n, false, err
	}
	return n, true, l.arrived(f, &h)
}

// missing is how many bytes of the next header, and of the payload of a notice, are not read yet.
func (f *frameReader) missing() int {
	have := f.hi - f.lo
	if have < headerSize {
		return headerSize - have
	}
	if h, err := parseHeader(f.buf[f.lo:]); err == nil && h.kind != dataFrame {
		return max(0, headerSize+int(h.length)-have)
	}
	return 0
}

// arrived deals with the header of a frame.
func (l *link) arrived(f *frameReader, h *header) error {
	w := &l.wire
	switch {
	case h.kind == abortFrame || h.kind == mismatchFrame: // where the peer's group had ended before this connection
		return l.notice(f, h)
	case h.kind != dataFrame:
		return errFrame
	case !l.begin():
		return errShut
	}
	buf, asked, err := l.path.g.boxes[l.rank].announce(h, &w.pending)
	w.into, w.filling, w.waiting = buf, asked, err == nil && !asked
	return err
}
