package sockets

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// A pair of ranks is connected by two channels: every pair if there are few ranks; otherwise the
// pairs that mesh.go names, and any other pair once an operation needs it. The data channel carries
// operations, and the control channel carries notices, goodbyes and acknowledgements. The control
// channel is always being read and never full, so a notice reaches a rank whatever the data channel
// is doing, and the end of a peer is noticed while nothing else is read from it.
const (
	dataChannel       = 0 // dialled by the higher rank
	controlChannel    = 1 // dialled by the lower rank, so that both ranks notice if the other one is missing
	visitChannel      = 2 // belongs to no group
	firstExtraChannel = 3 // and above: further connections of the data channel, dialled like the first
	// belongs to no group: measures the routes between two hosts
	probeChannel = firstExtraChannel + MaxConnections
	// and above: the first connection of a data channel with more connections than configured; the
	// number is added
	countedChannel = probeChannel
)

const (
	tlsRecord    = 16 << 10    // bytes of a frame that are sent in one TLS record with its header
	noticeBound  = time.Second // longest time until the kernel has taken a notice, on a starved rank
	verdictBound = time.Second // longest time until the control channel exists, or reports why the data channel has ended
	LeaveBound   = time.Second // longest time that a leaving rank waits until the others have read what it has sent
)

// Path is the transport of a group whose ranks are processes. Encrypted data channels have a reader
// and a writer goroutine each; others are driven by the operations themselves (driven.go).
type Path struct {
	Lane
	owner
	links []*link // by rank; nil at this rank

	stop     chan struct{} // closed by Leave and Release: readers do not wait for requests any more
	stopOnce sync.Once
	complete chan struct{}           // closed when every channel of every near link exists
	broke    func(peer int, c *conn) // called when the route of a connection has broken; it does not block
	dials    dials                   // of far links

	mu       sync.Mutex // guards what follows, and the conns of the links
	missing  int        // number of missing connections of near links
	fresh    []*link    // complete far links that no operation drives yet
	ended    bool       // the group has ended: the reason is sent on later connections
	released bool
	running  sync.WaitGroup // all goroutines of the links
	driver

	left atomic.Int32 // number of peers that have sent a goodbye
}

// owner is the group of a path, with the parts that the path needs often.
type owner struct {
	gen    *Generation
	group  Group
	boxes  []frame.Inbox // by rank
	wake   wake.Flag
	failed <-chan struct{}
}

// driver is the state of operations that drive the data channels.
type driver struct {
	driven  bool // operations drive; guarded by Path.mu, like the next two
	driving bool // an operation is driving
	alarm   int  // eventfd that wakes the operation, or −1

	sleeping       atomic.Bool
	hasFresh       atomic.Bool   // there are fresh links
	oversubscribed bool          // this host has more ranks than cores
	polls          []unix.PollFd // of the operation in progress
}

// conn is a proven connection.
type conn struct {
	net.Conn          // with TLS if it is encrypted
	raw      net.Conn // the socket
}

// undriven reports whether goroutines, not operations, read and write the connection, because it is
// encrypted or not a socket of the kernel.
func (c *conn) undriven() bool {
	_, socket := c.raw.(syscall.Conn)
	return !socket || c.Conn != c.raw
}

