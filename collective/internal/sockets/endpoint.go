package sockets

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/retry"
)

const (
	proofEach     = 50 * time.Millisecond  // additional time for a proof for each rank of the world: the ranks may share the processors
	waitBound     = 30 * time.Second       // longest time that a connection waits until this rank enters its group
	fewWaiting    = 1024                   // number of connections that may wait, whatever the world's size
	mostPast      = 4                      // number of past generations whose dialers can be informed that these are over
	maxVisits     = 16                     // number of visits at a time
	connectBound  = 30 * time.Second       // longest time that Connect waits without any new connection, if its context has no deadline
	connectEach   = 100 * time.Millisecond // additional time for each rank: ranks of one host may reach a group later
	lateBound     = 10                     // factor of connectIdle: longest time that connected ranks wait for the others
	dialBound     = 10 * time.Second       // longest time of one attempt at one address
	routeAttempts = 6                      // number of attempts if there is no route to a peer
	maxDialing    = 64                     // number of attempts at a time for one group: with more, the processes of one host starve each other
	localStagger  = time.Second            // between two addresses of a peer on this host, which all work
	dialAttempts  = 24                     // number of attempts if a connection breaks while it is being proven
	heldFor       = time.Second            // a connection that breaks after this time has waited at a peer that is behind
)

// dialBackoff is the pause before another attempt at a peer.
var dialBackoff = retry.Backoff{First: 5 * time.Millisecond, Most: 250 * time.Millisecond}

// keepAlive detects within about 5 seconds that a peer's host is gone, on the control channel,
// which has no unacknowledged data. TCP_USER_TIMEOUT would do so on the data channel, but it would
// also end the connection to a healthy peer that does not read for that time, because it computes
// and its receive window is full.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}

// MaxConnections is the largest number of connections between two ranks that share frames.
const MaxConnections = 16

// Config configures an [Endpoint].
type Config struct {
	Credentials *identity.Credentials // of this worker; required
	ListenAddr  string                // host:port; if empty, a free port on the addresses of the interfaces
	Interfaces  []string              // interfaces to listen on if ListenAddr has no address, and for Widen; if empty, all
	Encrypt     bool                  // TLS on every connection; every rank must agree
	Connections int                   // number of connections that share the large frames between two ranks of different hosts, at least 1
	ShareFrom   int                   // size in bytes from which a frame is large
	Log         logrus.FieldLogger    // required
	Visited     func(net.Conn)        // see Visit; if nil, visits are refused
	Network     identity.Network      // network of the ranks
}

// Endpoint is the endpoint at which the other workers of the job reach this one. It lives as long
// as the worker, over all generations.
type Endpoint struct {
	cfg      Config
	listener *identity.Listener
	life     context.Context // ends when the endpoint is closed
	endLife  context.CancelFunc
	made     atomic.Uint64  // see Connections
	running  sync.WaitGroup // the accept loop, the connections that it has accepted and not passed on, and the watches of routes

	mu    sync.Mutex
	addrs []string
	generations
	arrivals
	routing
	testHooks
}

// generations are the generations for which Connect was called.
type generations struct {
	current *Generation     // the newest generation
	keys    []generationKey // keys of current and of up to mostPast earlier generations, newest first
	turned  chan struct{}   // closed and replaced when current is replaced
	largest int             // number of ranks of the largest generation
}

// generationKey is the key that dialers of a generation prove.
type generationKey struct {
	number uint64
	key    identity.DataKey
}

// arrivals are connections that were accepted and not passed on.
type arrivals struct {
	inbound map[net.Conn]struct{}
	visits  int                        // number of visits
	waiting int                        // number of connections that wait for a group
	awaited map[groupKey]*awaitedGroup // groups that this rank has not reached yet and for which connections wait
}

// testHooks are settings of tests. The zero value has no effect.
type testHooks struct {
	dialOnce    func() error                  // instead of a dial
	forcedBound int                           // result of bound, unless 0
	mesh        func(distance, size int) bool // see Generation
	forcedRails int                           // number of routes to a peer that has one address, unless 0
}

