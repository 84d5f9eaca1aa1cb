package collective

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective/shm"
	"github.com/hvdrun/hvdrun/internal/identity"
)

const (
	proofBound   = 5 * time.Second        // longest a connection may take to prove itself
	proofEach    = 50 * time.Millisecond  // and so much longer for each rank of the world: they may share the processors
	fewUnproven  = 256                    // connections that have not yet, whatever the world's size; the oldest gives way to a new one
	waitBound    = 30 * time.Second       // longest a connection of a newer generation waits for this rank
	fewWaiting   = 1024                   // such connections, whatever the world's size
	maxVisits    = 16                     // at a time
	connectBound = 30 * time.Second       // of Connect without any new connection, where its context has no deadline
	connectEach  = 100 * time.Millisecond // by which ranks of one host may come to a group later, for each rank
	lateBound    = 10                     // times connectIdle: longest that ranks which are connected wait for those that are not
	dialBound    = 10 * time.Second       // of one attempt at one address
	wayAttempts  = 6                      // where no way leads to a peer
	maxDialing   = 64                     // attempts at a time for one group: many processes of one host would starve each other
	localStagger = time.Second            // from one address of a peer of this host to the next: all of them lead there
	dialAttempts = 24                     // where a connection breaks while it is proven
	firstBackoff = 5 * time.Millisecond
	lastBackoff  = 250 * time.Millisecond
)

// keepAlive notices in about 5 seconds that a peer's host is gone, on the control channel, where
// nothing waits to be acknowledged. TCP_USER_TIMEOUT would do so on the data channel, but it also
// ends the connection to a peer that is well and does not read for so long: one that computes, and
// whose receive window is full.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}

// MaxConnections is the most of Config.Connections.
const MaxConnections = 16

// Config configures an [Endpoint].
type Config struct {
	Credentials *identity.Credentials // of this worker; needed
	ListenAddr  string                // host:port; empty: every address, a free port
	Interfaces  []string              // whose addresses are offered where ListenAddr names none; empty: all
	Encrypt     bool                  // TLS on every connection; every rank must agree
	OnlySockets bool                  // no shared memory between the ranks of a host
	Algorithm   Algorithm             // of AllReduce; every rank must agree
	// Connections share the large frames between two ranks of different hosts: more than one where
	// the network bounds each of them. Up to MaxConnections; 0 is 1, and with Encrypt there is 1.
	// Every rank must agree.
	Connections int
	Log         logrus.FieldLogger // nil: nothing is logged
	Timeline    Timeline           // told of every operation; nil: nobody listens

	// Backend is told on rank 0 by what means package cuda combines what is in memory of devices:
	// of each name once in a generation. It must not block. Nil: nobody listens.
	Backend func(generation uint64, name string)

	// Visited is called with each connection that another worker's Visit has opened, in a goroutine
	// of its own. It is closed when Visited returns, and when the endpoint is closed, which waits
	// for that. Nil: there are none.
	Visited func(net.Conn)

	// Of asynchronous operations:
	FusionThreshold int           // bytes up to which tensors are reduced as one; 0: 64 MiB; the smallest of all ranks counts
	CycleTime       time.Duration // longest that an operation waits for others to be fused with; 0: 1 ms; negative: not at all
	StallWarning    time.Duration // after which one that some ranks have not called is logged; 0: 5 s; negative: never
}

// Endpoint is where the other workers of the job reach this one. It lives as long as the worker,
// over all generations.
type Endpoint struct {
	credentials *identity.Credentials
	encrypt     bool
	apart       bool
	algorithm   Algorithm
	connections int
	log         logrus.FieldLogger
	timeline    Timeline
	backend     func(generation uint64, name string)
	visited     func(net.Conn)
	listener    net.Listener
	addrs       []string
	tuning      tuning
	closed      chan struct{}
	made        atomic.Uint64  // see Connections
	running     sync.WaitGroup // the accept loop and what it has accepted and not handed over

	mu       sync.Mutex
	current  *family        // of the newest generation that Connect was called for
	rooms    map[door]*room // where connections wait for groups that this rank has not come to yet
	waiting  int
	inbound  map[net.Conn]struct{}         // accepted and not handed over
	unproven []net.Conn                    // those of them that have proven nothing, oldest first
	visits   int                           // those of them that are visits
	dialOnce func() error                  // instead of a dial, in tests; nil: as ever
	largest  int                           // ranks of the largest generation that Connect was called for
	forced   int                           // what bound returns, in tests
	mesh     func(distance, size int) bool // as that of family, in tests
}

