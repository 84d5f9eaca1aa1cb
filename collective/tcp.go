package collective

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Two connections join each pair of ranks. The data channel carries operations, the control channel notices, goodbyes and
// acknowledgements: it is always being read and never full, so a notice reaches a rank whatever the data channel is in the
// middle of, and the end of a peer is noticed while nothing else is read from it.
const (
	dataChannel    = 0 // dialled by the higher rank
	controlChannel = 1 // dialled by the lower rank, so that both of a pair notice when the other one is not there
	channels       = 2
)

const (
	directFrame  = 16 << 10              // frames up to this size are written on the operation's own goroutine
	noticeBound  = 50 * time.Millisecond // longest a notice may take to be handed to the kernel
	verdictBound = time.Second           // longest the control channel may take to tell why the data channel has ended
	dialVerdict  = 50 * time.Millisecond // the same while the peer has yet to dial it
	leaveBound   = time.Second           // longest a leaving rank waits for the others to read what it has sent
)

// tcpPath is the transport of a group whose ranks are processes.
type tcpPath struct {
	g     *Group
	links []*link // by rank; nil for the own one

	stop     chan struct{} // closed by leave and release: readers no longer wait for requests
	stopOnce sync.Once
	complete chan struct{} // closed when every channel of every link is there

	mu       sync.Mutex // guards what follows, and the conns of the links
	missing  int
	ended    bool // the group has ended: connections that come now are told so
	released bool
	running  sync.WaitGroup // all goroutines of the links
}

// conn is a proven connection.
type conn struct {
	net.Conn          // with TLS where it is encrypted
	raw      net.Conn // the socket
}

// link is the path to one other rank.
type link struct {
	path    *tcpPath
	rank    int
	claimed [channels]bool
	data    *conn
	control *conn
	out     sender

	controlWrites sync.Mutex

	mu      sync.Mutex
	began   bool  // operations have come, so the peer's side of the link was complete
	goodbye bool  // the peer leaves
	ending  error // how reading from the data channel has ended; nil while it has not
	suspect error // how writing to it has failed
	silent  error // how the control channel has ended, without a word
	verdict *time.Timer
	acked   chan struct{}
	ackOnce sync.Once
}

func newTCPPath(g *Group) *tcpPath {
	p := &tcpPath{g: g, links: make([]*link, g.size), stop: make(chan struct{}), complete: make(chan struct{}),
		missing: channels * (g.size - 1)}
	for i := range p.links {
		if i != g.rank {
			p.links[i] = &link{path: p, rank: i, acked: make(chan struct{})}
			p.links[i].out.kick = make(chan struct{}, 1)
		}
	}
	return p
}

// claim reserves a channel for one connection.
func (p *tcpPath) claim(from, channel int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.links[from]
	was := l.claimed[channel]
	l.claimed[channel] = true
	return !was
}

func (p *tcpPath) unclaim(from, channel int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.links[from].claimed[channel] = false
}

// install gives a link its connection and starts its goroutines. If the group has ended meanwhile, the peer is told why
// instead.
func (p *tcpPath) install(peer, channel int, c *conn) {
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		p.g.farewell(c)
		return
	}
	defer p.mu.Unlock()
	l := p.links[peer]
	if channel == dataChannel {
		l.data = c
		l.out.start(l)
		p.running.Add(2)
		go func() { defer p.running.Done(); l.readData() }()
		go func() { defer p.running.Done(); l.out.run() }()
	} else {
		l.control = c
		l.mu.Lock()
		if l.ending != nil {
			c.SetReadDeadline(time.Now().Add(verdictBound))
		}
		l.mu.Unlock()
		p.running.Add(1)
		go func() { defer p.running.Done(); l.readControl() }()
	}
	if p.missing--; p.missing == 0 {
		close(p.complete)
	}
}

