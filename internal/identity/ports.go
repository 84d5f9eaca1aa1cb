package identity

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Ports is a range of TCP ports, including both ends. With the zero value the kernel chooses among
// all ports.
type Ports struct{ From, To uint16 }

// ParsePorts parses a range as a user writes it: 40000-40100. Empty: the zero Ports.
func ParsePorts(text string) (p Ports, err error) {
	if text == "" {
		return p, nil
	}
	from, to, ok := strings.Cut(text, "-")
	a, err1 := strconv.ParseUint(strings.TrimSpace(from), 10, 16)
	b, err2 := strconv.ParseUint(strings.TrimSpace(to), 10, 16)
	if !ok || err1 != nil || err2 != nil || a == 0 || b < a {
		return p, fmt.Errorf("%q is not a range of ports, such as 40000-40100", text)
	}
	return Ports{uint16(a), uint16(b)}, nil
}

// String returns the range as ParsePorts takes it.
func (p Ports) String() string {
	if p.From == 0 {
		return ""
	}
	return fmt.Sprintf("%d-%d", p.From, p.To)
}

// portsInUse is the range set by UsePorts; nil: all ports.
var portsInUse atomic.Pointer[Ports]

// UsePorts makes listeners that this process opens later take a port from the range, if their
// address names no port and other machines may connect to them. A process has one such range, as
// firewalls do; programs set it before they listen.
func UsePorts(p Ports) {
	if p.From == 0 {
		portsInUse.Store(nil)
		return
	}
	portsInUse.Store(&p)
}

// listenTCP is like net.Listen, but takes a port of the range if addr has the port 0 and is not a
// loopback address.
func listenTCP(addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	p := portsInUse.Load()
	if ip, bad := netip.ParseAddr(host); err != nil || p == nil || port != "0" || bad == nil && ip.IsLoopback() {
		return net.Listen("tcp", addr)
	}
	n := int(p.To) - int(p.From) + 1
	first := rand.IntN(n) // spreads processes that start together
	for i := range n {
		lis, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(int(p.From)+(first+i)%n)))
		if !errors.Is(err, syscall.EADDRINUSE) {
			return lis, err
		}
	}
	return nil, fmt.Errorf("all %d ports of --port-range %v are in use: a job needs two for each worker on a host, one for an agent and two for hvdrun", n, *p)
}
