package tcpstore

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// DoorConfig configures a Door.
type DoorConfig struct {
	// Bounds are the bounds of the listener.
	Bounds identity.Bounds
	// Admit returns the reason why a connection is refused, or nil.
	Admit func(net.Conn) error
	// Serve serves a connection until its end. The door closes the connection afterwards.
	Serve func(d *Door, conn net.Conn)
	// What begins the lines of the log.
	What string
	Log  logrus.FieldLogger
}

// Door gives programs on this machine access to a store: it listens on a loopback port, and admits
// only connections that Admit accepts.
type Door struct {
	cfg DoorConfig
	ln  *identity.Listener

	ctx context.Context // ends when the door closes
	end context.CancelFunc
	wg  sync.WaitGroup
}

// OpenDoor listens on a free loopback port. The caller must call Close.
func OpenDoor(cfg DoorConfig) (*Door, error) {
	ln, err := cfg.Bounds.Listen(identity.ListenLoopback())
	if err != nil {
		return nil, fmt.Errorf("tcpstore: listening for programs: %w", err)
	}
	d := &Door{cfg: cfg, ln: ln}
	d.ctx, d.end = context.WithCancel(context.Background())
	d.wg.Go(func() { ln.Serve(cfg.Log, cfg.What, d.accept) })
	return d, nil
}

// Addr returns the address of the door.
func (d *Door) Addr() *net.TCPAddr { return d.ln.Addr().(*net.TCPAddr) }

// Open makes the door listen at a further address.
func (d *Door) Open(addr string) error {
	_, err := d.ln.Open(addr)
	return err
}

func (d *Door) accept(conn *identity.Conn) {
	defer conn.Close()
	if err := d.cfg.Admit(conn.NetConn()); err != nil {
		d.ln.WarnRefused(d.cfg.Log, d.cfg.What+": store", conn.RemoteAddr(), err)
		return
	}
	if conn.Proven() {
		defer context.AfterFunc(d.ctx, func() { conn.Close() })()
		d.cfg.Serve(d, conn)
	}
}

// Carry copies bytes between a program and a store elsewhere, in both directions, until one end
// closes its connection. It closes both.
func (d *Door) Carry(program, far net.Conn) {
	defer context.AfterFunc(d.ctx, func() { far.Close() })()
	var wg sync.WaitGroup
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		to.Close()
		from.Close()
	}
	wg.Go(func() { pass(far, program) })
	wg.Go(func() { pass(program, far) })
	wg.Wait()
}

// Close closes all connections, and blocks until their goroutines have ended.
func (d *Door) Close() {
	d.end()
	d.ln.Close()
	d.wg.Wait()
}