// door tells the groups apart that a worker takes part in.
type door struct{ generation, lane uint64 }

// room is where connections wait until this rank comes to their group.
type room struct {
	open    chan struct{} // closed when it does, or when the generation is over
	waiting int
}

// Peers are the ranks that [Endpoint.Connect] connects.
type Peers struct {
	Generation uint64
	Rank       int        // of this worker
	Addrs      [][]string // by rank: what Addrs of their endpoints returned; the own entry is not used
	Hosts      []string   // by rank: who is on one host shares memory, if that can be; nil, or empty names: nobody
}

// Listen opens an endpoint and starts to accept connections; Close ends it.
func Listen(cfg Config) (*Endpoint, error) {
	if cfg.Credentials == nil {
		return nil, errors.New("collective: an endpoint needs credentials")
	}
	if cfg.Connections < 0 || cfg.Connections > MaxConnections {
		return nil, fmt.Errorf("collective: %d connections to a peer; there may be up to %d", cfg.Connections, MaxConnections)
	}
	if cfg.Encrypt || cfg.Connections == 0 {
		cfg.Connections = 1 // what bounds an encrypted one is the processor
	}
	addr := cfg.ListenAddr
	if addr == "" {
		addr = ":0"
	}
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	ln, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("collective: %w", err)
	}
	addrs, err := candidates(ln.Addr().(*net.TCPAddr), cfg.Interfaces)
	if err != nil {
		ln.Close()
		return nil, err
	}
	e := &Endpoint{credentials: cfg.Credentials, encrypt: cfg.Encrypt, apart: cfg.OnlySockets, algorithm: cfg.Algorithm,
		connections: cfg.Connections, log: cfg.Log, timeline: cfg.Timeline, backend: cfg.Backend, visited: cfg.Visited,
		listener: ln, addrs: addrs, closed: make(chan struct{}), rooms: map[door]*room{}, inbound: map[net.Conn]struct{}{}}
	if e.log == nil {
		quiet := logrus.New()
		quiet.SetOutput(io.Discard)
		e.log = quiet
	}
	e.tuning = tuning{fusion: cfg.FusionThreshold, cycle: cfg.CycleTime, stall: cfg.StallWarning, log: e.logStall}
	e.running.Go(e.accept)
	if !e.apart {
		e.running.Go(shm.Prepare)
	}
	return e, nil
}

// candidates are the addresses under which a listener may be reached: its own, or where it listens
// on all of them those of the interfaces; loopback ones only where there is nothing else or an
// interface was named.
func candidates(at *net.TCPAddr, interfaces []string) ([]string, error) {
	if !at.IP.IsUnspecified() {
		return []string{at.String()}, nil
	}
	var found, loopback []string
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("collective: %w", err)
	}
	for _, i := range all {
		if i.Flags&net.FlagUp == 0 || len(interfaces) > 0 && !slices.Contains(interfaces, i.Name) {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			continue // the interface has gone meanwhile
		}
		for _, a := range addrs {
			n, ok := a.(*net.IPNet)
			if !ok || n.IP.IsLinkLocalUnicast() || n.IP.IsMulticast() {
				continue
			}
			text := (&net.TCPAddr{IP: n.IP, Port: at.Port}).String()
			if n.IP.IsLoopback() && len(interfaces) == 0 {
				loopback = append(loopback, text)
			} else {
				found = append(found, text)
			}
		}
	}
	if len(found) == 0 {
		found = loopback
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("collective: no address to offer on interfaces %q", interfaces)
	}
	return found, nil
}

// Addrs are the addresses to give to the other ranks, each host:port; they try all of them. A new
// slice.
func (e *Endpoint) Addrs() []string { return slices.Clone(e.addrs) }

// Connections is how many connections to other ranks there have been so far, of all generations:
// while Connect is under way, a sign of how it gets on. Any goroutine may call it.
func (e *Endpoint) Connections() uint64 { return e.made.Load() }

// Close ends the endpoint and waits for its goroutines. Groups that are connected stay so; a
// Connect under way fails.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	err := e.shut()
	e.mu.Unlock()
	e.running.Wait()
	if err != nil {
		return fmt.Errorf("collective: %w", err)
	}
	return nil
}

