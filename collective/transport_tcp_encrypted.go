package collective

import (
	"errors"
	"fmt"
	"sync"
)

// serve starts the goroutines of an encrypted data channel. The caller holds p.mu. That of a far
// link waits for the control channel, so that no operation can be finished before this rank can say
// goodbye.
func (l *link) serve() {
	l.out.link, l.out.conn = l, l.data
	l.path.running.Go(l.readData)
	l.path.running.Go(l.out.run)
}

// readData delivers the frames of operations of an encrypted channel. When they end it does not
// decide why: the control channel tells.
func (l *link) readData() {
	f := &frameReader{r: l.data}
	err := l.deliverAll(f)
	if err == nil || errors.Is(err, errShut) {
		return // the group has ended
	}
	if errors.Is(err, errFrame) {
		l.lost(err)
		return
	}
	l.ended(err)
}

func (l *link) deliverAll(f *frameReader) error {
	box := &l.path.g.boxes[l.rank]
	for {
		h, err := f.next()
		if err != nil {
			return err
		}
		switch {
		case h.kind == abortFrame || h.kind == mismatchFrame: // where the peer's group had ended before this connection
			return l.notice(f, &h)
		case h.kind != dataFrame:
			return errFrame
		case !l.begin():
			return errShut
		}
		buf, err := box.place(&h, l.path.stop)
		if err != nil {
			return err
		}
		if err = f.payload(buf); err != nil {
			return err
		}
		box.placed()
	}
}

// sender is the sending side of an encrypted data channel: its goroutine writes, so that an
// operation never waits for a peer to read.
type sender struct {
	link *link
	conn *conn
	kick chan struct{}

	mu     sync.Mutex
	queue  fifo[*outgoing]
	broken bool // frames are dropped: the group ends, or the peer needs them no more

	record []byte // of the goroutine
}

func (s *sender) poke() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

func (s *sender) send(o *outgoing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.broken {
		s.queue.push(o)
		s.poke()
	}
}

// run writes what is queued until the group ends.
func (s *sender) run() {
	for {
		s.mu.Lock()
		var o *outgoing
		if s.queue.len() > 0 {
			o = s.queue.pop()
		}
		s.mu.Unlock()
		if o == nil {
			if s.link.path.over() {
				return
			}
			<-s.kick
			continue
		}
		size := headerSize + len(o.data)
		err := s.write(o)
		o.finish()
		if err != nil {
			s.drop(err)
			return
		}
		s.link.path.g.family.sent.Add(uint64(size))
	}
}

func (s *sender) write(o *outgoing) error {
	cut := min(len(o.data), tlsRecord)
	s.record = append(o.header.append(s.record[:0]), o.data[:cut]...)
	if _, err := s.conn.Write(s.record); err != nil || cut == len(o.data) {
		return err
	}
	_, err := s.conn.Write(o.data[cut:])
	return err
}

// drop discards the queue.
func (s *sender) drop(err error) {
	s.mu.Lock()
	s.broken = true
	for s.queue.len() > 0 {
		s.queue.pop().finish()
	}
	s.mu.Unlock()
	s.link.unwritable(fmt.Errorf("write: %w", err))
}
