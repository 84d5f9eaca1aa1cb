package sockets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// The data channels of a group that is not encrypted belong to the operation under way: its own
// goroutine writes and reads them, without blocking, whenever it has to wait. No other goroutine
// stands between the kernel and the buffers of an operation, and once it has returned nothing
// touches them. Between operations nothing reads: the control channels tell what happens to the
// group.

const (
	spinBound          = 100 * time.Microsecond // how long a wait polls before it sleeps
	spinOversubscribed = 20 * time.Microsecond  // the same where ranks of one host outnumber its cores
	lookAround         = 16                     // passes between two polls of all links
	sleepBound         = time.Second            // of one sleep
	sleepContext       = 10 * time.Millisecond  // the same where a context may end meanwhile
	sameHostPacing     = "cubic"                // congestion control between ranks of one host: others pace their packets without need
)

// dataConn is one connection of a data channel. The first one has the headers, all small frames and
// the first share of each large one; a further one has its share of each large frame, without a
// header, in the order of the frames.
type dataConn struct {
	fd    int // −1 if it is not driven: under TLS, before the group is complete and after its end
	queue frame.FIFO[*frame.Outgoing]
	sent  int // bytes of the first in the queue, with its header, that the kernel has taken
}

// extraConn is a connection beside the first.
type extraConn struct {
	dataConn
	due  frame.FIFO[*frame.Incoming] // whose shares come next
	into []byte                      // where the rest of the first one's goes; empty: it has not begun
}

// wire is one data channel as operations drive it. It belongs to the operation under way.
type wire struct {
	dataConn
	more      []extraConn
	shareFrom int                         // least bytes of a frame that the connections share; MaxConnections at least
	unsent    frame.FIFO[*frame.Outgoing] // of a far link that is not driven yet: how many connections share them is not known

	head       [frame.HeaderSize]byte // of the first in the queue
	both       [2][]byte
	writeEnded bool // frames are dropped: the group ends, or the peer needs them no more

	in        *frame.Reader
	pending   frame.Early     // a frame that is not requested yet
	waiting   bool            // there is one
	target    *frame.Incoming // whose frame is under way
	into      []byte          // where the rest of it goes
	filling   bool            // there is one
	readEnded bool            // nothing more comes
}

// shares is how many connections have a part of a frame.
func (w *wire) shares(frame int) int {
	if frame < w.shareFrom {
		return 1
	}
	return 1 + len(w.more)
}

// share is the part of a frame that a connection has; the first is number 0.
func (w *wire) share(frame []byte, i int) []byte {
	return cutShare(frame, i, w.shares(len(frame)))
}

// cutShare is the share of a frame that connection i of so many has.
func cutShare(frame []byte, i, all int) []byte {
	n := len(frame)
	return frame[n*i/all : n*(i+1)/all]
}

// sending reports whether the kernel has yet to take something.
func (w *wire) sending() bool {
	waits := w.queue.Len() > 0
	for i := range w.more {
		waits = waits || w.more[i].queue.Len() > 0
	}
	return waits
}

// takeOver hands the data channels to the operations, once the group is complete: no connection can
// fail to come any more, so nothing but notices has to be read while no operation is under way, and
// those come over the control channels.
func (p *Path) takeOver() {
	here := 1
	for _, l := range p.links {
		if l == nil || !l.near {
			continue
		}
		if l.data.undriven() {
			l.unfold()
			continue // all are
		}
		l.stopListening()
		if sameHost(l.data) {
			here++
		}
	}
	if p.gen.undriven {
		return
	}
	p.oversubscribed = here > runtime.GOMAXPROCS(0)
	p.mu.Lock()
	err := p.takeOverLocked()
	p.mu.Unlock()
	if err != nil {
		p.group.Fail(frame.Gone(fmt.Errorf("collective: %w", err), p.Rank))
	}
}

func (p *Path) takeOverLocked() (err error) {
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
		if !l.near {
			continue
		}
		if err = l.drive(); err != nil {
			return err
		}
	}
	p.driven = true
	return nil
}

// stopListening ends the goroutine that reads the data channel.
func (l *link) stopListening() {
	l.data.SetReadDeadline(time.Unix(1, 0))
	<-l.listenEnded
}

// drive has operations drive a link, which no goroutine reads any more. The caller holds p.mu.
func (l *link) drive() (err error) {
	w := &l.wire
	w.more = make([]extraConn, len(l.more))
	for i := range w.more {
		w.more[i].fd = -1
	}
	if w.fd, err = l.data.drive(); err != nil {
		return err
	}
	for i, c := range l.more {
		if w.more[i].fd, err = c.drive(); err != nil {
			return err
		}
	}
	return nil
}

