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

// MaxConnections is the largest value of Config.Connections.
const MaxConnections = sockets.MaxConnections

// Config configures an [Endpoint].
type Config struct {
	Credentials *identity.Credentials // of this worker; required
	ListenAddr  string                // host:port; if empty, a free port on the addresses of the interfaces
	Interfaces  []string              // interfaces to listen on if ListenAddr has no address, and for Widen; if empty, all
	Encrypt     bool                  // TLS on every connection; every rank must agree
	OnlySockets bool                  // no shared memory between the ranks of a host
	Algorithm   Algorithm             // of AllReduce; every rank must agree
	// Connections is the number of connections that share the large frames between two ranks of
	// different hosts, at most MaxConnections. More than one helps if the network limits the rate
	// of each connection. 0 stands for 1. Every rank must agree.
	Connections int
	Log         logrus.FieldLogger // if nil, nothing is logged
	Timeline    Timeline           // receives every operation; may be nil

	// Backend is called on rank 0 with the backend with which package cuda combines device memory,
	// once for each name in a generation. It must not block. It may be nil.
	Backend func(generation uint64, name string)

	// Visited is called with each connection that another worker opens by Visit, in a separate
	// goroutine. The connection is closed when Visited returns, or when the endpoint is closed;
	// Close waits for Visited. If it is nil, visits are refused.
	Visited func(net.Conn)

	// Network is the network of the ranks. The zero value is the kernel's.
	Network identity.Network

	// For asynchronous operations:
	FusionThreshold int           // largest sum of bytes of tensors that are reduced together, 64 MiB if 0; the smallest of all ranks counts
	CycleTime       time.Duration // longest time that an operation waits to be fused with others, 1 ms if 0; if negative, it does not wait
	StallWarning    time.Duration // time after which an operation that some ranks have not called is logged, 5 s if 0; if negative, never
}

// Endpoint is the endpoint at which the other workers of the job reach this one. It lives as long
// as the worker, over all generations.
type Endpoint struct {
	cfg     Config // with the defaults of Log and Connections
	sockets *sockets.Endpoint
	tally   *tally
	running sync.WaitGroup // the goroutine that prepares the shared memory
}

// Peers are the ranks that [Endpoint.Connect] connects.
type Peers struct {
	Generation uint64
	Key        identity.DataKey // of the generation: only its members have the key
	Rank       int              // of this worker
	Addrs      [][]string       // by rank, the result of Addrs of each rank's endpoint; this rank's entry is not used
	Hosts      []string         // by rank, the host; ranks of one host share memory if possible, but not if it is empty or Hosts nil
}

// Listen opens an endpoint and starts to accept connections until Close.
func Listen(cfg Config) (*Endpoint, error) {
	if cfg.Credentials == nil {
		return nil, errors.New("collective: an endpoint needs credentials")
	}
	if cfg.Connections < 0 || cfg.Connections > MaxConnections {
		return nil, fmt.Errorf("collective: %d connections to a peer are configured; at most %d are possible", cfg.Connections, MaxConnections)
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

// Widen makes the endpoint listen on the addresses of the interfaces, or on all addresses, in
// addition to Config.ListenAddr. It returns the addresses to give to the other ranks from now on.
func (e *Endpoint) Widen() ([]string, error) { return e.sockets.Widen() }

// Addrs returns the addresses to give to the other ranks, each host:port, in a new slice. The other
// ranks try all of them.
func (e *Endpoint) Addrs() []string { return e.sockets.Addrs() }

// Connections returns the number of connections to other ranks so far, in all generations. During
// Connect it shows the progress. Any goroutine may call it.
func (e *Endpoint) Connections() uint64 { return e.sockets.Connections() }

// Close ends the endpoint and waits for its goroutines. Connected groups stay connected; a Connect
// in progress fails.
func (e *Endpoint) Close() error {
	err := e.sockets.Close()
	e.running.Wait()
	return err
}

// Kill ends the endpoint and its groups as the death of this process would: connections end without
// a notice. Operations of these groups, in progress or later, do not return but end their goroutine
// as runtime.Goexit does. Kill is for workers that are goroutines (package elastic/elastictest),
// which share no memory. It may be called from any goroutine and waits for none; Close does.
func (e *Endpoint) Kill() { e.sockets.Kill() }

// Visit connects to a member of a generation, at the first of its addresses that answers. This
// worker need not be in that generation. The key is the members' key for visits, which the driver
// gives to the job's workers. The connection is encrypted if tensors are. A member that has entered
// a later generation refuses. The other worker's Config.Visited gets the other end. The caller
// closes the connection; the endpoint does not.
func (e *Endpoint) Visit(ctx context.Context, generation uint64, key identity.DataKey, addrs []string) (net.Conn, error) {
	return e.sockets.Visit(ctx, generation, key, addrs)
}

// Connect connects the ranks of a generation and returns this rank's group. It blocks until there
// is a connection to every other rank or, with more than 32 ranks, to the ranks that most
// operations use: others are connected when an operation needs them. Generations must rise from
// call to call; from now on, connections of older generations are refused. Connect blocks at most
// until ctx ends or, if ctx has no deadline, until no new connection has been made for 30 s plus
// 0.1 s for each rank. Ranks of one host are then connected by shared memory if possible. Connect
// fails with an [*AbortedError] that names the ranks that could not be reached. It fails at once if
// nothing listens at a peer's addresses, which means that the peer's process is dead.
func (e *Endpoint) Connect(ctx context.Context, p Peers) (*Group, error) {
	n := len(p.Addrs)
	if p.Rank < 0 || p.Rank >= n {
		return nil, fmt.Errorf("collective: rank %d is not one of %d ranks", p.Rank, n)
	}
	f := newFamily(nil)
	f.Generation = e.sockets.Generation(sockets.Peers{Number: p.Generation, Size: n, Self: p.Rank, Key: p.Key, Addrs: p.Addrs, Hosts: p.Hosts}, (*kin)(f))
	f.settings = settings{
		onlySockets: e.cfg.OnlySockets, log: e.cfg.Log, timeline: e.cfg.Timeline, backend: e.cfg.Backend, tally: e.tally, forced: exchange.Forced{Algorithm: operation.Algorithm(e.cfg.Algorithm)},
		tuning: tuning{fusion: e.cfg.FusionThreshold, cycle: e.cfg.CycleTime, stall: e.cfg.StallWarning, log: e.logStall},
	}
	f.connect = func(ctx context.Context, l lane) (*Group, error) { return e.connect(ctx, f, l) }
	g, err := f.connect(ctx, lane{Lane: sockets.Lane{Rank: p.Rank, Size: n}})
	if err == nil {
		e.sockets.Settle(f.Generation)
	}
	return g, err
}

// connect connects the ranks of one group.
func (e *Endpoint) connect(ctx context.Context, f *family, l lane) (*Group, error) {
	g := newGroup(f, l)
	path := e.sockets.NewPath(f.Generation, l.Lane, (*inner)(g), g.call.Boxes)
	if g.size > 1 {
		g.call.Path, g.call.TCP = path, path
	}
	if err := e.sockets.Connect(ctx, path, func() { f.catchUp(g) }); err != nil {
		return nil, err
	}
	if g.err() != nil {
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
