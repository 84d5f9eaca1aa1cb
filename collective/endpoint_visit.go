package collective

import (
	"context"
	"errors"
	"net"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// visit is what the dialer of a visit claims. No group has it: a generation's number is not 0.
var visit = identity.Hello{Channel: visitChannel}

var errVisited = errors.New("collective: a visit has ended")

// Visit connects to another worker of the job, which need not be in a world with this one, at the
// first of its addresses that answers. Both ends have proven that they belong to the job, and the
// connection is encrypted if tensors are. The other worker's Config.Visited gets the other end. The
// caller closes the connection; the endpoint does not.
func (e *Endpoint) Visit(ctx context.Context, addrs []string) (net.Conn, error) {
	c, err := e.dial(ctx, addrs, visit, 0, func() int { return 0 })
	if err != nil {
		return nil, err
	}
	return c.Conn, nil
}

// admitVisit decides on a visit whose dialer is proven. If it is admitted, endVisit follows.
func (e *Endpoint) admitVisit() (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
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
