package client

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/stacks"
)

// mostProbe bounds the answer to Probe, in bytes.
const mostProbe = 1 << 20

var _ launch.Prober = (*Agents)(nil)

// Probe implements launch.Prober. It does not start a missing agent.
func (a *Agents) Probe(ctx context.Context, host, incarnation string) (w stacks.Worker, err error) {
	s, ok := a.routes.Load(incarnation)
	if !ok {
		return w, fmt.Errorf("agent: no agent of %s has that worker", host)
	}
	err = s.(*session).ask(ctx, func(ctx context.Context, agent agentpb.AgentClient) error {
		reply, err := agent.Probe(ctx, &agentpb.ProbeRequest{Incarnation: incarnation}, grpc.MaxCallRecvMsgSize(mostProbe))
		if err != nil {
			return err
		}
		w, err = stacks.Parse(reply.GetWorker())
		return err
	})
	return w, err
}
