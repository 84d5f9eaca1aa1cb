package identity

import (
	"context"
	"net"
)

// Network replaces the kernel's network, for tests in which processes are goroutines and time is
// virtual. The zero value is the kernel's.
type Network struct {
	// Listen listens on a TCP address, as net.Listen does.
	Listen func(addr string) (net.Listener, error)
	// Dial connects to a TCP address. If Dial is nil, the caller dials by itself, because it sets
	// options of the kernel's connections.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}
