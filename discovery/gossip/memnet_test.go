package gossip

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// memNet is a network in memory. Unlike memberlist's MockNetwork it loses packets to members that
// do not listen, as UDP does, and can isolate members.
type memNet struct {
	mu    sync.Mutex
	ports map[string]*memPort
	cut   map[string]bool
}

func newMemNet() *memNet { return &memNet{ports: map[string]*memPort{}, cut: map[string]bool{}} }

// memPort is one member's transport.
type memPort struct {
	net     *memNet
	addr    *net.UDPAddr
	packets chan *memberlist.Packet
	streams chan net.Conn
	down    chan struct{}
	once    sync.Once
}

// port adds a member with the next free address to the network.
func (n *memNet) port() *memPort {
	n.mu.Lock()
	defer n.mu.Unlock()
	i := len(n.ports) + 1
	p := &memPort{net: n, addr: &net.UDPAddr{IP: net.IPv4(10, 9, byte(i>>8), byte(i)).To4(), Port: DefaultPort},
		packets: make(chan *memberlist.Packet, 1024), streams: make(chan net.Conn), down: make(chan struct{})}
	n.ports[p.addr.String()] = p
	return p
}

// isolate cuts an address off from the network, or reconnects it.
func (n *memNet) isolate(addr string, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[addr] = cut
}

// to returns the member at addr as seen from p; nil: it cannot be reached.
func (p *memPort) to(addr string) *memPort {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	if p.net.cut[addr] || p.net.cut[p.addr.String()] {
		return nil
	}
	return p.net.ports[addr]
}

func (p *memPort) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return p.addr.IP, p.addr.Port, nil
}

func (p *memPort) WriteTo(b []byte, addr string) (time.Time, error) {
	now := time.Now()
	if dest := p.to(addr); dest != nil {
		select {
		case <-dest.down:
		case dest.packets <- &memberlist.Packet{Buf: b, From: p.addr, Timestamp: now}:
		default:
		}
	}
	return now, nil
}

func (p *memPort) PacketCh() <-chan *memberlist.Packet { return p.packets }

func (p *memPort) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	expired := time.After(timeout)
	dest := p.to(addr)
	if dest == nil {
		select {
		case <-expired:
		case <-p.down:
		}
		return nil, fmt.Errorf("dial %s: no answer", addr)
	}
	here, there := net.Pipe()
	select {
	case dest.streams <- there:
		return here, nil
	case <-dest.down:
	case <-p.down:
	case <-expired:
	}
	return nil, fmt.Errorf("dial %s: connection refused", addr)
}

func (p *memPort) StreamCh() <-chan net.Conn { return p.streams }

func (p *memPort) Shutdown() error {
	p.once.Do(func() { close(p.down) })
	return nil
}