// Listen opens an endpoint and starts to accept connections until Close.
func Listen(cfg Config) (*Endpoint, error) {
	ln, addrs, err := listen(cfg)
	if err != nil {
		return nil, err
	}
	e := &Endpoint{cfg: cfg, listener: ln, addrs: addrs, generations: generations{turned: make(chan struct{})},
		arrivals: arrivals{awaited: map[groupKey]*awaitedGroup{}, inbound: map[net.Conn]struct{}{}}, routing: newRouting()}
	e.life, e.endLife = context.WithCancel(context.Background())
	e.grow()
	e.running.Go(e.accept)
	return e, nil
}

// listen returns a listener as configured, and the addresses to give to the other ranks.
func listen(cfg Config) (*identity.Listener, []string, error) {
	addr := cfg.ListenAddr
	if addr == "" {
		addr = ":0"
	}
	at, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("collective: %w", err)
	}
	ln := identity.Data.On(cfg.Network).Listener()
	addrs, err := open(ln, at, cfg.Interfaces)
	if err != nil {
		ln.Close()
		return nil, nil, err
	}
	return ln, addrs, nil
}

// open listens on an address or, if it is unspecified, on the addresses of the interfaces. It
// returns the addresses to give to the other ranks.
func open(ln *identity.Listener, at *net.TCPAddr, interfaces []string) ([]string, error) {
	all := []string{at.String()}
	if at.IP.IsUnspecified() || at.IP == nil {
		if len(interfaces) == 0 {
			addr, err := ln.Open(at.String())
			if err != nil {
				return nil, fmt.Errorf("collective: %w", err)
			}
			return candidates(addr.(*net.TCPAddr), nil)
		}
		var err error
		if all, err = candidates(at, interfaces); err != nil {
			return nil, err
		}
	}
	for i, one := range all {
		addr, err := ln.Open(one)
		if err != nil {
			return nil, fmt.Errorf("collective: %w", err)
		}
		all[i] = addr.String()
	}
	return all, nil
}

// Widen makes the endpoint listen on the addresses of the interfaces, or on all addresses, in
// addition to Config.ListenAddr. It returns the addresses to give to the other ranks from now on.
func (e *Endpoint) Widen() ([]string, error) {
	addrs, err := open(e.listener, &net.TCPAddr{}, e.cfg.Interfaces)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.addrs = addrs
	return slices.Clone(addrs), nil
}

// candidates returns the addresses at which a listener can be reached: its own or, if it listens on
// all addresses, those of the interfaces. Loopback addresses are included only if there is no other
// address or their interface was named.
func candidates(at *net.TCPAddr, interfaces []string) ([]string, error) {
	if at.IP != nil && !at.IP.IsUnspecified() {
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
			continue // the interface is gone
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
		return nil, fmt.Errorf("collective: the interfaces %q have no address: name others (--network-interfaces)", interfaces)
	}
	return found, nil
}

// Addrs returns the addresses to give to the other ranks, each host:port, in a new slice. The other
// ranks try all of them.
func (e *Endpoint) Addrs() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.addrs)
}

// Connections returns the number of connections to other ranks so far, in all generations. During
// Connect it shows the progress. Any goroutine may call it.
func (e *Endpoint) Connections() uint64 { return e.made.Load() }

// Close ends the endpoint and waits for its goroutines. Connected groups stay connected; a Connect
// in progress fails.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	err := e.closeListener()
	e.mu.Unlock()
	e.running.Wait()
	if err != nil {
		return fmt.Errorf("collective: %w", err)
	}
	return nil
}

// closeListener closes the listener and the connections that are being accepted. The caller holds
// mu.
func (e *Endpoint) closeListener() error {
	if e.life.Err() != nil {
		return nil
	}
	e.endLife()
	err := e.listener.Close()
	for c := range e.inbound {
		c.Close()
	}
	return err
}