// farewell tells the other end of a connection that has come too late why the group has ended, and closes it.
func (g *Group) farewell(c *conn) {
	g.mu.Lock()
	n := g.notice
	failed := g.failure != nil
	g.mu.Unlock()
	if failed {
		c.SetWriteDeadline(time.Now().Add(noticeBound))
		c.Write(n.frame(g.generation)) // the connection's end says enough where it fails
	}
	c.raw.Close()
}

// absent lists the ranks to which a channel is missing.
func (p *tcpPath) absent() []int {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ranks []int
	for i, l := range p.links {
		if l != nil && (l.data == nil || l.control == nil) {
			ranks = append(ranks, i)
		}
	}
	return ranks
}

func (p *tcpPath) send(to int, o *outgoing) { p.links[to].out.send(o) }

func (p *tcpPath) flood(n *notice) {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	frame := n.frame(p.g.generation)
	for _, l := range p.links {
		if l != nil {
			l.tell(frame)
		}
	}
}

// tell writes a frame to the control channel. What goes wrong there its reader notices too. While there is none yet, no
// operation can have begun, and the data channel does.
func (l *link) tell(frame []byte) {
	l.path.mu.Lock()
	c := l.control
	if c == nil {
		c = l.data
	}
	l.path.mu.Unlock()
	if c == nil {
		return
	}
	l.controlWrites.Lock()
	defer l.controlWrites.Unlock()
	c.SetWriteDeadline(time.Now().Add(noticeBound))
	c.Write(frame)
}

func (p *tcpPath) release() {
	p.stopOnce.Do(func() { close(p.stop) })
	p.mu.Lock()
	p.ended, p.released = true, true
	conns := make([]*conn, 0, channels*len(p.links))
	for _, l := range p.links {
		if l != nil {
			conns = append(conns, l.data, l.control)
		}
	}
	p.mu.Unlock()
	for _, c := range conns {
		if c != nil {
			c.raw.Close() // a second time does no harm
		}
	}
	for _, l := range p.links {
		if l == nil {
			continue
		}
		l.out.poke()
		l.mu.Lock()
		if l.verdict != nil {
			l.verdict.Stop()
		}
		l.mu.Unlock()
	}
}

func (p *tcpPath) quiesce() { p.running.Wait() }

func (p *tcpPath) leave() {
	p.stopOnce.Do(func() { close(p.stop) })
	goodbye := (&header{kind: goodbyeFrame, generation: p.g.generation}).append(nil)
	for _, l := range p.links {
		if l != nil {
			l.tell(goodbye)
			l.out.finish()
		}
	}
	bound := time.NewTimer(leaveBound)
	defer bound.Stop()
	for _, l := range p.links {
		if l == nil {
			continue
		}
		select {
		case <-l.acked:
		case <-p.g.failed:
			return
		case <-bound.C:
			return
		}
	}
}

func (l *link) lost(err error) { l.path.g.fail(gone(err, l.rank)) }

func (l *link) acknowledged() { l.ackOnce.Do(func() { close(l.acked) }) }

// readData delivers the frames of operations. When they end it does not judge why: the control channel knows.
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
	leaving := false
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
		case leaving:
			err = f.skip(int(h.length))
		case !l.begin():
			return errShut
		default:
			var buf []byte
			buf, err = box.place(&h, l.path.stop)
			if errors.Is(err, errShut) {
				if l.path.over() {
					return err
				}
				leaving = true
				err = f.skip(int(h.length))
				break
			}
			if err = f.payload(buf); err == nil {
				box.placed()
			}
		}
		if err != nil {
			return err
		}
	}
}

func (p *tcpPath) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.released
}

// begin notes that the peer's side of the link is complete. If its control channel had ended already, the peer is gone.
func (l *link) begin() bool {
	l.mu.Lock()
	l.began = true
	silent := l.silent
	l.mu.Unlock()
	if silent != nil {
		l.lost(silent)
	}
	return silent == nil
}

// notice reads a notice and ends the group with it.
func (l *link) notice(f *frameReader, h *header) error {
	p := make([]byte, h.length)
	if err := f.payload(p); err != nil {
		return err
	}
	n, err := parseNotice(h.kind, p, l.path.g.family.size)
	if err != nil {
		return err
	}
	l.path.g.failAs(n)
	return errShut
}

