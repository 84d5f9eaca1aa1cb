package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
)

// Known takes connections whose client is known before it has said anything, and serves gRPC on
// them without a handshake: the launcher's ends of workers' sockets, and connections that have had
// their handshake.
type Known struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// NewKnown returns a Known for Serve.
func NewKnown() *Known {
	return &Known{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Take serves a connection of who, and closes it. It blocks until that is closed.
func (k *Known) Take(conn net.Conn, who any) {
	c := &knownConn{Conn: conn, who: who, closed: make(chan struct{})}
	select {
	case k.conns <- c:
		<-c.closed
	case <-k.closed:
		_ = conn.Close()
	}
}

// Serve serves the connections until ctx ends, as the function Serve does. A handler learns by
// KnownCaller whose it is.
func (k *Known) Serve(ctx context.Context, register func(grpc.ServiceRegistrar), release func(), more ...grpc.ServerOption) error {
	return serve(ctx, MaxMessage, k, knowing{}, register, release, more...)
}

// Accept implements net.Listener.
func (k *Known) Accept() (net.Conn, error) {
	select {
	case c := <-k.conns:
		return c, nil
	case <-k.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (k *Known) Close() error {
	k.once.Do(func() { close(k.closed) })
	return nil
}

// Addr implements net.Listener.
func (k *Known) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }

type knownConn struct {
	net.Conn
	who    any
	once   sync.Once
	closed chan struct{}
}

// NetConn returns the connection below.
func (c *knownConn) NetConn() net.Conn { return c.Conn }

func (c *knownConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.closed) })
	return err
}

// knowing are credentials of a server of a Known.
type knowing struct {
	credentials.TransportCredentials
}

type knownInfo struct {
	credentials.CommonAuthInfo
	who any
}

// AuthType makes it a credentials.AuthInfo.
func (knownInfo) AuthType() string { return "known" }

func (k knowing) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	for below := conn; ; {
		if c, ok := below.(*knownConn); ok {
			return conn, knownInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, c.who}, nil
		}
		above, ok := below.(interface{ NetConn() net.Conn })
		if !ok {
			return nil, nil, errors.New("wire: the client of a connection is not known")
		}
		below = above.NetConn()
	}
}

func (k knowing) Clone() credentials.TransportCredentials { return k }
func (knowing) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "known"}
}

// KnownCaller returns who makes a call of a handler, as Take was told; nil where the connection is
// not one of a Known.
func KnownCaller(ctx context.Context) any {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, _ := p.AuthInfo.(knownInfo)
	return info.who
}

// NewClientOver is NewClient, but the first connection is conn, to a server that knows this client:
// a Known. Once that is broken, connections are those of NewClient.
func NewClientOver(conn net.Conn, addr string, tlsConf *tls.Config, maxPause time.Duration) (*grpc.ClientConn, error) {
	first := make(chan net.Conn, 1)
	first <- conn
	by := func(ctx context.Context, addr string) (net.Conn, error) {
		select {
		case conn := <-first:
			return inherited{conn}, nil
		default:
			return Dial(ctx, addr)
		}
	}
	return newClient(by, addr, overInherited{credentials.NewTLS(tlsConf)}, maxPause)
}

// inherited is a connection without a handshake.
type inherited struct{ net.Conn }

// overInherited are the credentials of a client whose first connection needs no handshake.
type overInherited struct {
	credentials.TransportCredentials
}

func (o overInherited) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if _, is := conn.(inherited); is {
		return conn, knownInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, nil}, nil
	}
	return o.TransportCredentials.ClientHandshake(ctx, authority, conn)
}

func (o overInherited) Clone() credentials.TransportCredentials {
	return overInherited{o.TransportCredentials.Clone()}
}

// TakeCalls returns the options of a server that implements no service: take answers every call, of
// one encoded request and one encoded reply.
func TakeCalls(take func(ctx context.Context, method string, request []byte) (mem.BufferSlice, error)) []grpc.ServerOption {
	handle := func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream) // there is one: this is a handler
		var request message
		if err := stream.RecvMsg(&request); err != nil {
			return err
		}
		encoded := request.Materialize()
		request.Free()
		reply, err := take(stream.Context(), method, encoded)
		if err != nil {
			return err
		}
		return stream.SendMsg(&message{reply})
	}
	return []grpc.ServerOption{grpc.UnknownServiceHandler(handle), grpc.ForceServerCodecV2(unread{})}
}

// message is an encoded message.
type message struct{ mem.BufferSlice }

// unread is the codec of messages that are not decoded.
type unread struct{}

var _ encoding.CodecV2 = unread{}

func (unread) Marshal(v any) (mem.BufferSlice, error) { return v.(*message).BufferSlice, nil }

func (unread) Unmarshal(data mem.BufferSlice, v any) error {
	data.Ref()
	v.(*message).BufferSlice = data
	return nil
}

func (unread) Name() string { return "proto" }
