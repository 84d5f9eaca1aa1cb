package sockets

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/routes"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/netif"
)

// A peer on another host may be reached at several addresses, one for each of its interfaces. When
// the addresses are first needed, the lowest rank of this host measures all of them at the same
// time, over separate proven connections; the other ranks of the host request the results from it.
// The results are kept for the host, over all generations, so later worlds do not wait. Peers with
// one address, and peers on this host, are not measured.

const (
	probeDial     = 500 * time.Millisecond // longest time until an address to be measured answers
	probeOthers   = 20 * time.Millisecond  // longest wait for addresses that do not answer, once one is proven
	probeProofs   = 500 * time.Millisecond // the same for addresses that answer
	probeBound    = 10 * time.Second       // longest measurement, which may wait until the peer reaches the generation
	probeServe    = 10 * time.Second       // longest time for one request
	probeMost     = 64                     // largest number of requests on one connection
	fewProbes     = 64                     // number of probes served at a time, whatever the world's size
	probePings    = 5                      // number of round trips measured
	firstBurst    = 64 << 10               // bytes
	lastBurst     = 1 << 20
	burstEnough   = time.Millisecond // a burst that takes this long is exact enough
	burstRounds   = 4                // number of bursts on each route
	burstSurely   = 2                // number of bursts after which routes that are slower by the factor burstHopeless are given up
	burstHopeless = 4
	burstsAtOnce  = 4        // number of hosts that this one measures at a time
	probeAnswer   = 64 << 10 // largest answer, in bytes

	fallBack = 500 * time.Millisecond // time after which the next address is dialled too, if one that is known to work does not answer
	fallSoon = 50 * time.Millisecond  // the same if a route has just broken
	mendEach = time.Minute            // between two measurements of routes that do not work
)

// The requests on a probe's connection: a kind and a number, 4 bytes each.
const (
	burstRequest = 1 // the number of bytes follows; the answer has the length of a request
	askRequest   = 2 // requests what this host knows about the routes to the host of a rank
	cutRequest   = 3 // the route to the asking rank's address of this index is cut
	probeRequest = 8
)

// routing is what an endpoint knows about the routes to other hosts.
type routing struct {
	routes    routes.Memory
	bursts    chan struct{}            // one token for each measurement in progress
	measuring map[string]chan struct{} // by host, closed when its measurement has ended; guarded by Endpoint.mu, like all fields below
	said      map[string]string        // by host, the routes that were logged last
	probes    int                      // number of probes being served
	watching  bool                     // the kernel's reports about interfaces are watched
	mending   bool                     // the goroutine of mend has been started
}

func newRouting() routing {
	return routing{bursts: make(chan struct{}, burstsAtOnce), measuring: map[string]chan struct{}{},
		said: map[string]string{}}
}

// way describes how to dial a peer.
type way struct {
	host  string   // host of the routes; empty if they are not measured
	addrs []string // the best first
	// stagger is the time after which the next address is tried too; if it is 0, all are tried at
	// once.
	stagger time.Duration
	// ordered means that the next address is not tried while the connection to an earlier one is
	// being proven.
	ordered bool
	local   bool // the peer is on this host
	rails   int  // number of first addresses that share the data sent
	beside  int  // index of the address for the control channel
}

// from returns the way with the address at index first.
func (w way) from(index int) way {
	if index > 0 && index < len(w.addrs) {
		w.addrs = slices.Clone(w.addrs)
		first := w.addrs[index]
		w.addrs = slices.Insert(slices.Delete(w.addrs, index, index+1), 0, first)
	}
	return w
}

// hostKey returns a key for the host of a rank: its name or, if that is unknown, its addresses.
func (f *Generation) hostKey(rank int) string {
	if rank < len(f.Hosts) && f.Hosts[rank] != "" {
		return f.Hosts[rank]
	}
	return strings.Join(f.Addrs[rank], " ")
}

// leader returns the lowest rank on the host of a rank.
func (f *Generation) leader(rank int) int {
	for r := range f.Hosts {
		if f.sameHost(r, rank) {
			return r
		}
	}
	return rank
}

