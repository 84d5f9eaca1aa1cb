package identity

import (
	"context"
	"crypto/tls"
	"net"
	"time"
)

// Dial connects to a party of the job or cluster at addr (host:port), as ClientTLS says, for a
// protocol that both name (ALPN). Explain describes the error of a certificate that is outside of
// its dates. The caller must close the connection.
func (c *Credentials) Dial(ctx context.Context, want Subject, addr, protocol string) (net.Conn, error) {
	conf := c.ClientTLS(want)
	conf.NextProtos = []string{protocol}
	conn, err := (&tls.Dialer{Config: conf}).DialContext(ctx, "tcp", addr)
	return conn, Explain(err, time.Now())
}

// DriverAddrs are the addresses of a worker's driver, and how long an attempt at each may take.
type DriverAddrs struct {
	// Direct is the driver's address on this machine; empty, or the same as Addr: the worker uses
	// Addr. A connection to it avoids the agent, which costs each message two more wakes of a
	// process. If another driver has resumed the job, it may be elsewhere, and another process at
	// Direct.
	Direct        string
	DirectTimeout time.Duration
	// Addr leads to the current driver, whichever it is.
	Addr    string
	Timeout time.Duration
}

// DialDriver connects to the driver directly, and if that fails at its other address. The error is
// that of the last attempt.
func (c *Credentials) DialDriver(ctx context.Context, to DriverAddrs, protocol string) (net.Conn, error) {
	attempt := func(addr string, timeout time.Duration) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return c.Dial(ctx, Subject{Role: Driver}, addr, protocol)
	}
	if to.Direct != "" && to.Direct != to.Addr {
		if conn, err := attempt(to.Direct, to.DirectTimeout); err == nil {
			return conn, nil
		}
	}
	return attempt(to.Addr, to.Timeout)
}
