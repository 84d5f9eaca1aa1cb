package zmtp

import (
	"context"
	"fmt"
	"net"
	"strings"
)

// Split parses an address of ZeroMQ, such as tcp://host:port or ipc:///path/of/a/socket, and
// returns network and address for package net. The host of a listener may be "*".
func Split(address string) (network, addr string, err error) {
	kind, rest, ok := strings.Cut(address, "://")
	switch {
	case ok && kind == "ipc" && rest != "":
		return "unix", rest, nil
	case ok && kind == "tcp":
		host, port, err := net.SplitHostPort(rest)
		if err != nil {
			return "", "", fmt.Errorf("zmtp: address %q: %w", address, err)
		}
		if host == "*" {
			host = ""
		}
		return "tcp", net.JoinHostPort(host, port), nil
	}
	return "", "", fmt.Errorf("zmtp: address %q: want tcp://host:port or ipc://path", address)
}

// Dial connects to an address and performs the handshake. It returns an error if ctx ends first.
func Dial(ctx context.Context, address string, cfg Config) (*Conn, error) {
	network, addr, err := Split(address)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	c, err := Handshake(conn, cfg)
	if !stop() {
		err = context.Cause(ctx) // the connection was closed because ctx has ended
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("zmtp: %s: %w", address, err)
	}
	return c, nil
}