// Kill ends the endpoint and its groups as the death of this process would: connections end without
// a notice. Operations of these groups, in progress or later, do not return but end their goroutine
// as runtime.Goexit does. Kill is for workers that are goroutines (package elastic/elastictest),
// which share no memory. It may be called from any goroutine and waits for none; Close does.
func (e *Endpoint) Kill() {
	e.mu.Lock()
	f := e.current
	if f != nil {
		f.Killed.Store(true) // before a peer sees that the listener is closed, and reports it
	}
	_ = e.closeListener() // the listener may be closed already
	e.mu.Unlock()
	if f != nil {
		f.groups.FailAll(frame.Gone(errKilled))
	}
}

var errKilled = errors.New("collective: this worker has been killed")

// Connect connects a new path. It enrolls the path's group, and calls enrolled before it dials. It
// blocks until every near link is complete or the group has failed. It returns an error if the
// group is refused.
func (e *Endpoint) Connect(ctx context.Context, path *Path, enrolled func()) error {
	if err := e.admitGroup(path); err != nil {
		return err
	}
	enrolled()
	dialCtx, stop := context.WithCancel(ctx)
	var dialing sync.WaitGroup
	for d := 1; d < path.Size; d++ { // each rank begins with a different peer
		if peer := (path.Rank + d) % path.Size; path.links[peer].near {
			path.dial(dialCtx, peer, dialing.Go)
		}
	}
	if path.Size > 1 {
		e.awaitPeers(ctx, path)
	}
	stop()
	dialing.Wait()
	return nil
}

// LateBound returns how long connected ranks of a new group wait for those that are not connected,
// if nothing else bounds the wait.
func LateBound(size int) time.Duration { return lateBound * connectIdle(size) }

// connectIdle returns the longest time that Connect waits without any new connection, for the given
// number of ranks.
func connectIdle(size int) time.Duration { return connectBound + time.Duration(size)*connectEach }

// awaitPeers blocks until there is a connection to every near rank. It fails the group when ctx
// ends or, if ctx has no deadline, when there has been no new connection for connectIdle.
func (e *Endpoint) awaitPeers(ctx context.Context, path *Path) {
	var idle <-chan time.Time
	if _, bounded := ctx.Deadline(); !bounded {
		ticker := time.NewTicker(connectIdle(path.Size))
		defer ticker.Stop()
		idle = ticker.C
	}
	for before := path.lacking(); ; {
		select {
		case <-path.complete:
		case <-path.failed:
		case <-ctx.Done():
			path.group.Fail(frame.Gone(ctx.Err(), path.absent()...))
		case <-e.life.Done():
			path.group.Fail(frame.Gone(errors.New("collective: the endpoint is closed"), path.Rank))
		case <-idle:
			if now := path.lacking(); now < before {
				before = now
				continue
			}
			path.group.Fail(frame.Gone(context.DeadlineExceeded, path.absent()...))
		}
		return
	}
}

// admitGroup makes the endpoint accept connections of a path from now on, including those that
// already wait for it. If the group is that of all ranks, its generation becomes the current one.
func (e *Endpoint) admitGroup(path *Path) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life.Err() != nil {
		return errors.New("collective: the endpoint is closed")
	}
	gen := path.gen
	switch {
	case path.ID != 0 && e.current != gen:
		return fmt.Errorf("collective: generation %d is over", gen.Number)
	case path.ID == 0 && e.current != nil && gen.Number <= e.current.Number:
		return fmt.Errorf("collective: generation %d does not follow generation %d", gen.Number, e.current.Number)
	}
	if !path.group.Enroll() {
		return fmt.Errorf("collective: generation %d has lane %x already", gen.Number, path.ID)
	}
	if e.current != gen {
		e.keys = slices.Insert(e.keys, 0, generationKey{gen.Number, gen.Key})[:min(len(e.keys)+1, 1+mostPast)]
		close(e.turned)
		e.turned = make(chan struct{})
	}
	e.current = gen
	e.largest = max(e.largest, gen.Size)
	e.grow()
	for d, r := range e.awaited {
		if d.generation < gen.Number || d.generation == gen.Number && (d.lane == path.ID || path.ID == 0) {
			close(r.open)
			delete(e.awaited, d)
		}
	}
	return nil
}
