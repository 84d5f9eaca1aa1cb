package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// Reach connects to all the addresses (host:port) at the same time, and returns the first behind
// which there is the agent of the host. It sends nothing. The error names each address and
// what came of it.
func Reach(ctx context.Context, creds *identity.Credentials, host string, addrs []string) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	type result struct {
		addr string
		err  error
	}
	results := make(chan result, len(addrs))
	for _, addr := range addrs {
		go func() {
			dialer := tls.Dialer{Config: creds.ClientTLS(identity.Subject{Role: identity.Agent, Host: host})}
			conn, err := dialer.DialContext(ctx, "tcp", addr)
			if err == nil {
				addr = conn.RemoteAddr().String()
				conn.Close()
			}
			results <- result{addr, err}
		}()
	}
	found, all := "", []error{}
	for range addrs {
		switch r := <-results; {
		case r.err == nil && found == "":
			found = r.addr
			cancel() // the others end at once
		case r.err != nil:
			all = append(all, fmt.Errorf("%s: %w", r.addr, plainDial(r.err)))
		}
	}
	cancel()
	switch {
	case found != "":
		return found, nil
	case len(addrs) == 0:
		return "", errors.New("the host names no address")
	}
	return "", oneLine(all)
}

// plainDial leaves out of an error what the line has already.
func plainDial(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		if op.Timeout() {
			return errors.New("no answer")
		}
		return op.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return errors.New("no answer")
	}
	return err
}

// oneLine joins errors with "; ".
func oneLine(all []error) error {
	text := ""
	for i, err := range all {
		if i > 0 {
			text += "; "
		}
		text += err.Error()
	}
	return errors.New(text)
}

// outwardAddr returns an address of this machine that others may reach, where it has one: IPv4
// before IPv6.
func outwardAddr() netip.Addr {
	best := identity.Loopback()
	for _, addr := range OwnAddrs() {
		if addr.Is4() {
			return addr
		}
		if best.IsLoopback() {
			best = addr
		}
	}
	return best
}

// OwnAddrs returns the addresses of this machine that others may reach.
func OwnAddrs() (own []netip.Addr) {
	addrs, _ := net.InterfaceAddrs() // none known: none
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		if addr, ok := netip.AddrFromSlice(n.IP); ok && addr.Unmap().IsGlobalUnicast() {
			own = append(own, addr.Unmap())
		}
	}
	return own
}