// ended: nothing more comes over the data channel. That is right after a goodbye. Otherwise the peer is gone, or has ended
// the group because of another rank and said so on the control channel, which therefore has the first word.
func (l *link) ended(err error) {
	l.mu.Lock()
	l.ending = err
	goodbye := l.goodbye
	l.mu.Unlock()
	if goodbye {
		l.left()
		return
	}
	l.awaitVerdict(err)
}

// unwritable: a peer that has said goodbye needs no more frames; if the operation needs the peer, it fails as it receives.
func (l *link) unwritable(err error) {
	l.mu.Lock()
	if l.suspect = err; l.goodbye {
		err = nil
	}
	l.mu.Unlock()
	if err != nil {
		l.awaitVerdict(err)
	}
}

// awaitVerdict waits for the control channel to say why the data channel does not work.
func (l *link) awaitVerdict(err error) {
	l.path.mu.Lock()
	c, over := l.control, l.path.released
	l.path.mu.Unlock()
	l.mu.Lock()
	silent := l.silent != nil
	if !over && !silent && c == nil && l.rank < l.path.g.rank && l.verdict == nil {
		l.verdict = time.AfterFunc(dialVerdict, func() { l.lost(err) }) // the peer's dial must come at once, or never
	}
	l.mu.Unlock()
	switch {
	case over:
	case silent:
		l.lost(err)
	case c != nil:
		c.SetReadDeadline(time.Now().Add(verdictBound))
	}
	// Otherwise this rank is dialling the control channel, which ends with a notice, a refusal or a connection.
}

// left: the peer has said goodbye and all it sent is here.
func (l *link) left() {
	l.path.g.boxes[l.rank].end()
	l.tell((&header{kind: ackFrame, generation: l.path.g.generation}).append(nil))
}

// readControl hears what the peer says about the group, and its end.
func (l *link) readControl() {
	f := &frameReader{r: l.control}
	for {
		h, err := f.next()
		if err == nil {
			err = l.heard(f, &h)
		}
		if err != nil {
			l.acknowledged() // no acknowledgement will come
			l.judge(err)
			return
		}
	}
}

func (l *link) heard(f *frameReader, h *header) error {
	if h.generation != l.path.g.generation {
		return errFrame
	}
	switch h.kind {
	case abortFrame, mismatchFrame:
		return l.notice(f, h)
	case ackFrame:
		l.acknowledged()
	case goodbyeFrame:
		l.mu.Lock()
		l.goodbye = true
		ended := l.ending != nil
		l.mu.Unlock()
		if ended {
			l.left()
		}
	default:
		return errFrame
	}
	return nil
}

// judge says what the end of the control channel means. A lower rank whose Connect fails may break off its dial of this
// channel without a word, but then says why on the data channel, on which nothing else has come.
func (l *link) judge(err error) {
	l.mu.Lock()
	goodbye, data := l.goodbye, l.ending
	if data == nil {
		data = l.suspect
	}
	unsaid := !goodbye && !l.began && data == nil && l.rank < l.path.g.rank
	if unsaid {
		l.silent = err
	}
	l.mu.Unlock()
	switch {
	case goodbye || errors.Is(err, errShut) || l.path.over():
	case unsaid && !errors.Is(err, errFrame):
	case errors.Is(err, os.ErrDeadlineExceeded) && data != nil:
		l.lost(data)
	case errors.Is(err, io.EOF):
		l.lost(errors.New("its connection has ended without a goodbye"))
	default:
		l.lost(err)
	}
}

