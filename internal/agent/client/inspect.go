package client

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/netif"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

// inspectRounds is the number of requests for the clock of a host: the fastest answer is the most
// exact.
const inspectRounds = 5

// MaxTargets is the maximum number of other agents that an agent tries to reach for one request.
const MaxTargets = 256

// Inspection describes a host, as its agent reports it.
type Inspection struct {
	Host string
	// Endpoints are the addresses at which others may reach the agent.
	Endpoints []string
	// Offset is how far the host's clock is ahead of this one's, with an error of at most half of
	// RoundTrip.
	Offset, RoundTrip time.Duration
	// Version is the version of the host's hvdrun.
	Version string
	// GPUs is the number of GPUs; if it is unknown, GPUError gives the reason.
	GPUs     int
	GPUError string
	// Cards are its network interfaces by address.
	Cards map[netip.Addr]netif.Card
	// Used is the number of the host's slots that have workers, by run.
	Used map[string]uint32
}

// Route is a way from one host to another.
type Route struct {
	Local, Addr netip.Addr
	// Near is the first host's interface, and Far the other's; zero if unknown.
	Near, Far netif.Card
	// Trip is the time until the other host's kernel accepted the fastest connection.
	Trip time.Duration
}

// Inspect returns a description of the host from its agent, which it starts if it does not run, and
// begins a session there. If the start or the session fails, the error is a *HostError.
func (a *Agents) Inspect(ctx context.Context, host string) (Inspection, error) {
	s, err := a.session(ctx, host, false)
	if err != nil {
		return Inspection{}, err
	}
	in := Inspection{Host: host, Endpoints: []string{s.addr}, RoundTrip: time.Hour}
	a.mu.Lock()
	if j := a.jobs[host]; j != nil && j.started() && j.err == nil {
		in.Endpoints = j.candidates(a.cfg.Listen)
	}
	a.mu.Unlock()
	err = s.ask(ctx, func(ctx context.Context, agent agentpb.AgentClient) error {
		for range inspectRounds {
			begin := time.Now()
			reply, err := agent.Inspect(ctx, &agentpb.InspectRequest{})
			if err != nil {
				return err
			}
			if trip := time.Since(begin); trip < in.RoundTrip {
				in.RoundTrip = trip
				in.Offset = time.Unix(0, reply.GetUnixNano()).Sub(begin.Add(trip / 2).Round(0))
			}
			in.Version, in.GPUs, in.GPUError = reply.GetVersion(), int(reply.GetGpus()), reply.GetGpuError()
			in.Used = reply.GetUsed()
			in.Cards = make(map[netip.Addr]netif.Card)
			for _, c := range reply.GetCards() {
				if addr, card := cardFromWire(c); addr.IsValid() {
					in.Cards[addr] = card
				}
			}
		}
		return nil
	})
	if err != nil {
		return in, err
	}
	if err := s.begun(ctx); err != nil {
		return in, &HostError{Host: s.host, Stage: stageCommand, Err: err}
	}
	return in, nil
}

// Reachable asks the host's agent whether it reaches the agents of others. For each of them it
// returns the reason why not, or an empty text, and the routes to it.
func (a *Agents) Reachable(ctx context.Context, host string, others []Inspection) (failures []string, routes [][]Route, err error) {
	s, err := a.session(ctx, host, false)
	if err != nil {
		return nil, nil, err
	}
	err = s.ask(ctx, func(ctx context.Context, agent agentpb.AgentClient) error {
		for some := range slices.Chunk(others, MaxTargets) {
			request := &agentpb.InspectRequest{}
			for _, o := range some {
				request.Targets = append(request.Targets, &agentpb.Target{Host: o.Host, Addresses: o.Endpoints})
			}
			reply, err := agent.Inspect(ctx, request)
			if err != nil {
				return err
			}
			failures = append(failures, reply.GetFailures()...)
			ways := make([][]Route, len(some))
			for i, to := range reply.GetRoutes()[:min(len(reply.GetRoutes()), len(some))] {
				ways[i] = routesFromWire(to, some[i])
			}
			routes = append(routes, ways...)
		}
		return nil
	})
	if err == nil && len(failures) != len(others) {
		err = errors.New("the agent did not answer the request")
	}
	return failures, routes, err
}

func routesFromWire(all *agentpb.Routes, to Inspection) (routes []Route) {
	for _, r := range all.GetRoutes() {
		local, near := cardFromWire(r.GetCard())
		if addr, err := netip.ParseAddr(r.GetAddress()); err == nil {
			routes = append(routes, Route{Local: local, Addr: addr, Near: near, Far: to.Cards[addr],
				Trip: time.Duration(r.GetMicroseconds()) * time.Microsecond})
		}
	}
	return routes
}

func cardFromWire(c *agentpb.Card) (netip.Addr, netif.Card) {
	addr, _ := netip.ParseAddr(c.GetAddress()) // the zero value if the agent does not know it
	return addr, netif.Card{Name: c.GetName(), Bits: int64(min(c.GetBits(), math.MaxInt64))}
}

// CardOf describes the interface of this host that has an address.
func CardOf(addr netip.Addr) *agentpb.Card {
	card := netif.Of(addr)
	return &agentpb.Card{Address: addr.String(), Name: card.Name, Bits: uint64(card.Bits)}
}

// Used asks the host's agent, at addr, how many slots have workers, by run. creds are those of a
// driver in the agent's cluster. Used begins no session.
func Used(ctx context.Context, creds *identity.Credentials, host, addr string) (used map[string]uint32, err error) {
	err = ask(ctx, creds, host, addr, func(ctx context.Context, agent agentpb.AgentClient) error {
		reply, err := agent.Inspect(ctx, &agentpb.InspectRequest{})
		used = reply.GetUsed()
		return err
	})
	return used, err
}

// ask calls the session's agent over a separate connection.
func (s *session) ask(ctx context.Context, do func(context.Context, agentpb.AgentClient) error) error {
	return ask(ctx, s.credentials, s.host, s.addr, do)
}

// ask calls the host's agent, at addr, over a separate connection.
func ask(ctx context.Context, creds *identity.Credentials, host, addr string, do func(context.Context, agentpb.AgentClient) error) error {
	conn, err := wire.NewClient(addr, creds.ClientTLS(identity.Subject{Role: identity.Agent, Host: host}))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := do(ctx, agentpb.NewAgentClient(conn)); err != nil {
		return &HostError{Host: host, Stage: stageReach, Err: errors.New(status.Convert(err).Message())}
	}
	return nil
}
