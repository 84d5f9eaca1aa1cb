package collective

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// Sever cuts all connections of a group's family, like the death of its process: nothing more is
// sent.
func Sever(g *Group) {
	g.family.mu.Lock()
	n := g.outward(frame.Gone(errSevered, g.rank))
	g.family.failure = &n
	all := slices.Collect(maps.Values(g.family.lanes))
	g.family.mu.Unlock()
	for _, g := range all {
		sever(g)
	}
}

var errSevered = errors.New("severed")

func sever(g *Group) {
	g.mu.Lock()
	if g.failure != nil {
		g.mu.Unlock()
		return
	}
	n := frame.Gone(errSevered, g.rank)
	g.failure, g.notice = errorOf(&n, g.generation), g.outward(n)
	g.mu.Unlock()
	close(g.call.Failed)
	if g.call.Path != nil {
		g.call.Path.Release()
	}
	g.poke()
}

// Waiting returns the number of connections to e that wait for a newer generation or have not
// proved their identity.
func Waiting(e *Endpoint) int { return e.sockets.Unproven() }

// Force makes the groups of a world use one algorithm, with segments of at most the given number of
// bytes; 0: the usual size.
func Force(groups []*Group, a Algorithm, segment int) []*Group {
	for _, g := range groups {
		g.family.forced = exchange.Forced{Algorithm: operation.Algorithm(a), Segment: segment}
	}
	return groups
}

// Divide sets the hosts' shares of waves: the units before each host's share, and then the total.
func Divide(groups []*Group, shares ...int) []*Group {
	for _, g := range groups {
		g.family.forced = exchange.Forced{Shares: shares}
	}
	return groups
}

// SharesAgreed reports whether the hosts of a group have agreed on shares of waves.
func SharesAgreed(g *Group) bool { return g.call.SharesAgreed() }

// ShareFrom makes the connections of the groups' data channels share frames of at least the given
// number of bytes.
func ShareFrom(groups []*Group, least int) []*Group {
	for _, g := range groups {
		g.call.TCP.ShareFrom(least)
	}
	return groups
}

// Pace makes the kernel limit each data connection to a rate in bytes per second.
func Pace(t testing.TB, groups []*Group, rate int) {
	for _, g := range groups {
		for peer := range g.size {
			if peer == g.rank {
				continue
			}
			err := g.call.TCP.Sockets(peer, func(_, fd int) error {
				return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, rate)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}

// SeverConn cuts one of the additional connections of the data channel to a peer.
func SeverConn(g *Group, peer, extra int) {
	_ = g.call.TCP.Sockets(peer, func(index, fd int) error {
		if index != extra+1 {
			return nil
		}
		return unix.Shutdown(fd, unix.SHUT_RDWR)
	})
}

// CloseConn closes the first connection of the data channel to a peer in one direction, as a device
// between two hosts can.
func CloseConn(g *Group, peer int) {
	_ = g.call.TCP.Sockets(peer, func(index, fd int) error {
		if index != 0 {
			return nil
		}
		return unix.Shutdown(fd, unix.SHUT_WR)
	})
}

// Narrow limits the number of connections to e that wait for a group or have not proved their
// identity.
func Narrow(e *Endpoint, most int) { e.sockets.Narrow(most) }

// Occupy takes the place of a channel from a rank, in e's newest group of all ranks, as soon as
// that group exists. free ends that.
func Occupy(e *Endpoint, from, channel int) (free func()) { return e.sockets.Occupy(from, channel) }

// Squeeze makes the kernel buffer at most a few dozen kilobytes of what one rank sends to another.
func Squeeze(t testing.TB, groups []*Group, from, to int) {
	t.Helper()
	for _, end := range []struct{ rank, peer, option int }{{from, to, unix.SO_SNDBUF}, {to, from, unix.SO_RCVBUF}} {
		err := groups[end.rank].call.TCP.Sockets(end.peer, func(_, fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, end.option, 16<<10)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Sparse makes groups that the endpoints connect from now on begin with the fewest connections: the
// ring.
func Sparse(endpoints []*Endpoint) {
	for _, e := range endpoints {
		e.sockets.Sparse()
	}
}

// Railed makes endpoints connect to peers on other hosts as if there were the given number of
// routes of equal speed.
func Railed(endpoints []*Endpoint, rails int) {
	for _, e := range endpoints {
		e.sockets.Railed(rails)
	}
}

// Rails returns the number of connections of the data channel to a peer so far.
func Rails(g *Group, peer int) int { return g.call.TCP.Rails(peer) }

// Connected returns the number of ranks that g is connected to.
func Connected(g *Group) int { return g.call.TCP.Connected() }

// Guesses returns how many buckets a group's engine has reduced without a vote.
func Guesses(g *Group) int {
	e := g.async.Load()
	e.turn.Lock()
	defer e.turn.Unlock()
	return e.agreed.Guess.Right
}