// foreign returns a peer's addresses without those that this host also has, such as that of a
// bridge that every host has. It returns nil if no address is left, or if an address is a name.
func (f *Generation) foreign(addrs []string) []netip.AddrPort {
	own := f.own()
	var all []netip.AddrPort
	for _, text := range addrs {
		at, err := netip.ParseAddrPort(text)
		if err != nil {
			return nil
		}
		at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
		if _, is := own[at.Addr()]; !is && !at.Addr().IsLoopback() {
			all = append(all, at)
		}
	}
	return all
}

// hostsOf returns the addresses without the ports.
func hostsOf(all []netip.AddrPort) []netip.Addr {
	addrs := make([]netip.Addr, len(all))
	for i, at := range all {
		addrs[i] = at.Addr()
	}
	return addrs
}

// way returns how to dial a rank of the generation. It measures the rank's addresses if nothing is
// known about them.
func (e *Endpoint) way(ctx context.Context, f *Generation, rank int) way {
	w := way{addrs: f.Addrs[rank]}
	if f.sameHost(f.Self, rank) {
		w.local, w.stagger = true, localStagger
	}
	if w.local || len(w.addrs) < 2 {
		if !w.local {
			w.rails = e.forcedRails
		}
		return w
	}
	addrs, host := f.foreign(w.addrs), f.hostKey(rank)
	if len(addrs) < 2 {
		return w
	}
	choice, known := e.routes.Choose(host, hostsOf(addrs))
	if !known {
		e.measure(ctx, f, rank, host, addrs)
		if choice, known = e.routes.Choose(host, hostsOf(addrs)); !known {
			return w
		}
	}
	w = way{host: host, stagger: fallBack, ordered: true, rails: choice.Rails}
	if f.hurried {
		w.stagger = fallSoon
	}
	beside, apart := routes.Beside(choice.Routes[:choice.Sound], choice.Rails)
	for i, r := range choice.Routes {
		at := addrs[slices.IndexFunc(addrs, func(a netip.AddrPort) bool { return a.Addr() == r.Addr })]
		w.addrs = append(w.addrs, at.String())
		if apart && r == beside {
			w.beside = i
		}
	}
	for _, at := range addrs { // the addresses that could not be measured
		if text := at.String(); !slices.Contains(w.addrs, text) {
			w.addrs = append(w.addrs, text)
		}
	}
	return w
}

// measure measures the addresses of a rank's host, or requests the results from the rank of this
// host that measures, or waits until another goroutine has done so. On failure nothing is recorded.
func (e *Endpoint) measure(ctx context.Context, f *Generation, rank int, host string, addrs []netip.AddrPort) {
	e.mu.Lock()
	if under := e.measuring[host]; under != nil {
		e.mu.Unlock()
		select {
		case <-under:
		case <-ctx.Done():
		}
		return
	}
	done := make(chan struct{})
	e.measuring[host] = done
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.measuring, host)
		e.mu.Unlock()
		close(done)
	}()
	ctx, cancel := context.WithTimeout(ctx, probeBound)
	defer cancel()
	var found []routes.Route
	if leader := f.leader(f.Self); leader != f.Self {
		var err error
		if found, err = e.ask(ctx, f, leader, rank); err != nil {
			e.cfg.Log.WithError(err).Debugf("collective: rank %d does not send the routes to %s", leader, host)
		}
	} else {
		found = e.measureAll(ctx, f, rank, addrs)
	}
	if len(found) > 0 {
		e.routes.Learn(time.Now(), host, hostsOf(addrs), found)
	}
}

// probe is a proven connection for measurements.
type probe struct {
	conn  *conn
	route routes.Route
	size  int // size of the next burst, in bytes
}

// measureAll measures the addresses of a rank, and returns the routes to those that answer in time.
func (e *Endpoint) measureAll(ctx context.Context, f *Generation, rank int, addrs []netip.AddrPort) (found []routes.Route) {
	select {
	case e.bursts <- struct{}{}:
		defer func() { <-e.bursts }()
	case <-ctx.Done():
		return nil
	}
	for _, p := range burstAll(e.openProbes(ctx, f, rank, addrs)) {
		found = append(found, p.route)
		p.conn.raw.Close()
	}
	return found
}

