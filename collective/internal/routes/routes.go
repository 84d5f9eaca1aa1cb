// Package routes chooses among the addresses of a host by measurements, which it remembers. It is
// pure: it sends nothing and reads no clock.
package routes

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/netif"
)

// Route is a way to another host: one of its addresses, as measured from this host.
type Route struct {
	Addr  netip.Addr // of the other host
	Local netip.Addr // of this host, on the way there
	// Near is this host's interface, and Far the other host's. They are unknown if the kernel does
	// not report them.
	Near, Far netif.Card
	Trip      time.Duration // of the fastest round trip
	Rate      float64       // bits per second of a short burst; 0 if it was not measured
}

// String describes the route for logs.
func (r Route) String() string {
	near := cmp.Or(r.Near.String(), "an unknown interface")
	return fmt.Sprintf("%s, %v to %v, %s measured, round trip %v", near, r.Local, r.Addr, netif.Rate(r.Rate), r.Trip.Round(time.Microsecond))
}

// rated returns the speed of the slower interface, in bits per second; 0 if one is unknown.
func (r Route) rated() int64 { return min(r.Near.Bits, r.Far.Bits) }

const (
	// alike is the factor by which a route must be faster than another one to be preferred.
	alike = 1.25
	// trust is the factor by which the measured rates must contradict the speeds of the interfaces
	// to count more than these: on a fast link a burst is too short to be exact.
	trust = 2
	// tripFactor and tripSlack are how much longer a round trip must be to count as longer.
	tripFactor, tripSlack = 2, 300 * time.Microsecond
	// tripMore is how much longer the round trip on the route of the control channel may be than on
	// the best route.
	tripMore = time.Millisecond
)

// faster reports whether a is clearly faster than b.
func faster(a, b Route) bool {
	if ra, rb := float64(a.rated()), float64(b.rated()); ra > 0 && rb > 0 {
		switch {
		case ra >= alike*rb:
			return a.Rate*trust >= b.Rate
		case rb >= alike*ra:
			return a.Rate > trust*b.Rate
		}
		return a.Rate > trust*b.Rate
	}
	return a.Rate >= alike*b.Rate && a.Rate > 0
}

// nearer reports whether the round trip of a is clearly shorter than that of b.
func nearer(a, b Route) bool { return tripFactor*a.Trip+tripSlack < b.Trip }

// preferred reports whether a is clearly better than b.
func preferred(a, b Route) bool {
	return faster(a, b) || !faster(b, a) && nearer(a, b)
}

// order sorts routes, the best first. The first rails of them are equally good and have no
// interface in common, so that they can share the data sent. Among equally good routes, the one to
// the address kept is first, so that a choice does not change without need; then those with lower
// addresses.
func order(all []Route, kept netip.Addr) (ordered []Route, rails int) {
	rest := slices.Clone(all)
	slices.SortFunc(rest, func(a, b Route) int {
		if (a.Addr == kept) != (b.Addr == kept) {
			if a.Addr == kept {
				return -1
			}
			return 1
		}
		return a.Addr.Compare(b.Addr)
	})
	for len(rest) > 0 {
		best := rest[0]
		for _, r := range rest[1:] {
			if preferred(r, best) {
				best = r
			}
		}
		var class, others []Route
		for _, r := range rest {
			if r.Addr == best.Addr || !preferred(best, r) {
				class = append(class, r)
			} else {
				others = append(others, r)
			}
		}
		apart, shared := separate(class)
		if ordered == nil {
			rails = len(apart)
		}
		ordered = append(append(ordered, apart...), shared...)
		rest = others
	}
	return ordered, rails
}

// separate returns in apart the first route and those that have no interface in common with another
// route in apart, on either host. The rest is in shared.
func separate(all []Route) (apart, shared []Route) {
	for _, r := range all {
		if slices.ContainsFunc(apart, func(o Route) bool { return !distinct(o, r) }) {
			shared = append(shared, r)
		} else {
			apart = append(apart, r)
		}
	}
	return apart, shared
}

// distinct reports whether two routes are known to have no interface in common.
func distinct(a, b Route) bool {
	known := a.Near.Name != "" && a.Far.Name != "" && b.Near.Name != "" && b.Far.Name != ""
	return known && a.Near.Name != b.Near.Name && a.Far.Name != b.Far.Name
}

// Beside returns a route for the control channel, which survives a cut of the data's routes, and
// whether there is one. It is the best of the ordered routes that has a similar round trip and no
// interface in common with the first rails routes, which share the data, or at least with the
// first.
func Beside(ordered []Route, rails int) (Route, bool) {
	for _, used := range []int{rails, min(1, rails)} {
		for _, r := range ordered[used:] {
			apart := !slices.ContainsFunc(ordered[:used], func(o Route) bool { return !distinct(o, r) })
			if used > 0 && apart && r.Trip <= ordered[0].Trip+tripMore {
				return r, true
			}
		}
	}
	return Route{}, false
}
