package client

import (
	"context"
	"os"
)

// Hosts starts an agent with Local if the host is this machine, else with Remote.
type Hosts struct {
	// Local starts agents on this machine, Remote on all others.
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
