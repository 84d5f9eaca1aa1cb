package agent

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

const (
	// reachTimeout bounds the search for an address of another agent, maxTargets how many are asked
	// for at a time.
	reachTimeout = 5 * time.Second
	maxTargets   = 256
	maxAddresses = 64
)

// Facts are data about a host that drivers may ask for, in addition to its clock.
type Facts struct {
	// Version is the version of the program.
	Version string
	// GPUs counts the GPUs of the host. Nil: they are not counted.
	GPUs func() (int, error)
}

// inspector answers drivers that ask what the host is like.
func (f Facts) inspector(creds *identity.Credentials) func(context.Context, *agentpb.InspectRequest) *agentpb.InspectReply {
	return func(ctx context.Context, r *agentpb.InspectRequest) *agentpb.InspectReply {
		reply := &agentpb.InspectReply{UnixNano: time.Now().UnixNano(), Version: f.Version}
		targets := r.GetTargets()
		if len(targets) == 0 {
			f.describe(reply)
		}
		ctx, cancel := context.WithTimeout(ctx, reachTimeout)
		defer cancel()
		for _, t := range targets[:min(len(targets), maxTargets)] {
			addrs, why := t.GetAddresses(), ""
			addrs = addrs[:min(len(addrs), maxAddresses)]
			if _, err := client.Reach(ctx, creds, t.GetHost(), addrs); err != nil {
				why = err.Error()
			}
			reply.Failures = append(reply.Failures, why)
			reply.Routes = append(reply.Routes, &agentpb.Routes{Routes: client.Routes(ctx, addrs)})
		}
		return reply
	}
}

// describe says what the host has.
func (f Facts) describe(reply *agentpb.InspectReply) {
	for _, addr := range client.OwnAddrs() {
		reply.Cards = append(reply.Cards, client.CardOf(addr))
	}
	if f.GPUs == nil {
		return
	}
	n, err := f.GPUs()
	if reply.Gpus = uint32(n); err != nil {
		reply.GpuError = err.Error()
	}
}
