package sockets

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/routes"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/netif"
)

// A route may break while both ranks live. If there is another route to the same host, the group
// ends as soon as the break is detected, and the next world uses another route:
//
//   - The kernel reports that an interface of this host is down, or has lost the address.
//   - The peer's host acknowledges neither data on the route nor a new connection on it, and
//     answers on another route.
//
// If there is no other route, a reset would not help: TCP continues once the route has recovered.

const (
	watchEach  = 15 * time.Millisecond  // between two checks for unacknowledged data
	quietFor   = 30 * time.Millisecond  // a connection is suspected when an acknowledgement has been due for this time
	doubtEach  = 100 * time.Millisecond // between two trials of one route
	trialBound = 30 * time.Millisecond  // a working route answers within this time plus four round trips
	trialLate  = 10 * time.Millisecond  // additional time after the bound: this host may be slow
	trialSpare = 200 * time.Millisecond // another route answers within this time, or the host is gone
)

// Reasons why a group ends although all its ranks live.
var (
	errCut   = errors.New("collective: the route is cut, but the host answers on another one")
	errEnded = errors.New("collective: a connection has ended, but both ranks live")
)

// lostConn is a connection that was ended by an error while the group had not failed.
type lostConn struct {
	rank int
	addr netip.Addr // of the peer's host
}

