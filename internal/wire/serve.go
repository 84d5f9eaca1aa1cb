package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
)

// MaxMessage bounds, in bytes, what a server takes as one message.
const MaxMessage = 1 << 20

const (
	// maxReply bounds what a client takes from a server it has verified: the world of thousands of
	// workers.
	maxReply = 16 << 20
	// dialTimeout bounds how long the kernel of the other machine may take to answer.
	dialTimeout = 5 * time.Second
	// handshakeTimeout bounds how long a stranger can hold a connection, and how long a try to
	// connect lasts. Hundreds of processes that share a processor need many seconds, and each try
	// that is given up costs as much as the first one.
	handshakeTimeout = 20 * time.Second
	// A peer whose machine has gone without a word is noticed by the kernel after pingAfter and
	// lostAfter. A process that does not answer, though its machine does, has answerAfter: it may
	// be starved.
	pingAfter   = 10 * time.Second
	lostAfter   = 5 * time.Second
	answerAfter = 30 * time.Second
	// farewell is how long a server that stops lets its last answers travel.
	farewell = 250 * time.Millisecond
	// readBuffer is what a connection that says nothing holds on to, in bytes: a driver has two for
	// each worker.
	readBuffer = 4 << 10
	// streams bounds what one client can ask at a time; nobody here needs more than three.
	streams = 16
)

// What there is to say about connections is said by the packages that make them, in their callers'
// logs.
func init() { grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard)) }

// Serve runs a gRPC server on ln, which it closes, until ctx ends. Only those who pass the demands
// of tlsConf reach a handler. Register is called once, to add the services. When ctx ends, release
// is called: it must have every waiting handler answer soon. Serve returns when all handlers have
// returned and all connections are closed: nil after the end of ctx, else why the listener failed.
func Serve(
	ctx context.Context, ln net.Listener, tlsConf *tls.Config, register func(grpc.ServiceRegistrar), release func(),
) error {
	return ServeGuarded(ctx, ln, tlsConf, 0, register, release)
}

// ServeGuarded is Serve for a server that strangers can reach: at most so many connections (0: any
// number) are in a handshake at a time. One more pushes out the oldest: a handshake that is meant
// takes milliseconds, and those that strangers hold open cannot keep it out.
func ServeGuarded(
	ctx context.Context, ln net.Listener, tlsConf *tls.Config, unproven int,
	register func(grpc.ServiceRegistrar), release func(),
) error {
	return serve(ctx, ln, credentials.NewTLS(tlsConf), unproven, register, release)
}

// serve serves those whom the credentials let in.
func serve(
	ctx context.Context, ln net.Listener, who credentials.TransportCredentials, unproven int,
	register func(grpc.ServiceRegistrar), release func(),
) error {
	door := &door{TransportCredentials: who, most: unproven, inside: make(map[net.Conn]uint64)}
	gs := grpc.NewServer(
		grpc.Creds(door),
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxConcurrentStreams(streams),
		grpc.MaxHeaderListSize(16<<10),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: answerAfter}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingAfter / 2, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
		grpc.ForceServerCodecV2(newSharing()),
		grpc.ReadBufferSize(readBuffer),
	)
	register(gs)
	served := make(chan error, 1)
	go func() { served <- gs.Serve(watching{ln}) }()
	var failed error
	select {
	case failed = <-served:
	case <-ctx.Done():
	}
	door.shut()
	release()
	graceful := make(chan struct{})
	go func() {
		gs.GracefulStop()
		close(graceful)
	}()
	timer := time.NewTimer(farewell)
	defer timer.Stop()
	select {
	case <-graceful:
	case <-timer.C:
		gs.Stop()
		<-graceful
	}
	if failed == nil {
		<-served
	}
	return failed
}

// door knows the connections whose handshake is under way: a server that stops would wait for
// strangers among them.
type door struct {
	credentials.TransportCredentials
	most int // 0: no bound

	mu     sync.Mutex
	closed bool
	count  uint64
	inside map[net.Conn]uint64 // with the number of its coming
}

func (d *door) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		conn.Close()
		return nil, nil, errors.New("wire: the server stops")
	}
	if d.most > 0 && len(d.inside) >= d.most {
		d.pushOut()
	}
	d.count++
	d.inside[conn] = d.count
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		delete(d.inside, conn)
		d.mu.Unlock()
	}()
	return d.TransportCredentials.ServerHandshake(conn)
}

// pushOut closes the connection that has been inside longest.
func (d *door) pushOut() {
	var oldest net.Conn
	for conn, n := range d.inside {
		if oldest == nil || n < d.inside[oldest] {
			oldest = conn
		}
	}
	oldest.Close()
	delete(d.inside, oldest)
}

func (d *door) Clone() credentials.TransportCredentials { return d }

func (d *door) shut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for conn := range d.inside {
		conn.Close()
	}
}

// PeerTLS returns the TLS state of the connection that the call of a handler came on; false where
// it has none.
func PeerTLS(ctx context.Context) (tls.ConnectionState, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return tls.ConnectionState{}, false
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	return info.State, ok
}

// PeerAddrs returns the addresses of both ends of the connection that the call of a handler came
// on, as this end has them. They are the zero Addr where they are not known.
func PeerAddrs(ctx context.Context) (local, remote netip.Addr) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return local, remote
	}
	return addrOf(p.LocalAddr), addrOf(p.Addr)
}

func addrOf(a net.Addr) netip.Addr {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return tcp.AddrPort().Addr().Unmap()
}

// NewClient returns a connection to addr (host:port) whose other end must pass the demands of
// tlsConf. It does no I/O until the first call or Connect; then it stays open until Close, and when
// it breaks it is made anew by the next call, with pauses from 50 ms that grow to maxPause.
func NewClient(addr string, tlsConf *tls.Config, maxPause time.Duration) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(credentials.NewTLS(tlsConf)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxPause},
			MinConnectTimeout: handshakeTimeout,
		}),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			dialer := net.Dialer{Timeout: dialTimeout}
			conn, err := dialer.DialContext(ctx, "tcp", addr)
			if err != nil {
				return nil, err
			}
			return watch(conn), nil
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: pingAfter, Timeout: answerAfter, PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply)),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithIdleTimeout(0), // a connection that is open already is what makes a join fast
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(), // callers repeat calls themselves, and know when to stop
	)
}
