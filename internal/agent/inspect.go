package agent

import (
	"context"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

const (
	// reachTimeout bounds the search for a reachable address of another agent, and reachAtOnce the
	// number of concurrent searches.
	reachTimeout = 5 * time.Second
	reachAtOnce  = 16
	maxAddresses = 64
)

// Facts are facts about a host that drivers may request, in addition to its clock.
type Facts struct {
	// Version is the version of the program.
	Version string
	// GPUs counts the GPUs of the host. Nil: the agent does not count them.
	GPUs func() (int, error)
}

// inspector returns the function that answers a driver's request for a description of the host.
func (f Facts) inspector(creds *identity.Credentials) func(context.Context, *agentpb.InspectRequest) *agentpb.InspectReply {
	return func(ctx context.Context, r *agentpb.InspectRequest) *agentpb.InspectReply {
		reply := &agentpb.InspectReply{UnixNano: time.Now().UnixNano(), Version: f.Version}
		targets := r.GetTargets()
		if len(targets) == 0 {
			f.describe(reply)
		}
		targets = targets[:min(len(targets), client.MaxTargets)]
		reply.Failures, reply.Routes = make([]string, len(targets)), make([]*agentpb.Routes, len(targets))
		var trying sync.WaitGroup
		room := make(chan struct{}, reachAtOnce)
		for i, t := range targets {
			room <- struct{}{}
			trying.Go(func() {
				reply.Failures[i], reply.Routes[i] = reach(ctx, creds, t)
				<-room
			})
		}
		trying.Wait()
		return reply
	}
}

// reach returns the reason why another agent cannot be reached, or "", and the routes to it.
func reach(ctx context.Context, creds *identity.Credentials, t *agentpb.Target) (why string, routes *agentpb.Routes) {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	addrs := t.GetAddresses()
	addrs = addrs[:min(len(addrs), maxAddresses)]
	if _, err := client.Reach(ctx, creds, t.GetHost(), addrs); err != nil {
		why = err.Error()
	}
	return why, &agentpb.Routes{Routes: client.Routes(ctx, addrs)}
}

// describe fills in the host's network interfaces and its number of GPUs.
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