// shut closes the door. The caller holds mu.
func (e *Endpoint) shut() error {
	select {
	case <-e.closed:
		return nil
	default:
	}
	close(e.closed)
	err := e.listener.Close()
	for c := range e.inbound {
		c.Close()
	}
	return err
}

// Kill ends the endpoint and its groups as the death of this process would: connections end without
// a word. An operation of these groups, under way or later, does not return, but ends its goroutine
// as runtime.Goexit does. It is for workers that are goroutines (package elastic/elastictest),
// which share no memory. It may be called from any goroutine, and does not wait for any; Close
// does.
func (e *Endpoint) Kill() {
	e.mu.Lock()
	f := e.current
	if f != nil {
		f.dead.Store(true) // before anybody sees the door closed, and says so
	}
	_ = e.shut() // nothing is expected of a listener any more
	e.mu.Unlock()
	if f != nil {
		f.spread(nil, gone(errKilled))
	}
}

var errKilled = errors.New("collective: this worker has been killed")

// Connect connects the ranks of a generation and returns this rank's group, once there is a
// connection to every other rank, or, of more than 32 ranks, to those with which it meets in most
// operations: the others are connected when an operation needs them. Generations must rise from
// call to call; what is left of older ones is refused from now on. It blocks until then, at most
// until ctx ends, or, where ctx has no deadline, until no connection has come for 30 s and 0.1 s
// more for each rank. Ranks of one host then meet in shared memory, where they can. It fails with
// an [*AbortedError] that names the ranks that could not be reached: at once where nobody listens
// at a peer's addresses, which means that its process is dead.
func (e *Endpoint) Connect(ctx context.Context, p Peers) (*Group, error) {
	n := len(p.Addrs)
	if p.Rank < 0 || p.Rank >= n {
		return nil, fmt.Errorf("collective: rank %d among %d", p.Rank, n)
	}
	f := newFamily(p.Generation, n)
	f.hosts, f.apart, f.log, f.timeline, f.backend = p.Hosts, e.apart, e.log, e.timeline, e.backend
	f.tuning = e.tuning
	f.algorithm, f.connections, f.mesh = e.algorithm, e.connections, e.mesh
	f.connect = func(ctx context.Context, l lane) (*Group, error) { return e.connect(ctx, f, l, p.Addrs) }
	return f.connect(ctx, lane{rank: p.Rank, size: n})
}

// connect connects the ranks of one group. addrs are those of the ranks of the generation.
func (e *Endpoint) connect(ctx context.Context, f *family, l lane, addrs [][]string) (*Group, error) {
	g := newGroup(f, l.id, l.rank, l.size, l.members)
	g.strict = l.strict
	path := newTCPPath(g)
	if g.size > 1 {
		g.path, g.tcp = path, path
	}
	path.dials.reach = func(ctx context.Context, peer, channel int) {
		e.reach(ctx, g, path, peer, channel, addrs[g.original(peer)])
	}
	if err := e.begin(g); err != nil {
		return nil, err
	}
	f.catchUp(g)
	dialCtx, stop := context.WithCancel(ctx)
	var dialing sync.WaitGroup
	for d := 1; d < g.size; d++ { // each rank another one first
		if peer := (g.rank + d) % g.size; path.links[peer].near {
			path.dial(dialCtx, peer, dialing.Go)
		}
	}
	if g.size > 1 {
		e.awaitPeers(ctx, g, path)
	}
	stop()
	dialing.Wait()
	if g.err() != nil {
		<-g.failed
		path.release()
		path.quiesce()
		return nil, g.err()
	}
	if _, bounded := ctx.Deadline(); !bounded { // the others may still be about to connect
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, lateBound*connectIdle(g.size))
		defer cancel()
	}
	if err := g.share(ctx); err != nil {
		g.Abort(err)
		return nil, g.err()
	}
	return g, nil
}

// connectIdle is the longest that Connect goes without any new connection among so many ranks.
func connectIdle(size int) time.Duration { return connectBound + time.Duration(size)*connectEach }

