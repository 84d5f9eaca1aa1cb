package launch

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"
)

// resolveTimeout bounds the search for a host's addresses.
const resolveTimeout = 2 * time.Second

// IsLocal tells whether a host's name or address stands for this machine: localhost, loopback addresses, its own name,
// and whatever resolves to one of its addresses. A name that cannot be resolved within 2 seconds does not; IsLocal blocks
// so long at most and asks anew each time.
func IsLocal(host string) bool {
	host = strings.TrimSuffix(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), ".")
	if host == "" {
		return false
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return isOwn(addr, ownAddrs())
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	if own, err := os.Hostname(); err == nil && strings.EqualFold(host, own) {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return false
	}
	own := ownAddrs()
	for _, addr := range addrs {
		if isOwn(addr, own) {
			return true
		}
	}
	return false
}

func isOwn(addr netip.Addr, own map[netip.Addr]bool) bool {
	addr = addr.Unmap().WithZone("")
	return addr.IsLoopback() || own[addr]
}

func ownAddrs() map[netip.Addr]bool {
	own := make(map[netip.Addr]bool)
	addrs, _ := net.InterfaceAddrs() // none known: only loopback is ours
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				own[addr.Unmap().WithZone("")] = true
			}
		}
	}
	return own
}