// drive takes a connection from the runtime's poller. What it returns is −1 after an error.
func (c *conn) drive() (fd int, err error) {
	if fd, err = c.duplicate(); err != nil {
		return -1, err
	}
	if sameHost(c) {
		unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, sameHostPacing) // as well as can be
	}
	c.raw.Close()
	return fd, nil
}

// fds are the descriptors of the wires. The caller holds p.mu.
func (p *Path) fds(each func(fd *int)) {
	for _, l := range p.links {
		if l == nil {
			continue
		}
		if l.wire.fd >= 0 {
			each(&l.wire.fd)
		}
		for i := range l.wire.more {
			if f := &l.wire.more[i]; f.fd >= 0 {
				each(&f.fd)
			}
		}
	}
}

// Start lets an operation drive; false where the group has ended.
func (p *Path) Start() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.released {
		return false
	}
	p.driving = true
	return true
}

// Finish is the end of an operation.
func (p *Path) Finish() {
	p.mu.Lock()
	p.driving = false
	if p.released {
		p.closeWires()
	}
	p.mu.Unlock()
}

// shutWires ends all movement on the wires, so that an operation that sleeps wakes up. The caller
// holds p.mu.
func (p *Path) shutWires() {
	p.fds(func(fd *int) { unix.Shutdown(*fd, unix.SHUT_RDWR) }) // an error means that it has ended already
	p.alert()
	if !p.driving {
		p.closeWires()
	}
}

// closeWires closes the wires of a group that has ended. The caller holds p.mu; no operation is
// under way.
func (p *Path) closeWires() {
	p.fds(func(fd *int) {
		unix.Close(*fd)
		*fd = -1
	})
	if p.alarm >= 0 {
		unix.Close(p.alarm)
		p.alarm = -1
	}
}

// Poke wakes an operation that sleeps.
func (p *Path) Poke() {
	if p.sleeping.Load() {
		p.mu.Lock()
		p.alert()
		p.mu.Unlock()
	}
}

// alert raises the alarm. The caller holds p.mu.
func (p *Path) alert() {
	if p.alarm >= 0 {
		one := [8]byte{1}
		unix.Write(p.alarm, one[:]) // fails only where the alarm is raised already
	}
}

// Driven reports whether operations move the frames, by Pause and Advance. It is for them.
func (p *Path) Driven() bool { return p.driven }

// Pause moves frames until there is something for the operation to look at. It polls for a moment,
// since what it waits for is mostly on its way, and then sleeps between polls. It returns ErrEnded
// where the group has failed, and the error of a context that has ended.
func (p *Path) Pause(ctx context.Context, late Late) error {
	var until time.Time
	slept := false
	for pass := 1; ; pass++ {
		if p.Advance(slept || pass%lookAround == 0) {
			return nil
		}
		select {
		case <-p.wake:
			return nil
		case <-p.failed:
			return ErrEnded
		default:
		}
		now := time.Now()
		if until.IsZero() {
			until = now.Add(p.patience())
		}
		if now.After(until) {
			if err := ctx.Err(); err != nil {
				return err
			}
			p.sleep(ctx, late(now))
			slept = true
			continue
		}
		unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // the rank that is waited for may share this core
	}
}

func (p *Path) patience() time.Duration {
	if p.oversubscribed {
		return spinOversubscribed
	}
	return spinBound
}

// judgeSilence judges a peer whose control channel has ended without a notice. The peer may have
// sent the reason on the data channel, which nothing reads between operations; ranks that wait in
// another group of the generation must be told too.
func (l *link) judgeSilence(err error) {
	p := l.path
	p.mu.Lock()
	if p.released || !p.driven || p.driving || l.wire.fd < 0 { // then the data channel is read
		p.mu.Unlock()
		return
	}
	said := append([]byte(nil), l.wire.in.Held()...)
	var more [frame.HeaderSize + frame.MaxNotice]byte
	if n, _, err := unix.Recvfrom(l.wire.fd, more[:], unix.MSG_PEEK|unix.MSG_DONTWAIT); err == nil {
		said = append(said, more[:n]...)
	}
	p.mu.Unlock()
	if len(said) >= frame.HeaderSize {
		h, wrong := frame.ParseHeader(said)
		rest := said[frame.HeaderSize:]
		if wrong == nil && (h.Kind.IsNotice()) && int(h.Length) <= len(rest) {
			if n, wrong := frame.ParseNotice(h.Kind, rest[:h.Length], p.gen.Size); wrong == nil {
				p.group.FailAll(n)
				return
			}
		}
	}
	l.lost(err)
}

