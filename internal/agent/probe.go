package agent

import (
	"context"
	"encoding/json"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/probe"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/stacks"
)

// mostProbes is the maximum number of concurrent probes; further ones are refused.
const mostProbes = 8

// Probe reports where a worker of the caller's run is.
func (v service) Probe(ctx context.Context, r *agentpb.ProbeRequest) (*agentpb.ProbeReply, error) {
	from, by, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	pid, err := v.srv.processOf(from, r.GetIncarnation())
	if err == nil {
		select {
		case v.srv.probing <- struct{}{}:
		default:
			err = status.Error(codes.ResourceExhausted, "the agent looks at other processes")
		}
	}
	if err != nil {
		v.srv.note(by, "probe", "", audit.Refused(statusText(err)))
		return nil, err
	}
	v.srv.note(by, "probe", "", audit.Done)
	// A probe may hang with the process; the caller does not wait for it then.
	seen := make(chan stacks.Worker, 1)
	go func() {
		var w stacks.Worker
		var err error
		if w.Processes, err = probe.Probe(pid); err != nil {
			w.Error = err.Error()
		}
		seen <- w
		<-v.srv.probing
	}()
	select {
	case w := <-seen:
		text, err := json.Marshal(w)
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		return &agentpb.ProbeReply{Worker: text}, nil
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

// processOf returns the process id of a worker of the driver's run.
func (srv *server) processOf(driver identity.Subject, incarnation string) (pid int, err error) {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	s := srv.sessions[driver.RunID]
	if s == nil || s.driver.User != driver.User || s.driver.UID != driver.UID {
		return 0, status.Error(codes.NotFound, "the run has no session")
	}
	w := s.workers[incarnation]
	if w == nil || w.pid == 0 || w.over {
		return 0, status.Error(codes.NotFound, "there is no such worker")
	}
	return w.pid, nil
}
