package identity

import (
	"net"
	"net/netip"
)

// Loopback returns the loopback address of this machine: 127.0.0.1, or ::1 if no interface has
// that.
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
