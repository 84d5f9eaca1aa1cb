package collective

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// MaxConnections is the most of Config.Connections.
const MaxConnections = sockets.MaxConnections

// Config configures an [Endpoint].
type Config struct {
	Credentials *identity.Credentials // of this worker; needed
	ListenAddr  string                // host:port; empty: the addresses of the interfaces, a free port
	Interfaces  []string              // listened on where ListenAddr names no address, and by Widen; empty: all
	Encrypt     bool                  // TLS on every connection; every rank must agree
	OnlySockets bool                  // no shared memory between the ranks of a host
	Algorithm   Algorithm             // of AllReduce; every rank must agree
	// Connections share the large frames between two ranks of different hosts: more than one where
	// the network bounds each of them. Up to MaxConnections; 0 is 1. Every rank must agree.
	Connections int
	Log         logrus.FieldLogger // nil: nothing is logged
	Timeline    Timeline           // told of every operation; nil: unused

	// Backend is called on rank 0 with the backend by which package cuda combines memory of
	// devices, once for each name in a generation. It must not block. Nil: unused.
	Backend func(generation uint64, name string)

	// Visited is called with each connection that another worker's Visit has opened, in a goroutine
	// of its own. It is closed when Visited returns, and when the endpoint is closed, which waits
	// for that. Nil: visitors are refused.
	Visited func(net.Conn)

	// Network is where the other ranks are. The zero value is the kernel's.
	Network identity.Network

	// Of asynchronous operations:
	FusionThreshold int           // bytes up to which tensors are reduced as one; 0: 64 MiB; the smallest of all ranks counts
	CycleTime       time.Duration // longest that an operation waits for others to be fused with; 0: 1 ms; negative: not at all
	StallWarning    time.Duration // after which one that some ranks have not called is logged; 0: 5 s; negative: never
}

// Endpoint is where the other workers of the job reach this one. It lives as long as the worker,
// over all generations.
type Endpoint struct {
	cfg     Config // with the defaults of Log and Connections
	sockets *sockets.Endpoint
	tally   *tally
	running sync.WaitGroup // what prepares the shared memory
}

// Peers are the ranks that [Endpoint.Connect] connects.
type Peers struct {
	Generation uint64
	Key        identity.DataKey // of the generation: every member has it, and nobody else
	Rank       int              // of this worker
	Addrs      [][]string       // by rank: what Addrs of their endpoints returned; the own entry is not used
	Hosts      []string         // by rank: ranks of one host share memory, if that can be; nil, or empty names: they do not
}

// Listen opens an endpoint and starts to accept connections; Close ends it.
func Listen(cfg Config) (*Endpoint, error) {
	if cfg.Credentials == nil {
		return nil, errors.New("collective: an endpoint needs credentials")
	}
	if cfg.Connections < 0 || cfg.Connections > MaxConnections {
		return nil, fmt.Errorf("collective: %d connections to a peer; there may be up to %d", cfg.Connections, MaxConnections)
	}
	if cfg.Connections == 0 {
		cfg.Connections = 1
	}
	if cfg.Log == nil {
		quiet := logrus.New()
		quiet.SetOutput(io.Discard)
		cfg.Log = quiet
	}
	s, err := sockets.Listen(sockets.Config{
		Credentials: cfg.Credentials, ListenAddr: cfg.ListenAddr, Interfaces: cfg.Interfaces, Encrypt: cfg.Encrypt,
		Connections: cfg.Connections, ShareFrom: operation.Thresholds.Shared, Log: cfg.Log, Visited: cfg.Visited, Network: cfg.Network,
	})
	if err != nil {
		return nil, err
	}
	e := &Endpoint{cfg: cfg, sockets: s, tally: newTally()}
	if !cfg.OnlySockets {
		e.running.Go(shm.Prepare)
	}
	return e, nil
}

// Widen listens on the addresses of the interfaces, or on all, besides that of Config.ListenAddr,
// and returns the addresses to give to the other ranks from now on.
func (e *Endpoint) Widen() ([]string, error) { return e.sockets.Widen() }

// Addrs are the addresses to give to the other ranks, each host:port; they try all of them. A new
// slice.
func (e *Endpoint) Addrs() []string { return e.sockets.Addrs() }

