package collective

import (
	"errors"
	"maps"
	"slices"
)

// Sever cuts all connections of a group's family as the death of its process does: nothing more is said to anybody.
func Sever(g *Group) {
	g.family.mu.Lock()
	n := g.outward(gone(errSevered, g.rank))
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
	n := gone(errSevered, g.rank)
	g.failure, g.notice = n.error(g.generation), g.outward(n)
	g.mu.Unlock()
	if g.path != nil {
		g.path.release()
	}
	close(g.failed)
	g.poke()
}

// Waiting is the number of connections that wait at e for newer generations.
func Waiting(e *Endpoint) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waiting
}
