package client

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/netif"
)

const (
	// resolveTimeout bounds the search for a host's addresses, and resolveAll that for those of
	// many hosts.
	resolveTimeout = 2 * time.Second
	resolveAll     = 10 * time.Second
	// resolvers is how many names are resolved at a time.
	resolvers = 64
)

// LocalHosts returns for each of the hosts whether its name or address stands for this machine:
// localhost, loopback addresses, its own name, the first part of its own name if that finds no
// other machine, and all names that resolve to one of its addresses. It resolves the names
// concurrently, and blocks for at most 10 seconds: names that are not resolved by then, or within 2
// seconds each, are not this machine's. When ctx ends it returns its cause at once.
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

// AllLocal returns whether there are hosts and all are this machine, as LocalHosts finds. It
// returns as soon as one is not, and false if ctx ends.
func AllLocal(ctx context.Context, hosts []string) bool {
	ctx, cancel := context.WithTimeout(ctx, resolveAll)
	defer cancel()
	all := len(hosts) > 0
	var mu sync.Mutex
	newOwn().each(ctx, hosts, func(_ int, its bool) {
		mu.Lock()
		defer mu.Unlock()
		if !its {
			all = false
			cancel() // the others need not be known
		}
	})
	return all
}

// own is what is known of this machine.
type own struct {
	name    string                    // "" if it is not known
	addrs   map[netip.Addr]netif.Card // none known: only loopback is its
	resolve func(ctx context.Context, network, host string) ([]netip.Addr, error)
}

func newOwn() own {
	o := own{addrs: netif.Own(), resolve: net.DefaultResolver.LookupNetIP}
	o.name, _ = os.Hostname()
	return o
}

// each calls tell for each of the hosts, by several goroutines, and returns when all have.
func (o own) each(ctx context.Context, hosts []string, tell func(i int, its bool)) {
	var resolving sync.WaitGroup
	free := make(chan struct{}, resolvers)
	for i, host := range hosts {
		free <- struct{}{} // not held for long once ctx has ended
		resolving.Go(func() {
			tell(i, o.has(ctx, host))
			<-free
		})
	}
	resolving.Wait()
}

// has returns whether the host is this machine; a name that is not resolved within 2 seconds, or
// when ctx ends, is not.
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
	// The first part of the own name, where no name service has it for another machine.
	short, _, _ := strings.Cut(o.name, ".")
	return len(addrs) == 0 && short != "" && strings.EqualFold(host, short)
}

func (o own) is(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	_, its := o.addrs[addr]
	return its || addr.IsLoopback()
}