// awaitPeers blocks until there is a connection to every near rank, or fails the group: when ctx
// ends, or, where that has no deadline, when there has been no new connection for connectIdle.
func (e *Endpoint) awaitPeers(ctx context.Context, g *Group, path *tcpPath) {
	var idle <-chan time.Time
	if _, bounded := ctx.Deadline(); !bounded {
		ticker := time.NewTicker(connectIdle(g.size))
		defer ticker.Stop()
		idle = ticker.C
	}
	for before := path.lacking(); ; {
		select {
		case <-path.complete:
		case <-g.failed:
		case <-ctx.Done():
			g.fail(gone(ctx.Err(), path.absent()...))
		case <-e.closed:
			g.fail(gone(errors.New("collective: the endpoint is closed"), g.rank))
		case <-idle:
			if now := path.lacking(); now < before {
				before = now
				continue
			}
			g.fail(gone(context.DeadlineExceeded, path.absent()...))
		}
		return
	}
}

// begin opens the door to g, for those too that wait there. The group of all ranks makes its
// generation the current one.
func (e *Endpoint) begin(g *Group) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-e.closed:
		return errors.New("collective: the endpoint is closed")
	default:
	}
	switch {
	case g.lane != 0 && e.current != g.family:
		return fmt.Errorf("collective: generation %d is over", g.generation)
	case g.lane == 0 && e.current != nil && g.generation <= e.current.generation:
		return fmt.Errorf("collective: generation %d after generation %d", g.generation, e.current.generation)
	}
	if !g.family.add(g) {
		return fmt.Errorf("collective: generation %d has lane %x already", g.generation, g.lane)
	}
	e.current = g.family
	e.largest = max(e.largest, g.family.size)
	for d, r := range e.rooms {
		if d.generation < g.generation || d.generation == g.generation && (d.lane == g.lane || g.lane == 0) {
			close(r.open)
			delete(e.rooms, d)
		}
	}
	return nil
}

// reach dials one connection to a peer.
func (e *Endpoint) reach(ctx context.Context, g *Group, path *tcpPath, peer, channel int, addrs []string) {
	stagger := time.Duration(0)
	if g.family.sameHost(g.original(g.rank), g.original(peer)) {
		stagger = localStagger
	}
	if ctx.Err() != nil {
		return
	}
	h := identity.Hello{Generation: g.generation, From: g.rank, To: peer, Channel: channel, Lane: g.lane}
	c, err := e.dial(ctx, addrs, h, stagger, path.lacking)
	if err == nil {
		e.made.Add(1)
		path.install(peer, channel, c)
	} else if ctx.Err() == nil {
		g.fail(gone(err, peer))
	}
}

var (
	errBroken  = errors.New("collective: the connection broke") // before it was proven
	errNoWay   = errors.New("collective: no way to the peer")   // from this host
	errTimeout = errors.New("collective: the connection took too long")
	errLater   = errors.New("collective: not yet") // says the peer
)

// hopeful tells whether an attempt that has failed may go better the next time. Where the peer says
// so itself, the attempts end with their context: it already has a connection in the place of this
// one, which is broken and which it has yet to give up, or it has not come to the group.
func hopeful(err error, attempt int) bool {
	switch {
	case errors.Is(err, errLater):
		return true
	case errors.Is(err, errBroken):
		return attempt < dialAttempts
	}
	return errors.Is(err, errNoWay) && attempt < wayAttempts
}

// dial dials until it goes well, or there is no hope. A time out alone is no reason to give up
// where the peer is of this host, nor while other connections of the group come, of which lacking
// tells how many do not: then what is slow is this host.
func (e *Endpoint) dial(ctx context.Context, addrs []string, h identity.Hello, stagger time.Duration, lacking func() int) (*conn, error) {
	pause := firstBackoff
	for attempt := 1; ; attempt++ {
		before := lacking()
		c, err := e.dialAll(ctx, addrs, h, stagger)
		slow := errors.Is(err, errTimeout) && (stagger > 0 || loopback(addrs) || lacking() < before)
		if err == nil || ctx.Err() != nil || !slow && !hopeful(err, attempt) {
			return c, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		case <-timer.C:
		}
		pause = min(2*pause, lastBackoff)
	}
}

// loopback tells whether an address leads to this host alone.
func loopback(addrs []string) bool {
	return slices.ContainsFunc(addrs, func(addr string) bool {
		at, err := netip.ParseAddrPort(addr)
		return err == nil && at.Addr().IsLoopback()
	})
}

