package sockets

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// groupKey identifies a group among those that a worker takes part in.
type groupKey struct{ generation, lane uint64 }

// awaitedGroup is a group for which connections wait because this rank has not called Connect for
// it yet.
type awaitedGroup struct {
	open    chan struct{} // closed when this rank calls Connect for the group, or when the generation is over
	waiting int
}

// accept verifies the connections that the listener accepts, until the listener is closed.
func (e *Endpoint) accept() {
	e.listener.Serve(e.cfg.Log, "collective", func(c *identity.Conn) {
		if e.admit(c) {
			e.prove(c)
		}
	})
}

// bound returns the maximum number of accepted connections in one state. It is at least few, and at
// least twice the number of connections in the largest world so far. The caller holds mu.
func (e *Endpoint) bound(few int) int {
	if e.forcedBound > 0 {
		return e.forcedBound
	}
	return max(few, 2*e.largest) * (e.cfg.Connections + 1) / 2
}

// patience returns how long an accepted connection may take to prove itself. It grows with the
// number of ranks, which may share the processors. The caller holds mu.
func (e *Endpoint) patience() time.Duration {
	return identity.Data.Deadline + time.Duration(e.largest)*proofEach
}

// grow adapts the bounds to the largest world so far. The caller holds mu.
func (e *Endpoint) grow() {
	e.listener.Resize(e.bound(identity.Data.Unproven), e.patience())
}

// admit registers an accepted connection.
func (e *Endpoint) admit(c *identity.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life.Err() != nil {
		c.Close()
		return false
	}
	e.inbound[c.NetConn()] = struct{}{}
	return true
}

var (
	errGaveWay = errors.New("it was closed in favour of newer connections, or was not proven in time")
	errClosed  = errors.New("the endpoint is closed")
	errProbed  = errors.New("a measurement has ended")
)

// prove verifies one accepted connection and passes it to its group. The connection then no longer
// counts towards the listener's bounds.
func (e *Endpoint) prove(unproven *identity.Conn) {
	e.mu.Lock()
	bound := e.patience()
	e.mu.Unlock()
	raw := unproven.NetConn()
	if tcp, ok := raw.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(keepAlive) // if it fails, the next read fails too
	}
	c := &conn{Conn: raw, raw: raw}
	var bounded net.Conn = unproven
	if e.cfg.Encrypt {
		c.Conn = tls.Server(unproven, e.cfg.Credentials.ServerTLS(identity.Worker))
		bounded = c.Conn
	}
	var path *Path
	claimed, visiting := false, false
	var probed *Generation
	keyOf := func(h identity.Hello) (identity.DataKey, error) { return e.keyOf(unproven, h) }
	h, err := e.cfg.Credentials.ProveAccept(bounded, keyOf, func(h identity.Hello) (err error) {
		if !unproven.Proven() {
			return errGaveWay // the dialer sees a broken connection and dials again
		}
		switch {
		case h == visit(h.Generation):
			err = e.admitVisit(h.Generation)
			visiting = err == nil
		case h.Channel == probeChannel:
			probed, err = e.admitProbe(h)
		default:
			path, claimed, err = e.awaitGroup(h)
		}
		raw.SetDeadline(time.Now().Add(bound))
		return err
	})
	if visiting {
		if err == nil {
			raw.SetDeadline(time.Time{})
			e.cfg.Visited(c.Conn)
			err = errVisited
		}
		e.endVisit()
	}
	if probed != nil {
		if err == nil {
			err = errors.Join(errProbed, e.serveProbe(probed, h.From, c))
		}
		e.endProbe()
	}
	e.mu.Lock()
	delete(e.inbound, raw)
	e.mu.Unlock()
	if err == nil {
		raw.SetDeadline(time.Time{})
		e.made.Add(1)
		path.install(h.From, h.Channel, c)
		return
	}
	if claimed {
		path.unclaim(h.From, h.Channel)
	}
	unproven.Close()
	e.cfg.Log.WithError(err).WithField("peer", raw.RemoteAddr().String()).Debug("collective: connection refused")
}

