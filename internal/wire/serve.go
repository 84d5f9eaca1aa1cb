package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// MaxMessage bounds, in bytes, a message to a server other than an agent.
const MaxMessage = 1 << 20

// MaxStart bounds, in bytes, a message to an agent, which contains a worker's command and
// environment: Linux accepts at most 6 MiB of them.
const MaxStart = 6<<20 + 64<<10

const (
	// maxReply bounds a message from a verified server, such as the world of thousands of workers.
	maxReply = 16 << 20
	// dialTimeout bounds a TCP connect.
	dialTimeout = 5 * time.Second
	// The kernel detects a dead machine after at most pingAfter and lostAfter together. A process
	// that is silent although its machine answers has answerAfter, because it may lack CPU time.
	pingAfter   = 10 * time.Second
	lostAfter   = 5 * time.Second
	answerAfter = 30 * time.Second
	// stopGrace is how long a stopping server waits for its last answers to be sent.
	stopGrace = 250 * time.Millisecond
	// readBuffer is the size of a connection's own read buffer: none, since TLS has one.
	readBuffer = 0
	// writeBuffer is the size in bytes of the buffer that collects writes: a record of TLS.
	writeBuffer = 16 << 10
	// window bounds the bytes in flight to a reader, per connection and per call. A fixed window
	// needs no pings to measure the connection. It suffices: a driver of thousands of workers has
	// few concurrent calls of each host, and answers with worlds of 100 KiB.
	window = 1 << 20
)

// callsOfClient bounds the concurrent calls of a client; none needs more than four.
const callsOfClient = 16

// gRPC's own log is discarded: packages that make connections report errors to their callers.
func init() { grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard)) }

// Raw handles connections for a protocol other than gRPC, which the client names in the handshake.
type Raw struct {
	// Protocol is the ALPN name of the protocol.
	Protocol string
	// Handle serves a connection until it or ctx ends, and closes it.
	Handle func(ctx context.Context, conn net.Conn, peer tls.ConnectionState)
}

// Serve runs a gRPC server on ln, which it closes, until ctx ends. Only peers that satisfy tlsConf
// reach a handler. most bounds a message in bytes before memory is allocated for it. register is
// called once to add the services. Handlers that wait must return soon after the end of ctx. Serve
// returns once all handlers have returned and all connections are closed: nil after the end of ctx,
// otherwise the error of the listener.
func Serve(
	ctx context.Context, most int, ln *identity.Listener, tlsConf *tls.Config, register func(grpc.ServiceRegistrar), raw ...Raw,
) error {
	tlsConf = tlsConf.Clone()
	for _, r := range raw {
		tlsConf.NextProtos = append(tlsConf.NextProtos, r.Protocol)
	}
	return serve(ctx, most, accepting{credentials.NewTLS(tlsConf), ln, &raws{ctx: ctx, all: raw}}, register)
}

// accepting are credentials that report the result of each handshake to the listener, and pass
// connections for other protocols to their handlers.
type accepting struct {
	credentials.TransportCredentials
	ln   *identity.Listener
	raws *raws
}

// raws are the protocols other than gRPC.
type raws struct {
	ctx     context.Context
	all     []Raw
	running sync.WaitGroup // calls of their handlers
}

func (a accepting) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secured, info, err := a.TransportCredentials.ServerHandshake(conn)
	if err != nil {
		a.ln.Refused(conn, err)
		conn.Close()
		return nil, nil, err
	}
	if !a.ln.Proven(conn) {
		secured.Close()
		return nil, nil, errors.New("wire: the connection has given way to newer ones")
	}
	t, _ := info.(credentials.TLSInfo)
	for _, r := range a.raws.all {
		if r.Protocol == t.State.NegotiatedProtocol {
			a.raws.running.Go(func() { r.Handle(a.raws.ctx, layered{secured, conn}, t.State) })
			return nil, nil, credentials.ErrConnDispatched
		}
	}
	return secured, info, nil
}

func (a accepting) Clone() credentials.TransportCredentials { return a }

// layered is a connection with a reference to the one below it.
type layered struct {
	net.Conn
	below net.Conn
}

// NetConn returns the connection below.
func (l layered) NetConn() net.Conn { return l.below }

