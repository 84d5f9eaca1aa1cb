package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/plan"
)

// meetings are the rendezvous of successive drivers of a job.
type meetings struct {
	t         *testing.T
	authority *identity.Authority
	joins     chan rendezvous.Joining
}

func newMeetings(t *testing.T) *meetings {
	authority, err := identity.NewAuthority("calls")
	if err != nil {
		t.Fatal(err)
	}
	return &meetings{t, authority, make(chan rendezvous.Joining, 16)}
}

// Joined implements rendezvous.Handler.
func (m *meetings) Joined(_ identity.Subject, j rendezvous.Joining) { m.joins <- j }

// Reported implements rendezvous.Handler.
func (m *meetings) Reported(identity.Subject, rendezvous.Report, uint64, uint64) {}

func (m *meetings) issue(s identity.Subject) *identity.Credentials {
	m.t.Helper()
	c, err := m.authority.Issue(s)
	if err != nil {
		m.t.Fatal(err)
	}
	return c
}

// begin serves another driver's rendezvous until end is called.
func (m *meetings) begin() (server *rendezvous.Server, at netip.AddrPort, end func()) {
	m.t.Helper()
	ln, err := identity.Rendezvous.Listen("127.0.0.1:0")
	if err != nil {
		m.t.Fatal(err)
	}
	server = rendezvous.NewServer(rendezvous.ServerConfig{Credentials: m.issue(identity.Subject{Role: identity.Driver}), Handler: m, Log: quiet()})
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(ctx, ln); err != nil {
			m.t.Error(err)
		}
	})
	end = func() {
		cancel()
		serving.Wait()
	}
	m.t.Cleanup(end)
	return server, netip.MustParseAddrPort(ln.Addr().String()), end
}

// forwarder returns that of the agent of host a.
func (m *meetings) forwarder() *forwarder {
	f, err := newForwarder(netip.MustParseAddr("127.0.0.1"), quiet())
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(f.close)
	return f
}

func (m *meetings) aim(f *forwarder, to netip.AddrPort) {
	m.t.Helper()
	f.aim(to)
	if err := f.calls.aim(to, m.issue(identity.Subject{Role: identity.Agent, Host: "a"}).Encode(), f.dialForCalls); err != nil {
		m.t.Fatal(err)
	}
}

// worker returns the client of a worker of the agent, which has only its socket.
func (m *meetings) worker(f *forwarder, incarnation string) *rendezvous.Client {
	m.t.Helper()
	near, far := sockets(m.t)
	var taken sync.WaitGroup
	taken.Go(func() { f.calls.sockets.Take(far, incarnation) })
	c, err := rendezvous.NewClient(rendezvous.ClientConfig{
		Addr: "127.0.0.1:1", Socket: near, Credentials: m.issue(identity.Subject{Role: identity.Worker, Host: "a", Incarnation: incarnation}),
	})
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		_ = c.Close()
		taken.Wait()
	})
	return c
}

// sockets returns the ends of a socket.
func sockets(t *testing.T) (near, far net.Conn) {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range ends {
		f := os.NewFile(uintptr(fd), "socket")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return conns[0], conns[1]
}

// worldOf returns a world of one worker of host a.
func worldOf(generation uint64) plan.World {
	return plan.World{Generation: generation, Slots: []plan.Slot{{SlotID: plan.SlotID{Host: "a"}, LocalSize: 1, CrossSize: 1}}}
}

// TestCalls: workers reach the driver by their sockets alone. The driver takes calls for workers of
// the agent's host, and for no others. A join that its worker gives up is given up at the driver.
func TestCalls(t *testing.T) {
	m := newMeetings(t)
	server, to, _ := m.begin()
	f := m.forwarder()
	m.aim(f, to)
	server.Admit(identity.Subject{Host: "a", Incarnation: "one"})
	server.Admit(identity.Subject{Host: "b", Incarnation: "elsewhere"})
	one := m.worker(f, "one")
	for name, c := range map[string]*rendezvous.Client{"of another host": m.worker(f, "elsewhere"), "not admitted": m.worker(f, "stranger")} {
		if _, err := c.Look(t.Context()); err == nil || !strings.Contains(err.Error(), "does not belong to the job") {
			t.Errorf("a worker %s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	joined := make(chan error, 1)
	go func() {
		_, err := one.Join(ctx, rendezvous.Joining{Commits: 5})
		joined <- err
	}()
	if j := <-m.joins; j.Commits != 5 {
		t.Errorf("%+v", j)
	}
	cancel()
	if err := <-joined; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	go func() {
		place, err := one.Join(t.Context(), rendezvous.Joining{Commits: 6})
		if err == nil && place.Generation != 1 {
			err = errors.New("another world")
		}
		joined <- err
	}()
	<-m.joins
	server.Publish(worldOf(1), []rendezvous.Member{{Incarnation: "one"}}, 0, 0)
	if err := <-joined; err != nil {
		t.Error(err)
	}
}

// TestCallsOfTheNextDriver: a join that waits at a driver which ends is made at the one that takes
// over, wherever that is, and waits while there is none.
func TestCallsOfTheNextDriver(t *testing.T) {
	m := newMeetings(t)
	first, to, end := m.begin()
	f := m.forwarder()
	m.aim(f, to)
	first.Admit(identity.Subject{Host: "a", Incarnation: "one"})
	one := m.worker(f, "one")
	joined := make(chan error, 1)
	go func() {
		_, err := one.Join(t.Context(), rendezvous.Joining{})
		joined <- err
	}()
	<-m.joins
	end()
	second, to, _ := m.begin()
	second.Admit(identity.Subject{Host: "a", Incarnation: "one"})
	m.aim(f, to)
	<-m.joins
	second.Publish(worldOf(2), []rendezvous.Member{{Incarnation: "one"}}, 0, 0)
	if err := <-joined; err != nil {
		t.Error(err)
	}
}

// TestCallsWithoutSocket: a worker whose socket is broken calls by a connection of its own.
func TestCallsWithoutSocket(t *testing.T) {
	m := newMeetings(t)
	server, to, _ := m.begin()
	server.Admit(identity.Subject{Host: "a", Incarnation: "one"})
	near, far := sockets(t)
	far.Close()
	c, err := rendezvous.NewClient(rendezvous.ClientConfig{
		Addr: to.String(), Socket: near, Credentials: m.issue(identity.Subject{Role: identity.Worker, Host: "a", Incarnation: "one"}),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Look(t.Context()); err != nil {
		t.Error(err)
	}
}