// burstAll measures the throughput of each route, and returns the working probes. The probes send
// bursts in turn. The fastest burst of each counts, since either host may be busy.
func burstAll(probes []*probe) []*probe {
	for round := range burstRounds {
		best := 0.0
		for _, p := range probes {
			best = max(best, p.route.Rate)
		}
		probes = slices.DeleteFunc(probes, func(p *probe) bool {
			if round >= burstSurely && p.route.Rate*burstHopeless < best {
				return false
			}
			err := p.burst()
			if err != nil {
				p.conn.raw.Close()
			}
			return err != nil
		})
	}
	return probes
}

// openProbes connects to all addresses at the same time. Once one is proven, it waits only briefly
// for the others; longer for those at which the peer's kernel has answered.
func (e *Endpoint) openProbes(ctx context.Context, f *Generation, rank int, addrs []netip.AddrPort) (open []*probe) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		p   *probe
		err error
	}
	results, connected := make(chan result), make(chan struct{}, len(addrs))
	for _, at := range addrs {
		go func() {
			p, err := e.openProbe(ctx, f, rank, at, func() { connected <- struct{}{} })
			results <- result{p, err}
		}()
	}
	limit := time.NewTimer(probeDial) // until the first answers, then until the others do
	defer limit.Stop()
	answered, ended, proofs := 0, 0, false
	for ended < len(addrs) { // wait for every goroutine
		select {
		case <-connected:
			answered++
		case r := <-results:
			ended++
			if r.err != nil {
				continue
			}
			if open = append(open, r.p); len(open) == 1 {
				limit.Reset(probeOthers)
			}
		case <-limit.C:
			switch {
			case len(open) == 0 && answered > 0: // the peer has not reached the generation yet
			case len(open) > 0 && answered > len(open) && !proofs:
				proofs = true
				limit.Reset(probeProofs)
			default:
				cancel()
			}
		}
	}
	return open
}

// openProbe connects to an address and measures round trips.
func (e *Endpoint) openProbe(ctx context.Context, f *Generation, rank int, at netip.AddrPort, connected func()) (*probe, error) {
	c, err := e.dialOne(ctx, at.String(), f.Key, identity.Hello{Generation: f.Number, From: f.Self, To: rank, Channel: probeChannel}, connected)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.raw.Close() })
	defer stop()
	p := &probe{conn: c, route: routes.Route{Addr: at.Addr(), Local: localOf(c), Near: netif.Of(localOf(c))}}
	c.raw.SetDeadline(time.Now().Add(probeServe))
	if err := readAnswer(c, &p.route.Far); err != nil {
		c.raw.Close()
		return nil, err
	}
	for range probePings {
		trip, err := p.send(0)
		if err != nil {
			c.raw.Close()
			return nil, err
		}
		if p.route.Trip == 0 || trip < p.route.Trip {
			p.route.Trip = trip
		}
	}
	return p, nil
}

// burst sends a burst, and adapts its size so that the next one takes long enough to be exact.
func (p *probe) burst() error {
	p.size = max(p.size, firstBurst)
	took, err := p.send(p.size)
	if err != nil {
		return err
	}
	if fd, err := p.conn.duplicate(); err == nil { // the kernel's round trip excludes delays of processes
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && info.Min_rtt > 0 {
			p.route.Trip = min(p.route.Trip, time.Duration(info.Min_rtt)*time.Microsecond)
		}
		unix.Close(fd)
	}
	moving := max(took-p.route.Trip, took/4)
	p.route.Rate = max(p.route.Rate, float64(p.size)*8/moving.Seconds())
	if took < burstEnough {
		p.size = min(4*p.size, lastBurst)
	}
	return nil
}

// send sends size bytes, and blocks until the peer has received them. It returns how long that
// took.
func (p *probe) send(size int) (time.Duration, error) {
	message := make([]byte, probeRequest+size)
	binary.BigEndian.PutUint32(message, burstRequest)
	binary.BigEndian.PutUint32(message[4:], uint32(size))
	begun := time.Now()
	if _, err := p.conn.Write(message); err != nil {
		return 0, err
	}
	_, err := io.ReadFull(p.conn, message[:probeRequest])
	return time.Since(begun), err
}

