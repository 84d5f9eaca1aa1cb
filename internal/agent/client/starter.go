package client

import (
	"context"
	"os"
)

// Hosts starts agents on this machine for hosts that are names of it, and on other machines for
// others.
type Hosts struct {
	// Local starts agents on this machine, Remote all others.
	Local  Exec
	Remote Starter
}

var _ Starter = Hosts{}

// Start implements Starter.
func (h Hosts) Start(ctx context.Context, host string, hello Hello) (Ready, error) {
	if newOwn().has(ctx, host) {
		hello.Loopback = hello.Loopback || hello.Listen == ""
		hello.Starter = os.Getpid()
		return h.Local.Start(ctx, host, hello)
	}
	return h.Remote.Start(ctx, host, hello)
}
