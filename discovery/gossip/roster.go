package gossip

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"
)

// peer is another member of the cluster.
type peer struct {
	node    string // memberlist's name for it, which is never reused
	addr    string // where it gossips
	meta    *Meta  // nil: an observer, or an agent that cannot be understood
	seen    uint64 // number of the look before which it arrived; peers with the same number arrived together
	arrival uint64 // number of its arrival
	gone    time.Time
	refused bool // it has been informed that its host has another agent
}

// over reports whether the peer is dead and no longer listed.
func (p *peer) over(now time.Time, grace time.Duration) bool {
	return !p.gone.IsZero() && !now.Before(p.gone.Add(grace))
}

// older compares peers by start, then by when they were first seen, then by name.
func older(a, b *peer) int {
	return cmp.Or(a.meta.Start.Compare(b.meta.Start), cmp.Compare(a.seen, b.seen), cmp.Compare(a.meta.Name, b.meta.Name),
		cmp.Compare(a.node, b.node))
}

// roster holds the members known from memberlist's callbacks. It has neither a clock nor a lock.
type roster struct {
	peers    map[string]*peer
	holders  map[string]string // by host name, the node of the agent that holds it
	looks    uint64
	arrivals uint64
	deaf     bool // at the last look no member was heard, although the time of some had passed
}

func newRoster() *roster { return &roster{peers: map[string]*peer{}, holders: map[string]string{}} }

// here records that a member is alive, or has another Meta.
func (r *roster) here(node, addr string, meta *Meta) {
	p := r.peers[node]
	if p == nil {
		r.arrivals++
		p = &peer{node: node, seen: r.looks, arrival: r.arrivals}
		r.peers[node] = p
	}
	p.addr, p.meta, p.gone = addr, meta, time.Time{}
}

// away records that a member has left or died. An agent that did not announce this stays listed for
// a while, and is returned.
func (r *roster) away(now time.Time, node string) (lost *peer) {
	p := r.peers[node]
	switch {
	case p == nil:
	case p.meta == nil || p.meta.Draining:
		delete(r.peers, node)
	case p.gone.IsZero():
		p.gone = now
		return p
	}
	return nil
}

// grace is how long a dead member stays listed: the part of patience that remains after the
// suspicion, which takes longer in larger clusters.
func (r *roster) grace(probe, patience time.Duration) time.Duration {
	scale := max(1, math.Log10(float64(len(r.peers)+1)))
	return max(leastGrace, patience-time.Duration(suspicionMult*scale*float64(probe)))
}

// view is the result of a look at the roster.
type view struct {
	agents []agent // the oldest first
	// next is when the result will change even if nothing happens; zero: never.
	next time.Time
	// withheld: the listed agents include some that seem to be dead, because no member at all is
	// heard.
	withheld bool
	// conflicts are agents that claim another agent's host. Each is reported once.
	conflicts []conflict
}

// agent is a listed agent.
type agent struct {
	Meta
	addr string
}

type conflict struct{ kept, refused peer }

// look removes members whose time has passed, decides which agent each host belongs to, and returns
// the listed agents. heard means that this member hears others.
func (r *roster) look(now time.Time, grace time.Duration, heard bool) view {
	var v view
	claims := map[string][]*peer{}
	back := heard && r.deaf
	if heard {
		r.deaf = false
	}
	for _, p := range r.peers {
		if !p.gone.IsZero() {
			if back { // this member was cut off: it hears the others again one by one
				p.gone = now
			}
			due := p.gone.Add(grace)
			switch {
			case now.Before(due):
				if v.next.IsZero() || due.Before(v.next) {
					v.next = due
				}
			case heard:
				delete(r.peers, p.node)
				continue
			default:
				v.withheld, r.deaf = true, true
			}
		}
		if p.meta != nil {
			claims[p.meta.Name] = append(claims[p.meta.Name], p)
		}
	}
	r.looks++
	var kept []*peer
	for name := range r.holders {
		if len(claims[name]) == 0 {
			delete(r.holders, name) // one list lacks the host before another agent takes it
		}
	}
	for name, claimants := range claims {
		slices.SortFunc(claimants, older)
		p := r.decide(name, claimants)
		kept = append(kept, p)
		for _, other := range claimants {
			if other != p && other.gone.IsZero() && !other.refused && r.peers[other.node] != nil {
				other.refused = true
				v.conflicts = append(v.conflicts, conflict{*p, *other})
			}
		}
	}
	slices.SortFunc(kept, older)
	for _, p := range kept {
		v.agents = append(v.agents, agent{*p.meta, p.addr})
	}
	return v
}

// decide returns the agent to which a host belongs, among the agents that claim it, oldest first.
// The current holder keeps the host until it is gone. A holder that is dead, or whose address now
// has another agent, loses it at once.
func (r *roster) decide(name string, claimants []*peer) *peer {
	var current *peer // also nil if the holder can no longer be understood
	if i := slices.IndexFunc(claimants, func(p *peer) bool { return p.node == r.holders[name] }); i >= 0 {
		current = claimants[i]
	}
	next := current
	for _, p := range claimants {
		replaces := current == nil || p.gone.IsZero() && p.arrival > current.arrival && (p.addr == current.addr || !current.gone.IsZero())
		if !replaces {
			continue
		}
		if next == current || !next.gone.IsZero() && p.gone.IsZero() {
			next = p
		}
	}
	if current != nil && next != current {
		delete(r.peers, current.node)
	}
	r.holders[name], next.refused = next.node, false
	return next
}

// rival returns an older agent of the same host at another address, or nil. A dead agent does not
// count once its time has passed.
func (r *roster) rival(now time.Time, grace time.Duration, node, addr string, me Meta) *peer {
	for _, p := range r.peers {
		if p.meta == nil || p.meta.Name != me.Name || p.addr == addr || p.over(now, grace) {
			continue
		}
		if cmp.Or(p.meta.Start.Compare(me.Start), cmp.Compare(p.node, node)) < 0 {
			return p
		}
	}
	return nil
}

// purge deletes dead members whose time has passed.
func (r *roster) purge(now time.Time, grace time.Duration) {
	maps.DeleteFunc(r.peers, func(_ string, p *peer) bool { return p.over(now, grace) })
}
