package client

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/internal/netif"
)

const (
	// resolveTimeout bounds the resolution of one host's name, resolveAll that of the names of many
	// hosts.
	resolveTimeout = 2 * time.Second
	resolveAll     = 10 * time.Second
	// resolvers is the maximum number of names that are resolved concurrently.
	resolvers = 64
)

// LocalHosts returns, for each of the hosts, whether its name or address refers to this machine:
// localhost, loopback addresses, the machine's own name, the first part of that name if it resolves
// to no other machine, and all names that resolve to one of its addresses. It resolves the names
// concurrently and blocks for at most 10 seconds: a name that does not resolve by then, or within 2
// seconds, counts as another machine's. If ctx ends, LocalHosts returns its cause at once.
func LocalHosts(ctx context.Context, hosts []string) ([]bool, error) {
	local := make([]bool, len(hosts))
	bounded, cancel := context.WithTimeout(ctx, resolveAll)
	defer cancel()
	newOwn().each(bounded, hosts, func(i int, its bool) { local[i] = its })
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return local, nil
}

// AllLocal returns whether there are hosts and all of them are this machine, by the rules of
// LocalHosts. It returns as soon as one is not; it returns false if ctx ends.
func AllLocal(ctx context.Context, hosts []string) bool {
	ctx, cancel := context.WithTimeout(ctx, resolveAll)
	defer cancel()
	var other atomic.Bool
	newOwn().each(ctx, hosts, func(_ int, its bool) {
		if !its {
			other.Store(true)
			cancel() // the result is known
		}
	})
	return len(hosts) > 0 && !other.Load()
}

// own is the name and the addresses of this machine.
type own struct {
	name    string                    // "" if it is not known
	addrs   map[netip.Addr]netif.Card // empty: only loopback addresses are its own
	resolve func(ctx context.Context, network, host string) ([]netip.Addr, error)
}

func newOwn() own {
	o := own{addrs: netif.Own(), resolve: net.DefaultResolver.LookupNetIP}
	o.name, _ = os.Hostname()
	return o
}

// each calls tell for each of the hosts, from several goroutines, and returns when all calls have.
func (o own) each(ctx context.Context, hosts []string, tell func(i int, its bool)) {
	var resolving sync.WaitGroup
	free := make(chan struct{}, resolvers)
	for i, host := range hosts {
		free <- struct{}{} // blocks only shortly once ctx has ended
		resolving.Go(func() {
			tell(i, o.has(ctx, host))
			<-free
		})
	}
	resolving.Wait()
}

// has returns whether the host is this machine. A name that does not resolve within 2 seconds, or
// before ctx ends, is not.
func (o own) has(ctx context.Context, host string) bool {
	host = strings.TrimSuffix(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), ".")
	if host == "" {
		return false
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return o.is(addr)
	}
	if strings.EqualFold(host, "localhost") || o.name != "" && strings.EqualFold(host, o.name) {
		return true
	}
	if ctx.Err() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	addrs, _ := o.resolve(ctx, "ip", host)
	for _, addr := range addrs {
		if o.is(addr) {
			return true
		}
	}
	// The first part of the machine's name names the machine too, if no name service resolves it.
	short, _, _ := strings.Cut(o.name, ".")
	return len(addrs) == 0 && short != "" && strings.EqualFold(host, short)
}

func (o own) is(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	_, its := o.addrs[addr]
	return its || addr.IsLoopback()
}
