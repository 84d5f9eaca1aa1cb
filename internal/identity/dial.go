package identity

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"time"
)

// Dial connects to a party of the job or cluster at addr (host:port) with the configuration of
// ClientTLS, for a protocol that both sides name (ALPN). Errors of certificates that are not valid
// now pass through Explain. The caller must close the connection.
func (c *Credentials) Dial(ctx context.Context, want Subject, addr, protocol string) (net.Conn, error) {
	conf := c.ClientTLS(want)
	conf.NextProtos = []string{protocol}
	conn, err := (&tls.Dialer{Config: conf}).DialContext(ctx, "tcp", addr)
	return conn, Explain(err, time.Now())
}

// DialDoor is Dial to the door of the worker's launcher, with the ticket that proves which worker
// it is. Credentials without a ticket are an error.
func (c *Credentials) DialDoor(ctx context.Context, addr, protocol string) (net.Conn, error) {
	if c.ticket == nil {
		return nil, errors.New("identity: credentials without a ticket are not those of a worker")
	}
	conn, err := c.Dial(ctx, Subject{Role: Agent}, addr, protocol)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(c.ticket); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// ReadTicket reads the ticket that DialDoor has sent. It blocks as conn does.
func ReadTicket(conn net.Conn) ([]byte, error) {
	ticket := make([]byte, keyLen)
	_, err := io.ReadFull(conn, ticket)
	return ticket, err
}