// dialAll tries all addresses at once, or each of them so much later than the one before or when
// that has failed, and returns the connection that is proven first. The acceptor agrees to one
// alone, so that no second one can be meant by it.
func (e *Endpoint) dialAll(ctx context.Context, addrs []string, h identity.Hello, stagger time.Duration) (*conn, error) {
	switch len(addrs) {
	case 0:
		return nil, errors.New("it has given no address")
	case 1:
		return e.dialOne(ctx, addrs[0], h)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		c   *conn
		err error
	}
	results := make(chan result)
	var won *conn
	var errs []error
	started := 0
	start := func() {
		addr := addrs[started]
		started++
		go func() {
			c, err := e.dialOne(ctx, addr, h)
			results <- result{c, err}
		}()
	}
	var next <-chan time.Time
	if stagger > 0 {
		ticker := time.NewTicker(stagger)
		defer ticker.Stop()
		next = ticker.C
	}
	start()
	for ended := 0; ended < started; { // every goroutine is waited for
		more := won == nil && started < len(addrs)
		if more && stagger == 0 {
			start()
			continue
		}
		var r result
		select {
		case r = <-results:
			ended++
		case <-next:
			if more {
				start()
			}
			continue
		}
		switch {
		case r.err != nil:
			errs = append(errs, r.err)
			if more {
				start()
			}
		case won != nil:
			r.c.raw.Close()
		default:
			won = r.c
			cancel()
		}
	}
	if won == nil {
		return nil, errors.Join(errs...)
	}
	return won, nil
}

func (e *Endpoint) dialOne(ctx context.Context, addr string, h identity.Hello) (*conn, error) {
	if e.dialOnce != nil {
		return nil, e.dialOnce()
	}
	d := net.Dialer{Timeout: dialBound, KeepAliveConfig: keepAlive}
	raw, err := d.DialContext(ctx, "tcp", addr)
	if errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) {
		return nil, fmt.Errorf("%w: %w", errNoWay, err) // so a link is for a moment that has just come back
	}
	if failed, is := err.(net.Error); is && failed.Timeout() {
		return nil, fmt.Errorf("%w: %w", errTimeout, err)
	}
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	c := &conn{Conn: raw, raw: raw}
	if e.encrypt {
		c.Conn = tls.Client(raw, e.credentials.ClientTLS(identity.Subject{Role: identity.Worker}))
	}
	err = e.credentials.ProveDial(c.Conn, h)
	if !stop() {
		err = ctx.Err()
	}
	if err == nil {
		return c, nil
	}
	raw.Close()
	var refused *identity.RefusedError
	switch {
	case errors.As(err, &refused) && refused.Later:
		err = fmt.Errorf("%w: %w", errLater, err)
	case refused == nil && !errors.Is(err, identity.ErrUnproven):
		err = fmt.Errorf("%w: %s: %w", errBroken, addr, err)
	}
	return nil, err
}

// accept is the loop of the listener.
func (e *Endpoint) accept() {
	for {
		raw, err := e.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			e.log.WithError(err).Warn("collective: accept") // out of descriptors, as a rule
			timer := time.NewTimer(firstBackoff)
			select {
			case <-timer.C:
			case <-e.closed:
				timer.Stop()
			}
			continue
		}
		if e.admit(raw) {
			e.running.Go(func() { e.prove(raw) })
		}
	}
}

// bound is how many of the connections that this rank accepts there may be in some state: at least
// few of them, and room for all the connections of the largest world so far twice. The caller holds
// mu.
func (e *Endpoint) bound(few int) int {
	if e.forced > 0 {
		return e.forced
	}
	return max(few, 2*e.largest) * (e.connections + 1) / 2
}

// admit books an accepted connection. Strangers who say nothing cannot keep others out: the oldest
// gives way that has not proven anything.
func (e *Endpoint) admit(raw net.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-e.closed:
		raw.Close()
		return false
	default:
	}
	if len(e.unproven) >= e.bound(fewUnproven) {
		e.unproven[0].Close()
		e.unproven = slices.Delete(e.unproven, 0, 1)
	}
	e.unproven = append(e.unproven, raw)
	e.inbound[raw] = struct{}{}
	return true
}

// proven takes a connection from those that may have to give way. It reports false for one that
// has: nothing can be claimed for that.
func (e *Endpoint) proven(raw net.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	i := slices.Index(e.unproven, raw)
	if i >= 0 {
		e.unproven = slices.Delete(e.unproven, i, i+1)
	}
	return i >= 0
}

