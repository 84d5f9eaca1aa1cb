package collective

import "errors"

// Sever cuts all connections of a group as the death of its process does: nothing more is said to anybody.
func Sever(g *Group) {
	g.mu.Lock()
	if g.failure != nil {
		g.mu.Unlock()
		return
	}
	n := gone(errors.New("severed"), g.rank)
	g.failure, g.notice = n.error(g.generation), n
	g.mu.Unlock()
	g.path.release()
	close(g.failed)
	g.poke()
}

// Waiting is the number of connections that wait at e for newer generations.
func Waiting(e *Endpoint) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waiting
}
