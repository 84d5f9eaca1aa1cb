package discover

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// mostRoutes is the largest number of other hosts to which check prints the routes of a host. The
// JSON output has all.
const mostRoutes = 8

// route is a network route from one host to another.
type route struct {
	To      string `json:"to"`
	Address string `json:"address"`
	Local   string `json:"local"`
	// Interface is the interface of the first host, and PeerInterface that of the other.
	Interface     string `json:"interface"`
	PeerInterface string `json:"peer_interface,omitempty"`
	// Bits is the speed of the slower of both links in bits per second; 0: unknown.
	Bits int64 `json:"bits,omitempty"`
	// RoundTrip is the round-trip time in seconds.
	RoundTrip float64 `json:"round_trip"`

	text string
}

// routesTo returns the routes to a host, ordered by speed, fastest first, and then by round-trip
// time. It returns nil if there are fewer than two.
func routesTo(host string, all []client.Route) (routes []route) {
	if len(all) < 2 {
		return nil
	}
	for _, r := range all {
		link := r.Near
		link.Bits = min(r.Near.Bits, r.Far.Bits)
		routes = append(routes, route{
			To: host, Address: r.Addr.String(), Local: r.Local.String(), Interface: r.Near.Name, PeerInterface: r.Far.Name,
			Bits: link.Bits, RoundTrip: r.Trip.Seconds(),
			text: fmt.Sprintf("%v, %v to %v, round trip %v", link, r.Local, r.Addr, r.Trip.Round(10*time.Microsecond)),
		})
	}
	slices.SortStableFunc(routes, func(a, b route) int {
		return cmp.Or(cmp.Compare(b.Bits, a.Bits), cmp.Compare(a.RoundTrip, b.RoundTrip))
	})
	return routes
}

// routeLines returns the lines that check prints about a host's routes.
func (c *checked) routeLines() (lines []string) {
	var order []string
	texts := map[string][]string{}
	for _, r := range c.Routes {
		if texts[r.To] == nil {
			order = append(order, r.To)
		}
		texts[r.To] = append(texts[r.To], r.text)
	}
	for i, to := range order {
		if i == mostRoutes {
			return append(lines, fmt.Sprintf("%d more hosts are reached at several addresses; --json names all", len(order)-i))
		}
		lines = append(lines, fmt.Sprintf("reaches %s over %s", to, strings.Join(texts[to], "; or ")))
	}
	return lines
}
