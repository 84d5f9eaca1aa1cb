package identity

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// Loopback returns the loopback address of this machine: 127.0.0.1, or ::1 if no interface has the
// former.
func Loopback() netip.Addr {
	v4 := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	lis, err := net.Listen("tcp4", netip.AddrPortFrom(v4, 0).String())
	if err != nil {
		return netip.IPv6Loopback()
	}
	lis.Close()
	return v4
}

// ListenLoopback returns the argument of net.Listen for any free port of Loopback.
func ListenLoopback() string { return netip.AddrPortFrom(Loopback(), 0).String() }

// FreePort returns a TCP port on which nobody listens at the moment, on any address. It is for a
// program that must listen on a given port itself (MASTER_PORT).
func FreePort() (int, error) {
	lis, err := listenTCP(":0")
	if err != nil {
		return 0, fmt.Errorf("looking for a free port: %w", err)
	}
	return lis.Addr().(*net.TCPAddr).Port, lis.Close()
}

// IsFreePort reports whether nobody listens on the TCP port at the moment, on any address.
func IsFreePort(port int) bool {
	lis, err := net.Listen("tcp", fmt.Sprint(":", port))
	if err != nil {
		return false
	}
	return lis.Close() == nil
}

// ParseListen parses an address to listen on, as a user writes it: an IP address without a port,
// such as 10.0.0.5, ::1, or 0.0.0.0 for all addresses.
func ParseListen(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil || addr.IsMulticast() {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address to listen on, such as 10.0.0.5, or 0.0.0.0 for all", text)
	}
	return addr.Unmap(), nil
}

// OwnAddr returns the address on which a process listens, given the address that a user has set. It
// is that address if it belongs to this machine or stands for all addresses, else the address of
// this machine on the route to it. OwnAddr sends nothing.
func OwnAddr(text string) (netip.Addr, error) {
	addr, err := ParseListen(text)
	if err != nil || addr.IsUnspecified() || IsOwn(addr) {
		return addr, err
	}
	conn, err := net.Dial("udp", netip.AddrPortFrom(addr, 9).String()) // selects a route
	if err != nil {
		return netip.Addr{}, fmt.Errorf("no address of this machine leads to %s: %w", addr, err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

// IsOwn reports whether an address belongs to this machine.
func IsOwn(addr netip.Addr) bool {
	return addr.IsLoopback() || slices.Contains(OwnAddrs(), addr.WithZone(""))
}

// OwnAddrs returns the addresses of this machine, without zones.
func OwnAddrs() (own []netip.Addr) {
	all, _ := net.InterfaceAddrs() // after an error OwnAddrs returns none
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				own = append(own, addr.Unmap())
			}
		}
	}
	return own
}
