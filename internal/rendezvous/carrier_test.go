package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
)

// meetings are the rendezvous of successive drivers of a job.
type meetings struct {
	t         *testing.T
	authority *identity.Authority
	joins     chan Joining
}

func newMeetings(t *testing.T) *meetings {
	authority, err := identity.NewAuthority("calls")
	if err != nil {
		t.Fatal(err)
	}
	return &meetings{t, authority, make(chan Joining, 16)}
}

// Joined implements Handler.
func (m *meetings) Joined(_ identity.Subject, j Joining) { m.joins <- j }

// Reported implements Handler.
func (m *meetings) Reported(identity.Subject, Report, uint64, uint64) {}

func (m *meetings) issue(s identity.Subject) *identity.Credentials {
	m.t.Helper()
	c, err := m.authority.Issue(s)
	if err != nil {
		m.t.Fatal(err)
	}
	return c
}

// begin serves another driver's rendezvous until end is called.
func (m *meetings) begin() (server *Server, at netip.AddrPort, end func()) {
	m.t.Helper()
	ln, err := identity.Rendezvous.Listen("127.0.0.1:0")
	if err != nil {
		m.t.Fatal(err)
	}
	server = NewServer(ServerConfig{Credentials: m.issue(identity.Subject{Role: identity.Driver}), Handler: m, Log: quiet()})
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

// carrier returns that of the agent of host a.
func (m *meetings) carrier() *Carrier {
	c := NewCarrier()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	m.t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return c
}

func (m *meetings) aim(c *Carrier, to netip.AddrPort) {
	m.t.Helper()
	if err := c.Aim(to.String(), m.issue(identity.Subject{Role: identity.Agent, Host: "a"}).Encode(), nil); err != nil {
		m.t.Fatal(err)
	}
}

// worker returns the client of a worker of the agent, which has only its socket.
func (m *meetings) worker(f *Carrier, incarnation string) *Client {
	m.t.Helper()
	near, far := sockets(m.t)
	var taken sync.WaitGroup
	taken.Go(func() { f.Take(far, incarnation) })
	c, err := NewClient(ClientConfig{
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
	f := m.carrier()
	m.aim(f, to)
	server.Admit(identity.Subject{Host: "a", Incarnation: "one"})
	server.Admit(identity.Subject{Host: "b", Incarnation: "elsewhere"})
	one := m.worker(f, "one")
	for name, c := range map[string]*Client{"of another host": m.worker(f, "elsewhere"), "not admitted": m.worker(f, "stranger")} {
		if _, err := c.Look(t.Context()); err == nil || !strings.Contains(err.Error(), "does not belong to the job") {
			t.Errorf("a worker %s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	joined := make(chan error, 1)
	go func() {
		_, err := one.Join(ctx, Joining{Commits: 5})
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
		place, err := one.Join(t.Context(), Joining{Commits: 6})
		if err == nil && place.Generation != 1 {
			err = errors.New("another world")
		}
		joined <- err
	}()
	<-m.joins
	server.Publish(worldOf(1), []Member{{Incarnation: "one"}}, 0, 0)
	if err := <-joined; err != nil {
		t.Error(err)
	}
}

// TestCallsOfTheNextDriver: a join that waits at a driver which ends is made at the one that takes
// over, wherever that is, and waits while there is none.
func TestCallsOfTheNextDriver(t *testing.T) {
	m := newMeetings(t)
	first, to, end := m.begin()
	f := m.carrier()
	m.aim(f, to)
	first.Admit(identity.Subject{Host: "a", Incarnation: "one"})
	one := m.worker(f, "one")
	joined := make(chan error, 1)
	go func() {
		_, err := one.Join(t.Context(), Joining{})
		joined <- err
	}()
	<-m.joins
	end()
	second, to, _ := m.begin()
	second.Admit(identity.Subject{Host: "a", Incarnation: "one"})
	m.aim(f, to)
	<-m.joins
	second.Publish(worldOf(2), []Member{{Incarnation: "one"}}, 0, 0)
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
	c, err := NewClient(ClientConfig{
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

// TestCallsOfMany: workers of an agent that carries their calls have all members of a large world,
// and of the next one, which the driver tells as a difference.
func TestCallsOfMany(t *testing.T) {
	m := newMeetings(t)
	server, to, _ := m.begin()
	f := m.carrier()
	m.aim(f, to)
	const size = 2000
	var w plan.World
	var members []Member
	for r := range size {
		w.Slots = append(w.Slots, plan.Slot{SlotID: plan.SlotID{Host: "a", Index: r}, Rank: r, LocalRank: r, LocalSize: size, CrossSize: 1})
		members = append(members, Member{Incarnation: fmt.Sprint("worker-", r), DataAddrs: []string{fmt.Sprint("10.0.0.1:", 1000+r), fmt.Sprint("10.0.", r/250, ".2:", 1000+r)}})
	}
	workers := make([]*Client, 4)
	for r := range workers {
		server.Admit(identity.Subject{Host: "a", Incarnation: members[r].Incarnation})
		workers[r] = m.worker(f, members[r].Incarnation)
	}
	for generation := uint64(1); generation <= 3; generation++ {
		if generation == 3 {
			members[size-1].DataAddrs = []string{"10.9.9.9:1"}
		}
		w.Generation = generation
		var joined sync.WaitGroup
		for r, c := range workers {
			joined.Go(func() {
				place, err := c.Join(t.Context(), Joining{After: generation - 1, HoldsState: true})
				if err != nil {
					t.Error(err)
					return
				}
				world, err := place.World()
				if err != nil || world.Rank != r || world.Size() != size || !slices.Equal(world.DataAddrs()[size-1], members[size-1].DataAddrs) {
					t.Errorf("world %d of worker %d: rank %d of %d, %v", generation, r, world.Rank, world.Size(), err)
				}
			})
			if generation < 3 { // the others come when there is the world
				<-m.joins
			}
		}
		server.Publish(w, members, 0, 0)
		joined.Wait()
	}
	if f.number == 0 || len(f.members) < manyMembers {
		t.Errorf("%d bytes of members were left to the agent", len(f.members))
	}
}

// TestUnusedSocket: a client that is closed before its first call closes its socket, for which the
// launcher waits.
func TestUnusedSocket(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	c, err := NewClient(ClientConfig{Addr: "127.0.0.1:1", Socket: near, Credentials: newJob(t).credentials(slotOf("a"))})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if n, err := far.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%d bytes, %v", n, err)
	}
}
