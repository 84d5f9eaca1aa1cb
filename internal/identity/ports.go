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

// Ports is a range of TCP ports, both ends included. The zero value has all ports, of which the
// kernel chooses.
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

// portsInUse are those of UsePorts; nil: all.
var portsInUse atomic.Pointer[Ports]

// UsePorts has the listeners that this process opens from now on take their ports from the range,
// where they name none and other machines may connect to them. A process has one such range,
// because firewalls know no others: programs set it before they listen.
func UsePorts(p Ports) {
	if p.From == 0 {
		portsInUse.Store(nil)
		return
	}
	portsInUse.Store(&p)
}

// listenTCP is net.Listen, with a port of the range where addr has the port 0 and is not of
// loopback.
func listenTCP(addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	p := portsInUse.Load()
	if ip, bad := netip.ParseAddr(host); err != nil || p == nil || port != "0" || bad == nil && ip.IsLoopback() {
		return net.Listen("tcp", addr)
	}
	n := int(p.To) - int(p.From) + 1
	first := rand.IntN(n) // processes that start together begin with others
	for i := range n {
		lis, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(int(p.From)+(first+i)%n)))
		if !errors.Is(err, syscall.EADDRINUSE) {
			return lis, err
		}
	}
	return nil, fmt.Errorf("all %d ports of --port-range %v are in use: a job needs two for each worker on a host, one for an agent and two for hvdrun", n, *p)
}