// Advance moves what can be moved on the links where the operation needs it, or on all of them.
func (p *Path) Advance(all bool) bool {
	moved := p.hasFresh.Load() && p.takeFresh()
	for _, l := range p.links {
		if l == nil || l.wire.fd < 0 {
			continue
		}
		if l.wire.sending() && l.push() {
			moved = true
		}
		if !l.wire.readEnded && (all || l.wire.filling || p.boxes[l.rank].ExpectsFrame()) && l.pull() {
			moved = true
		}
		for i := range l.wire.more {
			if !l.wire.readEnded && l.pullMore(i) {
				moved = true
			}
		}
	}
	return moved
}

// sleep waits for the kernel, for an alarm, or for a bound; within is another one, if it is not 0.
func (p *Path) sleep(ctx context.Context, within time.Duration) {
	p.polls = append(p.polls[:0], unix.PollFd{Fd: int32(p.alarm), Events: unix.POLLIN})
	for _, l := range p.links {
		if l == nil || l.wire.fd < 0 {
			continue
		}
		w, events := &l.wire, int16(0)
		if w.queue.Len() > 0 {
			events = unix.POLLOUT
		}
		if !w.readEnded && !w.waiting {
			events |= unix.POLLIN
		}
		p.watch(w.fd, events)
		for i := range w.more {
			f, events := &w.more[i], int16(0)
			if f.queue.Len() > 0 {
				events = unix.POLLOUT
			}
			if !w.readEnded && f.due.Len() > 0 {
				events |= unix.POLLIN
			}
			p.watch(f.fd, events)
		}
	}
	bound := sleepBound
	if ctx.Done() != nil {
		bound = sleepContext
	}
	if within > 0 {
		bound = min(bound, within)
	}
	p.sleeping.Store(true)
	select {
	case <-p.failed: // the next look finds it
	case <-p.wake:
		p.group.Poke()
	default:
		timeout := unix.NsecToTimespec(int64(bound))
		unix.Ppoll(p.polls, &timeout, nil) // whatever it returns, the links are polled next
	}
	p.sleeping.Store(false)
	if p.polls[0].Revents != 0 {
		var count [8]byte
		unix.Read(p.alarm, count[:])
	}
}

// watch adds to what the kernel is asked for.
func (p *Path) watch(fd int, events int16) {
	if events != 0 {
		p.polls = append(p.polls, unix.PollFd{Fd: int32(fd), Events: events})
	}
}

// carry takes a frame of the operation under way and writes at once what the kernel takes of it.
func (l *link) carry(o *frame.Outgoing) {
	w := &l.wire
	switch {
	case w.writeEnded || w.fd < 0 && l.near:
		o.Done.Store(true) // the end of the group is told otherwise
		return
	case w.fd < 0:
		w.unsent.Push(o)
		return
	}
	o.Shares = w.shares(len(o.Data))
	idle := w.queue.Len() == 0
	w.queue.Push(o)
	for i := range o.Shares - 1 {
		idle = idle || w.more[i].queue.Len() == 0
		w.more[i].queue.Push(o)
	}
	if idle {
		l.push()
	}
}

// push writes what the kernel takes and reports whether that was anything.
func (l *link) push() bool {
	w := &l.wire
	moved := l.pushOn(&w.dataConn, 0)
	for i := range w.more {
		moved = l.pushOn(&w.more[i].dataConn, i+1) || moved
	}
	return moved
}

func (l *link) pushOn(s *dataConn, number int) (moved bool) {
	w := &l.wire
	for s.queue.Len() > 0 {
		o := s.queue.At(0)
		n, err := w.write(s, number, o)
		if n > 0 {
			moved = true
			s.sent += n
			l.path.gen.Sent.Add(uint64(n))
		}
		size := len(w.share(o.Data, number))
		if number == 0 {
			size += frame.HeaderSize
		}
		switch {
		case s.sent == size:
			s.queue.Pop()
			s.sent = 0
			if o.Shares--; o.Shares == 0 {
				o.Done.Store(true)
			}
		case err == nil || errors.Is(err, unix.EAGAIN):
			return moved
		case !errors.Is(err, unix.EINTR):
			w.dropFrames()
			l.unwritable(fmt.Errorf("write: %w", err))
			return true
		}
	}
	return moved
}

