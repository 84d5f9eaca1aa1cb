package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/carry"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// carrier returns that of the agent of the host of a, for the driver.
func (j *job) carrier() *carry.Carrier {
	j.t.Helper()
	c := carry.NewCarrier()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	j.t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	j.aim(c)
	return c
}

func (j *job) aim(c *carry.Carrier) {
	j.t.Helper()
	if err := c.Aim(j.addr, j.credentials(identity.Subject{Role: identity.Agent, Host: slotOf("a").Host}).Encode(), nil); err != nil {
		j.t.Fatal(err)
	}
}

// move ends the driver; another one begins elsewhere.
func (j *job) move() {
	j.t.Helper()
	j.stop()
	ln, err := identity.Rendezvous.Listen("127.0.0.1:0")
	if err != nil {
		j.t.Fatal(err)
	}
	j.addr = ln.Addr().String()
	j.serve(ln)
}

// carried returns the client of a worker of the agent, which has only its socket.
func (j *job) carried(by *carry.Carrier, inc string) *Client {
	j.t.Helper()
	near, far := net.Pipe()
	var taken sync.WaitGroup
	taken.Go(func() { by.Take(far, inc) })
	c, err := NewClient(ClientConfig{Addr: "127.0.0.1:1", Socket: near, Credentials: j.credentials(slotOf("a"))})
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() {
		_ = c.Close()
		taken.Wait()
	})
	return c
}

// TestCalls: workers reach the driver by their sockets alone. The driver takes calls for workers of
// the agent's host, and for no others. A join that its worker gives up is given up at the driver.
func TestCalls(t *testing.T) {
	j := newJob(t)
	c := j.carrier()
	a := j.carried(c, "a")
	j.credentials(slotOf("b"))
	for name, c := range map[string]*Client{"of another host": j.carried(c, "b"), "not admitted": j.carried(c, "stranger")} {
		if _, err := c.Look(t.Context()); err == nil || !strings.Contains(err.Error(), "does not belong to the job") {
			t.Errorf("a worker %s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	given := joinCtx(ctx, a, Joining{Commits: 5})
	if h := <-j.heard.joins; h.j.Commits != 5 {
		t.Errorf("%+v", h)
	}
	cancel()
	if r := <-given; !errors.Is(r.err, context.Canceled) {
		t.Error(r.err)
	}
	joined := join(a, Joining{Commits: 6})
	<-j.heard.joins
	j.publish(1, 0, 0, "a")
	j.world("a", joined, 1, 0)
}

// TestCallsOfTheNextDriver: a join that waits at a driver which ends is made at the one that takes
// over, wherever that is, and waits while there is none.
func TestCallsOfTheNextDriver(t *testing.T) {
	j := newJob(t)
	c := j.carrier()
	joined := join(j.carried(c, "a"), Joining{})
	<-j.heard.joins
	j.move()
	j.aim(c)
	<-j.heard.joins
	j.publish(2, 0, 0, "a")
	j.world("a", joined, 2, 0)
}

// TestConnected: a worker with a socket is connected while its agent is, and one with a connection
// of its own while it has that.
func TestConnected(t *testing.T) {
	j := newJob(t)
	by := j.carrier()
	c, own := j.carried(by, "a"), j.client("b")
	await := func(c *Client, want bool) {
		t.Helper()
		for c.Connected(t.Context()) != want {
			select {
			case <-sandbox.Expired():
				t.Fatalf("connected is not %t in time", want)
			default:
			}
		}
	}
	for _, c := range []*Client{c, own} {
		if err := c.Report(t.Context(), Draining, 0, 0); err != nil {
			t.Fatal(err)
		}
		await(c, true)
	}
	joined := join(c, Joining{}) // without a call that waits an agent does not look for the driver
	<-j.heard.joins
	j.stop()
	await(c, false)
	await(own, false)
	j.move()
	j.aim(by)
	await(c, true)
	<-j.heard.joins
	j.publish(1, 0, 0, "a")
	j.world("a", joined, 1, 0)
}

// TestCarriedHears: workers hear from the driver by their agent, also from one that takes over. A
// worker of another host hears nothing.
func TestCarriedHears(t *testing.T) {
	j := newJob(t)
	c := j.carrier()
	ctx, cancel := context.WithCancel(t.Context())
	var hearing sync.WaitGroup
	defer hearing.Wait()
	defer cancel()
	services := map[string]*notify.Service{"a": notify.NewService(nil), "a2": notify.NewService(nil)}
	second := slotOf("a")
	second.Incarnation = "a2"
	j.credentials(second)
	targets := []notify.Target{{Subject: slotOf("a"), Addr: "127.0.0.1:1"}, {Subject: second, Addr: "127.0.0.1:1"}}
	for inc, s := range services {
		client := j.carried(c, inc)
		hearing.Go(func() { s.Hear(ctx, client.Call) })
	}
	told := func(seq uint64) {
		t.Helper()
		j.pusher.Push(targets, notify.Update{Seq: seq, Generation: 1})
		for _, s := range services {
			for _, news := s.Loss(); s.Latest().Seq < seq; _, news = s.Loss() {
				<-news
			}
		}
	}
	told(1)
	told(2)
	j.credentials(slotOf("b"))
	other := j.carried(c, "b")
	if _, err := notifypb.NewHearingClient(other.conn).Hear(ctx, &notifypb.HearRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a worker of another host: %v", err)
	}
	j.move()
	j.aim(c)
	told(3)
}

// TestCallsWithoutSocket: a worker whose socket is broken calls by a connection of its own.
func TestCallsWithoutSocket(t *testing.T) {
	j := newJob(t)
	near, far := net.Pipe()
	far.Close()
	c, err := NewClient(ClientConfig{Addr: j.addr, Socket: near, Credentials: j.credentials(slotOf("a"))})
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
	j := newJob(t)
	carrier := j.carrier()
	const size = 2000
	var w plan.World
	var members []Member
	for r := range size {
		w.Slots = append(w.Slots, plan.Slot{SlotID: plan.SlotID{Host: slotOf("a").Host, Index: r}, Rank: r, LocalRank: r, LocalSize: size, CrossSize: 1})
		members = append(members, Member{Incarnation: fmt.Sprint("worker-", r), DataAddrs: []string{fmt.Sprint("10.0.0.1:", 1000+r), fmt.Sprint("10.0.", r/250, ".2:", 1000+r)}})
	}
	workers := make([]*Client, 4)
	for r := range workers {
		j.server.Admit(identity.Subject{Host: slotOf("a").Host, Incarnation: members[r].Incarnation})
		workers[r] = j.carried(carrier, members[r].Incarnation)
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
				<-j.heard.joins
			}
		}
		j.server.Publish(w, members, 0, 0)
		joined.Wait()
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