// remoteOf returns the address of the peer's host, or the zero Addr without TCP.
func remoteOf(c *conn) netip.Addr {
	if at, ok := c.raw.RemoteAddr().(*net.TCPAddr); ok {
		return at.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// localOf returns the address of this host, or the zero Addr without TCP.
func localOf(c *conn) netip.Addr {
	if at, ok := c.raw.LocalAddr().(*net.TCPAddr); ok {
		return at.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

func (f *Generation) noteLost(rank int, c *conn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = append(f.lost, lostConn{rank, remoteOf(c)})
}

// tcpState is the kernel's state of a connection.
type tcpState struct {
	ended   bool          // an error has ended the connection; the peer has not closed it
	closed  bool          // the peer, or a device in between, has closed the connection
	unacked bool          // there is unacknowledged data
	heard   time.Duration // time since the last acknowledgement
	sent    Sent
}

// Sent is what a connection has sent: the number of bytes that the peer has acknowledged, and the
// time during which there was data to send for which the peer had room.
type Sent struct {
	Bytes uint64
	Busy  time.Duration
}

// Sent returns what each connection of the data channel to a peer has sent, as counted by the
// kernel. It returns nil if there is no connection, or if the kernel does not report it.
func (p *Path) Sent(peer int) (all []Sent) {
	p.links[peer].sockets(func(index int, _ *conn, state func() (tcpState, bool)) {
		if index < 0 {
			return
		}
		if s, ok := state(); ok {
			all = append(all, s.sent)
		}
	})
	return all
}

// stateOf returns the state of a socket, and whether the kernel reports it.
func stateOf(fd int) (tcpState, bool) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return tcpState{}, false
	}
	const closed, closeWait = 7, 8 // TCP_CLOSE, TCP_CLOSE_WAIT
	return tcpState{
		ended: info.State == closed, closed: info.State == closeWait, unacked: info.Unacked > 0, heard: time.Duration(info.Last_ack_recv) * time.Millisecond,
		sent: Sent{info.Bytes_acked, time.Duration(info.Busy_time-info.Rwnd_limited) * time.Microsecond},
	}, true
}

// sockets calls each for every connection of a link: those of the data channel with indices from 0,
// the control channel with −1. state queries the kernel, and must not be called after each has
// returned.
func (l *link) sockets(each func(index int, c *conn, state func() (tcpState, bool))) {
	p := l.path
	p.mu.Lock()
	defer p.mu.Unlock()
	one := func(index int, c *conn, fd int) {
		if c == nil {
			return
		}
		each(index, c, func() (s tcpState, ok bool) {
			if fd >= 0 {
				return stateOf(fd)
			}
			if sc, is := c.raw.(syscall.Conn); is {
				if raw, err := sc.SyscallConn(); err == nil {
					err = raw.Control(func(fd uintptr) { s, ok = stateOf(int(fd)) })
					return s, ok && err == nil
				}
			}
			return s, false
		})
	}
	one(0, l.data, l.wire.fd)
	for i, c := range l.more {
		fd := -1
		if i < len(l.wire.more) {
			fd = l.wire.more[i].fd
		}
		one(i+1, c, fd)
	}
	one(-1, l.control, -1)
}

// noteEnded records which connections of a link have ended by an error, and returns those of the
// data channel: if the peer lives, their routes have broken. It also returns the connections that
// have been closed. Once the group has failed it does nothing, since peers then close their
// connections, which resets those with unread data.
func (l *link) noteEnded() (data, closed []int) {
	if l.path.hasFailed() {
		return nil, nil
	}
	l.sockets(func(index int, c *conn, state func() (tcpState, bool)) {
		s, ok := state()
		if ok && s.closed && index >= 0 {
			closed = append(closed, index)
		}
		if !ok || !s.ended {
			return
		}
		l.path.gen.noteLost(l.path.Original(l.rank), c)
		if index >= 0 {
			data = append(data, index)
		}
	})
	return data, closed
}

// tellCut reports to the peer, over the control channel, which connections of the data channel have
// ended. A dead peer does not receive it, and a peer whose group has ended has said so. Any other
// peer ends the group at once.
func (l *link) tellCut() {
	cut, closed := l.noteEnded()
	for _, index := range cut {
		l.tell((&frame.Header{Kind: frame.Cut, Generation: l.path.gen.Number, Seq: uint64(index)}).Append(nil))
	}
	for _, index := range closed {
		l.tell((&frame.Header{Kind: frame.Cut, Generation: l.path.gen.Number, Seq: uint64(index), Step: frame.AsIfClosed}).Append(nil))
	}
}

// wasCut is called when the peer, which lives, reports that a connection of the data channel has
// ended. This rank may itself have closed it because the group has ended; then wasCut has no
// effect.
func (l *link) wasCut(h *frame.Header) {
	ours := h.Step == frame.AsIfClosed && (l.path.hasFailed() || l.path.group.Closing())
	l.sockets(func(i int, c *conn, _ func() (tcpState, bool)) {
		if !ours && i >= 0 && uint64(i) == h.Seq {
			l.path.broke(l.rank, c)
		}
	})
	if h.Step != frame.NoticeFollows && !l.path.group.Closing() {
		l.path.group.Fail(frame.Gone(errEnded, l.rank))
	}
}

// survived reports whether ranks that the last group of all ranks has lost are in the new world,
// whose ranks have these addresses. If so, other routes may have broken too. The routes of the
// connections that ended have broken, unless the group has failed because of other ranks: then the
// peer closed them, and its notice may have arrived later.
func (e *Endpoint) survived(ranks [][]string) bool {
	e.mu.Lock()
	f := e.current
	e.mu.Unlock()
	if f == nil {
		return false
	}
	failure := f.groups.Failure()
	if failure == nil {
		return false
	}
	lives := func(rank int) bool {
		return rank < len(f.Addrs) && len(f.Addrs[rank]) > 0 &&
			slices.ContainsFunc(ranks, func(addrs []string) bool { return slices.Equal(addrs, f.Addrs[rank]) })
	}
	f.mu.Lock()
	lost := slices.Clone(f.lost)
	f.mu.Unlock()
	some := slices.ContainsFunc(failure.Dead, lives)
	for _, l := range lost {
		if lives(l.rank) && (slices.Contains(failure.Dead, l.rank) || slices.Contains(failure.Dead, f.Self)) {
			some = true
			e.breakRoute(f, l.rank, l.addr)
		}
	}
	return some
}

// breakRoute records that the route to an address of a rank has broken.
func (e *Endpoint) breakRoute(f *Generation, rank int, addr netip.Addr) {
	if addrIndex(f.Addrs[rank], addr) >= 0 {
		e.routes.Break(time.Now(), f.hostKey(rank), addr)
	}
}

// spare returns a route to a rank's host other than that of a connection.
func (e *Endpoint) spare(f *Generation, rank int, c *conn) (routes.Route, bool) {
	if len(f.Addrs[rank]) < 2 || f.sameHost(f.Self, rank) {
		return routes.Route{}, false
	}
	return e.routes.Spare(f.hostKey(rank), remoteOf(c))
}

// cut ends a group because the route of a connection to a peer is cut, and reports the route to the
// peer.
func (e *Endpoint) cut(path *Path, l *link, index int, c *conn, spare routes.Route, why string) {
	f, rank := path.gen, path.Original(l.rank)
	e.breakRoute(f, rank, remoteOf(c))
	if l.leads(remoteOf(c)) {
		e.tellElsewhere(f, rank, spare, c)
	} else if index >= 0 {
		l.tell((&frame.Header{Kind: frame.Cut, Generation: f.Number, Seq: uint64(index), Step: frame.NoticeFollows}).Append(nil))
	}
	e.cfg.Log.Warnf("collective: %s: the connection from %v to rank %d at %v is given up; the next world uses %v",
		why, localOf(c), rank, remoteOf(c), spare)
	path.group.Fail(frame.Gone(fmt.Errorf("%w: %s", errCut, why), l.rank))
}

// leads reports whether the control channel is connected to an address.
func (l *link) leads(addr netip.Addr) (leads bool) {
	l.sockets(func(index int, c *conn, _ func() (tcpState, bool)) {
		leads = leads || index < 0 && remoteOf(c) == addr
	})
	return leads
}

// tellElsewhere reports to a peer over another route that the route of a connection is cut, since
// the control channel is cut too. The peer then ends the group. If that takes too long, the peer
// detects the cut itself.
func (e *Endpoint) tellElsewhere(f *Generation, rank int, spare routes.Route, c *conn) {
	ctx, cancel := context.WithTimeout(e.life, trialSpare)
	defer cancel()
	own, there := addrIndex(f.Addrs[f.Self], localOf(c)), addrIndex(f.Addrs[rank], spare.Addr)
	if own < 0 || there < 0 {
		return
	}
	h := identity.Hello{Generation: f.Number, From: f.Self, To: rank, Channel: probeChannel}
	other, err := e.dialOne(ctx, f.Addrs[rank][there], f.Key, h, nil)
	if err != nil {
		e.cfg.Log.WithError(err).Debugf("collective: cannot notify rank %d of the cut route", rank)
		return
	}
	defer other.raw.Close()
	stop := context.AfterFunc(ctx, func() { other.raw.Close() })
	defer stop()
	var card netif.Card
	if readAnswer(other, &card) != nil {
		return
	}
	request := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, cutRequest), uint32(own))
	if _, err := other.Write(request); err == nil {
		_, _ = io.ReadFull(other, request) // an error means that the peer's group has ended, or that it is dead
	}
}