// ask requests, from a rank of this host, the routes to the host of another rank.
func (e *Endpoint) ask(ctx context.Context, f *Generation, leader, rank int) ([]routes.Route, error) {
	h := identity.Hello{Generation: f.Number, From: f.Self, To: leader, Channel: probeChannel}
	c, err := e.dialAll(ctx, way{addrs: f.Addrs[leader], stagger: localStagger}, f.Key, h)
	if err != nil {
		return nil, err
	}
	defer c.raw.Close()
	stop := context.AfterFunc(ctx, func() { c.raw.Close() })
	defer stop()
	var card netif.Card
	if err := readAnswer(c, &card); err != nil {
		return nil, err
	}
	request := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, askRequest), uint32(rank))
	if _, err := c.Write(request); err != nil {
		return nil, err
	}
	var found []routes.Route
	return found, readAnswer(c, &found)
}

// readAnswer reads what writeAnswer has written: JSON, after its length.
func readAnswer(r io.Reader, into any) error {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > probeAnswer {
		return fmt.Errorf("the answer has %d bytes", n)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

func writeAnswer(w io.Writer, answer any) error {
	text, err := json.Marshal(answer)
	if err != nil || len(text) > probeAnswer {
		text = []byte("null") // an empty answer
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...))
	return err
}

// admitProbe admits a probe whose dialer is proven, or returns the reason why it is refused. After
// an admission the caller calls endProbe.
func (e *Endpoint) admitProbe(h identity.Hello) (*Generation, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f := e.current
	switch {
	case f.Number != h.Generation:
		return nil, fmt.Errorf("generation %d is over; this rank is in generation %d", h.Generation, f.Number)
	case h.To != f.Self || h.From == f.Self || h.From >= f.Size:
		return nil, fmt.Errorf("rank %d of %d cannot be probed by rank %d as rank %d", f.Self, f.Size, h.From, h.To)
	case e.probes >= max(fewProbes, 2*e.largest):
		return nil, fmt.Errorf("too many probes run at this time (%w)", identity.ErrLater)
	}
	e.probes++
	return f, nil
}

// endProbe ends a probe that was admitted.
func (e *Endpoint) endProbe() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.probes--
}

// serveProbe answers the requests on a proven connection, until the connection ends.
func (e *Endpoint) serveProbe(f *Generation, from int, c *conn) error {
	c.raw.SetDeadline(time.Now().Add(probeServe))
	if err := writeAnswer(c, netif.Of(localOf(c))); err != nil {
		return err
	}
	var request [probeRequest]byte
	for range probeMost {
		c.raw.SetDeadline(time.Now().Add(probeServe))
		if _, err := io.ReadFull(c, request[:]); err != nil {
			return err
		}
		number := binary.BigEndian.Uint32(request[4:])
		var err error
		switch kind := binary.BigEndian.Uint32(request[:]); {
		case kind == burstRequest && number <= lastBurst:
			if _, err = io.CopyN(io.Discard, c, int64(number)); err == nil {
				_, err = c.Write(request[:])
			}
		case kind == askRequest && int64(number) < int64(f.Size):
			err = e.tellRoutes(f, int(number), c)
		case kind == cutRequest && int64(number) < int64(len(f.Addrs[from])):
			e.toldCut(f, from, int(number))
			_, err = c.Write(request[:])
		default:
			err = frame.Err
		}
		if err != nil {
			return err
		}
	}
	return frame.Err
}

// tellRoutes sends the routes to the host of a rank to a rank of this host that requested them.
func (e *Endpoint) tellRoutes(f *Generation, rank int, c *conn) error {
	ctx, cancel := context.WithTimeout(e.life, probeBound)
	defer cancel()
	found := []routes.Route{}
	if addrs := f.foreign(f.Addrs[rank]); len(addrs) > 1 && f.leader(f.Self) == f.Self {
		host := f.hostKey(rank)
		choice, known := e.routes.Choose(host, hostsOf(addrs))
		if !known {
			e.measure(ctx, f, rank, host, addrs)
			choice, _ = e.routes.Choose(host, hostsOf(addrs))
		}
		found = append(found, choice.Routes[:choice.Sound]...)
	}
	c.raw.SetDeadline(time.Now().Add(probeServe))
	return writeAnswer(c, found)
}