// serve serves peers that the credentials accept.
func serve(ctx context.Context, most int, who accepting, register func(grpc.ServiceRegistrar)) error {
	defer who.raws.running.Wait()
	gs := grpc.NewServer(
		grpc.Creds(who),
		grpc.MaxRecvMsgSize(most),
		grpc.MaxConcurrentStreams(callsOfClient),
		grpc.MaxHeaderListSize(16<<10),
		grpc.ConnectionTimeout(identity.HandshakeTime),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: answerAfter}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingAfter / 2, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
		grpc.ReadBufferSize(readBuffer),
		grpc.WriteBufferSize(writeBuffer),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
	)
	register(gs)
	served := make(chan error, 1)
	go func() { served <- gs.Serve(watching{who.ln}) }()
	var failed error
	select {
	case failed = <-served:
	case <-ctx.Done():
	}
	_ = who.ln.Close() // a graceful stop would wait for the connections in a handshake
	graceful := make(chan struct{})
	go func() {
		gs.GracefulStop()
		close(graceful)
	}()
	timer := time.NewTimer(stopGrace)
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

// Caller returns the caller of a handler, as subject reads it from the certificate of the
// connection. Its error is a gRPC status, Unauthenticated.
func Caller[S any](ctx context.Context, subject func(tls.ConnectionState) (S, error)) (S, error) {
	var info credentials.TLSInfo
	p, ok := peer.FromContext(ctx)
	if ok {
		info, ok = p.AuthInfo.(credentials.TLSInfo)
	}
	var none S
	if !ok {
		return none, status.Error(codes.Unauthenticated, "no certificate")
	}
	from, err := subject(info.State)
	if err != nil {
		return none, status.Error(codes.Unauthenticated, err.Error())
	}
	return from, nil
}

// PeerAddrs returns this end's view of both addresses of the connection of a handler's call; the
// zero Addr if unknown.
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

// NewClient returns a connection to addr (host:port), whose server must satisfy tlsConf. It does no
// I/O until the first call or Connect. It stays open until Close; a broken connection is restored
// by the next call, with pauses from 50 ms up to 1 s.
func NewClient(addr string, tlsConf *tls.Config) (*grpc.ClientConn, error) {
	return newClient(addr, explaining{credentials.NewTLS(tlsConf)}, dial,
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: pingAfter, Timeout: answerAfter, PermitWithoutStream: true,
		}),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithWriteBufferSize(writeBuffer),
		grpc.WithStaticStreamWindowSize(window),
		grpc.WithStaticConnWindowSize(window),
		grpc.WithIdleTimeout(0), // a join needs an open connection to be fast
	)
}

// newClient is NewClient with other credentials, another dial and more options.
func newClient(
	addr string, creds credentials.TransportCredentials, dial func(context.Context, string) (net.Conn, error), more ...grpc.DialOption,
) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+addr, append(more,
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(dial),
		grpc.WithConnectParams(reconnecting),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply)),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(), // callers repeat calls themselves
	)...)
}

// reconnecting is how a client restores a broken connection.
var reconnecting = grpc.ConnectParams{
	MinConnectTimeout: identity.HandshakeTime,
	Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
}

// dial connects to a TCP address, and makes the kernel watch the connection (see Watch).
func dial(ctx context.Context, addr string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	Watch(conn)
	return watched{conn}, nil
}

// explaining are credentials whose errors describe differing clocks. gRPC keeps only their text.
type explaining struct {
	credentials.TransportCredentials
}

func (e explaining) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secured, info, err := e.TransportCredentials.ClientHandshake(ctx, authority, conn)
	if err != nil {
		return nil, nil, identity.Explain(err, time.Now())
	}
	return reading{secured}, info, nil
}

// reading is a connection whose server may still refuse the client's certificate: in TLS 1.3 the
// client learns of that when it reads.
type reading struct{ net.Conn }

func (r reading) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	if err != nil && strings.HasSuffix(err.Error(), "tls: expired certificate") {
		err = fmt.Errorf("%w: by the clock of that machine, this one's certificate has ended or is not valid yet; its log says by how much the clocks differ", err)
	}
	return n, err
}

func (e explaining) Clone() credentials.TransportCredentials {
	return explaining{e.TransportCredentials.Clone()}
}