// toldCut is called when a rank reports that the route to one of its addresses is cut.
func (e *Endpoint) toldCut(f *Generation, from, index int) {
	if at, err := netip.ParseAddrPort(f.Addrs[from][index]); err == nil {
		e.breakRoute(f, from, at.Addr().Unmap())
	}
	for _, path := range f.groups.Paths() {
		if path.ID == 0 && !path.group.Closing() {
			path.group.Fail(frame.Gone(errCut, from))
		}
	}
}

// addrIndex returns the index of an address among those that a rank has given, or −1.
func addrIndex(texts []string, addr netip.Addr) int {
	return slices.IndexFunc(texts, func(text string) bool {
		at, err := netip.ParseAddrPort(text)
		return err == nil && at.Addr().Unmap() == addr
	})
}

// Guard watches the connections of a group for which there are other routes, until the group ends.
func (e *Endpoint) Guard(path *Path) {
	if path.Size < 2 || !slices.ContainsFunc(path.links, func(l *link) bool { return l != nil && e.spared(path, l) }) {
		return
	}
	e.mu.Lock()
	begin := !e.watching && e.life.Err() == nil
	if begin {
		e.watching = true
		e.running.Go(e.watchCards)
	}
	e.mu.Unlock()
	path.mu.Lock()
	if !path.released {
		path.running.Go(func() { e.watchAcks(path) })
	}
	path.mu.Unlock()
}

// spared reports whether there is another route for a connection of a link.
func (e *Endpoint) spared(path *Path, l *link) (some bool) {
	rank := path.Original(l.rank)
	l.sockets(func(_ int, c *conn, _ func() (tcpState, bool)) {
		if !some {
			_, some = e.spare(path.gen, rank, c)
		}
	})
	return some
}

