package tasks

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
)

// dialTimeout bounds a try to reach the scheduler: where a driver has just died, the host's agent
// holds a connection until it knows of the next one.
const dialTimeout = 5 * time.Second

// ownDial returns how this process, a worker of a job, reaches the scheduler of its driver.
func ownDial() (func(context.Context) (net.Conn, error), error) {
	dial, _, err := ownJob()
	if path := plan.OwnTasks(); errors.Is(err, errNotDriven) && path != "" {
		return func(ctx context.Context) (net.Conn, error) { return wire.DialLocal(ctx, path) }, nil
	}
	return dial, err
}

// ownJob is ownDial with the slot for which the job has started this process.
func ownJob() (dial func(context.Context) (net.Conn, error), slot plan.Slot, err error) {
	w, driven, err := plan.OwnWorker()
	if err != nil {
		return nil, slot, fmt.Errorf("tasks: environment: %w", err)
	}
	if !driven {
		return nil, slot, errNotDriven
	}
	creds, err := identity.Decode(w.Credentials)
	if err != nil {
		return nil, slot, fmt.Errorf("tasks: environment: %w", err)
	}
	return dialer(w.DriverAddr, creds), w.Slot, nil
}

// dialer returns connections to the scheduler of the driver at addr.
func dialer(addr string, creds *identity.Credentials) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		cfg := creds.ClientTLS(identity.Subject{Role: identity.Driver})
		cfg.NextProtos = []string{wire.TasksProtocol}
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return (&tls.Dialer{Config: cfg}).DialContext(ctx, "tcp", addr)
	}
}
