package routes

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
)

// penance is the time for which a broken route is used only if all routes are broken.
var penance = retry.Backoff{First: time.Minute, Most: time.Hour}

// Memory records the routes to other hosts, over all generations. The zero value is empty. Its
// methods may be called by any goroutine.
type Memory struct {
	mu    sync.Mutex
	hosts map[string]*known
}

// known is what is known about one host.
type known struct {
	tried  []netip.Addr // addresses whose measurement was tried
	routes []Route
	kept   netip.Addr // address of the best route, as last chosen
	broken map[netip.Addr]breakage
}

// breakage records that a route broke. It is kept until the route is found to work after its
// penance.
type breakage struct {
	at     time.Time
	times  int
	mended bool
}

// until returns when the route may be tried again.
func (b breakage) until() time.Time {
	return b.at.Add(penance.After(max(b.times, 1)))
}

// Choice is the routes to a host to be used, the best first.
type Choice struct {
	Routes []Route
	Rails  int // number of first routes that share the data sent
	Sound  int // number of first routes that have not broken; all routes if all have broken
}

func (m *Memory) of(host string) *known {
	if m.hosts == nil {
		m.hosts = make(map[string]*known)
	}
	k := m.hosts[host]
	if k == nil {
		k = &known{broken: make(map[netip.Addr]breakage)}
		m.hosts[host] = k
	}
	return k
}

// Learn records the result of a measurement of a host: the addresses that were tried and the routes
// that were found. What was known about an address that was not found is kept: an attempt to use
// the address will show whether it works.
func (m *Memory) Learn(now time.Time, host string, tried []netip.Addr, found []Route) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.of(host)
	all := slices.Clone(found)
	for _, r := range k.routes {
		if !slices.ContainsFunc(found, func(o Route) bool { return o.Addr == r.Addr }) && slices.Contains(tried, r.Addr) {
			all = append(all, r)
		}
	}
	k.tried, k.routes = slices.Clone(tried), all
	for addr, b := range k.broken {
		if now.Before(b.until()) || !slices.Contains(tried, addr) || b.mended {
			continue
		}
		if b.mended = slices.ContainsFunc(found, func(r Route) bool { return r.Addr == addr }); !b.mended {
			b.at = now
		}
		k.broken[addr] = b
	}
}

// Choose returns the routes to a host among these addresses. It returns false if they must be
// measured first, because some are new or no working route is known.
func (m *Memory) Choose(host string, addrs []netip.Addr) (Choice, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.of(host)
	whole := k.among(addrs, func(Route) bool { return true })
	sound := k.among(addrs, func(r Route) bool { return !k.isBroken(r.Addr) })
	fresh := slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !slices.Contains(k.tried, a) })
	if len(sound) == 0 {
		sound = whole
	}
	if fresh || len(sound) == 0 {
		return Choice{}, false
	}
	ordered, rails := order(sound, k.kept)
	k.kept = ordered[0].Addr
	sounds := len(ordered)
	for _, r := range whole {
		if !slices.Contains(ordered, r) {
			ordered = append(ordered, r)
		}
	}
	return Choice{Routes: ordered, Rails: rails, Sound: sounds}, true
}

// among returns the known routes to the addresses that satisfy a condition.
func (k *known) among(addrs []netip.Addr, is func(Route) bool) (found []Route) {
	for _, r := range k.routes {
		if slices.Contains(addrs, r.Addr) && is(r) {
			found = append(found, r)
		}
	}
	return found
}

func (k *known) isBroken(addr netip.Addr) bool {
	b, is := k.broken[addr]
	return is && !b.mended
}

// Break records that the route to an address has broken although the host lives. From now on the
// route is used only if all routes are broken, until a measurement finds that it works, after a
// time that grows with each break.
func (m *Memory) Break(now time.Time, host string, addr netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.of(host)
	b := k.broken[addr]
	if k.isBroken(addr) && now.Sub(b.at) < time.Second {
		return // several connections have reported the same break
	}
	if now.Sub(b.until()) > penance.Most {
		b.times = 0
	}
	k.broken[addr] = breakage{at: now, times: b.times + 1}
}

// Spare returns a working route to the host that shares no interface with the route to an address,
// and whether there is one.
func (m *Memory) Spare(host string, addr netip.Addr) (Route, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.of(host)
	at := slices.IndexFunc(k.routes, func(r Route) bool { return r.Addr == addr })
	if at < 0 {
		return Route{}, false
	}
	for _, r := range k.routes {
		if distinct(k.routes[at], r) && !k.isBroken(r.Addr) {
			return r, true
		}
	}
	return Route{}, false
}

// Stale reports whether addresses of a host should be measured again when there is time: some could
// not be reached, or have broken and may work again.
func (m *Memory) Stale(now time.Time, host string, addrs []netip.Addr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.of(host)
	return slices.ContainsFunc(addrs, func(a netip.Addr) bool {
		if k.isBroken(a) {
			return !now.Before(k.broken[a].until())
		}
		return !slices.ContainsFunc(k.routes, func(r Route) bool { return r.Addr == a })
	})
}