// watchCards checks the interfaces of the connections whenever the kernel reports a change.
func (e *Endpoint) watchCards() {
	err := netif.Watch(e.life, func() {
		e.mu.Lock()
		f := e.current
		e.mu.Unlock()
		own := netif.Own()
		if len(own) == 0 {
			return // the kernel does not report changes
		}
		for _, path := range f.groups.Paths() {
			e.checkCards(path, own)
		}
	})
	if err != nil {
		e.cfg.Log.WithError(err).Debug("collective: the kernel does not report changes of interfaces: a cut is noticed only when it delays data")
	}
}

// checkCards ends a group whose connections have lost their interface, if there is another route.
func (e *Endpoint) checkCards(path *Path, own map[netip.Addr]netif.Card) {
	if path.hasFailed() {
		return
	}
	for _, l := range path.links {
		if l == nil {
			continue
		}
		var down *conn
		at, why := 0, ""
		l.sockets(func(index int, c *conn, _ func() (tcpState, bool)) {
			local := localOf(c)
			card, has := own[local]
			switch {
			case down != nil || has && card.Up:
			case has:
				down, at, why = c, index, "interface "+card.Name+" is down"
			default:
				down, at, why = c, index, fmt.Sprintf("no interface has the address %v any more", local)
			}
		})
		if down == nil {
			continue
		}
		if spare, is := e.spare(path.gen, path.Original(l.rank), down); is {
			e.cut(path, l, at, down, spare, why)
			return
		}
	}
}

// doubt is what has been observed about a connection with unacknowledged data.
type doubt struct {
	since time.Time // the last acknowledgement, or when data was first seen unacknowledged
	tried time.Time // when its route was last tested
}

// watchAcks looks for connections on which nothing is acknowledged, and tests their routes.
func (e *Endpoint) watchAcks(path *Path) {
	ctx, cancel := context.WithCancel(e.life)
	defer cancel()
	ticker := time.NewTicker(watchEach)
	defer ticker.Stop()
	doubts := map[*conn]doubt{}
	for {
		select {
		case <-path.stop:
			return
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, l := range path.links {
			if l == nil {
				continue
			}
			if index, c := suspect(l, doubts, time.Now()); c != nil && e.tryRoute(ctx, path, l, index, c) {
				return
			}
		}
	}
}

// suspect returns a connection of a link on which nothing has been acknowledged for too long.
func suspect(l *link, doubts map[*conn]doubt, now time.Time) (at int, suspected *conn) {
	l.sockets(func(index int, c *conn, state func() (tcpState, bool)) {
		s, ok := state()
		if !ok || !s.unacked {
			delete(doubts, c)
			return
		}
		d, known := doubts[c]
		if heard := now.Add(-s.heard); !known {
			d.since = now
		} else if heard.After(d.since) {
			d.since = heard
		}
		if suspected == nil && now.Sub(d.since) >= quietFor && now.Sub(d.tried) >= doubtEach {
			d.tried = now
			at, suspected = index, c
		}
		doubts[c] = d
	})
	return at, suspected
}

// tryRoute ends the group if a new connection on the route of c is not answered but one on another
// route to the host is. The peer's kernel answers, however busy the peer's process is.
func (e *Endpoint) tryRoute(ctx context.Context, path *Path, l *link, index int, c *conn) bool {
	f, rank := path.gen, path.Original(l.rank)
	spare, is := e.spare(f, rank, c)
	if !is {
		return false
	}
	suspected, other := addrIndex(f.Addrs[rank], remoteOf(c)), addrIndex(f.Addrs[rank], spare.Addr)
	if suspected < 0 || other < 0 || path.hasFailed() ||
		!unanswered(ctx, f.Addrs[rank][suspected], f.Addrs[rank][other], trialBound+4*spare.Trip) {
		return false
	}
	e.cut(path, l, index, c, spare, fmt.Sprintf("nothing sent to %v is acknowledged", remoteOf(c)))
	return true
}

// unanswered reports whether attempts to connect to the suspected address are not answered within a
// time in which an attempt at the other address is answered. A refusal is an answer.
func unanswered(ctx context.Context, suspected, other string, bound time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, trialSpare+bound)
	defer cancel()
	answers := make(chan bool, 3) // whether an answer is from the suspected address
	attempts := 0
	try := func(addr string, isSuspected bool) {
		attempts++
		go func() {
			var d net.Dialer
			c, err := d.DialContext(ctx, "tcp", addr)
			if err == nil {
				c.Close()
			}
			if err == nil || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) {
				answers <- isSuspected
				return
			}
			<-ctx.Done()
			answers <- false
		}()
	}
	defer func() { // wait for every goroutine
		cancel()
		for ; attempts > 0; attempts-- {
			<-answers
		}
	}()
	try(suspected, true)
	try(other, false)
	again, end := time.NewTimer(bound/3), time.NewTimer(bound)
	defer again.Stop()
	defer end.Stop()
	alive, late := false, false
	for {
		select {
		case was := <-answers:
			attempts--
			if was || ctx.Err() != nil {
				return false
			}
			alive = true
		case <-again.C:
			try(suspected, true)
		case <-end.C:
			if alive && late {
				return true
			}
			late = alive
			end.Reset(trialLate)
		case <-ctx.Done():
			return false
		}
	}
}

