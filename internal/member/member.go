// Package member is a worker's connection to its driver, whatever the worker computes with: it
// joins worlds, learns of changed hosts and lost ranks, and reports. Package elastic adds
// collectives and a state; package internal/proxy adds the lines with which programs in other
// languages take part.
package member

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// dialTimeout bounds an attempt of Dial, and directTimeout the one without the agent.
	dialTimeout   = 20 * time.Second
	directTimeout = 2 * time.Second
)

// Config configures a Member.
type Config struct {
	// Worker is the worker's environment, with its credentials.
	Worker plan.Worker
	// Network is where the driver is. The zero value is the kernel's.
	Network identity.Network
	// Widen is as in rendezvous.ClientConfig.
	Widen func() ([]string, error)
	// Socket is as in rendezvous.ClientConfig. New closes it if it fails.
	Socket net.Conn
	// Stacks is as in notify.Service. Nil: the worker is this process.
	Stacks func(ctx context.Context, mostBytes int) ([]byte, error)
}

// Member is a worker of a job: a connection to its driver, and the service to which the driver
// sends notifications. Its methods are safe for concurrent use, except Close.
type Member struct {
	*rendezvous.Client
	*notify.Service
	// Credentials are the worker's.
	Credentials *identity.Credentials
	// Local is this machine's address on the route to the driver.
	Local netip.Addr

	driver     identity.DriverAddrs
	notifyAddr string
	ctx        context.Context // until Close
	stop       context.CancelFunc
	hear       sync.Once // at the first Join, by the connection to the driver
	serving    sync.WaitGroup
	served     error
}

// New opens the notification service, and does no other I/O. The caller must close the member.
func New(cfg Config) (_ *Member, err error) {
	defer func() {
		if err != nil && cfg.Socket != nil {
			_ = cfg.Socket.Close()
		}
	}()
	m := &Member{driver: identity.DriverAddrs{
		Direct: cfg.Worker.DriverDirect, DirectTimeout: directTimeout, Addr: cfg.Worker.DriverAddr, Timeout: dialTimeout,
	}}
	if m.Credentials, err = identity.Decode(cfg.Worker.Credentials); err != nil {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	if m.Local, err = addressTowards(cfg.Worker.DriverAddr); err != nil {
		return nil, fmt.Errorf("driver %s: %w", cfg.Worker.DriverAddr, err)
	}
	m.Service = notify.NewService(m.Credentials)
	m.Service.Stacks = cfg.Stacks
	m.Client, err = rendezvous.NewClient(rendezvous.ClientConfig{
		Addr: cfg.Worker.DriverAddr, Credentials: m.Credentials, Network: cfg.Network, Widen: cfg.Widen, Socket: cfg.Socket,
	})
	if err != nil {
		return nil, err
	}
	listener, err := identity.Notify.On(cfg.Network).Listen(netip.AddrPortFrom(m.Local, 0).String())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("notifications: %w", err), m.Client.Close())
	}
	m.notifyAddr = listener.Addr().String()
	m.ctx, m.stop = context.WithCancel(context.Background())
	m.serving.Go(func() { m.served = m.Serve(m.ctx, listener) })
	return m, nil
}

// addressTowards returns this machine's address on the route to the driver. Connecting a UDP socket
// selects the route without sending a packet.
func addressTowards(driver string) (netip.Addr, error) {
	conn, err := net.Dial("udp", driver)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	addr, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return addr.Addr().Unmap(), err
}

// Join is rendezvous.Client.Join, with the address of the notification service, and returns the
// world. From the first one on, the member hears notifications.
func (m *Member) Join(ctx context.Context, j rendezvous.Joining) (rendezvous.World, error) {
	m.hear.Do(func() { m.serving.Go(func() { m.Hear(m.ctx, m.Call) }) })
	j.NotifyAddr = m.notifyAddr
	place, err := m.Client.Join(ctx, j)
	if err != nil {
		return rendezvous.World{}, err
	}
	return place.World()
}

// Dial connects to the driver for a protocol other than gRPC: directly if it is on this machine;
// otherwise, or if another driver has replaced it, through the agent. The caller must close the
// connection.
func (m *Member) Dial(ctx context.Context, protocol string) (net.Conn, error) {
	return m.Credentials.DialDriver(ctx, m.driver, protocol)
}

// Kill closes everything of the member that other processes can see, without messages and without
// blocking. Close must still be called.
func (m *Member) Kill() {
	m.stop()
	_ = m.Client.Close() // pending calls fail; nothing else uses the error
}

// Close ends the notification service and the connection to the driver, and waits until both have
// ended.
func (m *Member) Close() error {
	m.stop()
	m.serving.Wait()
	return errors.Join(m.served, m.Client.Close())
}
