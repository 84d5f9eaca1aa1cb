package sockets

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// visit is what the dialer of a visit to a member of a generation claims. No group has it: no rank
// connects to itself.
func visit(generation uint64) identity.Hello {
	return identity.Hello{Generation: generation, Channel: visitChannel}
}

var errVisited = errors.New("collective: a visit has ended")

// Visit connects to a member of a generation, with the key of visits to it, as visits of package
// collective do.
func (e *Endpoint) Visit(ctx context.Context, generation uint64, key identity.DataKey, addrs []string) (net.Conn, error) {
	c, err := e.dial(ctx, way{addrs: addrs}, key, visit(generation), func() int { return 0 })
	if err != nil {
		return nil, err
	}
	return c.Conn, nil
}

// admitVisit decides on a visit whose dialer is proven. If it is admitted, endVisit follows.
func (e *Endpoint) admitVisit(generation uint64) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.current.Number != generation:
		return false, fmt.Errorf("generation %d is over, this is generation %d", generation, e.current.Number)
	case e.cfg.Visited == nil:
		return false, errors.New("this rank accepts no visits")
	case e.visits == maxVisits:
		return false, errors.New("too many visits at a time")
	}
	e.visits++
	return true, nil
}

func (e *Endpoint) endVisit() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.visits--
}
