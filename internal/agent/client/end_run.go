package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

// EndRun makes a job agent, which an earlier driver has started, end the workers of its job and
// then itself: with the workers' grace period, or at once if now is set. It blocks until none of
// them is left and returns their number, which is 0 if the agent's process is known to have ended.
func EndRun(ctx context.Context, authority *identity.Authority, k KnownAgent, now bool) (workers int, err error) {
	j := knownAgent(k)
	if j.there() != nil {
		return 0, nil // its workers have ended with it
	}
	own, err := authority.Issue(identity.Subject{Role: identity.Driver})
	if err != nil {
		return 0, err
	}
	workers, err = endAt(ctx, own, k, now)
	if err != nil && j.there() == nil {
		return workers, fmt.Errorf("agent: the agent of %s at %s: %w", k.Host, k.Addr, err)
	}
	if k.Local {
		j.awaitEnd()
	}
	return workers, nil
}

func endAt(ctx context.Context, own *identity.Credentials, k KnownAgent, now bool) (workers int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := wire.NewClient(k.Addr, own.ClientTLS(identity.Subject{Role: identity.Agent, Host: k.Host}))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	late := time.AfterFunc(reachTimeout, cancel)
	defer late.Stop()
	stream, err := agentpb.NewAgentClient(conn).Session(ctx)
	if err != nil {
		return 0, err
	}
	id := make([]byte, 16)
	rand.Read(id)
	_ = stream.Send(&agentpb.ToAgent{What: &agentpb.ToAgent_Attach{Attach: &agentpb.Attach{ // if it fails, Recv returns the reason
		Session: id, TakeOver: true, LeaseMs: uint32(defaultLease.Milliseconds()),
	}}})
	answer, err := stream.Recv()
	if err != nil {
		return 0, err
	}
	if !late.Stop() {
		return 0, errors.New("it took too long to answer")
	}
	workers = len(answer.GetAttached().GetKept())
	_ = stream.Send(&agentpb.ToAgent{What: &agentpb.ToAgent_End{End: &agentpb.End{Now: now}}})
	for err == nil {
		_, err = stream.Recv() // what they print meanwhile has no reader
	}
	if errors.Is(err, io.EOF) || status.Code(err) == codes.NotFound {
		return workers, nil
	}
	return workers, err
}
