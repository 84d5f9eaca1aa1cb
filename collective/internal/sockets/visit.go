package sockets

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// visit returns the claim of a dialer that visits a member of a generation. It differs from the
// claims for groups, since no rank connects to itself.
func visit(generation uint64) identity.Hello {
	return identity.Hello{Generation: generation, Channel: visitChannel}
}

var errVisited = errors.New("collective: a visit has ended")

// Visit connects to a member of a generation, with the generation's key for visits; see
// Endpoint.Visit of package collective.
func (e *Endpoint) Visit(ctx context.Context, generation uint64, key identity.DataKey, addrs []string) (net.Conn, error) {
	c, err := e.dial(ctx, way{addrs: addrs}, key, visit(generation), func() int { return 0 })
	if err != nil {
		return nil, err
	}
	return c.Conn, nil
}

// admitVisit admits a visit whose dialer is proven, or returns the reason why it is refused. After
// an admission the caller calls endVisit.
func (e *Endpoint) admitVisit(generation uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.current.Number != generation:
		return fmt.Errorf("generation %d is over; this rank is in generation %d", generation, e.current.Number)
	case e.cfg.Visited == nil:
		return errors.New("this rank accepts no visits")
	case e.visits == maxVisits:
		return errors.New("too many visits at a time")
	}
	e.visits++
	return nil
}

// endVisit ends a visit that was admitted.
func (e *Endpoint) endVisit() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.visits--
}