// keyOf returns the key of the generation that a dialer claims. If this rank has not reached the
// generation, the dialer cannot be verified yet, and its connection waits, as an unproven one,
// until this rank has. The keys of past generations are kept so that their dialers can be informed
// that these are over.
func (e *Endpoint) keyOf(unproven *identity.Conn, h identity.Hello) (identity.DataKey, error) {
	for {
		e.mu.Lock()
		keys, turned := slices.Clone(e.keys), e.turned
		e.mu.Unlock()
		newest := uint64(0)
		if len(keys) > 0 {
			newest = keys[0].number
		}
		if h.Generation <= newest {
			for _, k := range keys {
				if k.number == h.Generation && h == visit(h.Generation) {
					return k.key.ForVisits(), nil
				}
				if k.number == h.Generation {
					return k.key, nil
				}
			}
			return identity.DataKey{}, fmt.Errorf("collective: generation %d is long over; this rank is in generation %d", h.Generation, newest)
		}
		select {
		case <-turned:
		case <-unproven.Gone():
			return identity.DataKey{}, errGaveWay
		case <-e.life.Done():
			return identity.DataKey{}, errClosed
		}
	}
}

// awaitGroup returns the path of a connection whose dialer is proven. It waits until this rank has
// called Connect for the group. That includes groups of a generation that has already failed on
// this rank: its other groups report that to their dialers.
func (e *Endpoint) awaitGroup(h identity.Hello) (path *Path, claimed bool, err error) {
	timer := time.NewTimer(waitBound)
	defer timer.Stop()
	at := groupKey{h.Generation, h.Lane}
	for {
		e.mu.Lock()
		if f := e.current; f != nil && h.Generation <= f.Number {
			if h.Generation < f.Number {
				e.mu.Unlock()
				return nil, false, fmt.Errorf("generation %d is over; this rank is in generation %d", h.Generation, f.Number)
			}
			if path, there := f.groups.Path(h.Lane); there {
				e.mu.Unlock()
				return path.claimChannel(h)
			}
			if err := f.groups.Demand(h.Lane); err != nil {
				e.mu.Unlock()
				return nil, false, err
			}
		}
		if e.waiting >= e.bound(fewWaiting) {
			e.mu.Unlock()
			return nil, false, fmt.Errorf("too many connections wait for their groups (%w)", identity.ErrLater)
		}
		r := e.awaited[at]
		if r == nil {
			r = &awaitedGroup{open: make(chan struct{})}
			e.awaited[at] = r
		}
		r.waiting++
		e.waiting++
		e.mu.Unlock()
		select {
		case <-r.open:
		case <-timer.C:
			err = fmt.Errorf("this rank has not entered generation %d, lane %x within %v (%w)", h.Generation, h.Lane, waitBound, identity.ErrLater)
		case <-e.life.Done():
			err = errClosed
		}
		e.mu.Lock()
		e.waiting--
		if r.waiting--; r.waiting == 0 && e.awaited[at] == r {
			delete(e.awaited, at)
		}
		e.mu.Unlock()
		if err != nil {
			return nil, false, err
		}
	}
}

// claimChannel checks that a connection is expected and the first for its channel. If the group has
// already ended, it accepts the dialer in order to send it the reason.
func (p *Path) claimChannel(h identity.Hello) (path *Path, claimed bool, err error) {
	if p == nil {
		return nil, false, errors.New("the rank is alone in its group")
	}
	due := h.From < p.Size && h.From != p.Rank && h.To == p.Rank && p.due(h.From, h.Channel)
	if !due {
		return nil, false, fmt.Errorf("rank %d of %d expects no channel %d from rank %d to rank %d",
			p.Rank, p.Size, h.Channel, h.From, h.To)
	}
	if p.hasFailed() {
		return p, false, nil
	}
	if !p.claim(h.From, h.Channel) {
		return nil, false, fmt.Errorf("rank %d is connected already (%w)", h.From, identity.ErrLater)
	}
	p.Want(h.From)
	return p, true, nil
}
