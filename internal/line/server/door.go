package server

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"sync"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
)

// Door serves workers that have proven by a certificate that they are workers of the job, and by
// their tickets which of them they are. It serves their lines, if a process between the launcher
// and the worker has not passed the socket on, and their connections for other protocols.
type Door struct {
	server *Server
	ln     *identity.Listener
	tls    *tls.Config
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup
}

// OpenDoor listens at a TCP address of a network, with the credentials of the launcher as an agent
// of the job. The caller must call Close.
func OpenDoor(s *Server, on identity.Network, at string, own *identity.Credentials) (*Door, error) {
	ln, err := identity.Door.On(on).Listen(at)
	if err != nil {
		return nil, fmt.Errorf("line: listening for workers: %w", err)
	}
	d := &Door{server: s, ln: ln, tls: own.ServerTLS(identity.Worker)}
	d.tls.NextProtos = []string{line.Protocol, line.TasksProtocol, line.StoreProtocol}
	d.ctx, d.stop = context.WithCancel(context.Background())
	d.wg.Go(func() { ln.Serve(s.cfg.Log, "line: workers", d.admit) })
	return d, nil
}

// Addr returns the address of the door, host:port.
func (d *Door) Addr() string { return d.ln.Addr().String() }

// admit serves a connection until it ends.
func (d *Door) admit(conn *identity.Conn) {
	defer conn.Close()
	if !fromHere(conn) {
		return
	}
	secured := tls.Server(conn, d.tls)
	if err := secured.HandshakeContext(d.ctx); err != nil {
		return // a stranger, which has received the reason
	}
	ticket, err := identity.ReadTicket(secured)
	if err != nil || !conn.Proven() {
		return
	}
	defer context.AfterFunc(d.ctx, func() { conn.Close() })()
	from := d.server.holder(ticket)
	switch protocol := secured.ConnectionState().NegotiatedProtocol; {
	case protocol == line.Protocol:
		d.server.Serve(d.ctx, secured, from) // it answers a worker that does not run
	case from != "":
		d.server.cfg.Stream(from, protocol, secured)
	}
}

// fromHere returns whether both ends of a connection are on this host.
func fromHere(conn net.Conn) bool {
	near, ok1 := conn.LocalAddr().(*net.TCPAddr)
	far, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && (far.IP.IsLoopback() || far.IP.Equal(near.IP))
}

// Close ends all connections, and blocks until their goroutines have ended.
func (d *Door) Close() {
	d.stop()
	d.ln.Close()
	d.wg.Wait()
}