// dropFrames drops all frames, from now on too.
func (w *wire) dropFrames() {
	w.writeEnded = true
	drop := func(s *dataConn) {
		for s.queue.Len() > 0 {
			s.queue.Pop().Done.Store(true)
		}
	}
	drop(&w.dataConn)
	for i := range w.more {
		drop(&w.more[i].dataConn)
	}
}

// write writes some of a connection's share of a frame.
func (w *wire) write(s *dataConn, number int, o *frame.Outgoing) (int, error) {
	data := w.share(o.Data, number)
	if number > 0 {
		return unix.Write(s.fd, data[s.sent:])
	}
	if w.sent >= frame.HeaderSize {
		return unix.Write(w.fd, data[w.sent-frame.HeaderSize:])
	}
	o.Header.Append(w.head[:0])
	if len(data) == 0 {
		return unix.Write(w.fd, w.head[w.sent:])
	}
	w.both = [2][]byte{w.head[w.sent:], data}
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
			arrived(w.target)
			return true
		case w.waiting:
			r := l.path.boxes[l.rank].Wanted(&w.pending)
			if r == nil {
				return moved
			}
			w.waiting = false
			w.expect(r)
		default:
			n, ok, err := l.head()
			moved = moved || n > 0
			if err != nil {
				return l.broken(err) || moved
			}
			if !ok {
				return moved
			}
			moved = true // it may have come with the last read
		}
	}
}

// expect asks for a frame to be read to where an operation wants it.
func (w *wire) expect(r *frame.Incoming) {
	r.Shares = w.shares(len(r.Buf))
	w.target, w.into, w.filling = r, w.share(r.Buf, 0), true
	for i := range r.Shares - 1 {
		w.more[i].due.Push(r)
	}
}

// arrived notes that one more share of a frame is there.
func arrived(r *frame.Incoming) {
	if r.Shares--; r.Shares == 0 {
		r.Done.Store(true)
	}
}

// pullMore reads what an extra connection has of frames whose headers have come, and reports
// whether that was anything.
func (l *link) pullMore(i int) (moved bool) {
	f := &l.wire.more[i]
	for f.due.Len() > 0 {
		r := f.due.At(0)
		if len(f.into) == 0 {
			f.into = l.wire.share(r.Buf, i+1)
		}
		n, err := unix.Read(f.fd, f.into)
		if n <= 0 {
			if err == nil {
				err = io.ErrUnexpectedEOF
			}
			return l.broken(err) || moved
		}
		moved = true
		if f.into = f.into[n:]; len(f.into) == 0 {
			f.due.Pop()
			arrived(r)
		}
	}
	return moved
}

// broken handles the end of the incoming stream; it ignores errors that only mean that nothing is
// there.
func (l *link) broken(err error) bool {
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return false
	}
	l.wire.readEnded = true
	switch {
	case errors.Is(err, frame.ErrShut): // the group has ended
	case errors.Is(err, frame.Err):
		l.lost(err)
	default:
		l.ended(err)
	}
	return true
}

// fill reads some of the payload of the frame under way.
func (w *wire) fill() (int, error) {
	if n := w.in.Take(w.into); n > 0 {
		return n, nil
	}
	n, err := unix.Read(w.fd, w.into)
	if n == 0 && err == nil {
		err = io.ErrUnexpectedEOF
	}
	return max(n, 0), err
}

// head reads the header of the next frame; ok where it is complete, and the frame is handled or
// under way.
func (l *link) head() (n int, ok bool, err error) {
	f := l.wire.in
	if need := f.Missing(); need > 0 {
		if n, err = unix.Read(l.wire.fd, f.Room()); n <= 0 {
			if err == nil {
				if err = io.ErrUnexpectedEOF; len(f.Held()) == 0 {
					err = io.EOF
				}
			}
			return 0, false, err
		}
		f.Filled(n)
		if n < need || f.Missing() > 0 {
			return n, false, nil
		}
	}
	h, err := f.Header()
	if err != nil {
		return n, false, err
	}
	return n, true, l.arrived(f, &h)
}

// arrived handles the header of a frame.
func (l *link) arrived(f *frame.Reader, h *frame.Header) error {
	w := &l.wire
	switch {
	case h.Kind.IsNotice(): // where the peer's group had ended before this connection
		return l.notice(f, h)
	case h.Kind != frame.Data:
		return frame.Err
	case !l.begin():
		return frame.ErrShut
	}
	r, err := l.path.boxes[l.rank].Announce(h, &w.pending)
	if r != nil {
		w.expect(r)
	} else {
		w.waiting = err == nil
	}
	return err
}
