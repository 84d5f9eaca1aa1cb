package agent

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
)

const (
	// reachTimeout bounds the search for an address of another agent, maxTargets how many are asked
	// for at a time.
	reachTimeout = 5 * time.Second
	maxTargets   = 256
	maxAddresses = 64
)

// Facts are what drivers may ask of a host, besides its clock.
type Facts struct {
	// Version is what the program calls itself.
	Version string
	// GPUs counts those of the host. Nil: they are not counted.
	GPUs func() (int, error)
}

// inspector answers drivers that ask what the host is like.
func (f Facts) inspector(creds *identity.Credentials) func(context.Context, *wire.InspectRequest) *wire.InspectReply {
	return func(ctx context.Context, r *wire.InspectRequest) *wire.InspectReply {
		reply := &wire.InspectReply{UnixNano: time.Now().UnixNano(), Version: f.Version}
		targets := r.GetTargets()
		if len(targets) == 0 && f.GPUs != nil {
			n, err := f.GPUs()
			if reply.Gpus = uint32(n); err != nil {
				reply.GpuError = err.Error()
			}
		}
		ctx, cancel := context.WithTimeout(ctx, reachTimeout)
		defer cancel()
		for _, t := range targets[:min(len(targets), maxTargets)] {
			addrs, why := t.GetAddresses(), ""
			if _, err := client.Reach(ctx, creds, t.GetHost(), addrs[:min(len(addrs), maxAddresses)]); err != nil {
				why = err.Error()
			}
			reply.Failures = append(reply.Failures, why)
		}
		return reply
	}
}