// sender is the sending side of a data channel. Small frames are written at once by whoever sends, as long as the kernel takes
// them; everything else by the sender's goroutine, so that an operation never waits for a peer to read.
type sender struct {
	link *link
	conn *conn
	raw  syscall.RawConn // nil under TLS, where no write can be taken back half way
	kick chan struct{}

	mu      sync.Mutex
	queue   fifo[*outgoing]
	small   []byte // header and payload of a frame that is written at once
	rest    []byte // what of small the kernel has not taken
	writing bool   // the goroutine has taken something from the queue
	last    bool   // nothing follows; the channel is closed for writing after the queue
	broken  bool   // frames are dropped: the group ends, or the peer needs them no more

	both     [2][]byte             // of the goroutine
	buffers  net.Buffers           // of the goroutine
	attempt  func(fd uintptr) bool // writes small once; kept, so that it is allocated once
	wrote    int
	wroteErr error
}

// start prepares the sender before its goroutine and its users begin.
func (s *sender) start(l *link) {
	s.link, s.conn = l, l.data
	if _, encrypted := l.data.Conn.(*tls.Conn); !encrypted {
		if sc, ok := l.data.raw.(syscall.Conn); ok {
			s.raw, _ = sc.SyscallConn()
		}
	}
	s.attempt = func(fd uintptr) bool {
		s.wrote, s.wroteErr = syscall.Write(int(fd), s.small)
		return true
	}
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
	if s.broken {
		return
	}
	if s.raw == nil || len(o.data) > directFrame || s.writing || len(s.rest) > 0 || s.queue.len() > 0 {
		s.queue.push(o)
		s.poke()
		return
	}
	s.small = append(o.header.append(s.small[:0]), o.data...)
	s.wrote, s.wroteErr = 0, nil
	if err := s.raw.Write(s.attempt); err != nil || s.wroteErr != nil {
		s.wrote = 0 // a full kernel, or an error that the goroutine's write meets again
	}
	if s.wrote < len(s.small) {
		s.rest = s.small[s.wrote:]
		s.poke()
	}
	o.done.Store(true)
}

// finish lets the goroutine close the channel for writing once everything is out.
func (s *sender) finish() {
	s.mu.Lock()
	s.last = true
	s.mu.Unlock()
	s.poke()
}

// run writes what is queued until the group ends.
func (s *sender) run() {
	head := make([]byte, 0, headerSize)
	for {
		s.mu.Lock()
		rest := s.rest
		var o *outgoing
		if len(rest) == 0 && s.queue.len() > 0 {
			o = s.queue.pop()
		}
		s.writing = o != nil
		last := s.last
		s.mu.Unlock()
		var err error
		switch {
		case len(rest) > 0:
			_, err = s.conn.Write(rest)
		case o != nil:
			head = o.header.append(head[:0])
			err = s.write(head, o.data)
			o.finish()
		case last:
			s.closeWrite()
			return
		case s.link.path.over():
			return
		default:
			<-s.kick
		}
		s.mu.Lock()
		if len(rest) > 0 {
			s.rest = nil
		}
		s.broken = s.broken || err != nil
		s.mu.Unlock()
		if err != nil {
			s.drop(err)
			return
		}
	}
}

func (s *sender) write(head, data []byte) error {
	if s.raw == nil { // then nobody else uses small; one write is one record where it fits
		s.small = append(append(s.small[:0], head...), data[:min(len(data), directFrame)]...)
		if _, err := s.conn.Write(s.small); err != nil || len(data) <= directFrame {
			return err
		}
		_, err := s.conn.Write(data[directFrame:])
		return err
	}
	s.both[0], s.both[1] = head, data
	s.buffers = s.both[:]
	_, err := s.buffers.WriteTo(s.conn.raw)
	s.both[1] = nil
	return err
}

// drop forgets the queue.
func (s *sender) drop(err error) {
	s.mu.Lock()
	for s.queue.len() > 0 {
		s.queue.pop().finish()
	}
	s.mu.Unlock()
	s.link.unwritable(fmt.Errorf("write: %w", err))
}

func (s *sender) closeWrite() {
	if c, ok := s.conn.Conn.(interface{ CloseWrite() error }); ok {
		c.CloseWrite() // an error means that the peer is gone, which its readers tell
	}
}