// mostSaid is the largest number of hosts whose chosen routes are logged.
const mostSaid = 8

// Settle logs which routes a connected generation uses, on one rank of each host, and makes the
// endpoint test broken routes again later.
func (e *Endpoint) Settle(f *Generation) {
	hosts := map[string][]netip.AddrPort{}
	for rank, texts := range f.Addrs {
		if key := f.hostKey(rank); rank != f.Self && len(texts) > 1 && !f.sameHost(f.Self, rank) && hosts[key] == nil {
			hosts[key] = f.foreign(texts)
		}
	}
	stale, said := false, 0
	for host, addrs := range hosts {
		choice, known := e.routes.Choose(host, hostsOf(addrs))
		if len(addrs) < 2 || !known {
			continue
		}
		stale = stale || e.routes.Stale(time.Now(), host, hostsOf(addrs)) || choice.Sound < len(addrs)
		if f.leader(f.Self) == f.Self {
			e.say(host, choice, &said)
		}
	}
	e.mu.Lock()
	begin := stale && !e.mending && e.life.Err() == nil
	if begin {
		e.mending = true
		e.running.Go(e.mend)
	}
	e.mu.Unlock()
}

// say logs the routes to a host, unless they are those that were logged last. said counts the
// hosts.
func (e *Endpoint) say(host string, choice routes.Choice, said *int) {
	rails := choice.Routes[:choice.Rails]
	key, text := "", ""
	for i, r := range rails {
		key += fmt.Sprint(r.Near.Name, r.Local, r.Addr, " ")
		if i > 0 {
			text += " and "
		}
		text += r.String()
	}
	for _, r := range choice.Routes[choice.Rails:choice.Sound] {
		text += "; not over " + r.String()
	}
	for _, r := range choice.Routes[choice.Sound:] {
		text += fmt.Sprintf("; not over %s, %v to %v, which broke", r.Near, r.Local, r.Addr)
	}
	e.mu.Lock()
	same := e.said[host] == key
	e.said[host] = key
	e.mu.Unlock()
	if same {
		return
	}
	if *said++; *said > mostSaid {
		e.cfg.Log.Debugf("collective: data to host %s goes over %s", host, text)
		return
	}
	e.cfg.Log.Infof("collective: data to host %s goes over %s", host, text)
}

// mend periodically measures the routes that have not worked, until the endpoint is closed, since a
// later world may use them.
func (e *Endpoint) mend() {
	ticker := time.NewTicker(mendEach)
	defer ticker.Stop()
	for {
		select {
		case <-e.life.Done():
			return
		case <-ticker.C:
		}
		e.mu.Lock()
		f := e.current
		e.mu.Unlock()
		seen := map[string]bool{}
		for rank, texts := range f.Addrs {
			host := f.hostKey(rank)
			if seen[host] || len(texts) < 2 || f.sameHost(f.Self, rank) || rank == f.Self {
				continue
			}
			seen[host] = true
			if addrs := f.foreign(texts); len(addrs) > 1 && e.routes.Stale(time.Now(), host, hostsOf(addrs)) {
				e.measure(e.life, f, rank, host, addrs)
			}
		}
	}
}
