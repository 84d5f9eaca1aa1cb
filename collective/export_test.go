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

// Sever cuts all connections of a group's family as the death of its process does: nothing more is
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
	if g.call.Path != nil {
		g.call.Path.Release()
	}
	close(g.call.Failed)
	g.poke()
}

// Waiting is the number of connections that wait at e for newer generations, or prove themselves.
func Waiting(e *Endpoint) int { return e.sockets.Unproven() }

// Force has the groups of a world run one algorithm, with segments of at most so many bytes; 0: as
// is best.
func Force(groups []*Group, a Algorithm, segment int) []*Group {
	for _, g := range groups {
		g.family.forced = exchange.Forced{Algorithm: operation.Algorithm(a), Segment: segment}
	}
	return groups
}

// Divide gives the hosts of a world shares of waves: the units before each host's, then all.
func Divide(groups []*Group, shares ...int) []*Group {
	for _, g := range groups {
		g.family.forced = exchange.Forced{Shares: shares}
	}
	return groups
}

// SharesAgreed reports whether the hosts of a group have agreed on shares of waves.
func SharesAgreed(g *Group) bool { return g.call.SharesAgreed() }

// ShareFrom has the connections of the groups' data channels share frames from so many bytes on.
func ShareFrom(groups []*Group, least int) []*Group {
	for _, g := range groups {
		g.call.TCP.ShareFrom(least)
	}
	return groups
}

// Pace has the kernel send no more than so many bytes a second over each data connection.
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

// SeverConn cuts one connection of the data channel to a peer beside the first, and no other.
func SeverConn(g *Group, peer, extra int) {
	_ = g.call.TCP.Sockets(peer, func(index, fd int) error {
		if index != extra+1 {
			return nil
		}
		return unix.Shutdown(fd, unix.SHUT_RDWR)
	})
}

// CloseConn closes the first connection of the data channel to a peer in one direction, as what is
// between two hosts does.
func CloseConn(g *Group, peer int) {
	_ = g.call.TCP.Sockets(peer, func(index, fd int) error {
		if index != 0 {
			return nil
		}
		return unix.Shutdown(fd, unix.SHUT_WR)
	})
}

// Narrow has e take no more than so many connections that have yet to prove themselves, or that
// wait for a group.
func Narrow(e *Endpoint, most int) { e.sockets.Narrow(most) }

// Occupy takes the place of a channel from a rank in e's newest group of all ranks, as soon as that
// is there, until free is called.
func Occupy(e *Endpoint, from, channel int) (free func()) { return e.sockets.Occupy(from, channel) }

// Squeeze has the kernel keep no more than a few dozen kilobytes of what one rank sends to another,
// on the way.
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

// Sparse has the groups that endpoints connect from now on have the least of near links: the ring.
func Sparse(endpoints []*Endpoint) {
	for _, e := range endpoints {
		e.sockets.Sparse()
	}
}

// Railed has endpoints connect to peers on other hosts as over so many routes of equal speed.
func Railed(endpoints []*Endpoint, rails int) {
	for _, e := range endpoints {
		e.sockets.Railed(rails)
	}
}

// Rails is the number of connections of the data channel to a peer, as far as they have come.
func Rails(g *Group, peer int) int { return g.call.TCP.Rails(peer) }

// Connected is the number of ranks that g is connected to.
func Connected(g *Group) int { return g.call.TCP.Connected() }

// Guesses is how many buckets a group's engine has reduced without a vote.
func Guesses(g *Group) int {
	e := g.async.Load()
	e.turn.Lock()
	defer e.turn.Unlock()
	return e.agreed.Guess.Right
}
