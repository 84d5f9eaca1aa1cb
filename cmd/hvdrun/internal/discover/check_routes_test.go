package discover

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/netif"
)

// TestRouteLines: check lists the routes to a host if there are several, with faster links first.
func TestRouteLines(t *testing.T) {
	way := func(n byte, near, far int64, trip time.Duration) client.Route {
		name := "eth" + strconv.Itoa(int(n))
		return client.Route{Local: netip.AddrFrom4([4]byte{10, 0, n, 1}), Addr: netip.AddrFrom4([4]byte{10, 0, n, 2}),
			Near: netif.Card{Name: name, Bits: near}, Far: netif.Card{Name: name, Bits: far}, Trip: trip}
	}
	c := &checked{Routes: routesTo("b", []client.Route{
		way(0, 1e9, 1e9, 90*time.Microsecond), way(1, 100e9, 25e9, 110*time.Microsecond), way(2, 0, 100e9, 80*time.Microsecond)})}
	want := []string{"reaches b over eth1 (25 Gbit/s), 10.0.1.1 to 10.0.1.2, round trip 110µs; " +
		"or eth0 (1 Gbit/s), 10.0.0.1 to 10.0.0.2, round trip 90µs; or eth2, 10.0.2.1 to 10.0.2.2, round trip 80µs"}
	if got := c.routeLines(); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if routesTo("b", []client.Route{way(0, 1e9, 1e9, 0)}) != nil {
		t.Error("one route is no choice")
	}
	c.Routes = nil
	for n := range mostRoutes + 2 {
		c.Routes = append(c.Routes, route{To: strconv.Itoa(n), text: "x"})
	}
	if got := c.routeLines(); len(got) != mostRoutes+1 || got[mostRoutes] != "2 more hosts are reached at several addresses; --json names all" {
		t.Errorf("%q", got)
	}
}