var errGaveWay = errors.New("it has given way to newer connections")

// prove has one accepted connection prove itself and hands it to its group.
func (e *Endpoint) prove(raw net.Conn) {
	e.mu.Lock()
	bound := proofBound + time.Duration(e.largest)*proofEach
	e.mu.Unlock()
	raw.SetDeadline(time.Now().Add(bound))
	c := &conn{Conn: raw, raw: raw}
	if e.encrypt {
		c.Conn = tls.Server(raw, e.credentials.ServerTLS(identity.Worker))
	}
	var path *tcpPath
	claimed, visiting := false, false
	h, err := e.credentials.ProveAccept(c.Conn, func(h identity.Hello) (err error) {
		if !e.proven(raw) {
			return errGaveWay // the dialer sees it broken, and comes again
		}
		if h == visit {
			visiting, err = e.admitVisit()
		} else {
			path, claimed, err = e.welcome(h)
		}
		raw.SetDeadline(time.Now().Add(bound))
		return err
	})
	e.proven(raw)
	if visiting {
		if err == nil {
			raw.SetDeadline(time.Time{})
			e.visited(c.Conn)
			err = errVisited
		}
		e.endVisit()
	}
	e.mu.Lock()
	delete(e.inbound, raw)
	e.mu.Unlock()
	if err == nil {
		raw.SetDeadline(time.Time{})
		e.made.Add(1)
		path.install(h.From, h.Channel, c)
		return
	}
	if claimed {
		path.unclaim(h.From, h.Channel)
	}
	raw.Close()
	e.log.WithError(err).WithField("peer", raw.RemoteAddr().String()).Debug("collective: connection refused")
}

// welcome decides on a connection whose dialer is proven. One for a group to which this rank has
// not come waits until it does. That includes those for a generation that has failed here already:
// their dialers are told so by its other groups.
func (e *Endpoint) welcome(h identity.Hello) (path *tcpPath, claimed bool, err error) {
	timer := time.NewTimer(waitBound)
	defer timer.Stop()
	at := door{h.Generation, h.Lane}
	for {
		e.mu.Lock()
		if f := e.current; f != nil && h.Generation <= f.generation {
			if h.Generation < f.generation {
				e.mu.Unlock()
				return nil, false, fmt.Errorf("generation %d is over, this is generation %d", h.Generation, f.generation)
			}
			if g := f.group(h.Lane); g != nil {
				e.mu.Unlock()
				return g.welcome(h)
			}
			if err := f.demand(h.Lane); err != nil {
				e.mu.Unlock()
				return nil, false, err
			}
		}
		if e.waiting >= e.bound(fewWaiting) {
			e.mu.Unlock()
			return nil, false, fmt.Errorf("too many connections wait for groups to come (%w)", identity.ErrLater)
		}
		r := e.rooms[at]
		if r == nil {
			r = &room{open: make(chan struct{})}
			e.rooms[at] = r
		}
		r.waiting++
		e.waiting++
		e.mu.Unlock()
		select {
		case <-r.open:
		case <-timer.C:
			err = fmt.Errorf("not in generation %d, lane %x within %v (%w)", h.Generation, h.Lane, waitBound, identity.ErrLater)
		case <-e.closed:
			err = errors.New("the endpoint is closed")
		}
		e.mu.Lock()
		e.waiting--
		if r.waiting--; r.waiting == 0 && e.rooms[at] == r {
			delete(e.rooms, at)
		}
		e.mu.Unlock()
		if err != nil {
			return nil, false, err
		}
	}
}

// welcome checks that a connection is the one of its kind that is due. Where the group has ended
// already, the dialer is let in to be told why.
func (g *Group) welcome(h identity.Hello) (path *tcpPath, claimed bool, err error) {
	path = g.path.(*tcpPath)
	due := h.From < g.size && h.From != g.rank && h.To == g.rank && path.due(h.From, h.Channel)
	if !due {
		return nil, false, fmt.Errorf("rank %d of %d expects no channel %d from rank %d to rank %d",
			g.rank, g.size, h.Channel, h.From, h.To)
	}
	if g.err() != nil {
		return path, false, nil
	}
	if !path.claim(h.From, h.Channel) {
		return nil, false, fmt.Errorf("rank %d is connected already (%w)", h.From, identity.ErrLater)
	}
	path.want(h.From)
	return path, true, nil
}
