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

// The data channels of a group that is not encrypted belong to the operation in progress: its own
// goroutine writes and reads them, without blocking, whenever it has to wait. No other goroutine is
// between the kernel and the buffers of an operation, and once the operation has returned, nothing
// accesses the buffers. Between operations nothing is read: the control channels report what
// happens to the group.

const (
	spinBound          = 100 * time.Microsecond // how long a wait polls before it sleeps
	spinOversubscribed = 20 * time.Microsecond  // the same if the ranks of one host outnumber its cores
	lookAround         = 16                     // passes between two polls of all links
	sleepBound         = time.Second            // of one sleep
	sleepContext       = 10 * time.Millisecond  // the same if a context may end meanwhile
	sameHostPacing     = "cubic"                // congestion control between ranks of one host: other algorithms pace packets without need
)

// dataConn is one connection of a data channel. The first connection carries the headers, all small
// frames and the first share of each large frame; a further connection carries its share of each
// large frame, without a header, in the order of the frames.
type dataConn struct {
	fd    int // −1 while operations do not drive it: under TLS, before the group is complete and after its end
	queue frame.FIFO[*frame.Outgoing]
	sent  int // bytes of the first frame in the queue, including its header, that the kernel has taken
}

// extraConn is a connection other than the first.
type extraConn struct {
	dataConn
	due  frame.FIFO[*frame.Incoming] // the frames whose shares come next
	into []byte                      // memory for the rest of the first frame's share; empty before its first byte
}

// wire is a data channel that operations drive. It belongs to the operation in progress.
type wire struct {
	dataConn
	more      []extraConn
	shareFrom int                         // smallest frame, in bytes, that the connections share; at least MaxConnections
	unsent    frame.FIFO[*frame.Outgoing] // frames of a far link that is not driven yet: the number of connections is not known

	head       [frame.HeaderSize]byte // header of the first frame in the queue
	both       [2][]byte
	writeEnded bool // frames are dropped, since the group ends or the peer does not need them any more

	in        *frame.Reader
	pending   frame.Early     // a frame that is not requested yet …
	waiting   bool            // … if this is set
	target    *frame.Incoming // the request of the frame that is being read …
	into      []byte          // … and the memory for the rest of that frame …
	filling   bool            // … if this is set
	readEnded bool            // nothing more is read
}

// shares returns the number of connections that carry a share of a frame.
func (w *wire) shares(frame int) int {
	if frame < w.shareFrom {
		return 1
	}
	return 1 + len(w.more)
}

// share returns the share of a frame that a connection carries; the first connection has the number
// 0.
func (w *wire) share(frame []byte, i int) []byte {
	return cutShare(frame, i, w.shares(len(frame)))
}

// cutShare returns the share of a frame that connection i of all connections carries.
func cutShare(frame []byte, i, all int) []byte {
	n := len(frame)
	return frame[n*i/all : n*(i+1)/all]
}

// sending reports whether the kernel has not taken all queued data yet.
func (w *wire) sending() bool {
	waits := w.queue.Len() > 0
	for i := range w.more {
		waits = waits || w.more[i].queue.Len() > 0
	}
	return waits
}

// takeOver makes operations drive the data channels, once no connection of the group is missing.
// From then on only notices must be read between operations, and these are sent over the control
// channels.
func (p *Path) takeOver() {
	here := 1
	for _, l := range p.links {
		if l == nil || !l.near {
			continue
		}
		if l.data.undriven() {
			l.unfold()
			continue // all links are undriven
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
		if l == nil || !l.near {
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

// drive makes operations drive a link, which no goroutine reads any more. The caller holds p.mu.
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

// drive removes a connection from the runtime's poller and returns its descriptor, or −1 after an
// error.
func (c *conn) drive() (fd int, err error) {
	if fd, err = c.duplicate(); err != nil {
		return -1, err
	}
	if sameHost(c) {
		unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, sameHostPacing) // a failure has no effect
	}
	c.raw.Close()
	return fd, nil
}

// fds calls each for every descriptor of the wires. The caller holds p.mu.
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

// Start begins an operation that drives the wires. It returns false if the group has ended.
func (p *Path) Start() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.released {
		return false
	}
	p.driving = true
	return true
}

// Finish ends the operation that Start began.
func (p *Path) Finish() {
	p.mu.Lock()
	p.driving = false
	if p.released {
		p.closeWires()
	}
	p.mu.Unlock()
}

// shutWires shuts down the wires, so that a sleeping operation wakes up. The caller holds p.mu.
func (p *Path) shutWires() {
	p.fds(func(fd *int) { unix.Shutdown(*fd, unix.SHUT_RDWR) }) // an error means that it has ended already
	p.alert()
	if !p.driving {
		p.closeWires()
	}
}

// closeWires closes the wires of a group that has ended. The caller holds p.mu; no operation is in
// progress.
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

// Poke wakes a sleeping operation.
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
		unix.Write(p.alarm, one[:]) // fails only if the alarm is raised already
	}
}

