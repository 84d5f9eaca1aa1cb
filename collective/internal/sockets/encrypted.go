package sockets

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// strand is one of the further connections of an encrypted data channel. It carries its share of
// all large frames, without a header, in the order of the frames, like the extra connections that
// operations drive.
type strand struct {
	out     sender
	due     chan []byte // memory for the next share
	got     chan error  // the result of reading it
	started bool        // guarded by Path.mu
}

// serve starts the goroutines of an encrypted data channel whose number of connections is known.
// The goroutines of a far link wait for the control channel, so that no operation can finish before
// this rank can send a goodbye. The caller holds p.mu.
func (l *link) serve() {
	l.strands = make([]*strand, len(l.more))
	for i := range l.strands {
		l.strands[i] = &strand{out: sender{more: wake.New()}, due: make(chan []byte, 1), got: make(chan error, 1)}
	}
	l.served = true
	l.out.link, l.out.conn = l, l.data
	l.path.running.Go(l.readData)
	l.path.running.Go(l.out.run)
	for i := range l.more {
		l.serveStrand(i)
	}
}

// serveStrand starts the goroutines of a further connection, once it and the first one exist. The
// caller holds p.mu.
func (l *link) serveStrand(i int) {
	if !l.served || l.more[i] == nil || l.strands[i].started {
		return
	}
	s := l.strands[i]
	s.started = true
	s.out.link, s.out.conn, s.out.number = l, l.more[i], i+1
	l.path.running.Go(s.out.run)
	l.path.running.Go(func() {
		for {
			select {
			case part := <-s.due:
				_, err := io.ReadFull(s.out.conn, part)
				s.got <- frame.NoEOF(err)
				if err != nil {
					return
				}
			case <-l.path.stop:
				return
			}
		}
	})
}

// unfold divides the frames that were queued before the link was complete, and all later ones,
// among all connections.
func (l *link) unfold() {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	l.unfolded = true
	for i := range l.out.queue.Len() {
		l.share(l.out.queue.At(i))
	}
	l.out.more.Set()
}

// seal sends a frame over an encrypted channel.
func (l *link) seal(o *frame.Outgoing) {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	if l.out.broken {
		return
	}
	if l.unfolded {
		l.share(o)
	}
	l.out.queue.Push(o)
	if l.unfolded {
		l.out.more.Set()
	}
}

// share gives the further connections their shares of a frame. The caller holds l.out.mu.
func (l *link) share(o *frame.Outgoing) {
	all := l.sharing(len(o.Data))
	o.Left.Store(int32(all))
	for i := range all - 1 {
		l.strands[i].out.send(o)
	}
}

// sharing returns the number of connections that carry a share of a frame of the given size.
func (l *link) sharing(frame int) int {
	if frame < l.wire.shareFrom {
		return 1
	}
	return 1 + len(l.strands)
}

// readData delivers the frames of an encrypted channel. When the channel ends, the control channel,
// not readData, determines the reason.
func (l *link) readData() {
	f := frame.NewReader(l.data)
	err := l.deliverAll(f)
	if err == nil || errors.Is(err, frame.ErrShut) {
		return // the group has ended
	}
	if errors.Is(err, frame.Err) {
		l.lost(err)
		return
	}
	l.ended(err)
}

func (l *link) deliverAll(f *frame.Reader) error {
	box := &l.path.boxes[l.rank]
	for {
		h, err := f.Next()
		if err != nil {
			return err
		}
		switch {
		case h.Kind.IsNotice(): // the peer's group had ended before this connection was made
			return l.notice(f, &h)
		case h.Kind != frame.Data:
			return frame.Err
		case !l.begin():
			return frame.ErrShut
		}
		buf, err := box.Place(&h, l.path.stop)
		if err != nil {
			return err
		}
		if err = l.payload(f, buf); err != nil {
			return err
		}
		box.Placed()
	}
}

// payload reads the payload of a frame from all connections that carry a share of it.
func (l *link) payload(f *frame.Reader, buf []byte) error {
	all := l.sharing(len(buf))
	for i := 1; i < all; i++ {
		l.strands[i-1].due <- cutShare(buf, i, all)
	}
	err := f.Payload(cutShare(buf, 0, all))
	for i := 1; i < all && err == nil; i++ {
		select {
		case err = <-l.strands[i-1].got:
		case <-l.path.stop:
			err = frame.ErrShut
		}
	}
	return err
}

// sender is the sending side of a connection of an encrypted data channel: its goroutine writes, so
// that an operation never waits for a peer to read.
type sender struct {
	link   *link
	conn   *conn
	number int // 0 for the first connection, which carries the headers
	more   wake.Flag

	mu     sync.Mutex
	queue  frame.FIFO[*frame.Outgoing]
	broken bool // frames are dropped, since the group ends or the peer does not need them any more

	record []byte // owned by the goroutine
}

// send queues a frame, of which this connection carries a share.
func (s *sender) send(o *frame.Outgoing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.broken {
		s.queue.Push(o)
		s.more.Set()
	}
}

// run writes the queued frames until the group ends.
func (s *sender) run() {
	for {
		s.mu.Lock()
		var o *frame.Outgoing
		if s.queue.Len() > 0 && (s.number > 0 || s.link.unfolded) {
			o = s.queue.Pop()
		}
		s.mu.Unlock()
		if o == nil {
			if s.link.path.over() {
				return
			}
			<-s.more
			continue
		}
		size, err := s.write(o)
		sealed(o)
		if err != nil {
			s.drop(err)
			return
		}
		s.link.path.gen.Sent.Add(uint64(size))
	}
}

// write writes this connection's share of a frame, and returns its size in bytes.
func (s *sender) write(o *frame.Outgoing) (size int, err error) {
	data := cutShare(o.Data, s.number, s.link.sharing(len(o.Data)))
	if s.number > 0 {
		_, err = s.conn.Write(data)
		return len(data), err
	}
	cut := min(len(data), tlsRecord)
	s.record = append(o.Header.Append(s.record[:0]), data[:cut]...)
	if _, err := s.conn.Write(s.record); err != nil || cut == len(data) {
		return frame.HeaderSize + len(data), err
	}
	_, err = s.conn.Write(data[cut:])
	return frame.HeaderSize + len(data), err
}

// sealed records that a connection has written its share of a frame.
func sealed(o *frame.Outgoing) {
	if o.Left.Add(-1) == 0 {
		o.Finish()
	}
}

// drop discards the queue and all later frames, after a write has failed with err.
func (s *sender) drop(err error) {
	s.mu.Lock()
	s.broken = true
	for s.queue.Len() > 0 {
		sealed(s.queue.Pop())
	}
	s.mu.Unlock()
	s.link.unwritable(fmt.Errorf("write: %w", err))
}