// Connections is the number of connections to other ranks so far, of all generations: while Connect
// is under way, a sign of its progress. Any goroutine may call it.
func (e *Endpoint) Connections() uint64 { return e.sockets.Connections() }

// Close ends the endpoint and waits for its goroutines. Groups that are connected stay so; a
// Connect under way fails.
func (e *Endpoint) Close() error {
	err := e.sockets.Close()
	e.running.Wait()
	return err
}

// Kill ends the endpoint and its groups as the death of this process would: connections end without
// a notice. An operation of these groups, under way or later, does not return, but ends its
// goroutine as runtime.Goexit does. It is for workers that are goroutines (package
// elastic/elastictest), which share no memory. It may be called from any goroutine, and does not
// wait for any; Close does.
func (e *Endpoint) Kill() { e.sockets.Kill() }

// Visit connects to a member of a generation, at the first of its addresses that answers. This
// worker need not be in that generation. The key is the members' key for visits, which the driver
// gives to the job's workers. The connection is encrypted if tensors are. A member that has entered
// a later generation refuses. The other worker's Config.Visited gets the other end. The caller
// closes the connection; the endpoint does not.
func (e *Endpoint) Visit(ctx context.Context, generation uint64, key identity.DataKey, addrs []string) (net.Conn, error) {
	return e.sockets.Visit(ctx, generation, key, addrs)
}

// Connect connects the ranks of a generation and returns this rank's group, once there is a
// connection to every other rank, or, of more than 32 ranks, to those with which it meets in most
// operations: the others are connected when an operation needs them. Generations must rise from
// call to call; what is left of older ones is refused from now on. It blocks until then, at most
// until ctx ends, or, where ctx has no deadline, until no connection has come for 30 s and 0.1 s
// more for each rank. Ranks of one host then meet in shared memory, where they can. It fails with
// an [*AbortedError] that names the ranks that could not be reached: at once where nothing listens
// at a peer's addresses, which means that its process is dead.
func (e *Endpoint) Connect(ctx context.Context, p Peers) (*Group, error) {
	n := len(p.Addrs)
	if p.Rank < 0 || p.Rank >= n {
		return nil, fmt.Errorf("collective: rank %d among %d", p.Rank, n)
	}
	f := newFamily(nil)
	f.Generation = e.sockets.Generation(sockets.Peers{Number: p.Generation, Size: n, Self: p.Rank, Key: p.Key, Addrs: p.Addrs, Hosts: p.Hosts}, (*kin)(f))
	f.settings = settings{
		onlySockets: e.cfg.OnlySockets, log: e.cfg.Log, timeline: e.cfg.Timeline, backend: e.cfg.Backend, tally: e.tally, forced: exchange.Forced{Algorithm: operation.Algorithm(e.cfg.Algorithm)},
		tuning: tuning{fusion: e.cfg.FusionThreshold, cycle: e.cfg.CycleTime, stall: e.cfg.StallWarning, log: e.logStall},
	}
	f.connect = func(ctx context.Context, l lane) (*Group, error) { return e.connect(ctx, f, l) }
	g, err := f.connect(ctx, lane{rank: p.Rank, size: n})
	if err == nil {
		e.sockets.Settle(f.Generation)
	}
	return g, err
}

// connect connects the ranks of one group.
func (e *Endpoint) connect(ctx context.Context, f *family, l lane) (*Group, error) {
	g := newGroup(f, l)
	path := e.sockets.NewPath(f.Generation, sockets.Lane{ID: l.id, Rank: l.rank, Size: l.size, Members: l.members}, (*inner)(g), g.call.Boxes)
	if g.size > 1 {
		g.call.Path, g.call.TCP = path, path
	}
	if err := e.sockets.Connect(ctx, path, func() { f.catchUp(g) }); err != nil {
		return nil, err
	}
	if g.err() != nil {
		<-g.call.Failed
		path.Release()
		path.Quiesce()
		return nil, g.err()
	}
	if _, bounded := ctx.Deadline(); !bounded { // the others may still be about to connect
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, sockets.LateBound(g.size))
		defer cancel()
	}
	if err := g.share(ctx); err != nil {
		g.Abort(err)
		return nil, g.err()
	}
	e.sockets.Guard(path)
	return g, nil
}