// Driven reports whether operations move the frames, by Pause and Advance. Only operations call it.
func (p *Path) Driven() bool { return p.driven }

// Pause moves frames until something has changed for the operation. It polls for a moment, since
// the awaited data is mostly in flight already, and then sleeps between polls. It returns ErrEnded
// if the group has failed, and the error of ctx if ctx has ended.
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
		unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // the rank for which this one waits may share this core
	}
}

// patience returns how long Pause polls before it sleeps.
func (p *Path) patience() time.Duration {
	if p.oversubscribed {
		return spinOversubscribed
	}
	return spinBound
}

// judgeSilence handles a peer whose control channel has ended without a notice. The peer may have
// sent the reason on the data channel, which nothing reads between operations. Ranks that wait in
// another group of the generation must be notified too.
func (l *link) judgeSilence(err error) {
	p := l.path
	p.mu.Lock()
	if p.released || !p.driven || p.driving || l.wire.fd < 0 { // the data channel is being read
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

// Advance moves data, without blocking, on the links that the operation needs or, if all is true,
// on all links. It reports whether anything was moved.
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

// sleep waits for an event on the wires or for an alarm, for a bounded time; within, if not 0, is a
// further bound.
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

// watch adds events of a descriptor to the poll.
func (p *Path) watch(fd int, events int16) {
	if events != 0 {
		p.polls = append(p.polls, unix.PollFd{Fd: int32(fd), Events: events})
	}
}

// carry queues a frame of the operation in progress, and immediately writes as much of it as the
// kernel takes.
func (l *link) carry(o *frame.Outgoing) {
	w := &l.wire
	switch {
	case w.writeEnded || w.fd < 0 && l.near:
		o.Done.Store(true) // the end of the group is reported elsewhere
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

// push writes as much as the kernel takes, and reports whether it has taken anything.
func (l *link) push() bool {
	w := &l.wire
	moved := l.pushOn(&w.dataConn, 0)
	for i := range w.more {
		moved = l.pushOn(&w.more[i].dataConn, i+1) || moved
	}
	return moved
}

// pushOn is like push, for one connection, by its number.
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

// dropFrames drops all queued frames, and all later ones.
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

// write writes a part of a connection's share of a frame, and returns the number of bytes.
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

// pull reads at most one frame, and reports whether anything has arrived.
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
			moved = true // it may have arrived with the last read
		}
	}
}

// expect makes the wire read a frame into the buffer of a request.
func (w *wire) expect(r *frame.Incoming) {
	r.Shares = w.shares(len(r.Buf))
	w.target, w.into, w.filling = r, w.share(r.Buf, 0), true
	for i := range r.Shares - 1 {
		w.more[i].due.Push(r)
	}
}

// arrived records that one more share of a frame is complete.
func arrived(r *frame.Incoming) {
	if r.Shares--; r.Shares == 0 {
		r.Done.Store(true)
	}
}

// pullMore reads, from an extra connection, shares of frames whose headers have arrived. It reports
// whether it has read anything.
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

// broken handles the end of the incoming stream, and returns true. For an error that only means
// that nothing has arrived, it returns false.
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

// fill reads a part of the payload of the current frame.
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

// head reads the header of the next frame. ok reports whether the header is complete, and the frame
// handled or begun.
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
	case h.Kind.IsNotice(): // the peer's group had ended before this connection
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
