package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

// Reach connects to all the addresses (host:port) concurrently, and returns the first at which the
// host's agent answers. It sends nothing. The error names each address with its result.
func Reach(ctx context.Context, creds *identity.Credentials, host string, addrs []string) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	type result struct {
		addr string
		err  error
	}
	results := make(chan result, len(addrs))
	for _, addr := range addrs {
		go func() {
			// The protocol is that of drivers: the agent would record a connection of another kind
			// as a stranger.
			conn, err := creds.Dial(ctx, identity.Subject{Role: identity.Agent, Host: host}, addr, "h2")
			if err == nil {
				addr = conn.RemoteAddr().String()
				conn.Close()
			}
			results <- result{addr, err}
		}()
	}
	found, all := "", []string{}
	for range addrs {
		switch r := <-results; {
		case r.err == nil && found == "":
			found = r.addr
			cancel() // ends the other attempts at once
		case r.err != nil:
			all = append(all, fmt.Sprintf("%s: %v", r.addr, plainDial(r.err)))
		}
	}
	cancel()
	switch {
	case found != "":
		return found, nil
	case len(addrs) == 0:
		return "", errors.New("the host names no address")
	}
	return "", errors.New(strings.Join(all, "; "))
}

// routeTries is how many times Routes connects to an address; the fastest connection counts.
// routeTimeout bounds each.
const (
	routeTries   = 3
	routeTimeout = time.Second
)

// Routes connects to all the addresses (host:port) concurrently, and returns the routes to those
// that answer. It sends nothing and does not authenticate the other end.
func Routes(ctx context.Context, addrs []string) []*agentpb.Route {
	all := make([]*agentpb.Route, len(addrs))
	var trying sync.WaitGroup
	for i, addr := range addrs {
		trying.Go(func() { all[i] = route(ctx, addr) })
	}
	trying.Wait()
	return slices.DeleteFunc(all, func(r *agentpb.Route) bool { return r == nil })
}

// route describes the route to an address; nil: the address does not answer.
func route(ctx context.Context, addr string) (r *agentpb.Route) {
	dialer := net.Dialer{Timeout: routeTimeout}
	for range routeTries {
		begun := time.Now()
		conn, err := dialer.DialContext(ctx, "tcp", addr)
		if err != nil {
			return nil
		}
		took := uint32(max(1, min(time.Since(begun).Microseconds(), math.MaxUint32)))
		local, _ := conn.LocalAddr().(*net.TCPAddr)
		remote, _ := conn.RemoteAddr().(*net.TCPAddr)
		conn.Close()
		if r == nil {
			r = &agentpb.Route{Address: remote.AddrPort().Addr().Unmap().String(), Card: CardOf(local.AddrPort().Addr().Unmap()), Microseconds: took}
		}
		r.Microseconds = min(r.Microseconds, took)
	}
	return r
}

// plainDial removes from an error what the caller's line already contains.
func plainDial(err error) error {
	var op *net.OpError
	dials := errors.As(err, &op) && op.Op == "dial"
	switch {
	case dials && op.Timeout(), !dials && errors.Is(err, context.DeadlineExceeded):
		return errors.New("it does not answer")
	case dials:
		return op.Err
	}
	return err
}

// outwardAddr returns an address of this machine that other machines may reach, IPv4 before IPv6,
// or else a loopback address.
func outwardAddr() netip.Addr {
	all := OwnAddrs()
	if i := slices.IndexFunc(all, netip.Addr.Is4); i >= 0 {
		return all[i]
	}
	return append(all, identity.Loopback())[0]
}

// OwnAddrs returns the addresses of this machine that other machines may reach.
func OwnAddrs() []netip.Addr {
	return slices.DeleteFunc(identity.OwnAddrs(), func(a netip.Addr) bool { return !a.IsGlobalUnicast() })
}
