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