// duplicate returns another descriptor of the socket, which the caller must close.
func (c *conn) duplicate() (fd int, err error) {
	sc, ok := c.raw.(syscall.Conn)
	if !ok {
		return -1, errors.ErrUnsupported
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	var dupErr error
	err = raw.Control(func(is uintptr) { fd, dupErr = unix.FcntlInt(is, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(err, dupErr)
}

// sameHost reports whether both ends of a connection have the same address.
func sameHost(c *conn) bool {
	local, ok1 := c.raw.LocalAddr().(*net.TCPAddr)
	remote, ok2 := c.raw.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && local.IP.Equal(remote.IP)
}

// link is the path to one other rank.
type link struct {
	path *Path
	rank int
	connecting
	data    *conn
	more    []*conn // of the data channel, by channel from firstExtraChannel
	control *conn
	sealing      // used if goroutines move the frames
	wire    wire // used if operations do

	listenEnded   chan struct{} // closed when no goroutine reads the data channel
	controlWrites sync.Mutex

	mu sync.Mutex // guards what follows
	ends
	leaving
}

// sealing is a data channel that operations do not drive, because it is encrypted or no socket.
type sealing struct {
	out      sender
	strands  []*strand // of the connections in more
	served   bool      // strands are set; guarded by Path.mu
	unfolded bool      // frames are divided among them; guarded by out.mu
}

// connecting is the state of a link's connections while they are being made.
type connecting struct {
	near       bool         // it is complete before Connect returns; other links are far
	wanted     atomic.Bool  // a far link is needed: it is being connected, or complete
	lacking    int          // number of its missing connections
	configured int          // least number of connections of the data channel
	dataConns  int          // the same, including those for further routes
	claimed    map[int]bool // by channel
}

// ends records how a link's channels have ended.
type ends struct {
	began   bool        // frames of operations have arrived, so the peer's side of the link was complete
	ending  error       // the error that ended the reading of the data channel, or nil
	suspect error       // the error of writing to it, or nil
	silent  error       // the error that ended the control channel without a notice, or nil
	verdict *time.Timer // ends the group unless the other channel reports the reason
}

// leaving is the state of the peer's leave.
type leaving struct {
	goodbye bool          // the peer leaves
	owed    bool          // this rank has not acknowledged the goodbye yet
	acked   chan struct{} // closed by acknowledged
	ackOnce sync.Once
}

// NewPath returns the path of a group that is not connected yet; boxes are the group's inboxes.
func (e *Endpoint) NewPath(of *Generation, lane Lane, group Group, boxes []frame.Inbox) *Path {
	p := newPath(of, lane, group, boxes, e.cfg.ShareFrom)
	p.dials.dialChannel = func(ctx context.Context, peer, channel int) { e.dialChannel(ctx, p, peer, channel) }
	p.broke = func(peer int, c *conn) { e.breakRoute(of, p.Original(peer), remoteOf(c)) }
	return p
}

func newPath(gen *Generation, lane Lane, group Group, boxes []frame.Inbox, shareFrom int) *Path {
	p := &Path{
		Lane: lane, owner: owner{gen, group, boxes, group.Wake(), group.Failed()}, broke: func(int, *conn) {},
		links: make([]*link, lane.Size), stop: make(chan struct{}), complete: make(chan struct{}), driver: driver{alarm: -1},
	}
	p.dials.slots = make(chan struct{}, maxDialing)
	p.dials.ctx, p.dials.stop = context.WithCancel(context.Background())
	for i := range p.links {
		if i != p.Rank {
			conns := gen.connsBetween(p.Original(p.Rank), p.Original(i))
			l := &link{path: p, rank: i, connecting: connecting{configured: conns, dataConns: conns},
				leaving: leaving{acked: make(chan struct{})}, listenEnded: make(chan struct{})}
			l.more = make([]*conn, l.dataConns-1)
			l.out.more = wake.New()
			l.wire.fd, l.wire.shareFrom = -1, shareFrom
			l.lacking = 1 + l.dataConns
			if l.near = gen.near((i-p.Rank+p.Size)%p.Size, p.Size); l.near {
				l.wanted.Store(true)
				p.missing += l.lacking
			}
			p.links[i] = l
		}
	}
	return p
}

// dialled returns the channels to a peer that this rank dials.
func (p *Path) dialled(peer int) []int {
	if peer > p.Rank {
		return []int{controlChannel}
	}
	all := []int{dataChannel}
	for i := range p.links[peer].more {
		all = append(all, firstExtraChannel+i)
	}
	return all
}

// due reports whether the peer dials the channel.
func (p *Path) due(peer, channel int) bool {
	if peer < p.Rank {
		return channel == controlChannel
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.links[peer]
	if channel, all := l.counted(channel); all > 0 {
		return channel == dataChannel && l.widens() && all >= l.configured && all <= MaxConnections
	}
	return channel == dataChannel || channel >= firstExtraChannel && channel < firstExtraChannel+len(l.more)
}

// counted returns the channel that a name stands for, and the number of connections that the name
// announces, or 0.
func (l *link) counted(name int) (channel, all int) {
	if name > countedChannel {
		return dataChannel, name - countedChannel
	}
	return name, 0
}

// widens reports whether the data channel may have more connections than configured.
func (l *link) widens() bool {
	return !l.path.gen.sameHost(l.path.Original(l.rank), l.path.gen.Self)
}

// widen increases the number of connections of the data channel to a peer to most, if the channel
// may have more connections than configured. It returns the configured and the resulting number.
func (p *Path) widen(peer, most int) (configured, all int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.links[peer]
	if most = min(most, MaxConnections); l.widens() && most > l.configured {
		l.resize(most)
	}
	return l.configured, l.dataConns
}

// resize sets the number of connections of the data channel, before the first of them exists. The
// caller holds p.mu.
func (l *link) resize(conns int) {
	more := conns - l.dataConns
	l.dataConns = conns
	l.lacking += more
	if l.near {
		l.path.missing += more
	}
	fresh := make([]*conn, conns-1)
	copy(fresh, l.more)
	l.more = fresh
}

// claim reserves a channel for one connection. It returns false if the channel is taken.
func (p *Path) claim(from, name int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.links[from]
	channel, all := l.counted(name)
	was := l.claimed[channel]
	if all = max(all, l.configured); !was && channel == dataChannel && all != l.dataConns {
		l.resize(all)
	}
	if l.claimed == nil {
		l.claimed = map[int]bool{}
	}
	l.claimed[channel] = true
	return !was
}

// unclaim ends the effect of claim.
func (p *Path) unclaim(from, name int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	channel, _ := p.links[from].counted(name)
	p.links[from].claimed[channel] = false
}

// install adds a connection to a link and starts its goroutines. If the group has ended meanwhile,
// it sends the reason to the peer instead.
func (p *Path) install(peer, name int, c *conn) {
	channel, _ := p.links[peer].counted(name)
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		p.tellFailure(c)
		return
	}
	l := p.links[peer]
	if channel >= firstExtraChannel {
		l.more[channel-firstExtraChannel] = c
		if c.undriven() {
			l.serveStrand(channel - firstExtraChannel)
		}
	} else if channel == dataChannel && c.undriven() {
		l.data = c
		if l.near {
			l.serve()
		}
	} else if channel == dataChannel {
		l.data = c
		l.wire.in = frame.NewReader(c)
		p.running.Go(l.listen)
	} else {
		l.control = c
		l.mu.Lock()
		if l.ending != nil {
			c.SetReadDeadline(time.Now().Add(verdictBound))
		}
		l.mu.Unlock()
		p.running.Go(l.readControl)
	}
	last := p.arrived(l)
	p.mu.Unlock()
	if last {
		p.takeOver()
		close(p.complete)
	}
}

// arrived records that a link has one more connection, and reports whether it is the last one that
// the group needs. The caller holds p.mu.
func (p *Path) arrived(l *link) bool {
	l.lacking--
	if l.near {
		p.missing--
		return p.missing == 0
	}
	switch {
	case l.lacking > 0:
	case l.data.undriven():
		l.serve()
		l.unfold()
	default:
		p.fresh = append(p.fresh, l)
		p.hasFresh.Store(true)
		p.wakeOperation()
	}
	return false
}

// tellFailure sends the reason why the group has ended over a connection that was made too late,
// and closes it.
func (p *Path) tellFailure(c *conn) {
	if n, failed := p.group.Failure(); failed && !p.gen.Killed.Load() {
		c.SetWriteDeadline(time.Now().Add(noticeBound))
		c.Write(n.Frame(p.gen.Number)) // if it fails, the peer notices the end of the connection
	}
	c.raw.Close()
}

// hasFailed reports whether the group has failed.
func (p *Path) hasFailed() bool {
	_, failed := p.group.Failure()
	return failed
}

// lacking returns the number of missing connections of near links.
func (p *Path) lacking() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.missing
}

// absent returns the near ranks to which a connection is missing.
func (p *Path) absent() []int {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ranks []int
	for i, l := range p.links {
		if l != nil && l.near && l.lacking > 0 {
			ranks = append(ranks, i)
		}
	}
	return ranks
}

// Send starts to send a frame to a rank. It does not block.
func (p *Path) Send(to int, o *frame.Outgoing) {
	p.Want(to)
	if p.driven {
		p.links[to].carry(o)
	} else {
		p.links[to].seal(o)
	}
}

// Flood sends the reason why the group has ended to every connected rank. It blocks for at most
// noticeBound for each.
func (p *Path) Flood(n *frame.Notice) {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	frame := n.Frame(p.gen.Number)
	for _, l := range p.links {
		if l != nil {
			l.tell(frame)
		}
	}
}

// Nudge notifies a rank that the group's engine begins a cycle. Errors are ignored.
func (p *Path) Nudge(to int, cycle uint64) {
	h := frame.Header{Kind: frame.Nudge, Generation: p.gen.Number, Seq: cycle}
	p.links[to].tell(h.Append(make([]byte, 0, frame.HeaderSize)))
}

// tell writes a frame to the control channel. It ignores errors, since the channel's reader notices
// them. If there is no control channel yet, no operation can have begun, and tell uses the data
// channel.
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

// Release stops all transfers and closes the connections. If another goroutine makes the group
// fail, Release blocks until that has sent the reason to every rank; a rank without the reason
// would take this one for dead. It may be called more than once.
func (p *Path) Release() {
	if p.hasFailed() {
		<-p.failed
	}
	p.stopOnce.Do(func() { close(p.stop) })
	p.dials.stop()
	p.mu.Lock()
	p.ended, p.released, p.fresh = true, true, nil
	var conns []*conn
	for _, l := range p.links {
		if l != nil {
			conns = append(append(conns, l.data, l.control), l.more...)
		}
	}
	p.shutWires()
	p.mu.Unlock()
	for _, c := range conns {
		if c != nil {
			c.raw.Close() // may be closed already
		}
	}
	for _, l := range p.links {
		if l == nil {
			continue
		}
		l.out.more.Set()
		for _, s := range l.strands {
			s.out.more.Set()
		}
		l.mu.Lock()
		if l.verdict != nil {
			l.verdict.Stop()
		}
		l.mu.Unlock()
	}
}

// Quiesce blocks, after Release, until no goroutine accesses a buffer of a request any more.
func (p *Path) Quiesce() { p.running.Wait() }

// Leave notifies every rank that this one calls no more operations, and blocks until the others
// have read everything that it has sent, for at most LeaveBound.
func (p *Path) Leave() {
	goodbye := (&frame.Header{Kind: frame.Goodbye, Generation: p.gen.Number, Seq: p.group.Finished()}).Append(nil)
	connected := p.connected()
	for _, l := range connected {
		l.tell(goodbye)
	}
	bound := time.NewTimer(LeaveBound)
	defer bound.Stop()
	for _, l := range connected {
		select {
		case <-l.acked:
		case <-p.failed:
			return
		case <-bound.C:
			return
		}
	}
}

// Concluded is called after a successful operation: everything that a leaving peer has sent may now
// be read.
func (p *Path) Concluded() {
	if p.left.Load() == 0 {
		return
	}
	for _, l := range p.links {
		if l != nil {
			l.acknowledge()
		}
	}
}

// acknowledge notifies a peer that has left that this rank has finished all operations in which the
// peer took part, and so has read everything that it sent.
func (l *link) acknowledge() {
	l.mu.Lock()
	owed := l.owed && l.path.boxes[l.rank].Done(l.path.group.Finished())
	l.owed = l.owed && !owed
	l.mu.Unlock()
	if owed {
		l.tell((&frame.Header{Kind: frame.Ack, Generation: l.path.gen.Number}).Append(nil))
	}
}

// lost ends the group because the peer seems to be gone.
func (l *link) lost(err error) {
	l.noteEnded()
	l.path.group.Fail(frame.Gone(err, l.rank))
}

// acknowledged records that the peer has read everything, or cannot say so any more.
func (l *link) acknowledged() { l.ackOnce.Do(func() { close(l.acked) }) }

// listen reads the data channel while the group is not complete, since a peer whose Connect fails
// may report that there. It ends at the latest when operations take over the channel, and keeps the
// bytes that it has read for them.
func (l *link) listen() {
	defer close(l.listenEnded)
	f := l.wire.in
	for {
		if f.Missing() > 0 {
			n, err := l.data.Read(f.Room())
			f.Filled(n)
			switch {
			case n > 0 || err == nil:
			case errors.Is(err, os.ErrDeadlineExceeded):
				return
			default:
				if err == io.EOF && len(f.Held()) > 0 {
					err = io.ErrUnexpectedEOF
				}
				l.broken(err)
				return
			}
			continue
		}
		h, err := f.Peek()
		if err == nil && h.Kind == frame.Data {
			return
		}
		if h, err = f.Header(); err == nil {
			err = frame.Err
			if h.Kind.IsNotice() {
				err = l.notice(f, &h)
			}
		}
		l.broken(err)
		return
	}
}

// over reports whether Release was called.
func (p *Path) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.released
}

// begin records that the peer's side of the link is complete. If the peer's control channel had
// already ended, the peer is gone.
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

// notice reads a notice and ends the group with it. It then returns frame.ErrShut.
func (l *link) notice(f *frame.Reader, h *frame.Header) error {
	p := make([]byte, h.Length)
	if err := f.Payload(p); err != nil {
		return err
	}
	n, err := frame.ParseNotice(h.Kind, p, l.path.gen.Size)
	if err != nil {
		return err
	}
	l.path.group.FailAll(n)
	return frame.ErrShut
}

// ended is called when the data channel has ended. That is expected after a goodbye. Otherwise the
// peer is gone, or has ended the group because of another rank and reports that on the control
// channel, for which ended therefore waits.
func (l *link) ended(err error) {
	l.mu.Lock()
	l.ending = err
	goodbye := l.goodbye
	l.mu.Unlock()
	if !goodbye {
		l.awaitVerdict(err)
	}
}

// unwritable is called when a write has failed. A peer that has sent a goodbye needs no more
// frames; if the operation needs the peer, it fails when it receives.
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

// awaitVerdict gives the control channel verdictBound to report why the data channel does not work;
// then the group ends. It does not block.
func (l *link) awaitVerdict(err error) {
	l.path.mu.Lock()
	c, over := l.control, l.path.released
	l.path.mu.Unlock()
	l.mu.Lock()
	silent := l.silent != nil
	if !over && !silent && c == nil && l.rank < l.path.Rank && l.verdict == nil {
		l.verdict = time.AfterFunc(verdictBound, func() { l.lost(err) }) // a starved peer needs less time to dial
	}
	l.mu.Unlock()
	switch {
	case over:
	case silent:
		l.lost(err)
	case c != nil:
		c.SetReadDeadline(time.Now().Add(verdictBound))
		l.tellCut()
	}
	// Otherwise this rank is dialling the control channel, which ends with a notice, a refusal or a
	// connection.
}

// readControl handles the peer's frames on the control channel until the channel ends.
func (l *link) readControl() {
	f := frame.NewReader(l.control)
	for {
		h, err := f.Next()
		if err == nil {
			err = l.heard(f, &h)
		}
		if err != nil {
			l.acknowledged() // no acknowledgement can arrive any more
			l.judge(err)
			return
		}
	}
}

// heard handles a frame of the control channel.
func (l *link) heard(f *frame.Reader, h *frame.Header) error {
	if h.Generation != l.path.gen.Number {
		return frame.Err
	}
	switch h.Kind {
	case frame.Abort, frame.Mismatch:
		return l.notice(f, h)
	case frame.Ack:
		l.acknowledged()
	case frame.Nudge:
		l.path.group.Nudged(h.Seq)
	case frame.Cut:
		l.wasCut(h)
	case frame.Goodbye:
		l.mu.Lock()
		l.goodbye, l.owed = true, true
		l.mu.Unlock()
		l.path.left.Add(1)
		l.path.boxes[l.rank].End(h.Seq)
		l.path.group.Left(l.rank)
		l.acknowledge()
	default:
		return frame.Err
	}
	return nil
}

// judge decides what the end of the control channel means. A lower rank whose Connect fails may
// abandon its dial of this channel without a notice, but then reports the reason on the data
// channel, on which nothing else has arrived. A host that does not answer ends the channel in other
// ways.
func (l *link) judge(err error) {
	l.mu.Lock()
	goodbye, data := l.goodbye, l.ending
	if data == nil {
		data = l.suspect
	}
	brokenOff := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
	unsaid := brokenOff && !goodbye && !l.began && data == nil && l.rank < l.path.Rank
	if unsaid {
		l.silent = err
		if l.verdict == nil {
			l.verdict = time.AfterFunc(verdictBound, func() { l.judgeSilence(err) })
		}
	}
	l.mu.Unlock()
	switch {
	case goodbye || errors.Is(err, frame.ErrShut) || l.path.over():
	case unsaid:
	case errors.Is(err, os.ErrDeadlineExceeded) && data != nil:
		l.lost(data)
	case errors.Is(err, io.EOF):
		l.lost(errors.New("its connection has ended without a goodbye"))
	default:
		l.lost(err)
	}
}
